//! 4 lanes: AArch64 Advanced SIMD.

use super::{Kernel, Simd};
use std::arch::aarch64::*;
use std::arch::asm;

#[derive(Clone, Copy)]
pub struct Neon;

/// # Safety
/// The CPU has Advanced SIMD; the kernel's own pointers are valid.
#[target_feature(enable = "neon")]
#[inline(never)]
pub unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Neon>()
}

impl Simd for Neon {
    const LANES: usize = 4;
    const DOT_ROWS: usize = 5;
    const OUTER_ROWS: usize = 6;
    const OUTER_VECTORS: usize = 4;

    type Vector = float32x4_t;
    /// Scale and offset.
    type Nibbles = (float32x4_t, float32x4_t);

    methods! {
        splat(value: f32) -> float32x4_t = vdupq_n_f32(value);
        load(pointer: *const f32) -> float32x4_t = vld1q_f32(pointer);
        store(pointer: *mut f32, vector: float32x4_t) = vst1q_f32(pointer, vector);
        load_bf16(pointer: *const u16) -> float32x4_t = vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(pointer)));
        nibbles(scale: float32x4_t, offset: float32x4_t) -> (float32x4_t, float32x4_t) = (scale, offset);
        add(a: float32x4_t, b: float32x4_t) -> float32x4_t = vaddq_f32(a, b);
        sub(a: float32x4_t, b: float32x4_t) -> float32x4_t = vsubq_f32(a, b);
        mul(a: float32x4_t, b: float32x4_t) -> float32x4_t = vmulq_f32(a, b);
        div(a: float32x4_t, b: float32x4_t) -> float32x4_t = vdivq_f32(a, b);
        fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t = vfmaq_f32(c, a, b);
        max(a: float32x4_t, b: float32x4_t) -> float32x4_t = vmaxq_f32(a, b);
        min(a: float32x4_t, b: float32x4_t) -> float32x4_t = vminq_f32(a, b);
        abs(a: float32x4_t) -> float32x4_t = vabsq_f32(a);
        round(a: float32x4_t) -> float32x4_t = vrndnq_f32(a);
        sum(a: float32x4_t) -> f32 = vaddvq_f32(a);
        max_lane(a: float32x4_t) -> f32 = vmaxvq_f32(a);

        load_f16(pointer: *const u16) -> float32x4_t {
            let half = vld1_u16(pointer);
            let wide: float32x4_t;
            // The intrinsic needs the f16 type of newer compilers; the instruction is in every AArch64 CPU.
            asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) wide, in(vreg) half, options(pure, nomem, nostack, preserves_flags));
            wide
        }
        load_i8(pointer: *const i8) -> float32x4_t {
            let bytes = vcreate_s8(u64::from(pointer.cast::<u32>().read_unaligned()));
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))))
        }
        load_e4m3(pointer: *const u8) -> float32x4_t {
            // Seven bits further up an IEEE half has the same fields; only the exponent's bias is 8 more.
            let bytes = vcreate_s8(u64::from(pointer.cast::<u32>().read_unaligned()));
            let shifted = vreinterpret_u16_s16(vshl_n_s16::<7>(vget_low_s16(vmovl_s8(bytes))));
            let half = vand_u16(shifted, vdup_n_u16(0xbfff));
            let nan = vceq_u16(vand_u16(half, vdup_n_u16(0x7fff)), vdup_n_u16(0x3f80));
            let half = vorr_u16(half, nan);
            Self::load_f16((&raw const half).cast())
        }
        load_e5m2(pointer: *const u8) -> float32x4_t {
            let bytes = vcreate_u8(u64::from(pointer.cast::<u32>().read_unaligned()));
            let half = vshl_n_u16::<8>(vget_low_u16(vmovl_u8(bytes)));
            Self::load_f16((&raw const half).cast())
        }
        load_low_nibbles((scale, offset): (float32x4_t, float32x4_t), pointer: *const u8) -> float32x4_t {
            let bytes = vcreate_u8(u64::from(pointer.cast::<u32>().read_unaligned()) & 0x0f0f_0f0f);
            let numbers = vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
            vfmaq_f32(offset, vcvtq_f32_u32(numbers), scale)
        }
        load_high_nibbles((scale, offset): (float32x4_t, float32x4_t), pointer: *const u8) -> float32x4_t {
            let bytes = vcreate_u8(u64::from(pointer.cast::<u32>().read_unaligned()) >> 4 & 0x0f0f_0f0f);
            let numbers = vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
            vfmaq_f32(offset, vcvtq_f32_u32(numbers), scale)
        }
        store_bf16(pointer: *mut u16, vector: float32x4_t) {
            let bits = vreinterpretq_u32_f32(vector);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
            let number = vceqq_f32(vector, vector);
            vst1_u16(pointer, vshrn_n_u32::<16>(vbslq_u32(number, rounded, quiet)))
        }
        store_f16(pointer: *mut u16, vector: float32x4_t) {
            let half: uint16x4_t;
            asm!("fcvtn {0:v}.4h, {1:v}.4s", out(vreg) half, in(vreg) vector, options(pure, nomem, nostack, preserves_flags));
            vst1_u16(pointer, half)
        }

        copysign(magnitude: float32x4_t, sign: float32x4_t) -> float32x4_t {
            let sign_bit = vdupq_n_u32(0x8000_0000);
            let size = vbicq_u32(vreinterpretq_u32_f32(magnitude), sign_bit);
            vreinterpretq_f32_u32(vorrq_u32(size, vandq_u32(vreinterpretq_u32_f32(sign), sign_bit)))
        }
        select_less(a: float32x4_t, b: float32x4_t, x: float32x4_t, y: float32x4_t) -> float32x4_t =
            vbslq_f32(vcltq_f32(a, b), x, y);
        scale_by_power(a: float32x4_t, exponent: float32x4_t) -> float32x4_t {
            // Two factors, since 2^exponent itself may lie outside the range of f32; the first product is exact.
            let whole = vcvtq_s32_f32(exponent);
            let first = vshrq_n_s32::<1>(whole);
            let second = vsubq_s32(whole, first);
            let bias = vdupq_n_s32(127);
            let first = vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(first, bias)));
            let second = vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(second, bias)));
            vmulq_f32(vmulq_f32(a, first), second)
        }

        sum4([a, b, c, d]: [float32x4_t; 4]) -> [f32; 4] {
            // This adds the pairs that vaddvq adds: neighbours first.
            let sums = vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
            std::mem::transmute(sums)
        }

        deinterleave(a: float32x4_t, b: float32x4_t) -> (float32x4_t, float32x4_t) =
            (vuzp1q_f32(a, b), vuzp2q_f32(a, b));
        transpose(rows: &mut [float32x4_t; 16]) {
            let wide = |a| vreinterpretq_f64_f32(a);
            let even01 = wide(vtrn1q_f32(rows[0], rows[1]));
            let odd01 = wide(vtrn2q_f32(rows[0], rows[1]));
            let even23 = wide(vtrn1q_f32(rows[2], rows[3]));
            let odd23 = wide(vtrn2q_f32(rows[2], rows[3]));
            rows[0] = vreinterpretq_f32_f64(vtrn1q_f64(even01, even23));
            rows[1] = vreinterpretq_f32_f64(vtrn1q_f64(odd01, odd23));
            rows[2] = vreinterpretq_f32_f64(vtrn2q_f64(even01, even23));
            rows[3] = vreinterpretq_f32_f64(vtrn2q_f64(odd01, odd23));
        }

        prefetch(pointer: *const u8) {
            asm!("prfm pldl1keep, [{0}]", in(reg) pointer, options(readonly, nostack, preserves_flags));
        }
    }

    #[inline(always)]
    unsafe fn call<K: Kernel>(kernel: K) -> K::Output {
        run(kernel)
    }
}

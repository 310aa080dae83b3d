//! 4 lanes in plain Rust, for a CPU without any of the other levels: the compiler's own vectorisation does what it can.

use super::{Kernel, Simd};
use half::{bf16, f16};

#[derive(Clone, Copy)]
pub struct Portable;

type Lanes = [f32; 4];

/// # Safety
/// The kernel's own pointers are valid.
#[inline(never)]
pub unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Portable>()
}

#[inline(always)]
fn zip(a: Lanes, b: Lanes, f: impl Fn(f32, f32) -> f32) -> Lanes {
    [f(a[0], b[0]), f(a[1], b[1]), f(a[2], b[2]), f(a[3], b[3])]
}

#[allow(clippy::missing_safety_doc)] // The trait states the rules.
impl Simd for Portable {
    const LANES: usize = 4;
    const DOT_ROWS: usize = 2;
    const OUTER_ROWS: usize = 4;
    const OUTER_VECTORS: usize = 2;

    type Vector = Lanes;
    /// Scale and offset.
    type Nibbles = (Lanes, Lanes);

    methods! {
        splat(value: f32) -> Lanes = [value; 4];
        load(pointer: *const f32) -> Lanes = pointer.cast::<Lanes>().read_unaligned();
        store(pointer: *mut f32, vector: Lanes) = pointer.cast::<Lanes>().write_unaligned(vector);
        load_i8(pointer: *const i8) -> Lanes = pointer.cast::<[i8; 4]>().read_unaligned().map(f32::from);
        nibbles(scale: Lanes, offset: Lanes) -> (Lanes, Lanes) = (scale, offset);
        add(a: Lanes, b: Lanes) -> Lanes = zip(a, b, |a, b| a + b);
        sub(a: Lanes, b: Lanes) -> Lanes = zip(a, b, |a, b| a - b);
        mul(a: Lanes, b: Lanes) -> Lanes = zip(a, b, |a, b| a * b);
        div(a: Lanes, b: Lanes) -> Lanes = zip(a, b, |a, b| a / b);
        fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes = Self::add(Self::mul(a, b), c);
        exact_fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes = std::array::from_fn(|i| a[i].mul_add(b[i], c[i]));
        max(a: Lanes, b: Lanes) -> Lanes = zip(a, b, |a, b| if a > b { a } else { b });
        min(a: Lanes, b: Lanes) -> Lanes = zip(a, b, |a, b| if a < b { a } else { b });
        abs(a: Lanes) -> Lanes = a.map(f32::abs);
        copysign(magnitude: Lanes, sign: Lanes) -> Lanes = zip(magnitude, sign, f32::copysign);
        round(a: Lanes) -> Lanes = a.map(f32::round_ties_even);
        sum(a: Lanes) -> f32 = (a[0] + a[2]) + (a[1] + a[3]);
        sum4(vectors: [Lanes; 4]) -> [f32; 4] = vectors.map(|a| (a[0] + a[2]) + (a[1] + a[3]));
        max_lane(a: Lanes) -> f32 = a.into_iter().fold(f32::NEG_INFINITY, f32::max);
        deinterleave(a: Lanes, b: Lanes) -> (Lanes, Lanes) = ([a[0], a[2], b[0], b[2]], [a[1], a[3], b[1], b[3]]);

        load_bf16(pointer: *const u16) -> Lanes =
            pointer.cast::<[u16; 4]>().read_unaligned().map(|bits| f32::from_bits(u32::from(bits) << 16));
        load_f16(pointer: *const u16) -> Lanes =
            pointer.cast::<[u16; 4]>().read_unaligned().map(|bits| f16::from_bits(bits).to_f32());
        load_e4m3(pointer: *const u8) -> Lanes {
            pointer.cast::<[u8; 4]>().read_unaligned().map(|byte| {
                // Twenty bits further up an f32 has the same fields; only the exponent's bias is 120 more.
                let size = u32::from(byte & 0x7f);
                let sign = u32::from(byte & 0x80) << 24;
                let value = if size == 0x7f { f32::NAN } else { f32::from_bits(size << 20) * 2f32.powi(112) };
                f32::from_bits(value.to_bits() | sign)
            })
        }
        load_e5m2(pointer: *const u8) -> Lanes {
            let bytes = pointer.cast::<[u8; 4]>().read_unaligned();
            bytes.map(|byte| f16::from_bits(u16::from(byte) << 8).to_f32())
        }
        load_low_nibbles((scale, offset): (Lanes, Lanes), pointer: *const u8) -> Lanes {
            let numbers = pointer.cast::<[u8; 4]>().read_unaligned().map(|byte| f32::from(byte & 15));
            Self::fma(numbers, scale, offset)
        }
        load_high_nibbles((scale, offset): (Lanes, Lanes), pointer: *const u8) -> Lanes {
            let numbers = pointer.cast::<[u8; 4]>().read_unaligned().map(|byte| f32::from(byte >> 4));
            Self::fma(numbers, scale, offset)
        }
        store_bf16(pointer: *mut u16, vector: Lanes) =
            pointer.cast::<[u16; 4]>().write_unaligned(vector.map(|value| bf16::from_f32(value).to_bits()));
        store_f16(pointer: *mut u16, vector: Lanes) =
            pointer.cast::<[u16; 4]>().write_unaligned(vector.map(|value| f16::from_f32(value).to_bits()));

        select_less(a: Lanes, b: Lanes, x: Lanes, y: Lanes) -> Lanes =
            std::array::from_fn(|i| if a[i] < b[i] { x[i] } else { y[i] });
        scale_by_power(a: Lanes, exponent: Lanes) -> Lanes {
            // Two factors, since 2^exponent itself may lie outside the range of f32; the first product is exact.
            let power = |exponent: i32| f32::from_bits(((exponent + 127) << 23) as u32);
            zip(a, exponent, |a, exponent| {
                let first = exponent as i32 >> 1;
                a * power(first) * power(exponent as i32 - first)
            })
        }

        transpose(rows: &mut [Lanes; 16]) {
            let [a, b, c, d] = [rows[0], rows[1], rows[2], rows[3]];
            for (i, row) in rows.iter_mut().enumerate().take(4) {
                *row = [a[i], b[i], c[i], d[i]];
            }
        }

        prefetch(_pointer: *const u8) = ();
    }

    #[inline(always)]
    unsafe fn call<K: Kernel>(kernel: K) -> K::Output {
        run(kernel)
    }
}

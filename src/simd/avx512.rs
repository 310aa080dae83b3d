//! 16 lanes: AVX-512 F, BW, DQ and VL.

use super::{Kernel, Simd};
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub struct Avx512;

/// # Safety
/// The CPU has the features below; the kernel's own pointers are valid.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
#[inline(never)]
pub unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512>()
}

/// f32 bits rounded to the nearest bf16, ties to even; a NaN stays one.
#[inline(always)]
unsafe fn to_bf16(vector: __m512) -> __m256i {
    let bits = _mm512_castps_si512(vector);
    let odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    let nan = _mm512_cmp_ps_mask(vector, vector, _CMP_UNORD_Q);
    let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
    _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16))
}

#[inline(always)]
unsafe fn from_bf16(half: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))
}

/// A byte a lane, four times over. With zeros above it instead, the compiler would shift bytes before it widens them, and
/// widen twice, once for each half.
#[inline(always)]
unsafe fn spread_bytes(pointer: *const u8) -> __m512i {
    let bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(pointer.cast()));
    let lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    _mm512_shuffle_epi8(bytes, _mm512_mullo_epi32(lanes, _mm512_set1_epi32(0x0101_0101)))
}

#[inline(always)]
fn mask(count: usize) -> __mmask16 {
    (1u32 << count).wrapping_sub(1) as __mmask16
}

impl Simd for Avx512 {
    const LANES: usize = 16;
    const DOT_ROWS: usize = 6;
    const OUTER_ROWS: usize = 6;
    const OUTER_VECTORS: usize = 4;

    type Vector = __m512;
    /// The value of each q.
    type Nibbles = __m512;

    methods! {
        splat(value: f32) -> __m512 = _mm512_set1_ps(value);
        load(pointer: *const f32) -> __m512 = _mm512_loadu_ps(pointer);
        store(pointer: *mut f32, vector: __m512) = _mm512_storeu_ps(pointer, vector);
        load_bf16(pointer: *const u16) -> __m512 = from_bf16(_mm256_loadu_si256(pointer.cast()));
        load_f16(pointer: *const u16) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(pointer.cast()));
        nibbles(scale: __m512, offset: __m512) -> __m512 = _mm512_fmadd_ps(Self::lane_numbers(), scale, offset);
        store_bf16(pointer: *mut u16, vector: __m512) = _mm256_storeu_si256(pointer.cast(), to_bf16(vector));
        load_partial(pointer: *const f32, count: usize) -> __m512 = _mm512_maskz_loadu_ps(mask(count), pointer);
        add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
        abs(a: __m512) -> __m512 = _mm512_abs_ps(a);
        round(a: __m512) -> __m512 = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
        scale_by_power(a: __m512, exponent: __m512) -> __m512 = _mm512_scalef_ps(a, exponent);
        sum(a: __m512) -> f32 = Self::sum4([a; 4])[0];
        max_lane(a: __m512) -> f32 = _mm512_reduce_max_ps(a);
        prefetch(pointer: *const u8) = _mm_prefetch::<_MM_HINT_T0>(pointer.cast());

        load_i8(pointer: *const i8) -> __m512 =
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(pointer.cast())));
        load_e4m3(pointer: *const u8) -> __m512 {
            // Seven bits further up an IEEE half has the same fields; only the exponent's bias is 8 more.
            let bytes = _mm_loadu_si128(pointer.cast());
            let shifted = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(bytes));
            let half = _mm256_and_si256(shifted, _mm256_set1_epi16(0xbfff_u16 as i16));
            let nan = _mm_cmpeq_epi8_mask(_mm_or_si128(bytes, _mm_set1_epi8(i8::MIN)), _mm_set1_epi8(-1));
            _mm512_cvtph_ps(_mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7fff)))
        }
        load_e5m2(pointer: *const u8) -> __m512 =
            _mm512_cvtph_ps(_mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(_mm_loadu_si128(pointer.cast()))));
        load_sfp(pointer: *const u8) -> __m512 {
            // Of both kinds of fields the right ones are the smaller number (weight/sfp.rs).
            let bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(pointer.cast()));
            let size = _mm256_and_si256(bytes, _mm256_set1_epi16(0x7f));
            let small = _mm256_add_epi16(_mm256_slli_epi16::<5>(size), _mm256_set1_epi16(0x3400));
            let large = _mm256_add_epi16(_mm256_slli_epi16::<4>(size), _mm256_set1_epi16(0x3800));
            let some = _mm256_cmpneq_epi16_mask(size, _mm256_setzero_si256());
            let magnitude = _mm256_maskz_min_epu16(some, small, large);
            let sign = _mm256_slli_epi16::<8>(_mm256_andnot_si256(_mm256_set1_epi16(0x7f), bytes));
            from_bf16(_mm256_or_si256(magnitude, sign))
        }
        symmetric_nibbles(scale: __m512) -> __m512 =
            _mm512_mul_ps(_mm512_sub_ps(Self::lane_numbers(), Self::splat(8.0)), scale);
        load_low_nibbles(values: __m512, pointer: *const u8) -> __m512 {
            // The permutation looks at the lowest four bits of each index.
            _mm512_permutexvar_ps(spread_bytes(pointer), values)
        }
        load_high_nibbles(values: __m512, pointer: *const u8) -> __m512 =
            _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(spread_bytes(pointer)), values);
        store_f16(pointer: *mut u16, vector: __m512) =
            _mm256_storeu_si256(pointer.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(vector));
        load_bf16_partial(pointer: *const u16, count: usize) -> __m512 =
            from_bf16(_mm256_maskz_loadu_epi16(mask(count), pointer.cast()));
        load_f16_partial(pointer: *const u16, count: usize) -> __m512 =
            _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(count), pointer.cast()));
        store_partial(pointer: *mut f32, vector: __m512, count: usize) =
            _mm512_mask_storeu_ps(pointer, mask(count), vector);
        store_bf16_partial(pointer: *mut u16, vector: __m512, count: usize) =
            _mm256_mask_storeu_epi16(pointer.cast(), mask(count), to_bf16(vector));
        store_f16_partial(pointer: *mut u16, vector: __m512, count: usize) {
            let half = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(vector);
            _mm256_mask_storeu_epi16(pointer.cast(), mask(count), half)
        }

        copysign(magnitude: __m512, sign: __m512) -> __m512 {
            let sign_bit = _mm512_set1_ps(-0.0);
            _mm512_or_ps(_mm512_andnot_ps(sign_bit, magnitude), _mm512_and_ps(sign_bit, sign))
        }
        select_less(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 =
            _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x);

        sum4([a, b, c, d]: [__m512; 4]) -> [f32; 4] {
            // Within each 128-bit quarter: two interleaving additions leave one lane for each of a, b, c, d.
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let abcd = _mm512_add_ps(_mm512_shuffle_ps::<0x44>(ab, cd), _mm512_shuffle_ps::<0xee>(ab, cd));
            let halves = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps::<1>(abcd));
            let sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves));
            std::mem::transmute(sums)
        }

        deinterleave(a: __m512, b: __m512) -> (__m512, __m512) {
            let even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
            let odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
            (_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b))
        }
        transpose(rows: &mut [__m512; 16]) {
            let mut pairs = [_mm512_setzero_ps(); 16];
            for i in 0..8 {
                pairs[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
                pairs[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
            }
            // fours[4g + c]: column c of each quarter, rows 4g..4g+4.
            let mut fours = [_mm512_setzero_ps(); 16];
            for g in 0..4 {
                fours[4 * g] = _mm512_shuffle_ps::<0x44>(pairs[4 * g], pairs[4 * g + 2]);
                fours[4 * g + 1] = _mm512_shuffle_ps::<0xee>(pairs[4 * g], pairs[4 * g + 2]);
                fours[4 * g + 2] = _mm512_shuffle_ps::<0x44>(pairs[4 * g + 1], pairs[4 * g + 3]);
                fours[4 * g + 3] = _mm512_shuffle_ps::<0xee>(pairs[4 * g + 1], pairs[4 * g + 3]);
            }
            for c in 0..4 {
                let low01 = _mm512_shuffle_f32x4::<0x44>(fours[c], fours[4 + c]);
                let high01 = _mm512_shuffle_f32x4::<0xee>(fours[c], fours[4 + c]);
                let low23 = _mm512_shuffle_f32x4::<0x44>(fours[8 + c], fours[12 + c]);
                let high23 = _mm512_shuffle_f32x4::<0xee>(fours[8 + c], fours[12 + c]);
                rows[c] = _mm512_shuffle_f32x4::<0x88>(low01, low23);
                rows[4 + c] = _mm512_shuffle_f32x4::<0xdd>(low01, low23);
                rows[8 + c] = _mm512_shuffle_f32x4::<0x88>(high01, high23);
                rows[12 + c] = _mm512_shuffle_f32x4::<0xdd>(high01, high23);
            }
        }

    }

    #[inline(always)]
    unsafe fn call<K: Kernel>(kernel: K) -> K::Output {
        run(kernel)
    }
}

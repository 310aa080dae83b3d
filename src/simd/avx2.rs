//! 8 lanes: AVX2, FMA and F16C.

use super::{Kernel, Simd};
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub struct Avx2;

/// # Safety
/// The CPU has the features below; the kernel's own pointers are valid.
#[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
#[inline(never)]
pub unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2>()
}

impl Simd for Avx2 {
    const LANES: usize = 8;
    const DOT_ROWS: usize = 3;
    const OUTER_ROWS: usize = 6;
    const OUTER_VECTORS: usize = 2;

    type Vector = __m256;
    /// Scale and offset.
    type Nibbles = (__m256, __m256);

    methods! {
        splat(value: f32) -> __m256 = _mm256_set1_ps(value);
        load(pointer: *const f32) -> __m256 = _mm256_loadu_ps(pointer);
        store(pointer: *mut f32, vector: __m256) = _mm256_storeu_ps(pointer, vector);
        load_f16(pointer: *const u16) -> __m256 = _mm256_cvtph_ps(_mm_loadu_si128(pointer.cast()));
        nibbles(scale: __m256, offset: __m256) -> (__m256, __m256) = (scale, offset);
        add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
        sub(a: __m256, b: __m256) -> __m256 = _mm256_sub_ps(a, b);
        mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        div(a: __m256, b: __m256) -> __m256 = _mm256_div_ps(a, b);
        fma(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        max(a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
        min(a: __m256, b: __m256) -> __m256 = _mm256_min_ps(a, b);
        abs(a: __m256) -> __m256 = _mm256_andnot_ps(_mm256_set1_ps(-0.0), a);
        round(a: __m256) -> __m256 = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
        sum(a: __m256) -> f32 = Self::sum4([a; 4])[0];
        prefetch(pointer: *const u8) = _mm_prefetch::<_MM_HINT_T0>(pointer.cast());

        load_bf16(pointer: *const u16) -> __m256 {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(pointer.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
        load_i8(pointer: *const i8) -> __m256 =
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(pointer.cast())));
        load_e4m3(pointer: *const u8) -> __m256 {
            // Seven bits further up an IEEE half has the same fields; only the exponent's bias is 8 more.
            let shifted = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(pointer.cast())));
            let half = _mm_and_si128(shifted, _mm_set1_epi16(0xbfff_u16 as i16));
            let size = _mm_and_si128(half, _mm_set1_epi16(0x7fff));
            let nan = _mm_cmpeq_epi16(size, _mm_set1_epi16(0x3f80));
            _mm256_cvtph_ps(_mm_or_si128(half, nan))
        }
        load_e5m2(pointer: *const u8) -> __m256 =
            _mm256_cvtph_ps(_mm_slli_epi16::<8>(_mm_cvtepu8_epi16(_mm_loadl_epi64(pointer.cast()))));
        load_sfp(pointer: *const u8) -> __m256 {
            // Of both kinds of fields the right ones are the smaller number (weight/sfp.rs).
            let bytes = _mm_cvtepu8_epi16(_mm_loadl_epi64(pointer.cast()));
            let size = _mm_and_si128(bytes, _mm_set1_epi16(0x7f));
            let small = _mm_add_epi16(_mm_slli_epi16::<5>(size), _mm_set1_epi16(0x3400));
            let large = _mm_add_epi16(_mm_slli_epi16::<4>(size), _mm_set1_epi16(0x3800));
            let zero = _mm_cmpeq_epi16(size, _mm_setzero_si128());
            let magnitude = _mm_andnot_si128(zero, _mm_min_epu16(small, large));
            let sign = _mm_slli_epi16::<8>(_mm_andnot_si128(_mm_set1_epi16(0x7f), bytes));
            let wide = _mm256_cvtepu16_epi32(_mm_or_si128(magnitude, sign));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
        load_low_nibbles((scale, offset): (__m256, __m256), pointer: *const u8) -> __m256 {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(pointer.cast()));
            let numbers = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(numbers), scale, offset)
        }
        load_high_nibbles((scale, offset): (__m256, __m256), pointer: *const u8) -> __m256 {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(pointer.cast()));
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(bytes)), scale, offset)
        }
        store_bf16(pointer: *mut u16, vector: __m256) {
            let bits = _mm256_castps_si256(vector);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(vector, vector));
            let upper = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            let packed = _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256::<1>(upper));
            _mm_storeu_si128(pointer.cast(), packed)
        }
        store_f16(pointer: *mut u16, vector: __m256) =
            _mm_storeu_si128(pointer.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(vector));

        copysign(magnitude: __m256, sign: __m256) -> __m256 {
            let sign_bit = _mm256_set1_ps(-0.0);
            _mm256_or_ps(_mm256_andnot_ps(sign_bit, magnitude), _mm256_and_ps(sign_bit, sign))
        }
        select_less(a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 =
            _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b));
        scale_by_power(a: __m256, exponent: __m256) -> __m256 {
            // Two factors, since 2^exponent itself may lie outside the range of f32; the first product is exact.
            let whole = _mm256_cvtps_epi32(exponent);
            let first = _mm256_srai_epi32::<1>(whole);
            let second = _mm256_sub_epi32(whole, first);
            let bias = _mm256_set1_epi32(127);
            let first = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(first, bias)));
            let second = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(second, bias)));
            _mm256_mul_ps(_mm256_mul_ps(a, first), second)
        }

        sum4([a, b, c, d]: [__m256; 4]) -> [f32; 4] {
            let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            let abcd = _mm256_add_ps(_mm256_shuffle_ps::<0x44>(ab, cd), _mm256_shuffle_ps::<0xee>(ab, cd));
            let sums = _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps::<1>(abcd));
            std::mem::transmute(sums)
        }
        max_lane(a: __m256) -> f32 {
            let four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }

        deinterleave(a: __m256, b: __m256) -> (__m256, __m256) {
            // Halves first, so that the pick within each half leaves the elements in order.
            let low = _mm256_permute2f128_ps::<0x20>(a, b);
            let high = _mm256_permute2f128_ps::<0x31>(a, b);
            (_mm256_shuffle_ps::<0x88>(low, high), _mm256_shuffle_ps::<0xdd>(low, high))
        }
        transpose(rows: &mut [__m256; 16]) {
            let mut pairs = [_mm256_setzero_ps(); 8];
            for i in 0..4 {
                pairs[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
                pairs[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
            }
            let mut fours = [_mm256_setzero_ps(); 8];
            for g in 0..2 {
                fours[4 * g] = _mm256_shuffle_ps::<0x44>(pairs[4 * g], pairs[4 * g + 2]);
                fours[4 * g + 1] = _mm256_shuffle_ps::<0xee>(pairs[4 * g], pairs[4 * g + 2]);
                fours[4 * g + 2] = _mm256_shuffle_ps::<0x44>(pairs[4 * g + 1], pairs[4 * g + 3]);
                fours[4 * g + 3] = _mm256_shuffle_ps::<0xee>(pairs[4 * g + 1], pairs[4 * g + 3]);
            }
            for c in 0..4 {
                rows[c] = _mm256_permute2f128_ps::<0x20>(fours[c], fours[4 + c]);
                rows[4 + c] = _mm256_permute2f128_ps::<0x31>(fours[c], fours[4 + c]);
            }
        }

    }

    #[inline(always)]
    unsafe fn call<K: Kernel>(kernel: K) -> K::Output {
        run(kernel)
    }
}

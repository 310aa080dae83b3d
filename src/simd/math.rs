//! Elementary functions on vectors.
//!
//! The polynomials of [`exp`] and [`tanh`] are those of the Cephes library's `expf` and `tanhf` (Moshier, 1992); that of
//! [`gelu_erf`] is formula 7.1.26 of Abramowitz and Stegun. NaN goes through all of them.

#![allow(clippy::missing_safety_doc)] // The CPU has `S`, as for every function of `Simd`.

use super::Simd;

/// e^x, within about 1e-7 of the value; 0 below −104, +∞ above 89.
#[inline(always)]
pub unsafe fn exp<S: Simd>(x: S::Vector) -> S::Vector {
    let x = S::min(S::splat(89.0), S::max(S::splat(-104.0), x));
    let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts: the first has so few bits that n times it is exact.
    let r = S::fma(n, S::splat(-0.693_359_4), x);
    let r = S::fma(n, S::splat(2.121_944_4e-4), r);
    let p = S::fma(S::splat(1.987_569_1e-4), r, S::splat(1.398_199_9e-3));
    let p = S::fma(p, r, S::splat(8.333_452e-3));
    let p = S::fma(p, r, S::splat(4.166_579_6e-2));
    let p = S::fma(p, r, S::splat(1.666_666_5e-1));
    let p = S::fma(p, r, S::splat(0.5));
    let p = S::fma(p, S::mul(r, r), S::add(r, S::splat(1.0)));
    S::scale_by_power(p, n)
}

/// 2^x for x ≤ 127, within about 1e-7 of the value, and 1 at 0; 0 below −151. The polynomial is the minimax one of the relative
/// error on −1/2 … 1/2, found by the exchange algorithm. It takes three operations fewer than [`exp`].
#[inline(always)]
pub unsafe fn exp2<S: Simd>(x: S::Vector) -> S::Vector {
    let x = S::max(S::splat(-160.0), x);
    let n = S::round(x);
    let r = S::sub(x, n);
    let p = S::fma(S::splat(1.534_581_2e-4), r, S::splat(1.339_993_1e-3));
    let p = S::fma(p, r, S::splat(9.618_489e-3));
    let p = S::fma(p, r, S::splat(5.550_328_6e-2));
    let p = S::fma(p, r, S::splat(2.402_264_6e-1));
    let p = S::fma(p, r, S::splat(std::f32::consts::LN_2));
    let p = S::fma(p, r, S::splat(1.0));
    S::scale_by_power(p, n)
}

/// tanh x, within about 2e-7 of the value, relatively, also near 0.
#[inline(always)]
pub unsafe fn tanh<S: Simd>(x: S::Vector) -> S::Vector {
    let z = S::mul(x, x);
    let p = S::fma(S::splat(-5.704_988_7e-3), z, S::splat(2.063_908_8e-2));
    let p = S::fma(p, z, S::splat(-5.373_971_6e-2));
    let p = S::fma(p, z, S::splat(1.333_144_2e-1));
    let p = S::fma(p, z, S::splat(-3.333_328e-1));
    let near = S::fma(S::mul(p, z), x, x);
    let size = S::abs(x);
    let e = exp::<S>(S::add(size, size));
    let far = S::sub(S::splat(1.0), S::div(S::splat(2.0), S::add(e, S::splat(1.0))));
    S::select_less(size, S::splat(0.625), near, S::copysign(far, x))
}

/// x / (1 + e^(−k·x)), the common form of SiLU (k = 1) and of the tanh-GELU.
#[inline(always)]
unsafe fn times_sigmoid<S: Simd>(x: S::Vector, exponent: S::Vector) -> S::Vector {
    let denominator = S::add(S::splat(1.0), exp::<S>(exponent));
    // x = −∞ would be −∞ / ∞; the limit is −0.
    S::div(S::max(S::splat(f32::MIN), x), denominator)
}

/// x · sigmoid(x).
#[inline(always)]
pub unsafe fn silu<S: Simd>(x: S::Vector) -> S::Vector {
    times_sigmoid::<S>(x, S::sub(S::zero(), x))
}

/// x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³))), which is x · sigmoid of twice the argument.
#[inline(always)]
pub unsafe fn gelu_tanh<S: Simd>(x: S::Vector) -> S::Vector {
    let cubic = S::fma(S::mul(x, x), S::splat(0.044_715), S::splat(1.0));
    let scaled = S::mul(x, S::splat(-1.595_769));
    times_sigmoid::<S>(x, S::mul(scaled, cubic))
}

/// x/2 · (1 + erf(x/√2)), within 1e-7·|x| of the value.
#[inline(always)]
pub unsafe fn gelu_erf<S: Simd>(x: S::Vector) -> S::Vector {
    let size = S::mul(S::abs(x), S::splat(std::f32::consts::FRAC_1_SQRT_2));
    let t = S::div(S::splat(1.0), S::fma(S::splat(0.327_591_1), size, S::splat(1.0)));
    let p = S::fma(S::splat(1.061_405_4), t, S::splat(-1.453_152));
    let p = S::fma(p, t, S::splat(1.421_413_8));
    let p = S::fma(p, t, S::splat(-0.284_496_74));
    let p = S::fma(p, t, S::splat(0.254_829_6));
    let tail = S::mul(S::mul(p, t), exp::<S>(S::sub(S::zero(), S::mul(size, size))));
    let half_tail = S::mul(tail, S::splat(0.5));
    // The tail is erfc(|x|/√2): half of it weighs a negative x, one minus that a positive one. The bound keeps −∞ · 0 out.
    let weight = S::select_less(x, S::zero(), half_tail, S::sub(S::splat(1.0), half_tail));
    S::mul(S::max(S::splat(f32::MIN), x), weight)
}

/// (sin x, cos x) within about 1e-7, for |x| up to 10^5 and beyond; absolute, as a rotation needs.
#[inline(always)]
pub unsafe fn sin_cos<S: Simd>(x: S::Vector) -> (S::Vector, S::Vector) {
    // x = n·π/2 + r with π/2 in two parts; a fused multiply-add makes the first step exact.
    let n = S::round(S::mul(x, S::splat(std::f32::consts::FRAC_2_PI)));
    let r = S::exact_fma(n, S::splat(-std::f32::consts::FRAC_PI_2), x);
    let r = S::exact_fma(n, S::splat(4.371_139e-8), r);
    let z = S::mul(r, r);
    // Cephes, sinf and cosf, on |r| ≤ π/4.
    let p = S::fma(S::splat(-1.951_529_6e-4), z, S::splat(8.332_161e-3));
    let p = S::fma(p, z, S::splat(-1.666_665_5e-1));
    let sine = S::fma(S::mul(p, z), r, r);
    let q = S::fma(S::splat(2.443_315_7e-5), z, S::splat(-1.388_731_6e-3));
    let q = S::fma(q, z, S::splat(4.166_664_6e-2));
    let cosine = S::fma(S::mul(q, z), z, S::fma(S::splat(-0.5), z, S::splat(1.0)));
    // The quadrant, n modulo 4, as −2 … 2.
    let quadrant = S::exact_fma(S::round(S::mul(n, S::splat(0.25))), S::splat(-4.0), n);
    let from_one = S::abs(S::sub(S::abs(quadrant), S::splat(1.0)));
    let (one, minus_one, half) = (S::splat(1.0), S::splat(-1.0), S::splat(0.5));
    let sine_sign =
        S::select_less(quadrant, S::splat(-0.5), minus_one, S::select_less(S::splat(1.5), quadrant, minus_one, one));
    let cosine_sign =
        S::select_less(half, quadrant, minus_one, S::select_less(quadrant, S::splat(-1.5), minus_one, one));
    (
        S::mul(S::select_less(from_one, half, cosine, sine), sine_sign),
        S::mul(S::select_less(from_one, half, sine, cosine), cosine_sign),
    )
}

/// cap · tanh(x / cap). Below 2⁻¹² tanh is its argument to the last bit, and x is the result even where x / cap is so small
/// that it has lost bits or become 0.
#[inline(always)]
pub unsafe fn soft_cap<S: Simd>(x: S::Vector, cap: f32) -> S::Vector {
    let ratio = S::div(x, S::splat(cap));
    let capped = S::mul(S::splat(cap), tanh::<S>(ratio));
    S::select_less(S::abs(ratio), S::splat(1.0 / 4096.0), x, capped)
}

#[cfg(test)]
mod tests {
    use super::super::{Kernel, Level, Simd};
    use super::*;

    /// Applies the function with this number to up to 16 values.
    struct Apply<'a> {
        function: usize,
        values: &'a mut [f32],
    }

    impl Kernel for Apply<'_> {
        type Output = ();
        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            for chunk in self.values.chunks_exact_mut(S::LANES) {
                let x = S::load(chunk.as_ptr());
                let y = match self.function {
                    0 => exp::<S>(x),
                    1 => tanh::<S>(x),
                    2 => silu::<S>(x),
                    3 => gelu_tanh::<S>(x),
                    5 => exp2::<S>(S::min(S::splat(127.0), x)),
                    _ => gelu_erf::<S>(x),
                };
                S::store(chunk.as_mut_ptr(), y);
            }
        }
    }

    fn erf(x: f64) -> f64 {
        let terms = (0..200).scan(x, |term, n| {
            let value = *term / f64::from(2 * n + 1);
            *term *= -x * x / f64::from(n + 1);
            Some(value)
        });
        if x.abs() > 5.0 {
            x.signum()
        } else {
            terms.sum::<f64>() * 2.0 / std::f64::consts::PI.sqrt()
        }
    }

    fn exact(function: usize, x: f64) -> f64 {
        match function {
            0 => x.exp(),
            1 => x.tanh(),
            2 => x / (1.0 + (-x).exp()),
            5 => x.min(127.0).exp2(),
            3 => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh()),
            _ => 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
        }
    }

    #[test]
    fn functions_match_f64_at_every_level() {
        let xs: Vec<f32> = (-3200..3200).map(|i| i as f32 * 0.0271).chain((0..160).map(|i| i as f32 * 1e-4)).collect();
        for level in Level::supported() {
            for function in 0..6 {
                let mut ys = xs.clone();
                // SAFETY: the level is supported; the kernel reads and writes within its slice.
                unsafe { level.run(Apply { function, values: &mut ys }) };
                for (&x, &y) in xs.iter().zip(&ys) {
                    let expected = exact(function, f64::from(x));
                    let bound = match function {
                        0 | 1 | 5 => 2.5e-7 * expected.abs() + 1e-45,
                        // Far below 0 the exponent's own rounding grows with it; the values there are tiny.
                        _ => 3e-7 * f64::from(x.abs()),
                    };
                    let close = (f64::from(y) - expected).abs() <= bound
                        || (expected > f64::from(f32::MAX) && y == f32::INFINITY);
                    assert!(close, "{level:?} function {function} at {x}: {y} instead of {expected}");
                }
            }
        }
    }

    struct SinCos<'a>(&'a mut [f32]);

    impl Kernel for SinCos<'_> {
        type Output = Vec<f32>;
        #[inline(always)]
        unsafe fn run<S: Simd>(self) -> Vec<f32> {
            let mut cosines = self.0.to_vec();
            for (x, c) in self.0.chunks_exact_mut(S::LANES).zip(cosines.chunks_exact_mut(S::LANES)) {
                let (sine, cosine) = sin_cos::<S>(S::load(x.as_ptr()));
                S::store(x.as_mut_ptr(), sine);
                S::store(c.as_mut_ptr(), cosine);
            }
            cosines
        }
    }

    #[test]
    fn sines_and_cosines_match_f64_up_to_large_angles() {
        let xs: Vec<f32> = (0..64_000).map(|i| (i as f32 - 1000.0) * 2.1739).collect();
        for level in Level::supported() {
            let mut sines = xs.clone();
            // SAFETY: the level is supported; the kernel stays within its slice.
            let cosines = unsafe { level.run(SinCos(&mut sines)) };
            for ((&x, &s), &c) in xs.iter().zip(&sines).zip(&cosines) {
                let (sine, cosine) = f64::from(x).sin_cos();
                let error = (f64::from(s) - sine).abs().max((f64::from(c) - cosine).abs());
                assert!(error < 1.5e-7, "{level:?} at {x}: {s} {c}, not {sine} {cosine}");
            }
        }
    }

    #[test]
    fn infinities_and_nan() {
        let inputs = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0];
        let inf = f32::INFINITY;
        let outputs = [
            [inf, 0.0, 1.0],
            [1.0, -1.0, 0.0],
            [inf, 0.0, 0.0],
            [inf, 0.0, 0.0],
            [inf, 0.0, 0.0],
            [127f32.exp2(), 0.0, 1.0],
        ];
        for level in Level::supported() {
            for (function, [up, down, zero]) in outputs.into_iter().enumerate() {
                let mut values = [0f32; 16];
                values[..4].copy_from_slice(&inputs);
                // SAFETY: as above.
                unsafe { level.run(Apply { function, values: &mut values }) };
                assert_eq!(values[0], up, "{level:?} {function}");
                assert_eq!(values[1], down, "{level:?} {function}");
                assert!(values[2].is_nan(), "{level:?} {function}");
                assert_eq!(values[3], zero, "{level:?} {function}");
            }
        }
    }
}

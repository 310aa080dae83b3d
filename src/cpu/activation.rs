//! Activations by name: on a vector for the fast paths, on one value for the references.

use crate::operation::Activation;
use crate::simd::{math, Simd};

/// # Safety
/// The CPU has `S`.
#[inline(always)]
pub unsafe fn activate<S: Simd>(activation: Activation, x: S::Vector) -> S::Vector {
    match activation {
        Activation::None => x,
        Activation::GeluTanh => math::gelu_tanh::<S>(x),
        Activation::GeluErf => math::gelu_erf::<S>(x),
        Activation::Silu => math::silu::<S>(x),
    }
}

/// The formula in f64.
pub fn reference(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::None => x,
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
        }
        Activation::GeluErf => 0.5 * x * (1.0 + libm_erf(x / 2f64.sqrt())),
        Activation::Silu => x / (1.0 + (-x).exp()),
    }
}

fn libm_erf(x: f64) -> f64 {
    extern "C" {
        fn erf(x: f64) -> f64;
    }
    // SAFETY: the C library's function of one number.
    unsafe { erf(x) }
}

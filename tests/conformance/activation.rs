//! The activations' formulas.

use nvbackend::operation::Activation;

pub const ACTIVATIONS: [Activation; 4] =
    [Activation::None, Activation::GeluTanh, Activation::GeluErf, Activation::Silu];

extern "C" {
    /// The C library's, which std links.
    fn erf(x: f64) -> f64;
}

pub fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::None => x,
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        // SAFETY: a pure function of its argument.
        Activation::GeluErf => 0.5 * x * (1.0 + unsafe { erf(x / std::f64::consts::SQRT_2) }),
        Activation::Silu => x / (1.0 + (-x).exp()),
    }
}

//! Activations, which products, gated activations and norms end with.

/// `nvb_activation_code` of csrc/common/launch.h; the numbers are `NVB_ACTIVATION_*` of the C ABI too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u32)]
pub enum Activation {
    #[default]
    None = 0,
    /// 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), Hendrycks and Gimpel 2016.
    GeluTanh = 1,
    /// 0.5·x·(1 + erf(x/√2)), ibid.
    GeluErf = 2,
    /// x·sigmoid(x).
    Silu = 3,
}

impl Activation {
    pub fn from_code(code: u32) -> Option<Activation> {
        match code {
            0 => Some(Activation::None),
            1 => Some(Activation::GeluTanh),
            2 => Some(Activation::GeluErf),
            3 => Some(Activation::Silu),
            _ => None,
        }
    }
}

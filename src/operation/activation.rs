//! Activations, which products, gated activations and norms end with.

use crate::error::numbered;

numbered! {
    /// `nvb_activation_code` of csrc/common/launch.h; the numbers are `NVB_ACTIVATION_*` of the C ABI too.
    #[derive(Default)]
    pub enum Activation: u32 {
        #[default]
        None = 0,
        /// 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), Hendrycks and Gimpel 2016.
        GeluTanh = 1,
        /// 0.5·x·(1 + erf(x/√2)), ibid.
        GeluErf = 2,
        /// x·sigmoid(x).
        Silu = 3,
    }
}

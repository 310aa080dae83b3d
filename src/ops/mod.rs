//! Operations: one file each with the descriptor, its validation and its cost.
//!
//! A descriptor is what a C call becomes once it has been checked, and what an executor receives. It speaks of device
//! memory through [`crate::tensor`] views and owns none of it. `new` validates: whoever holds a descriptor may run it.

pub mod argmax;
pub mod dequantize;
pub mod embedding;
pub mod grouped_linear;
pub mod linear;
pub mod linear_product;
pub mod matmul;
mod norm;
pub mod quantize;
pub mod quantized_rows;
pub mod rope;
pub mod sample;
crate::plain_operations!(operation_modules);

use crate::error::{Error, Result};
use crate::operation_modules;

pub(crate) use crate::tensor::expect_extent;

/// What an operation must do at the least: floating-point operations, and bytes with each input read and each output
/// written once.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    pub operations: f64,
    pub bytes: f64,
}

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

pub(crate) fn expect_finite_positive(name: &str, value: f32) -> Result<()> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(Error::invalid(format!("{name} is {value}; a finite value above 0 is needed")))
}

/// Norms multiply by w, or by 1 + w.
pub(crate) fn expect_weight_offset(value: f32) -> Result<()> {
    if value == 0.0 || value == 1.0 {
        return Ok(());
    }
    Err(Error::invalid(format!("weight_offset is {value}; 0 or 1 is needed")))
}

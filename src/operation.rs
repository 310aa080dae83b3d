//! What every operation's descriptor can do: tell its kind and cost, and go to an executor.

use crate::attention::{AttentionDecode, AttentionPrefill};
use crate::error::Result;
use crate::executor::Executor;
use crate::ops::{
    argmax::Argmax, elementwise::Elementwise, embedding::Embedding, gated_activation::GatedActivation,
    grouped_linear::GroupedLinear, layer_norm::LayerNorm, linear::Linear, linear_codes::LinearCodes,
    linear_to_codes::LinearToCodes, matmul::Matmul, rms_norm::RmsNorm, rope::Rope, sample::Sample, softmax::Softmax,
    Cost,
};
use crate::stream::RawHandle;
use crate::tensor::Tensor;
use std::ffi::CStr;

/// The cost of a call, from numbers that it read in device memory.
pub type CostOf = Box<dyn FnOnce(&[i32]) -> Cost + Send>;

pub trait Operation {
    const KIND: OperationKind;

    /// An upper bound where `cost_by_content` says more.
    fn cost(&self) -> Cost;

    /// The I32 vector in device memory that decides on what the operation must read, and the cost once it is known. Asked
    /// for by profiling alone.
    fn cost_by_content(&self) -> Option<(Tensor, CostOf)> {
        None
    }

    /// Queues the operation on the stream.
    fn queue(&self, executor: &dyn Executor, stream: RawHandle) -> Result<()>;
}

macro_rules! operations {
    ($($kind:ident = $number:literal, $method:ident, $label:literal $(, $by_content:ident)?;)+) => {
        /// The numbers are the C ABI's `NVB_OPERATION_…`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u32)]
        pub enum OperationKind {
            $($kind = $number,)+
        }

        impl OperationKind {
            pub const ALL: &'static [OperationKind] = &[$(OperationKind::$kind),+];

            /// "linear"
            pub fn name(self) -> &'static str {
                match self {
                    $(OperationKind::$kind => stringify!($method),)+
                }
            }

            /// "nvbackend::linear", as profilers show it.
            pub fn label(self) -> &'static CStr {
                match self {
                    $(OperationKind::$kind => $label,)+
                }
            }
        }

        $(impl Operation for $kind {
            const KIND: OperationKind = OperationKind::$kind;

            fn cost(&self) -> Cost {
                $kind::cost(self)
            }

            $(fn $by_content(&self) -> Option<(Tensor, CostOf)> {
                Some($kind::$by_content(self))
            })?

            fn queue(&self, executor: &dyn Executor, stream: RawHandle) -> Result<()> {
                executor.$method(self, stream)
            }
        })+
    };
}

operations! {
    Embedding = 0, embedding, c"nvbackend::embedding";
    RmsNorm = 1, rms_norm, c"nvbackend::rms_norm";
    Linear = 2, linear, c"nvbackend::linear";
    GatedActivation = 3, gated_activation, c"nvbackend::gated_activation";
    Rope = 4, rope, c"nvbackend::rope";
    AttentionPrefill = 5, attention_prefill, c"nvbackend::attention_prefill";
    AttentionDecode = 6, attention_decode, c"nvbackend::attention_decode", cost_by_content;
    Softmax = 7, softmax, c"nvbackend::softmax";
    Elementwise = 8, elementwise, c"nvbackend::elementwise";
    Argmax = 9, argmax, c"nvbackend::argmax";
    Sample = 10, sample, c"nvbackend::sample";
    LayerNorm = 11, layer_norm, c"nvbackend::layer_norm";
    Matmul = 12, matmul, c"nvbackend::matmul";
    GroupedLinear = 13, grouped_linear, c"nvbackend::grouped_linear";
}

/// A linear operation like others to whoever counts them.
impl Operation for LinearCodes {
    const KIND: OperationKind = OperationKind::Linear;

    fn cost(&self) -> Cost {
        LinearCodes::cost(self)
    }

    fn queue(&self, executor: &dyn Executor, stream: RawHandle) -> Result<()> {
        executor.linear_codes(self, stream)
    }
}

/// As that one.
impl Operation for LinearToCodes {
    const KIND: OperationKind = OperationKind::Linear;

    fn cost(&self) -> Cost {
        LinearToCodes::cost(self)
    }

    fn queue(&self, executor: &dyn Executor, stream: RawHandle) -> Result<()> {
        executor.linear_to_codes(self, stream)
    }
}

impl OperationKind {
    pub fn from_code(code: u32) -> Option<OperationKind> {
        OperationKind::ALL.get(code as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_places_and_labels_hold_the_names() {
        for (place, kind) in OperationKind::ALL.iter().enumerate() {
            assert_eq!(*kind as usize, place);
            assert_eq!(OperationKind::from_code(place as u32), Some(*kind));
            assert_eq!(kind.label().to_str().unwrap(), format!("nvbackend::{}", kind.name()));
        }
        assert_eq!(OperationKind::from_code(OperationKind::ALL.len() as u32), None);
    }
}

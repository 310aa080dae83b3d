//! An operation as a value: one list of all of them, which makes the enum, the kinds, their numbers in the C ABI, their names
//! and what is common to all. Whoever holds a value may run it, because descriptors are checked where they are made.

pub mod access;

use crate::attention::{AttentionDecode, AttentionPrefill};
use crate::ops::{
    argmax::Argmax, elementwise::Elementwise, embedding::Embedding, gated_activation::GatedActivation,
    grouped_linear::GroupedLinear, layer_norm::LayerNorm, linear::Linear, linear_product::LinearProduct,
    matmul::Matmul, rms_norm::RmsNorm, rope::Rope, sample::Sample, softmax::Softmax, Cost,
};
use crate::tensor::Tensor;
use access::Visit;
use std::ffi::CStr;

/// The cost of a call, from numbers that it read in device memory.
pub type CostOf = Box<dyn FnOnce(&[i32]) -> Cost + Send>;

/// Each line is a kind, which is its descriptor's name too, its number in the C ABI, its name and how profilers show it.
macro_rules! operations {
    ($($kind:ident = $number:literal, $name:ident, $label:literal;)+) => {
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
                    $(OperationKind::$kind => stringify!($name),)+
                }
            }

            /// "nvbackend::linear", as profilers show it.
            pub fn label(self) -> &'static CStr {
                match self {
                    $(OperationKind::$kind => $label,)+
                }
            }
        }

        /// A checked descriptor of any operation. It names device memory and owns none.
        #[derive(Debug, Clone)]
        #[expect(clippy::large_enum_variant, reason = "a box would allocate in each call")]
        pub enum Operation {
            $($kind($kind),)+
        }

        impl Operation {
            pub fn kind(&self) -> OperationKind {
                match self {
                    $(Operation::$kind(_) => OperationKind::$kind,)+
                }
            }

            /// Tells which memory the operation reads and writes.
            #[inline]
            pub fn accesses(&self, visit: &mut impl Visit) {
                match self {
                    $(Operation::$kind(op) => op.accesses(visit),)+
                }
            }

            /// An upper bound where `cost_by_content` says more.
            pub fn cost(&self) -> Cost {
                match self {
                    $(Operation::$kind(op) => op.cost(),)+
                }
            }
        }

        $(impl From<$kind> for Operation {
            fn from(op: $kind) -> Operation {
                Operation::$kind(op)
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
    AttentionDecode = 6, attention_decode, c"nvbackend::attention_decode";
    Softmax = 7, softmax, c"nvbackend::softmax";
    Elementwise = 8, elementwise, c"nvbackend::elementwise";
    Argmax = 9, argmax, c"nvbackend::argmax";
    Sample = 10, sample, c"nvbackend::sample";
    LayerNorm = 11, layer_norm, c"nvbackend::layer_norm";
    Matmul = 12, matmul, c"nvbackend::matmul";
    GroupedLinear = 13, grouped_linear, c"nvbackend::grouped_linear";
}

impl Operation {
    /// The I32 vector in device memory that decides on what the operation must read, and the cost once it is known. Asked
    /// for by profiling alone.
    pub fn cost_by_content(&self) -> Option<(Tensor, CostOf)> {
        match self {
            Operation::AttentionDecode(op) => Some(op.cost_by_content()),
            _ => None,
        }
    }
}

impl From<LinearProduct> for Operation {
    fn from(op: LinearProduct) -> Operation {
        Operation::Linear(op.into())
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

//! Operations: one list of all of them, which makes the enum, the kinds, their numbers in the C ABI, their names and what is
//! common to all; and a file for each with its descriptor, validation, cost, and what it reads and writes.
//!
//! A descriptor is what a C call becomes once it has been checked, and what an executor receives. It speaks of device
//! memory through [`crate::tensor`] views and owns none of it. `new` validates: whoever holds a descriptor may run it.

pub mod access;
mod activation;
pub mod argmax;
pub mod attention;
pub mod block_rows;
pub mod constant_reads;
pub mod dequantize;
pub mod embedding;
pub mod grouped_linear;
pub mod linear;
pub mod linear_product;
pub mod matmul;
pub mod memory_copy;
pub mod memory_fill;
mod norm;
mod operands;
pub mod pack_blocks;
pub mod quantize;
pub mod quantized_rows;
pub mod rope;
pub mod rotary_embedding;
pub mod sample;
pub mod scatter_rows;
pub mod sort_rows;
crate::plain_operations!(operation_modules);

use crate::error::{Error, Result};
use crate::operation_modules;
use crate::tensor::Tensor;
use access::Visit;
use argmax::Argmax;
use attention::{AttentionDecode, AttentionPrefill};
use attention_merge::AttentionMerge;
use block_rows::BlockRows;
use convert_heads::ConvertHeads;
use elementwise::Elementwise;
use embedding::Embedding;
use gated_activation::GatedActivation;
use group_norm::GroupNorm;
use grouped_linear::GroupedLinear;
use l2_norm::L2Norm;
use layer_norm::LayerNorm;
use linear::Linear;
use linear_product::LinearProduct;
use masked_softmax::MaskedSoftmax;
use matmul::Matmul;
use memory_copy::MemoryCopy;
use memory_fill::MemoryFill;
use pointwise::Pointwise;
use rms_norm::RmsNorm;
use rope::Rope;
use rotary_embedding::RotaryEmbedding;
use sample::Sample;
use scatter_rows::ScatterRows;
use softmax::Softmax;
use sort_rows::SortRows;
use std::ffi::CStr;
use sum_rows::SumRows;

pub(crate) use crate::tensor::expect_extent;
pub use activation::Activation;

/// What an operation must do at the least: floating-point operations, and bytes with each input read and each output
/// written once.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    pub operations: f64,
    pub bytes: f64,
}

/// The cost of a call, from numbers that it read in device memory.
pub type CostOf = Box<dyn FnOnce(&[i32]) -> Cost + Send>;

/// Each line is a kind, which is its descriptor's name too, its number in the C ABI, its name and how profilers show it.
macro_rules! operations {
    ($($kind:ident = $number:literal, $name:ident, $label:literal;)+) => {
        /// The numbers are the C ABI's `NVB_OPERATION_…`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
        // Attention's is the largest by far, and a box for it would be an allocation in every call.
        #[allow(clippy::large_enum_variant)]
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
    GroupNorm = 14, group_norm, c"nvbackend::group_norm";
    MemoryCopy = 15, memory_copy, c"nvbackend::memory_copy";
    MemoryFill = 16, memory_fill, c"nvbackend::memory_fill";
    AttentionMerge = 17, attention_merge, c"nvbackend::attention_merge";
    Pointwise = 18, pointwise, c"nvbackend::pointwise";
    ScatterRows = 19, scatter_rows, c"nvbackend::scatter_rows";
    RotaryEmbedding = 20, rotary_embedding, c"nvbackend::rotary_embedding";
    MaskedSoftmax = 21, masked_softmax, c"nvbackend::masked_softmax";
    BlockRows = 22, block_rows, c"nvbackend::block_rows";
    SortRows = 23, sort_rows, c"nvbackend::sort_rows";
    SumRows = 24, sum_rows, c"nvbackend::sum_rows";
    L2Norm = 25, l2_norm, c"nvbackend::l2_norm";
    ConvertHeads = 26, convert_heads, c"nvbackend::convert_heads";
}

/// The operations that need neither workspace nor a choice of kernel, and have a file of their own by one name in
/// src/operation, src/cpu, src/cuda and tests/conformance. From these lines come those modules and the dispatch (docs/adding.md).
#[doc(hidden)]
#[macro_export]
macro_rules! plain_operations {
    ($then:ident $(, $argument:tt)*) => {
        $then! {
            $($argument)*
            AttentionMerge attention_merge;
            ConvertHeads convert_heads;
            Elementwise elementwise;
            GatedActivation gated_activation;
            GroupNorm group_norm;
            L2Norm l2_norm;
            LayerNorm layer_norm;
            MaskedSoftmax masked_softmax;
            Pointwise pointwise;
            RmsNorm rms_norm;
            Softmax softmax;
            SumRows sum_rows;
        }
    };
}

/// `plain_operations!(operation_modules)` declares their modules.
#[doc(hidden)]
#[macro_export]
macro_rules! operation_modules {
    ($($kind:ident $name:ident;)+) => {
        $(pub mod $name;)+
    };
}

/// A match of an operation: the arms that are given, and for each plain operation what `$run` makes of its module and the
/// descriptor.
macro_rules! match_operation {
    ($operation:ident $run:ident { $($arms:tt)* } $($kind:ident $name:ident;)+) => {
        match $operation {
            $($arms)*
            $($crate::operation::Operation::$kind(op) => $run!($name, op),)+
        }
    };
}
pub(crate) use match_operation;

impl Operation {
    /// Whether it may take workspace, which copies and fills never do.
    pub fn computes(&self) -> bool {
        !matches!(self, Operation::MemoryCopy(_) | Operation::MemoryFill(_))
    }

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

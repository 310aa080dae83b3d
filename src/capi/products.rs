//! Products besides `nvb_linear`: batches of matrices, and tokens sorted by expert.

use super::backend::arguments;
use super::operations::{activation, or};
use super::prelude::*;
use super::tensor::{nvb_tensor, Reading};
use super::weight::{nvb_weight, weight_to_read};
use crate::operation::grouped_linear::{GroupedLinear, Routing};
use crate::operation::matmul::Matmul;
use crate::weight::WeightView;

/// output = alpha · op(a) · op(b) for each matrix of a batch, op(x) = x or xᵀ. Tensors have rank 2 to 4: the last two axes
/// are a matrix, with a contiguous last axis, those before the batch.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_matmul_args {
    pub struct_size: usize,
    /// [.., M, K], transposed [.., K, M]; any float dtype. A batch axis of extent 1, of stride 0 or left out serves the
    /// whole batch.
    pub a: nvb_tensor,
    /// [.., K, N], transposed [.., N, K]; the dtype of `a`, with batch axes as there.
    pub b: nvb_tensor,
    /// [.., M, N], any float dtype; its batch axes are the batch. Must not overlap `a` or `b`.
    pub output: nvb_tensor,
    /// 0: 1.
    pub alpha: f32,
    /// 0, or 1: `a` lies transposed.
    pub transpose_a: u32,
    /// 0, or 1: `b` lies transposed.
    pub transpose_b: u32,
    /// Must be 0.
    pub reserved: u32,
}
versioned!(nvb_matmul_args);

/// output[t] = activation(input[t] · weight[e]ᵀ + bias[e]) for the tokens of expert e, which lie one expert after the
/// other: expert_offsets[e] .. expert_offsets[e + 1]; or for tokens that name their experts. A mixture of experts.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_grouped_linear_args {
    pub struct_size: usize,
    /// [T, K], sorted by expert. F32, or with a float weight the weight's dtype; a quantised weight takes F32, F16 and BF16.
    pub input: nvb_tensor,
    /// I32 [experts + 1] in device memory, ascending from 0 to at most T. They are read when the work runs, so a captured
    /// graph serves every routing. Others are clamped on CUDA and an error on the CPU. Tokens from the last offset on
    /// have no expert, and their rows of `output` are not written.
    pub expert_offsets: nvb_tensor,
    /// The experts' weights stacked, [experts · N, K]; scales of 128 × 128 blocks need N to be a multiple of 128.
    pub weight: *const nvb_weight,
    /// Optional [experts · N], any float dtype. For a gated weight in the order of its rows, in which gate and up alternate:
    /// of each expert element 2i is the bias of row i of gate, element 2i + 1 that of row i of up.
    pub bias: nvb_tensor,
    /// [T, N], gated [T, N / 2]; any float dtype. Must not overlap `input`.
    pub output: nvb_tensor,
    /// `NVB_ACTIVATION_…`
    pub activation: u32,
    /// Of `weight`, beside `expert_ids`; with `expert_offsets` 0 or their number.
    pub experts: u32,
    /// In place of `expert_offsets`: I32 [T, U] in device memory, any strides: the U experts of each token, in no order. `input` is
    /// then [T, K], or [T · U, K] with a row for each of them, and `output` [T · U, N]: row t · U + u is that of expert
    /// expert_ids[t, u]. A number that is no expert's is an error on the CPU, and leaves its row unwritten on CUDA.
    pub expert_ids: nvb_tensor,
}
versioned!(nvb_grouped_linear_args);

pub(super) fn flag(name: &str, value: u32) -> Result<bool> {
    match value {
        0 | 1 => Ok(value == 1),
        _ => Err(Error::invalid(format!("{name} is {value}; 0 or 1 is needed"))),
    }
}

pub(super) fn matmul_of(reading: Reading<'_>, args: &nvb_matmul_args) -> Result<Matmul> {
    expect_reserved(args.reserved)?;
    Matmul::new(
        reading.tensor("a", &args.a)?,
        reading.tensor("b", &args.b)?,
        flag("transpose_a", args.transpose_a)?,
        flag("transpose_b", args.transpose_b)?,
        or(args.alpha, 1.0),
        reading.tensor("output", &args.output)?,
    )
}

pub(super) fn grouped_linear_of(
    reading: Reading<'_>,
    args: &nvb_grouped_linear_args,
    weight: WeightView,
) -> Result<GroupedLinear> {
    let offsets = reading.optional("expert_offsets", &args.expert_offsets)?;
    let routing = match (offsets, reading.optional_strided("expert_ids", &args.expert_ids)?) {
        (Some(offsets), None) => Routing::Offsets(offsets),
        (None, Some(ids)) => Routing::Ids(ids),
        (None, None) => return Err(Error::invalid("tensor `expert_offsets` is missing, and so is `expert_ids`")),
        _ => return Err(Error::invalid("`expert_offsets` and `expert_ids` are both given; one of them is needed")),
    };
    GroupedLinear::new(
        reading.tensor("input", &args.input)?,
        (routing, args.experts as usize),
        weight,
        reading.optional("bias", &args.bias)?,
        activation(args.activation)?,
        reading.tensor("output", &args.output)?,
    )
}

/// Queues a batch of products, summed in f32 with one rounding at the store. Any extents, 0 included. Does not
/// synchronise; the first call of a stream may allocate workspace. May be captured after that.
#[no_mangle]
pub unsafe extern "C" fn nvb_matmul(
    backend: *const nvb_backend,
    args: *const nvb_matmul_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_matmul, {
        arguments!(backend, args, stream);
        backend.queue(matmul_of(Reading::Memory(&backend), args)?, &stream)
    })
}

/// Queues the products of a mixture of experts, summed in f32 with one rounding at the store; a quantised weight's values
/// are exact, with the exception below. Does not synchronise; may be captured. Tokens that name their experts are sorted on the
/// CPU, which allocates. On CUDA many of them with an input in F16 or BF16 are sorted on the device, for which the first call of
/// a stream may allocate workspace, and GGUF's blocks are then rounded to the input's dtype, or on 9.0, in formats of 256
/// elements, to 11 bits; all others are computed row by row, with blocks from compute capability 8.0 on by tensor cores, as
/// `nvb_linear` does for few tokens.
/// (With `batch_invariant` none are sorted, and the first call of a stream with input that is not aligned, or whose rows overlap,
/// may allocate workspace. Nothing else allocates.)
#[no_mangle]
pub unsafe extern "C" fn nvb_grouped_linear(
    backend: *const nvb_backend,
    args: *const nvb_grouped_linear_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_grouped_linear, {
        arguments!(backend, args, stream);
        let (owner, weight) = weight_to_read(&backend, args.weight)?;
        backend.queue_with(grouped_linear_of(Reading::Memory(&backend), args, weight)?, Some(owner), &stream)
    })
}

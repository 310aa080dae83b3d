//! From logits to tokens, and elementwise operations.

use super::backend::arguments;
use super::operations::{activation, or};
use super::prelude::*;
use super::tensor::{device_tensor, nvb_tensor, optional_device_tensor, Reading};
use crate::operation::argmax::Argmax;
use crate::operation::elementwise::{Elementwise, ElementwiseKind};
use crate::operation::sample::{Sample, SampleOptions};
use crate::operation::softmax::Softmax;

/// output = exp(scale · input − max) / Σ, over the last axis.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_softmax_args {
    pub struct_size: usize,
    /// [rows, n], any float dtype.
    pub input: nvb_tensor,
    /// The shape of `input`, which it may be; any float dtype.
    pub output: nvb_tensor,
    /// 0: 1.
    pub scale: f32,
    /// Must be 0.
    pub reserved: u32,
}
versioned!(nvb_softmax_args);

/// The operands of `nvb_add`, `nvb_multiply`, `nvb_scale`, `nvb_soft_cap`, `nvb_convert` and `nvb_activate`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_elementwise_args {
    pub struct_size: usize,
    /// [rows, n], any float dtype.
    pub input: nvb_tensor,
    /// The second operand of add and multiply only: [rows, n], or one row for all.
    pub second: nvb_tensor,
    /// [rows, n], any float dtype; may be the same memory as an operand of the same dtype.
    pub output: nvb_tensor,
    /// The factor of scale, the cap of soft_cap; else ignored.
    pub factor: f32,
    /// `NVB_ACTIVATION_…` of activate; else ignored.
    pub activation: u32,
}
versioned!(nvb_elementwise_args);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_argmax_args {
    pub struct_size: usize,
    /// [B, V], any float dtype.
    pub logits: nvb_tensor,
    /// I32 [B]
    pub tokens: nvb_tensor,
}
versioned!(nvb_argmax_args);

/// Temperature, then top-k, then top-p, then the draw.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_sample_args {
    pub struct_size: usize,
    /// [B, V], any float dtype.
    pub logits: nvb_tensor,
    /// Optional, I32 [B]: the sequence of each row, part of the random counter; absent: the row number.
    pub sequences: nvb_tensor,
    /// Optional, I32 [B]: the position of each row, part of the random counter; absent: 0.
    pub positions: nvb_tensor,
    /// I32 [B]
    pub tokens: nvb_tensor,
    /// Optional, F32 [B]: the chosen token's probability after temperature and before truncation.
    pub probabilities: nvb_tensor,
    pub seed: u64,
    /// Divides the logits; 0: the largest logit is chosen.
    pub temperature: f32,
    /// Keeps the smallest set of most probable tokens whose sum reaches it; 0 or ≥ 1: off.
    pub top_p: f32,
    /// Keeps the k most probable tokens; 0: off.
    pub top_k: u32,
    /// Must be 0.
    pub reserved: u32,
}
versioned!(nvb_sample_args);

/// Queues a softmax over rows, f32 inside. A row of −inf gives zeros. Does not allocate or synchronise; may be captured.
#[no_mangle]
pub unsafe extern "C" fn nvb_softmax(
    backend: *const nvb_backend,
    args: *const nvb_softmax_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_softmax, {
        arguments!(backend, args, stream);
        expect_reserved(args.reserved)?;
        let input = device_tensor(&backend, "input", &args.input)?;
        let output = device_tensor(&backend, "output", &args.output)?;
        backend.queue(Softmax::new(input, output, or(args.scale, 1.0))?, &stream)
    })
}

fn elementwise(
    backend: *const nvb_backend,
    args: *const nvb_elementwise_args,
    stream: *mut nvb_stream,
    kind: impl FnOnce(&nvb_elementwise_args) -> Result<ElementwiseKind>,
) -> Result<()> {
    arguments!(backend, args, stream);
    let input = device_tensor(&backend, "input", &args.input)?;
    let second = optional_device_tensor(&backend, "second", &args.second)?;
    let output = device_tensor(&backend, "output", &args.output)?;
    backend.queue(Elementwise::new(kind(args)?, input, second, output)?, &stream)
}

/// Queues output = input + second. As all elementwise operations: f32 inside, one rounding at the store; does not
/// allocate or synchronise; may be captured.
#[no_mangle]
pub unsafe extern "C" fn nvb_add(
    backend: *const nvb_backend,
    args: *const nvb_elementwise_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_add, { elementwise(backend, args, stream, |_| Ok(ElementwiseKind::Add)) })
}

/// Queues output = input · second.
#[no_mangle]
pub unsafe extern "C" fn nvb_multiply(
    backend: *const nvb_backend,
    args: *const nvb_elementwise_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_multiply, { elementwise(backend, args, stream, |_| Ok(ElementwiseKind::Multiply)) })
}

/// Queues output = input · factor.
#[no_mangle]
pub unsafe extern "C" fn nvb_scale(
    backend: *const nvb_backend,
    args: *const nvb_elementwise_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_scale, { elementwise(backend, args, stream, |args| Ok(ElementwiseKind::Scale(args.factor))) })
}

/// Queues output = factor · tanh(input / factor), Gemma 2's soft cap; the factor is above 0.
#[no_mangle]
pub unsafe extern "C" fn nvb_soft_cap(
    backend: *const nvb_backend,
    args: *const nvb_elementwise_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_soft_cap, { elementwise(backend, args, stream, |args| Ok(ElementwiseKind::SoftCap(args.factor))) })
}

/// Queues output = input in the output's dtype, rounded to nearest even.
#[no_mangle]
pub unsafe extern "C" fn nvb_convert(
    backend: *const nvb_backend,
    args: *const nvb_elementwise_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_convert, { elementwise(backend, args, stream, |_| Ok(ElementwiseKind::Convert)) })
}

/// Queues output = activation(input).
#[no_mangle]
pub unsafe extern "C" fn nvb_activate(
    backend: *const nvb_backend,
    args: *const nvb_elementwise_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_activate, {
        elementwise(backend, args, stream, |args| Ok(ElementwiseKind::Activation(activation(args.activation)?)))
    })
}

pub(super) fn argmax_of(reading: Reading<'_>, args: &nvb_argmax_args) -> Result<Argmax> {
    Argmax::new(reading.tensor("logits", &args.logits)?, reading.tensor("tokens", &args.tokens)?)
}

pub(super) fn sample_of(reading: Reading<'_>, args: &nvb_sample_args) -> Result<Sample> {
    expect_reserved(args.reserved)?;
    let options =
        SampleOptions { temperature: args.temperature, top_k: args.top_k, top_p: or(args.top_p, 1.0), seed: args.seed };
    Sample::new(
        reading.tensor("logits", &args.logits)?,
        options,
        reading.optional("sequences", &args.sequences)?,
        reading.optional("positions", &args.positions)?,
        reading.tensor("tokens", &args.tokens)?,
        reading.optional("probabilities", &args.probabilities)?,
    )
}

/// Queues the index of each row's largest logit. The lowest index wins ties; NaN never wins unless all are NaN (then 0).
/// Does not synchronise; the first call with more rows or columns may allocate workspace. May be captured after that.
#[no_mangle]
pub unsafe extern "C" fn nvb_argmax(
    backend: *const nvb_backend,
    args: *const nvb_argmax_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_argmax, {
        arguments!(backend, args, stream);
        backend.queue(argmax_of(Reading::Memory(&backend), args)?, &stream)
    })
}

/// Queues a draw for each row. The random number is a pure function of (seed, sequence, position): Philox4x32-10
/// (Salmon et al. 2011), so a run can be repeated whatever else the batch holds. Ties are ordered by index, lowest first.
/// Does not synchronise; the first call with more rows or columns may allocate workspace. May be captured after that.
#[no_mangle]
pub unsafe extern "C" fn nvb_sample(
    backend: *const nvb_backend,
    args: *const nvb_sample_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_sample, {
        arguments!(backend, args, stream);
        backend.queue(sample_of(Reading::Memory(&backend), args)?, &stream)
    })
}

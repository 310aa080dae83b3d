//! Products of quantised values on CUDA: an input that is rounded to 8 bits with a scale a row, or came so, times a
//! weight in 8 bits, by the wgmma kernel or by cuBLASLt.

use super::cublaslt::{LibraryAlgorithm, Operand, OuterScales, Product};
use super::linear::{plain_product, with_epilogue};
use super::linear_wgmma::{self, Params as WgmmaParams, QuantizedOperands};
use super::prelude::*;
use super::quantize_tokens;
use crate::device::Device;
use crate::executor::Executor;
use crate::weight::{Encoding, Scales};

/// Sums of so many products of INT8 values fit an i32: 2^17 · 127 · 128 < 2^31.
const LONGEST_INT8: usize = 1 << 17;

/// What multiplies the quantised values of input and weight.
#[derive(Clone, Copy)]
pub(super) enum By<'a> {
    /// The wgmma kernel.
    Own,
    Vendor(LibraryAlgorithm<'a>),
}

/// The operands of a product with the input in 8 bits, and the compute capability from which on it can be; `None` where
/// the weight has no quantised values for it.
fn rounded_operands(op: &LinearProduct) -> Option<([Operand; 2], i32)> {
    let Scales::Rows(_) = op.weight.scales else { return None };
    match op.weight.encoding {
        Encoding::Int8 if op.weight.columns <= LONGEST_INT8 => Some(([Operand::Int8, Operand::Int8], 75)),
        Encoding::Fp8E4m3 => Some(([Operand::Fp8E4m3, Operand::Fp8E4m3], 89)),
        Encoding::Fp8E5m2 => Some(([Operand::Fp8E4m3, Operand::Fp8E5m2], 89)),
        _ => None,
    }
}

/// The compute capability from which on the weight's quantised values can be multiplied; `None`: nowhere.
pub(super) fn oldest_capability(op: &LinearProduct) -> Option<i32> {
    rounded_operands(op).map(|(_, oldest)| oldest)
}

/// The operands of a product with quantised values of this encoding for its input.
pub(super) fn quantized_operands(op: &LinearProduct, input: Encoding) -> Option<[Operand; 2]> {
    let wanted = if input == Encoding::Int8 { Operand::Int8 } else { Operand::Fp8E4m3 };
    rounded_operands(op).map(|(operands, _)| operands).filter(|operands| operands[0] == wanted)
}

/// Whether the input may be rounded to 8 bits, and something multiplies the quantised values.
pub(super) fn supports_rounding(executor: &CudaExecutor, op: &LinearProduct, own: bool) -> bool {
    executor.choices().may_round_input(op) && supports_quantized_product(executor, op, own)
}

/// Whether something multiplies the quantised values of such an input: the wgmma kernel (`own`), or cuBLASLt.
pub(super) fn supports_quantized_product(executor: &CudaExecutor, op: &LinearProduct, own: bool) -> bool {
    let Some((operands, oldest)) = rounded_operands(op) else { return false };
    let there = || match own {
        true => {
            // Of the quantised values' addresses nothing counts but that they are aligned.
            let scales = OuterScales { input: std::ptr::dangling(), weight: std::ptr::dangling() };
            let quantized =
                QuantizedOperands { data: std::ptr::null(), stride: op.weight.row_stride, operands, scales };
            WgmmaParams::of_quantized(op, &quantized).is_some_and(|params| linear_wgmma::supports(executor, &params))
        }
        false => executor.cublaslt().is_some(),
    };
    executor.info().compute_capability >= oldest && there()
}

/// The one that leads: cuBLASLt does not scale i32 sums, and has no epilogue with the scales of FP8.
pub(super) fn rounds_with_own(executor: &CudaExecutor, op: &LinearProduct) -> bool {
    executor.choices().may_round_input(op) && prefers_quantized_product(executor, op)
}

/// The same of an input that is in 8 bits already.
pub(super) fn prefers_quantized_product(executor: &CudaExecutor, op: &LinearProduct) -> bool {
    linear_wgmma::has_many_rows(op)
        && (op.weight.encoding == Encoding::Int8 || !op.is_plain())
        && supports_quantized_product(executor, op, true)
}

/// Bytes of the input's scales in front of its quantised values.
fn quantized_scale_bytes(op: &LinearProduct) -> usize {
    (op.input.rows * size_of::<f32>()).next_multiple_of(256)
}

/// Bytes of the input in 8 bits, scales and quantised values.
pub(super) fn quantized_bytes(op: &LinearProduct) -> usize {
    quantized_scale_bytes(op) + op.input.rows * op.weight.columns.next_multiple_of(16)
}

/// The input in 8 bits with a scale a row, times the weight's quantised values; `false` where that cannot be.
pub(super) fn with_quantized_activations(
    executor: &CudaExecutor,
    op: &LinearProduct,
    by: By<'_>,
    scratch: &mut ScratchGuard<'_>,
    stream: RawHandle,
) -> Result<bool> {
    let Some((operands, _)) = rounded_operands(op) else { return Ok(false) };
    if !supports_rounding(executor, op, matches!(by, By::Own)) {
        return Ok(false);
    }
    let encoding = if operands[0] == Operand::Int8 { Encoding::Int8 } else { Encoding::Fp8E4m3 };
    let (m, k) = (op.input.rows, op.weight.columns);
    let row_stride = k.next_multiple_of(16);
    let scale_bytes = quantized_scale_bytes(op);
    let data = scratch.get(WorkspaceUse::Input, quantized_bytes(op))?;
    let tokens =
        Tokens { data: data.wrapping_byte_add(scale_bytes), row_stride, scales: data.cast(), padded: row_stride };
    let rows = QuantizedRows {
        data: tokens.data,
        scales: data.cast(),
        given_scales: false,
        encoding,
        rows: m,
        columns: row_stride,
        row_stride,
    };
    // SAFETY: the buffer holds the scales and the quantised values of every row, and the context is current.
    unsafe { quantize_tokens::run(executor, &op.input, None, &rows, stream)? };
    quantized_product(executor, op, by, &tokens, operands, scratch, stream)
}

/// An input in 8 bits: rows and scales on 16-byte boundaries.
#[derive(Clone, Copy)]
pub(super) struct Tokens {
    pub data: *mut c_void,
    /// A multiple of 16.
    pub row_stride: usize,
    pub scales: *const f32,
    /// The columns rounded up to a multiple of 16; those that the weight does not have are zeros.
    pub padded: usize,
}

/// The quantised values of both sides multiplied, in the place of the product's input; `false` where that cannot be.
pub(super) fn quantized_product(
    executor: &CudaExecutor,
    op: &LinearProduct,
    by: By<'_>,
    tokens: &Tokens,
    operands: [Operand; 2],
    scratch: &mut ScratchGuard<'_>,
    stream: RawHandle,
) -> Result<bool> {
    let Scales::Rows(weight_scales) = op.weight.scales else { return Ok(false) };
    let scales = OuterScales { input: tokens.scales, weight: weight_scales };
    let [input_operand, weight_operand] = operands;
    let algorithm = match by {
        By::Own => {
            let quantized = QuantizedOperands { data: tokens.data, stride: tokens.row_stride, operands, scales };
            return linear_wgmma::run(executor, WgmmaParams::of_quantized(op, &quantized), stream);
        }
        By::Vendor(algorithm) => algorithm,
    };
    let Some(cublaslt) = executor.cublaslt() else { return Ok(false) };
    let product = Product {
        input: tokens.data,
        // The padding of both sides is zeros.
        k: tokens.padded,
        input_stride: tokens.row_stride,
        ..plain_product(op, [input_operand, weight_operand], algorithm)
    };
    // FP8's scales can be cuBLASLt's business, in libraries from CUDA 12.9 on.
    if input_operand != Operand::Int8 {
        let scaled = Product { scales: Some(scales), ..product };
        let done = if op.is_plain() {
            cublaslt.product(&scaled, scratch, stream)?
        } else {
            let sums = Product { output_dtype: DType::F32, ..scaled };
            with_epilogue(executor, cublaslt, op, &sums, None, scratch, stream)?
        };
        if done {
            return Ok(true);
        }
    }
    // The quantised values multiplied as they are, and both scales applied by the epilogue.
    let sums = if input_operand == Operand::Int8 { DType::I32 } else { DType::F32 };
    with_epilogue(executor, cublaslt, op, &Product { output_dtype: sums, ..product }, Some(scales), scratch, stream)
}

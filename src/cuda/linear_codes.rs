//! `linear` of an input in 8 bits on CUDA: the codes times those of a weight in 8 bits where something multiplies them and
//! is ahead, else the dequantised input by `linear`.

use super::executor::CudaExecutor;
use super::launch::Launch;
use super::linear_quantized::takes_own_kernel;
use super::linear_rounded::{codes_operands, leads_with_codes, multiplies_codes, product_of_codes, By, Tokens};
use super::needs::Needs;
use super::scratch::{Purpose, ScratchGuard};
use super::{
    cublaslt::{Operand, Pick},
    dequantize, linear, linear_needs, linear_quantized,
};
use crate::error::Result;
use crate::ops::linear_codes::LinearCodes;
use crate::ops::quantized_rows::QuantizedRows;
use crate::stream::RawHandle;
use crate::tensor::Matrix;
use crate::weight::Scales;
use std::ffi::c_void;

/// `nvb_linear_codes_params` of csrc/linear/linear_quantized_input.h.
#[repr(C)]
struct Params {
    codes: *const c_void,
    scales: *const f32,
    output: *mut c_void,
    output_scales: *mut f32,
    rows: i64,
    columns: i64,
    row_bytes: i64,
    output_row_bytes: i64,
}

extern "C" {
    fn nvb_cuda_linear_codes(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &LinearCodes, stream: RawHandle) -> Result<()> {
    let shape = op.shape();
    if op.input.rows == 0 || op.weight.rows == 0 || op.input.columns == 0 {
        return linear::run(executor, &shape, stream);
    }
    let _guard = executor.enter()?;
    let scratch = executor.scratch(stream);
    // Held while the product takes what is for itself, so that nobody puts another input in the place of this one.
    let mut inputs = scratch.lock_inputs(executor, stream, || input_needs(op))?;
    let input = aligned(executor, &op.input, &mut inputs, stream)?;
    let op = &LinearCodes { input, ..*op };
    let needs = || linear_needs::of_codes(executor, op).0;
    if multiplied(executor, op, &mut scratch.lock(executor, stream, needs)?, stream)? {
        return Ok(());
    }
    let dtype = shape.input.dtype;
    let QuantizedRows { rows, columns, .. } = input;
    let data = inputs.get(Purpose::Workspace, value_bytes(op))?;
    // SAFETY: aligned codes of these rows, and the buffer holds their values.
    unsafe { dequantize::rows(executor, &input.view(), &(0..rows), (data, dtype), stream)? };
    let input = Matrix { data, dtype, rows, columns, row_stride: columns };
    linear::run(executor, &op.with_input(input), stream)
}

/// What `run` asks of the stream's scratch for inputs.
pub(super) fn input_needs(op: &LinearCodes) -> Needs {
    let copy = if is_aligned(&op.input) { 0 } else { scale_bytes(&op.input) + op.input.rows * padded(&op.input) };
    Needs::none().with(Purpose::Workspace, value_bytes(op)).with(Purpose::Input, copy)
}

/// Of the dequantised input.
fn value_bytes(op: &LinearCodes) -> usize {
    op.input.rows * op.input.columns * op.shape().input.dtype.size()
}

/// The operands of the product of codes, if there is one for this weight and as many rows.
pub(super) fn operands(executor: &CudaExecutor, op: &LinearCodes) -> Option<[Operand; 2]> {
    let shape = op.shape();
    let fits = matches!(op.weight.scales, Scales::Rows(_)) && op.weight.order.is_null() && !executor.batch_invariant;
    codes_operands(&shape, op.input.encoding)
        .filter(|_| fits)
        .filter(|_| !takes_own_kernel(executor, &shape, &linear_quantized::params(&shape), RawHandle::NULL))
}

/// The product of codes, from as many rows on as `linear` rounds its input to 8 bits; `false` where that cannot be.
fn multiplied(
    executor: &CudaExecutor,
    op: &LinearCodes,
    scratch: &mut ScratchGuard<'_>,
    stream: RawHandle,
) -> Result<bool> {
    let shape = op.shape();
    let Some(operands) = operands(executor, op) else { return Ok(false) };
    let tokens = Tokens {
        data: op.input.data,
        row_stride: op.input.row_stride,
        scales: op.input.scales,
        // Codes past the last column are zeros, or there are none.
        padded: op.input.columns.next_multiple_of(16),
    };
    let mut ways = [By::Vendor(Pick::First), By::Own];
    if leads_with_codes(executor, &shape) {
        ways.reverse();
    }
    for by in ways {
        if multiplies_codes(executor, &shape, matches!(by, By::Own))
            && product_of_codes(executor, &shape, by, &tokens, operands, scratch, stream)?
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether products read the codes where they lie.
fn is_aligned(input: &QuantizedRows) -> bool {
    let on_boundary = |address: usize| address.is_multiple_of(16);
    let stride = if input.rows == 1 { input.columns } else { input.row_stride };
    on_boundary(input.data as usize)
        && on_boundary(input.scales as usize)
        && on_boundary(stride)
        && on_boundary(input.columns)
}

fn padded(input: &QuantizedRows) -> usize {
    input.columns.next_multiple_of(16)
}

fn scale_bytes(input: &QuantizedRows) -> usize {
    (input.rows * size_of::<f32>()).next_multiple_of(256)
}

/// The codes themselves or, where their rows or scales are not aligned or not padded as products want them, a copy.
fn aligned(
    executor: &CudaExecutor,
    input: &QuantizedRows,
    inputs: &mut ScratchGuard<'_>,
    stream: RawHandle,
) -> Result<QuantizedRows> {
    let &QuantizedRows { data, scales, rows, columns, row_stride, .. } = input;
    if is_aligned(input) {
        return Ok(QuantizedRows { row_stride: if rows == 1 { columns } else { row_stride }, ..*input });
    }
    let (row_bytes, scale_bytes) = (padded(input), scale_bytes(input));
    let buffer = inputs.get(Purpose::Input, scale_bytes + rows * row_bytes)?;
    let copy = QuantizedRows {
        data: buffer.wrapping_byte_add(scale_bytes),
        scales: buffer.cast(),
        row_stride: row_bytes,
        ..*input
    };
    let params = Params {
        codes: data,
        scales,
        output: copy.data,
        output_scales: copy.scales,
        rows: rows as i64,
        columns: columns as i64,
        row_bytes: row_stride as i64,
        output_row_bytes: row_bytes as i64,
    };
    // SAFETY: the descriptor was validated, the buffer holds the copy, and the context is current.
    let code = unsafe { nvb_cuda_linear_codes(&params, &executor.launch_on(stream)) };
    executor.check_launch(code, "aligning the codes of a linear")?;
    Ok(copy)
}

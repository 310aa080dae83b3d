//! `dequantize` on CUDA: a quantised weight, or a range of its rows, as floats.

use super::prelude::*;
use super::quantized::QuantizedMatrix;
use crate::operation::dequantize::Dequantize;
use crate::weight::WeightView;
use std::ops::Range;

/// `nvb_dequantize_params` of csrc/dequantize/dequantize.h.
#[repr(C)]
struct Params {
    matrix: QuantizedMatrix,
    output: *mut c_void,
    order: *const i32,
    first_row: i64,
    rows: i64,
    first_column: i64,
    columns: i64,
    output_stride: i64,
    output_dtype: u32,
    reserved: u32,
}

extern "C" {
    fn nvb_cuda_dequantize(params: *const Params, launch: *const Launch) -> i32;
}

/// `false` for a float weight, which has nothing to dequantise.
pub(super) fn run(executor: &CudaExecutor, op: &Dequantize, stream: RawHandle) -> Result<bool> {
    let Some(matrix) = QuantizedMatrix::of(&op.weight) else { return Ok(false) };
    let _guard = executor.enter()?;
    let params = Params {
        matrix,
        output: op.output.data,
        order: op.weight.order,
        first_row: 0,
        rows: op.weight.rows as i64,
        first_column: 0,
        columns: op.weight.columns as i64,
        output_stride: op.output.row_stride as i64,
        output_dtype: op.output.dtype as u32,
        reserved: 0,
    };
    // SAFETY: the descriptor was validated, and the context is current.
    let code = unsafe { nvb_cuda_dequantize(&params, &executor.launch_on(stream)) };
    executor.check_launch(code, "dequantize").map(|()| true)
}

/// Writes these rows to `output` [rows, columns] without gaps, columns in the weight's own order. The context is current.
///
/// # Safety
/// The weight is quantised and has these rows, and `output` room for them.
pub(super) unsafe fn rows(
    executor: &CudaExecutor,
    weight: &WeightView,
    rows: &Range<usize>,
    (output, dtype): (*mut c_void, DType),
    stream: RawHandle,
) -> Result<()> {
    let params = Params {
        matrix: QuantizedMatrix::of(weight).expect("a quantised weight"),
        output,
        order: std::ptr::null(),
        first_row: rows.start as i64,
        rows: rows.len() as i64,
        first_column: 0,
        columns: weight.columns as i64,
        output_stride: weight.columns as i64,
        output_dtype: dtype as u32,
        reserved: 0,
    };
    executor.check_launch(nvb_cuda_dequantize(&params, &executor.launch_on(stream)), "dequantize")
}

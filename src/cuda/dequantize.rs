//! `dequantize` on CUDA: a quantised weight, or a range of its rows, as floats.

use super::prelude::*;
use super::quantized::QuantizedMatrix;
use crate::operation::dequantize::Dequantize;
use crate::weight::WeightView;
use std::ops::Range;

mirror! {
    /// `nvb_dequantize_params` of csrc/dequantize/dequantize.h.
    #[repr(C)]
    struct Params of(matrix: QuantizedMatrix, order: *const i32, first_row: usize, output: &Matrix) {
        matrix: QuantizedMatrix,
        output: *mut c_void = output.data,
        order: *const i32,
        first_row: i64 = first_row as i64,
        rows: i64 = output.rows as i64,
        first_column: i64 = 0,
        columns: i64 = output.columns as i64,
        output_stride: i64 = output.row_stride as i64,
        output_dtype: u32 = output.dtype as u32,
        reserved: u32 = 0,
    }
}

extern "C" {
    fn nvb_cuda_dequantize(params: *const Params, launch: *const Launch) -> i32;
}

/// `false` for a float weight, which has nothing to dequantise.
pub(super) fn run(executor: &CudaExecutor, op: &Dequantize, stream: RawHandle) -> Result<bool> {
    let Some(matrix) = QuantizedMatrix::of(&op.weight) else { return Ok(false) };
    let _guard = executor.enter()?;
    let params = Params::of(matrix, op.weight.order, 0, &op.output);
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
    let (rows, first, columns) = (rows.len(), rows.start, weight.columns);
    let output = Matrix { data: output, dtype, rows, columns, row_stride: columns };
    let matrix = QuantizedMatrix::of(weight).expect("a quantised weight");
    let params = Params::of(matrix, std::ptr::null(), first, &output);
    executor.check_launch(nvb_cuda_dequantize(&params, &executor.launch_on(stream)), "dequantize")
}

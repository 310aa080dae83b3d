//! What the launchers of csrc/rms_norm and csrc/layer_norm have in common.

use super::prelude::*;
use crate::tensor::Tensor;

// The weights have one dtype.
mirror! {
    /// `nvb_norm_rows` of csrc/common/norm.h.
    #[repr(C)]
    pub(super) struct NormRows of(input: &Matrix, others: [Option<Matrix>; 3], vectors: [Option<Tensor>; 2]) {
        input: *const c_void = input.data,
        residual: *const c_void = data_of(residual),
        residual_output: *mut c_void = data_of(residual_output),
        output: *mut c_void = data_of(output),
        rows: i64 = input.rows as i64,
        columns: i64 = input.columns as i64,
        input_stride: i64 = input.row_stride as i64,
        residual_stride: i64 = stride_of(residual),
        residual_output_stride: i64 = stride_of(residual_output),
        output_stride: i64 = stride_of(output),
        input_dtype: u32 = input.dtype as u32,
        residual_dtype: u32 = dtype_of(residual.or(residual_output)),
        weight_dtype: u32 = vector_dtype_of(vectors[0].or(vectors[1])),
        output_dtype: u32 = dtype_of(output),
    }
    with [residual, residual_output, output] = others;
}

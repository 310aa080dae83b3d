//! What the launchers of csrc/rms_norm and csrc/layer_norm have in common.

use crate::tensor::{DType, Matrix, Tensor};
use std::ffi::c_void;

/// `nvb_norm_rows` of csrc/common/norm.h.
#[repr(C)]
pub(super) struct NormRows {
    input: *const c_void,
    residual: *const c_void,
    residual_output: *mut c_void,
    output: *mut c_void,
    rows: i64,
    columns: i64,
    input_stride: i64,
    residual_stride: i64,
    residual_output_stride: i64,
    output_stride: i64,
    input_dtype: u32,
    residual_dtype: u32,
    weight_dtype: u32,
    output_dtype: u32,
}

impl NormRows {
    /// Describes an operation's validated matrices; `vectors` are its weights, of one dtype.
    pub fn new(
        input: &Matrix,
        residual: Option<Matrix>,
        residual_output: Option<Matrix>,
        output: Option<Matrix>,
        vectors: [Option<Tensor>; 2],
    ) -> NormRows {
        let data = |matrix: Option<Matrix>| matrix.map_or(std::ptr::null_mut(), |matrix| matrix.data);
        let stride = |matrix: Option<Matrix>| matrix.map_or(0, |matrix| matrix.row_stride as i64);
        // What is absent still names a dtype that has a kernel.
        let dtype = |matrix: Option<Matrix>| matrix.map_or(DType::F32, |matrix| matrix.dtype) as u32;
        NormRows {
            input: input.data,
            residual: data(residual),
            residual_output: data(residual_output),
            output: data(output),
            rows: input.rows as i64,
            columns: input.columns as i64,
            input_stride: input.row_stride as i64,
            residual_stride: stride(residual),
            residual_output_stride: stride(residual_output),
            output_stride: stride(output),
            input_dtype: input.dtype as u32,
            residual_dtype: dtype(residual.or(residual_output)),
            weight_dtype: vectors[0].or(vectors[1]).map_or(DType::F32, |tensor| tensor.dtype) as u32,
            output_dtype: dtype(output),
        }
    }
}

pub(super) fn vector_data(tensor: Option<Tensor>) -> *const c_void {
    tensor.map_or(std::ptr::null(), |tensor| tensor.data.cast_const())
}

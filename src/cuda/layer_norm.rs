//! `layer_norm` on CUDA: the launcher of csrc/layer_norm.

use super::executor::CudaExecutor;
use super::launch::Launch;
use crate::error::Result;
use crate::ops::layer_norm::LayerNorm;
use crate::stream::RawHandle;
use crate::tensor::{DType, Matrix, Tensor};
use std::ffi::c_void;

/// `nvb_layer_norm_params` of csrc/layer_norm/layer_norm.h.
#[repr(C)]
struct Params {
    input: *const c_void,
    residual: *const c_void,
    residual_output: *mut c_void,
    weight: *const c_void,
    bias: *const c_void,
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
    epsilon: f32,
    reserved: u32,
}
const _: () = assert!(size_of::<Params>() == 120);

extern "C" {
    fn nvb_cuda_layer_norm(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &LayerNorm, stream: RawHandle) -> Result<()> {
    let _guard = executor.enter()?;
    let data = |matrix: Option<Matrix>| matrix.map_or(std::ptr::null_mut(), |matrix| matrix.data);
    let stride = |matrix: Option<Matrix>| matrix.map_or(0, |matrix| matrix.row_stride as i64);
    let vector = |tensor: Option<Tensor>| tensor.map_or(std::ptr::null_mut(), |tensor| tensor.data);
    // What is absent still names a dtype that has a kernel.
    let dtype = |matrix: Option<Matrix>| matrix.map_or(DType::F32, |matrix| matrix.dtype) as u32;
    let params = Params {
        input: op.input.data,
        residual: data(op.residual),
        residual_output: data(op.residual_output),
        weight: vector(op.weight),
        bias: vector(op.bias),
        output: data(op.output),
        rows: op.input.rows as i64,
        columns: op.input.columns as i64,
        input_stride: op.input.row_stride as i64,
        residual_stride: stride(op.residual),
        residual_output_stride: stride(op.residual_output),
        output_stride: stride(op.output),
        input_dtype: op.input.dtype as u32,
        residual_dtype: dtype(op.residual.or(op.residual_output)),
        weight_dtype: op.weight.or(op.bias).map_or(DType::F32, |tensor| tensor.dtype) as u32,
        output_dtype: dtype(op.output),
        epsilon: op.epsilon,
        reserved: 0,
    };
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_layer_norm(&params, &executor.launch_on(stream)) }, "layer_norm")
}

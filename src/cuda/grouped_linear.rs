//! `grouped_linear` on CUDA: the launcher of csrc/grouped_linear.

use super::executor::CudaExecutor;
use super::launch::Launch;
use super::linear::{bias_data, bias_dtype};
use super::quantized::{encoding_code, scale_code};
use crate::error::Result;
use crate::ops::grouped_linear::GroupedLinear;
use crate::stream::RawHandle;
use std::ffi::c_void;

/// `nvb_grouped_linear_params` of csrc/grouped_linear/grouped_linear.h.
#[repr(C)]
struct Params {
    input: *const c_void,
    offsets: *const c_void,
    weight: *const c_void,
    scales: *const c_void,
    weight_offsets: *const c_void,
    bias: *const c_void,
    output: *mut c_void,
    rows: i64,
    n: i64,
    k: i64,
    input_stride: i64,
    weight_stride: i64,
    output_stride: i64,
    experts: i32,
    input_dtype: u32,
    weight_dtype: u32,
    encoding: u32,
    scale_kind: u32,
    group: u32,
    bias_dtype: u32,
    output_dtype: u32,
    activation: u32,
    gated: u32,
}
const _: () = assert!(size_of::<Params>() == 144);

extern "C" {
    fn nvb_cuda_grouped_linear(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &GroupedLinear, stream: RawHandle) -> Result<()> {
    let _guard = executor.enter()?;
    let (scale_kind, group, scales) = scale_code(op.weight.scales);
    let params = Params {
        input: op.input.data,
        offsets: op.offsets.data,
        weight: op.weight.data,
        scales,
        weight_offsets: op.weight.offsets.cast(),
        bias: bias_data(op.bias),
        output: op.output.data,
        rows: op.input.rows as i64,
        n: op.expert_rows() as i64,
        k: op.weight.columns as i64,
        input_stride: op.input.row_stride as i64,
        weight_stride: op.weight.row_stride as i64,
        output_stride: op.output.row_stride as i64,
        experts: op.experts as i32,
        input_dtype: op.input.dtype as u32,
        weight_dtype: op.weight.dtype().map_or(0, |dtype| dtype as u32),
        encoding: encoding_code(op.weight.encoding).unwrap_or(0),
        scale_kind,
        group,
        bias_dtype: bias_dtype(op.bias),
        output_dtype: op.output.dtype as u32,
        activation: op.activation as u32,
        gated: op.weight.gated.into(),
    };
    // SAFETY: the descriptor was validated, and the context is current.
    let code = unsafe { nvb_cuda_grouped_linear(&params, &executor.launch_on(stream)) };
    executor.check_launch(code, "grouped linear")
}

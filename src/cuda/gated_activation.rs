//! `gated_activation` on CUDA: the launcher of csrc/gated_activation.

use super::prelude::*;
use super::quantized::QuantizedOutput;
use crate::operation::gated_activation::GatedActivation;

/// `nvb_gated_activation_params` of csrc/gated_activation/gated_activation.h.
#[repr(C)]
struct Params {
    gate: *const c_void,
    up: *const c_void,
    output: *mut c_void,
    rows: i64,
    columns: i64,
    gate_stride: i64,
    up_stride: i64,
    output_stride: i64,
    input_dtype: u32,
    output_dtype: u32,
    activation: u32,
    reserved: u32,
    quantized_output: QuantizedOutput,
}

extern "C" {
    fn nvb_cuda_gated_activation(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &GatedActivation, stream: RawHandle) -> Result<()> {
    let _guard = executor.enter()?;
    // Tensors without elements may have no address, which the launcher takes for a missing operand.
    if op.gate.rows == 0 || op.gate.columns == 0 {
        return Ok(());
    }
    let params = Params {
        gate: op.gate.data,
        up: op.up.data,
        output: op.output.map_or(std::ptr::null_mut(), |output| output.data),
        rows: op.gate.rows as i64,
        columns: op.gate.columns as i64,
        gate_stride: op.gate.row_stride as i64,
        up_stride: op.up.row_stride as i64,
        output_stride: op.output.map_or(0, |output| output.row_stride as i64),
        input_dtype: op.gate.dtype as u32,
        output_dtype: op.output.map_or(DType::F32, |output| output.dtype) as u32,
        activation: op.activation as u32,
        reserved: 0,
        quantized_output: QuantizedOutput::of(op.quantized_output),
    };
    // SAFETY: the descriptor was validated, and the context is current.
    executor
        .check_launch(unsafe { nvb_cuda_gated_activation(&params, &executor.launch_on(stream)) }, "gated_activation")
}

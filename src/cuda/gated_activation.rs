//! `gated_activation` on CUDA: the launcher of csrc/gated_activation.

use super::prelude::*;
use super::quantized::QuantizedOutput;
use crate::operation::gated_activation::GatedActivation;

mirror! {
    /// `nvb_gated_activation_params` of csrc/gated_activation/gated_activation.h.
    #[repr(C)]
    struct Params of(op: &GatedActivation) {
        gate: *const c_void = op.gate.data,
        up: *const c_void = op.up.data,
        output: *mut c_void = data_of(op.output),
        rows: i64 = op.gate.rows as i64,
        columns: i64 = op.gate.columns as i64,
        gate_stride: i64 = op.gate.row_stride as i64,
        up_stride: i64 = op.up.row_stride as i64,
        output_stride: i64 = stride_of(op.output),
        input_dtype: u32 = op.gate.dtype as u32,
        output_dtype: u32 = dtype_of(op.output),
        activation: u32 = op.activation as u32,
        reserved: u32 = 0,
        quantized_output: QuantizedOutput = QuantizedOutput::of(op.quantized_output),
    }
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
    let params = Params::of(op);
    // SAFETY: the descriptor was validated, and the context is current.
    executor
        .check_launch(unsafe { nvb_cuda_gated_activation(&params, &executor.launch_on(stream)) }, "gated_activation")
}

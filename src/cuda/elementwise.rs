//! `elementwise` on CUDA: the launcher of csrc/elementwise.

use super::prelude::*;
use crate::operation::elementwise::{Elementwise, ElementwiseKind};
use crate::operation::Activation;

mirror! {
    /// `nvb_elementwise_params` of csrc/elementwise/elementwise.h.
    #[repr(C)]
    struct Params of(op: &Elementwise, operation: Code, activation: Activation, scalar: f32) {
        input: *const c_void = op.input.data,
        other: *const c_void = data_of(op.second),
        output: *mut c_void = op.output.data,
        rows: i64 = op.input.rows as i64,
        columns: i64 = op.input.columns as i64,
        input_stride: i64 = op.input.row_stride as i64,
        other_stride: i64 = stride_of(op.second),
        output_stride: i64 = op.output.row_stride as i64,
        operation: u32 = operation as u32,
        activation: u32 = activation as u32,
        input_dtype: u32 = op.input.dtype as u32,
        other_dtype: u32 = op.second.map_or(op.input.dtype, |second| second.dtype) as u32,
        output_dtype: u32 = op.output.dtype as u32,
        scalar: f32,
    }
}

/// `nvb_elementwise_code` of csrc/elementwise/elementwise.h.
#[repr(u32)]
enum Code {
    Add = 1,
    Multiply = 2,
    Scale = 3,
    SoftCap = 4,
    Convert = 5,
    Activation = 6,
}

extern "C" {
    fn nvb_cuda_elementwise(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &Elementwise, stream: RawHandle) -> Result<()> {
    let _guard = executor.enter()?;
    // Tensors without elements may have no address, which the launcher takes for a missing operand.
    if op.input.rows == 0 || op.input.columns == 0 {
        return Ok(());
    }
    let (operation, scalar, activation) = match op.kind {
        ElementwiseKind::Add => (Code::Add, 0.0, Activation::None),
        ElementwiseKind::Multiply => (Code::Multiply, 0.0, Activation::None),
        ElementwiseKind::Scale(factor) => (Code::Scale, factor, Activation::None),
        ElementwiseKind::SoftCap(cap) => (Code::SoftCap, cap, Activation::None),
        ElementwiseKind::Convert => (Code::Convert, 0.0, Activation::None),
        ElementwiseKind::Activation(activation) => (Code::Activation, 0.0, activation),
    };
    let params = Params::of(op, operation, activation, scalar);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_elementwise(&params, &executor.launch_on(stream)) }, "elementwise")
}

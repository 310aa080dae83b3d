//! `elementwise` on CUDA: the launcher of csrc/elementwise.

use super::prelude::*;
use crate::operation::elementwise::{Elementwise, ElementwiseKind};
use crate::operation::Activation;

/// `nvb_elementwise_params` of csrc/elementwise/elementwise.h.
#[repr(C)]
struct Params {
    input: *const c_void,
    other: *const c_void,
    output: *mut c_void,
    rows: i64,
    columns: i64,
    input_stride: i64,
    other_stride: i64,
    output_stride: i64,
    operation: u32,
    activation: u32,
    input_dtype: u32,
    other_dtype: u32,
    output_dtype: u32,
    scalar: f32,
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
    let params = Params {
        input: op.input.data,
        other: op.second.map_or(std::ptr::null_mut(), |second| second.data),
        output: op.output.data,
        rows: op.input.rows as i64,
        columns: op.input.columns as i64,
        input_stride: op.input.row_stride as i64,
        other_stride: op.second.map_or(0, |second| second.row_stride as i64),
        output_stride: op.output.row_stride as i64,
        operation: operation as u32,
        activation: activation as u32,
        input_dtype: op.input.dtype as u32,
        other_dtype: op.second.map_or(op.input.dtype, |second| second.dtype) as u32,
        output_dtype: op.output.dtype as u32,
        scalar,
    };
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_elementwise(&params, &executor.launch_on(stream)) }, "elementwise")
}

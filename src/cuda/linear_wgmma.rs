//! Large products on compute capability 9.0 by the kernel of csrc/linear/sm90/linear_wgmma.cuh, which has the epilogue in
//! it.

use super::cublaslt::{Operand, OuterScales};
use super::prelude::*;

mirror! {
    /// `nvb_linear_wgmma_params` of csrc/linear/linear_wgmma.h.
    #[repr(C)]
    pub(super) struct Params of(op: &LinearProduct, rows: (*const c_void, usize), operands: u32, scales: OuterScales) {
        input: *const c_void,
        weight: *const c_void = op.weight.data,
        row_scales: *const f32 = scales.input,
        column_scales: *const f32 = scales.weight,
        bias: *const c_void = vector_of(op.bias),
        residual: *const c_void = data_of(op.residual),
        output: *mut c_void = op.output.data,
        m: i64 = op.input.rows as i64,
        n: i64 = op.weight.rows as i64,
        k: i64 = op.weight.columns as i64,
        input_stride: i64 = stride as i64,
        weight_stride: i64 = op.weight.row_stride as i64,
        residual_stride: i64 = stride_of(op.residual),
        output_stride: i64 = op.output.row_stride as i64,
        operands: u32,
        bias_dtype: u32 = vector_dtype_of(op.bias),
        residual_dtype: u32 = dtype_of(op.residual),
        output_dtype: u32 = op.output.dtype as u32,
        activation: u32 = op.activation as u32,
        gated: u32 = op.weight.gated.into(),
    }
    with (input, stride) = rows;
}

extern "C" {
    fn nvb_cuda_linear_wgmma_supports(params: *const Params, launch: *const Launch) -> i32;
    fn nvb_cuda_linear_wgmma(params: *const Params, launch: *const Launch) -> i32;
}

/// From this number of rows on its tiles of 256 tokens leave little of the tensor cores idle.
const ROWS: usize = 192;

/// Quantised values in place of the product's input: rows of `stride` elements.
#[derive(Clone, Copy)]
pub(super) struct QuantizedOperands {
    pub data: *const c_void,
    pub stride: usize,
    pub operands: [Operand; 2],
    pub scales: OuterScales,
}

/// `nvb_linear_operands` of csrc/linear/linear_wgmma.h.
#[repr(u32)]
enum Operands {
    F16 = 1,
    Bf16 = 2,
    E4m3E4m3 = 3,
    E4m3E5m2 = 4,
    Int8 = 5,
}

/// An [`Operands`]; `None` for operands that no kernel multiplies.
fn operands_code(input: Operand, weight: Operand) -> Option<u32> {
    let code = match (input, weight) {
        (Operand::Float(DType::F16), Operand::Float(DType::F16)) => Operands::F16,
        (Operand::Float(DType::Bf16), Operand::Float(DType::Bf16)) => Operands::Bf16,
        (Operand::Fp8E4m3, Operand::Fp8E4m3) => Operands::E4m3E4m3,
        (Operand::Fp8E4m3, Operand::Fp8E5m2) => Operands::E4m3E5m2,
        (Operand::Int8, Operand::Int8) => Operands::Int8,
        _ => return None,
    };
    Some(code as u32)
}

impl Params {
    /// Of a product with a float weight of this dtype.
    pub fn of_floats(op: &LinearProduct, weight_dtype: DType) -> Option<Params> {
        let operands = operands_code(Operand::Float(op.input.dtype), Operand::Float(weight_dtype))?;
        let none = OuterScales { input: std::ptr::null(), weight: std::ptr::null() };
        Some(Params::of(op, (op.input.data, op.input.row_stride), operands, none))
    }

    /// Of a product with quantised values of input and weight.
    pub fn of_quantized(op: &LinearProduct, quantized: &QuantizedOperands) -> Option<Params> {
        let operands = operands_code(quantized.operands[0], quantized.operands[1])?;
        Some(Params::of(op, (quantized.data, quantized.stride), operands, quantized.scales))
    }
}

/// Whether it leads the library's other kernels: many rows.
pub(super) fn has_many_rows(op: &LinearProduct) -> bool {
    op.input.rows >= ROWS
}

pub(super) fn supports(executor: &CudaExecutor, params: &Params) -> bool {
    // SAFETY: reads the two structs alone.
    unsafe { nvb_cuda_linear_wgmma_supports(params, &executor.launch_on(RawHandle::NULL)) != 0 }
}

/// Queues the product; `false` where the kernel cannot do it. The context is current.
pub(super) fn run(executor: &CudaExecutor, params: Option<Params>, stream: RawHandle) -> Result<bool> {
    let Some(params) = params.filter(|params| supports(executor, params)) else { return Ok(false) };
    // SAFETY: the descriptor was validated, quantised values and scales cover every row, and the context is current.
    let code = unsafe { nvb_cuda_linear_wgmma(&params, &executor.launch_on(stream)) };
    executor.check_launch(code, "large linear").map(|()| true)
}

//! Large products on compute capability 9.0 by the kernel of csrc/linear/sm90/linear_wgmma.cuh, which has the epilogue in
//! it.

use super::cublaslt::{Operand, OuterScales};
use super::linear::{bias_data, bias_dtype, residual_data, residual_dtype, residual_stride};
use super::prelude::*;

/// `nvb_linear_wgmma_params` of csrc/linear/linear_wgmma.h.
#[repr(C)]
pub(super) struct Params {
    input: *const c_void,
    weight: *const c_void,
    row_scales: *const f32,
    column_scales: *const f32,
    bias: *const c_void,
    residual: *const c_void,
    output: *mut c_void,
    m: i64,
    n: i64,
    k: i64,
    input_stride: i64,
    weight_stride: i64,
    residual_stride: i64,
    output_stride: i64,
    operands: u32,
    bias_dtype: u32,
    residual_dtype: u32,
    output_dtype: u32,
    activation: u32,
    gated: u32,
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
    pub fn of(op: &LinearProduct, weight_dtype: DType) -> Option<Params> {
        let operands = operands_code(Operand::Float(op.input.dtype), Operand::Float(weight_dtype))?;
        let none = OuterScales { input: std::ptr::null(), weight: std::ptr::null() };
        Some(Params::with(op, op.input.data, op.input.row_stride, operands, none))
    }

    /// Of a product with quantised values of input and weight.
    pub fn of_quantized(op: &LinearProduct, quantized: &QuantizedOperands) -> Option<Params> {
        let operands = operands_code(quantized.operands[0], quantized.operands[1])?;
        Some(Params::with(op, quantized.data, quantized.stride, operands, quantized.scales))
    }

    fn with(op: &LinearProduct, input: *const c_void, stride: usize, operands: u32, scales: OuterScales) -> Params {
        Params {
            input,
            weight: op.weight.data,
            row_scales: scales.input,
            column_scales: scales.weight,
            bias: bias_data(op.bias),
            residual: residual_data(op.residual),
            output: op.output.data,
            m: op.input.rows as i64,
            n: op.weight.rows as i64,
            k: op.weight.columns as i64,
            input_stride: stride as i64,
            weight_stride: op.weight.row_stride as i64,
            residual_stride: residual_stride(op.residual),
            output_stride: op.output.row_stride as i64,
            operands,
            bias_dtype: bias_dtype(op.bias),
            residual_dtype: residual_dtype(op.residual),
            output_dtype: op.output.dtype as u32,
            activation: op.activation as u32,
            gated: op.weight.gated.into(),
        }
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

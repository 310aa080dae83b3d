//! `linear` on CUDA: which kernel, and the two steps around a vendor product.

use super::cublaslt::{CublasLt, Operand, OuterScales, Pick, Product};
use super::executor::CudaExecutor;
use super::launch::Launch;
use super::scratch::{Purpose, ScratchGuard};
use super::{linear_choice, linear_invariant, linear_needs, linear_quantized, linear_wgmma};
use crate::error::Result;
use crate::executor::Executor;
use crate::ops::linear::Linear;
use crate::ops::Activation;
use crate::stream::RawHandle;
use crate::tensor::{DType, Tensor};
use std::ffi::c_void;

/// `nvb_linear_params` of csrc/linear/linear.h.
#[repr(C)]
pub(super) struct Params {
    input: *const c_void,
    weight: *const c_void,
    bias: *const c_void,
    output: *mut c_void,
    m: i64,
    n: i64,
    k: i64,
    input_stride: i64,
    weight_stride: i64,
    output_stride: i64,
    input_dtype: u32,
    weight_dtype: u32,
    bias_dtype: u32,
    output_dtype: u32,
    activation: u32,
    gated: u32,
}
const _: () = assert!(size_of::<Params>() == 104);

/// `nvb_linear_epilogue_params` of csrc/linear/linear.h.
#[repr(C)]
struct EpilogueParams {
    product: *const c_void,
    row_scales: *const f32,
    column_scales: *const f32,
    bias: *const c_void,
    output: *mut c_void,
    rows: i64,
    columns: i64,
    product_stride: i64,
    output_stride: i64,
    product_dtype: u32,
    bias_dtype: u32,
    output_dtype: u32,
    activation: u32,
    gated: u32,
    reserved: u32,
}
const _: () = assert!(size_of::<EpilogueParams>() == 96);

extern "C" {
    fn nvb_cuda_linear(params: *const Params, launch: *const Launch) -> i32;
    fn nvb_cuda_linear_epilogue(params: *const EpilogueParams, launch: *const Launch) -> i32;
}

/// From this number of rows on a product is bound by arithmetic, where cuBLASLt leads; below it by reading the weight,
/// where our kernels do.
const VENDOR_ROWS: usize = 17;

/// An f32 product on its way to the epilogue is made in slices of this size, so that it stays in the L2 cache.
const PRODUCT_BYTES: usize = 64 << 20;

pub(super) fn run(executor: &CudaExecutor, op: &Linear, stream: RawHandle) -> Result<()> {
    if executor.batch_invariant() {
        return linear_invariant::run(executor, op, stream);
    }
    let Some(weight_dtype) = op.weight.dtype() else {
        return linear_quantized::run(executor, op, stream);
    };
    let _guard = executor.enter()?;
    for choice in executor.choices().of(op) {
        if linear_choice::take_float(executor, op, weight_dtype, &choice, stream)?.is_some() {
            return Ok(());
        }
    }
    if prefers_wgmma(op) && linear_wgmma::run(executor, linear_wgmma::Params::of(op, weight_dtype), stream)? {
        return Ok(());
    }
    if prefers_vendor(op, weight_dtype) {
        let scratch = executor.scratch(stream);
        let needs = || linear_needs::vendor(executor, op, weight_dtype);
        if vendor(executor, op, weight_dtype, Pick::First, &mut scratch.lock(executor, stream, needs)?, stream)? {
            return Ok(());
        }
    }
    if linear_wgmma::has_many_rows(op)
        && linear_wgmma::run(executor, linear_wgmma::Params::of(op, weight_dtype), stream)?
    {
        return Ok(());
    }
    own(executor, op, weight_dtype, stream)
}

/// Whether the wgmma kernel is asked before cuBLASLt: where that would need a second kernel for the epilogue.
pub(super) fn prefers_wgmma(op: &Linear) -> bool {
    linear_wgmma::has_many_rows(op) && !is_plain(op) && !fused_by_library(op)
}

/// Whether cuBLASLt has the product's epilogue: a bias of the output's dtype, GELU's tanh form, both.
fn fused_by_library(op: &Linear) -> bool {
    let bias = op.bias.is_none_or(|bias| bias.dtype == op.output.dtype && (bias.data as usize).is_multiple_of(16));
    let activation = matches!(op.activation, Activation::None | Activation::GeluTanh);
    bias && activation && !op.weight.gated && op.output.dtype == op.input.dtype && op.output.dtype != DType::F32
}

/// Whether cuBLASLt is asked first.
pub(super) fn prefers_vendor(op: &Linear, weight_dtype: DType) -> bool {
    op.input.rows >= VENDOR_ROWS && vendor_takes(op, weight_dtype)
}

/// Whether cuBLASLt can be asked at all.
pub(super) fn vendor_takes(op: &Linear, weight_dtype: DType) -> bool {
    op.input.rows > 0 && op.input.dtype == weight_dtype && op.weight.columns > 0
}

/// The library's own kernels for a float weight. The context is current.
pub(super) fn own(executor: &CudaExecutor, op: &Linear, weight_dtype: DType, stream: RawHandle) -> Result<()> {
    let params = params(op, weight_dtype);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_linear(&params, &executor.launch_on(stream)) }, "linear")
}

pub(super) fn params(op: &Linear, weight_dtype: DType) -> Params {
    Params {
        input: op.input.data,
        weight: op.weight.data,
        bias: bias_data(op.bias),
        output: op.output.data,
        m: op.input.rows as i64,
        n: op.weight.rows as i64,
        k: op.weight.columns as i64,
        input_stride: op.input.row_stride as i64,
        weight_stride: op.weight.row_stride as i64,
        output_stride: op.output.row_stride as i64,
        input_dtype: op.input.dtype as u32,
        weight_dtype: weight_dtype as u32,
        bias_dtype: bias_dtype(op.bias),
        output_dtype: op.output.dtype as u32,
        activation: op.activation as u32,
        gated: op.weight.gated.into(),
    }
}

pub(super) fn bias_data(bias: Option<Tensor>) -> *const c_void {
    bias.map_or(std::ptr::null(), |bias| bias.data.cast_const())
}

pub(super) fn bias_dtype(bias: Option<Tensor>) -> u32 {
    bias.map_or(DType::F32, |bias| bias.dtype) as u32
}

/// cuBLASLt's product with a float weight; `false` where it is absent or has no algorithm. The context is current.
pub(super) fn vendor(
    executor: &CudaExecutor,
    op: &Linear,
    dtype: DType,
    pick: Pick<'_>,
    scratch: &mut ScratchGuard<'_>,
    stream: RawHandle,
) -> Result<bool> {
    let Some(cublaslt) = executor.cublaslt() else { return Ok(false) };
    let product = Product {
        input: op.input.data,
        weight: op.weight.data,
        bias: None,
        gelu: false,
        output: op.output.data,
        m: op.input.rows,
        n: op.weight.rows,
        k: op.weight.columns,
        input_stride: op.input.row_stride,
        weight_stride: op.weight.row_stride,
        output_stride: op.output.row_stride,
        input_operand: Operand::Float(op.input.dtype),
        weight_operand: Operand::Float(dtype),
        output_dtype: op.output.dtype,
        scales: None,
        pick,
    };
    if vendor_is_final(op, dtype) {
        return cublaslt.product(&product, scratch, stream);
    }
    if fused_by_library(op) {
        let bias = op.bias.map(|bias| bias.data.cast_const());
        let product = Product { bias, gelu: op.activation == Activation::GeluTanh, ..product };
        if cublaslt.product(&product, scratch, stream)? {
            return Ok(true);
        }
    }
    let product = Product { output_dtype: DType::F32, ..product };
    with_epilogue(executor, cublaslt, op, &product, None, scratch, stream)
}

/// Whether cuBLASLt's plain product is the result, with no epilogue to try.
pub(super) fn vendor_is_final(op: &Linear, dtype: DType) -> bool {
    let mixed = op.output.dtype != dtype && op.output.dtype != DType::F32;
    is_plain(op) && !mixed
}

/// Bytes of the slices in which an unrounded product of this dtype goes through the epilogue, at most.
pub(super) fn product_bytes(op: &Linear, dtype: DType) -> usize {
    let row_bytes = op.weight.rows * dtype.size();
    PRODUCT_BYTES.max(row_bytes).min(op.input.rows.saturating_mul(row_bytes))
}

/// Whether the product is the result.
pub(super) fn is_plain(op: &Linear) -> bool {
    !op.weight.gated && op.activation == Activation::None && op.bias.is_none()
}

/// The product in f32 or i32 (`product.output_dtype`) on its way through the epilogue, which applies `scales` to it if the
/// library does not. The product stays unrounded until the epilogue has rounded once, so every path gives the same numbers.
pub(super) fn with_epilogue(
    executor: &CudaExecutor,
    cublaslt: &CublasLt,
    op: &Linear,
    product: &Product,
    scales: Option<OuterScales>,
    scratch: &mut ScratchGuard<'_>,
    stream: RawHandle,
) -> Result<bool> {
    let row_bytes = product.n * product.output_dtype.size();
    let slice = (PRODUCT_BYTES / row_bytes).clamp(1, product.m);
    let buffer = scratch.get(Purpose::Product, slice * row_bytes)?;
    let input_bytes = match product.input_operand {
        Operand::Float(dtype) => dtype.size(),
        _ => 1,
    };
    for first in (0..product.m).step_by(slice) {
        let rows = slice.min(product.m - first);
        let from = |scales: OuterScales| OuterScales { input: scales.input.wrapping_add(first), ..scales };
        let part = Product {
            input: product.input.wrapping_byte_add(first * product.input_stride * input_bytes),
            output: buffer,
            m: rows,
            output_stride: product.n,
            scales: product.scales.map(from),
            ..*product
        };
        if !cublaslt.product(&part, scratch, stream)? {
            // Shapes differ by slice; nothing is lost by starting over with another kernel.
            return Ok(false);
        }
        let scales = scales.map(from);
        let params = EpilogueParams {
            product: buffer,
            row_scales: scales.map_or(std::ptr::null(), |scales| scales.input),
            column_scales: scales.map_or(std::ptr::null(), |scales| scales.weight),
            bias: bias_data(op.bias),
            output: op.output.data.wrapping_byte_add(first * op.output.row_stride * op.output.dtype.size()),
            rows: rows as i64,
            columns: product.n as i64,
            product_stride: product.n as i64,
            output_stride: op.output.row_stride as i64,
            product_dtype: product.output_dtype as u32,
            bias_dtype: bias_dtype(op.bias),
            output_dtype: op.output.dtype as u32,
            activation: op.activation as u32,
            gated: op.weight.gated.into(),
            reserved: 0,
        };
        // SAFETY: the descriptor was validated, the buffer holds the slice, and the context is current.
        executor.check_launch(
            unsafe { nvb_cuda_linear_epilogue(&params, &executor.launch_on(stream)) },
            "linear epilogue",
        )?;
    }
    Ok(true)
}

//! `linear` on CUDA: which kernel, and the two steps around a vendor product.

use super::cublaslt::{CublasLt, LibraryAlgorithm, Operand, OuterScales, Product, Residual};
use super::prelude::*;
use super::{linear_plan, linear_quantized_input, linear_quantized_output, linear_wgmma};
use crate::operation::linear::{Linear, LinearInput};
use crate::operation::Activation;

mirror! {
    /// `nvb_linear_params` of csrc/linear/linear.h.
    #[repr(C)]
    pub(super) struct Params of(op: &LinearProduct, weight_dtype: DType) {
        input: *const c_void = op.input.data,
        weight: *const c_void = op.weight.data,
        bias: *const c_void = vector_of(op.bias),
        residual: *const c_void = data_of(op.residual),
        output: *mut c_void = op.output.data,
        m: i64 = op.input.rows as i64,
        n: i64 = op.weight.rows as i64,
        k: i64 = op.weight.columns as i64,
        input_stride: i64 = op.input.row_stride as i64,
        weight_stride: i64 = op.weight.row_stride as i64,
        residual_stride: i64 = stride_of(op.residual),
        output_stride: i64 = op.output.row_stride as i64,
        input_dtype: u32 = op.input.dtype as u32,
        weight_dtype: u32 = weight_dtype as u32,
        bias_dtype: u32 = vector_dtype_of(op.bias),
        residual_dtype: u32 = dtype_of(op.residual),
        output_dtype: u32 = op.output.dtype as u32,
        activation: u32 = op.activation as u32,
        gated: u32 = op.weight.gated.into(),
        settled: u32 = op.weight.settled.into(),
    }
}

mirror! {
    /// `nvb_linear_epilogue_params` of csrc/common/linear_epilogue.h.
    #[repr(C)]
    struct EpilogueParams of(op: &LinearProduct, part: &Product, scales: Option<OuterScales>) {
        product: *const c_void = part.output,
        row_scales: *const f32 = scales.map_or(std::ptr::null(), |scales| scales.input),
        column_scales: *const f32 = scales.map_or(std::ptr::null(), |scales| scales.weight),
        bias: *const c_void = vector_of(op.bias),
        residual: *const c_void = data_of(op.residual),
        output: *mut c_void = op.output.data,
        rows: i64 = part.m as i64,
        columns: i64 = part.n as i64,
        product_stride: i64 = part.n as i64,
        residual_stride: i64 = stride_of(op.residual),
        output_stride: i64 = op.output.row_stride as i64,
        product_dtype: u32 = part.output_dtype as u32,
        bias_dtype: u32 = vector_dtype_of(op.bias),
        residual_dtype: u32 = dtype_of(op.residual),
        output_dtype: u32 = op.output.dtype as u32,
        activation: u32 = op.activation as u32,
        gated: u32 = op.weight.gated.into(),
    }
}

extern "C" {
    fn nvb_cuda_linear(params: *const Params, launch: *const Launch) -> i32;
    fn nvb_cuda_linear_epilogue(params: *const EpilogueParams, launch: *const Launch) -> i32;
}

/// From this number of rows on a product is bound by arithmetic, where cuBLASLt leads; below it by reading the weight,
/// where our kernels do.
const VENDOR_ROWS: usize = 17;

/// An f32 product on its way to the epilogue is made in slices of this size, so that it stays in the L2 cache.
pub(super) const PRODUCT_BYTES: usize = 64 << 20;

pub(super) fn run(executor: &CudaExecutor, op: &Linear, stream: RawHandle) -> Result<()> {
    match (&op.quantized_output, op.output) {
        (Some(rows), _) => linear_quantized_output::run(executor, op, rows, stream),
        (None, Some(output)) => rows(executor, op, 0, output, stream),
        (None, None) => unreachable!("a validated descriptor has an output"),
    }
}

/// The product of as many rows of the input from `first` on as the output has.
pub(super) fn rows(
    executor: &CudaExecutor,
    op: &Linear,
    first: usize,
    output: Matrix,
    stream: RawHandle,
) -> Result<()> {
    let part = op.product(first, output.rows, output);
    match op.input.part(first, output.rows) {
        LinearInput::Floats(_) => linear_plan::run(executor, &part, stream),
        LinearInput::Quantized(rows) => linear_quantized_input::run(executor, &rows, &part, stream),
    }
}

/// Whether the wgmma kernel is asked before cuBLASLt: where that would need a second kernel for the epilogue.
pub(super) fn prefers_wgmma(op: &LinearProduct) -> bool {
    linear_wgmma::has_many_rows(op) && !op.is_plain() && !fused_by_library(op)
}

/// Whether cuBLASLt has the product's epilogue. For 16-bit outputs a bias of the output's dtype, GELU's tanh form, both;
/// without GELU a residual of the output's dtype, which F32 outputs may have as well.
pub(super) fn fused_by_library(op: &LinearProduct) -> bool {
    let wide = op.output.dtype == DType::F32;
    let bias =
        op.bias.is_none_or(|bias| !wide && bias.dtype == op.output.dtype && (bias.data as usize).is_multiple_of(16));
    let residual = op.residual.is_none_or(|residual| {
        let rows = residual.row_stride >= residual.columns;
        op.activation == Activation::None && residual.dtype == op.output.dtype && rows
    });
    let activation = match op.activation {
        Activation::None => !wide || op.residual.is_some(),
        Activation::GeluTanh => !wide,
        _ => false,
    };
    bias && activation && residual && !op.weight.gated && (wide || op.output.dtype == op.input.dtype)
}

/// Whether cuBLASLt is asked first.
pub(super) fn prefers_vendor(op: &LinearProduct, weight_dtype: DType) -> bool {
    op.input.rows >= VENDOR_ROWS && vendor_supports(op, weight_dtype)
}

/// Whether cuBLASLt can be asked at all.
pub(super) fn vendor_supports(op: &LinearProduct, weight_dtype: DType) -> bool {
    op.input.rows > 0 && op.input.dtype == weight_dtype && op.weight.columns > 0
}

/// The library's own kernels for a float weight. The context is current.
pub(super) fn own(executor: &CudaExecutor, op: &LinearProduct, weight_dtype: DType, stream: RawHandle) -> Result<()> {
    let params = Params::of(op, weight_dtype);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_linear(&params, &executor.launch_on(stream)) }, "linear")
}

/// cuBLASLt's product with a float weight; `false` where it is absent or has no algorithm. The context is current.
pub(super) fn vendor(
    executor: &CudaExecutor,
    op: &LinearProduct,
    dtype: DType,
    algorithm: LibraryAlgorithm<'_>,
    scratch: &mut ScratchGuard<'_>,
    stream: RawHandle,
) -> Result<bool> {
    let Some(cublaslt) = executor.cublaslt() else { return Ok(false) };
    if let Some(product) = library_product(op, dtype, algorithm) {
        if cublaslt.product(&product, scratch, stream)? {
            return Ok(true);
        }
        if vendor_is_final(op, dtype) {
            return Ok(false);
        }
    }
    let product = Product { output_dtype: DType::F32, ..plain_product(op, floats(op, dtype), algorithm) };
    with_epilogue(executor, cublaslt, op, &product, None, scratch, stream)
}

/// The one product of cuBLASLt that is the whole `op`, if there is such.
pub(super) fn library_product<'a>(
    op: &LinearProduct,
    dtype: DType,
    algorithm: LibraryAlgorithm<'a>,
) -> Option<Product<'a>> {
    let product = plain_product(op, floats(op, dtype), algorithm);
    if vendor_is_final(op, dtype) {
        return Some(product);
    }
    let bias = op.bias.map(|bias| bias.data.cast_const());
    let residual = op.residual.map(|residual| Residual { data: residual.data, stride: residual.row_stride });
    let gelu = op.activation == Activation::GeluTanh;
    fused_by_library(op).then_some(Product { bias, residual, gelu, ..product })
}

fn floats(op: &LinearProduct, weight_dtype: DType) -> [Operand; 2] {
    [Operand::Float(op.input.dtype), Operand::Float(weight_dtype)]
}

/// `op` without what follows the sums.
pub(super) fn plain_product<'a>(
    op: &LinearProduct,
    [input_operand, weight_operand]: [Operand; 2],
    algorithm: LibraryAlgorithm<'a>,
) -> Product<'a> {
    Product {
        input: op.input.data,
        weight: op.weight.data,
        bias: None,
        gelu: false,
        residual: None,
        output: op.output.data,
        m: op.input.rows,
        n: op.weight.rows,
        k: op.weight.columns,
        input_stride: op.input.row_stride,
        weight_stride: op.weight.row_stride,
        output_stride: op.output.row_stride,
        input_operand,
        weight_operand,
        output_dtype: op.output.dtype,
        scales: None,
        algorithm,
    }
}

/// Whether cuBLASLt's plain product is the result, with no epilogue to try.
pub(super) fn vendor_is_final(op: &LinearProduct, dtype: DType) -> bool {
    let mixed = op.output.dtype != dtype && op.output.dtype != DType::F32;
    op.is_plain() && !mixed
}

/// Bytes of the slices in which an unrounded product of this dtype goes through the epilogue, at most.
pub(super) fn product_bytes(op: &LinearProduct, dtype: DType) -> usize {
    let row_bytes = op.weight.rows * dtype.size();
    PRODUCT_BYTES.max(row_bytes).min(op.input.rows.saturating_mul(row_bytes))
}

/// The product in f32 or i32 (`product.output_dtype`) on its way through the epilogue, which applies `scales` to it if the
/// library does not. The product stays unrounded until the epilogue has rounded once, so every path gives the same numbers.
pub(super) fn with_epilogue(
    executor: &CudaExecutor,
    cublaslt: &CublasLt,
    op: &LinearProduct,
    product: &Product,
    scales: Option<OuterScales>,
    scratch: &mut ScratchGuard<'_>,
    stream: RawHandle,
) -> Result<bool> {
    let row_bytes = product.n * product.output_dtype.size();
    // Slices of sixteen rows leave the rows' scales as aligned as the first one is.
    let rows = PRODUCT_BYTES / row_bytes;
    let slice = if rows >= 16 { rows / 16 * 16 } else { rows }.clamp(1, product.m);
    let buffer = scratch.get(WorkspaceUse::Product, slice * row_bytes)?;
    let input_bytes = match product.input_operand {
        Operand::Float(dtype) => dtype.size(),
        _ => 1,
    };
    let from = |scales: OuterScales, first: usize| OuterScales { input: scales.input.wrapping_add(first), ..scales };
    let part = |first: usize| Product {
        input: product.input.wrapping_byte_add(first * product.input_stride * input_bytes),
        output: buffer,
        m: slice.min(product.m - first),
        output_stride: product.n,
        scales: product.scales.map(|scales| from(scales, first)),
        ..*product
    };
    // Shapes differ by slice, and a residual that is the output can be added once: it is all slices or none.
    for first in (slice..product.m).step_by(slice) {
        if !cublaslt.has_algorithm(&part(first))? {
            return Ok(false);
        }
    }
    for first in (0..product.m).step_by(slice) {
        let part = part(first);
        let rows = part.m;
        if !cublaslt.product(&part, scratch, stream)? {
            return Ok(false);
        }
        let scales = scales.map(|scales| from(scales, first));
        let residual = op.residual.map(|residual| residual.part(first, rows));
        let output = op.output.part(first, rows);
        let params = EpilogueParams::of(&LinearProduct { residual, output, ..*op }, &part, scales);
        // SAFETY: the descriptor was validated, the buffer holds the slice, and the context is current.
        executor.check_launch(
            unsafe { nvb_cuda_linear_epilogue(&params, &executor.launch_on(stream)) },
            "linear epilogue",
        )?;
    }
    Ok(true)
}

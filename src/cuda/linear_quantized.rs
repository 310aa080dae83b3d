//! `linear` with weights in 8 or 4 bits on CUDA: own kernels for few rows, for many a float product with slices of the
//! dequantised weight, or, where the options allow it, one with 8-bit activations.

use super::cublaslt::LibraryAlgorithm;
use super::linear::{own, vendor};
use super::prelude::*;
use super::quantized::{encoding_code, scale_code};
use super::{dequantize, linear_workspace};
use crate::tensor::Tensor;
use crate::weight::WeightView;

mirror! {
    /// `nvb_linear_quantized_params` of csrc/common/quantized_product.h.
    #[repr(C)]
    pub(super) struct Params of(op: &LinearProduct) {
        input: *const c_void = op.input.data,
        weight: *const c_void = op.weight.data,
        scales: *const c_void,
        zero_points: *const c_void = op.weight.zero_points.cast(),
        bias: *const c_void = vector_of(op.bias),
        residual: *const c_void = data_of(op.residual),
        output: *mut c_void = op.output.data,
        pub(super) workspace: *mut c_void = std::ptr::null_mut(),
        m: i64 = op.input.rows as i64,
        n: i64 = op.weight.rows as i64,
        k: i64 = op.weight.columns as i64,
        input_stride: i64 = op.input.row_stride as i64,
        weight_stride: i64 = op.weight.kernel_stride() as i64,
        residual_stride: i64 = stride_of(op.residual),
        output_stride: i64 = op.output.row_stride as i64,
        input_dtype: u32 = op.input.dtype as u32,
        encoding: u32 = encoding_code(op.weight.encoding).unwrap_or(0),
        scale_kind: u32,
        group: u32,
        bias_dtype: u32 = vector_dtype_of(op.bias),
        residual_dtype: u32 = dtype_of(op.residual),
        output_dtype: u32 = op.output.dtype as u32,
        activation: u32 = op.activation as u32,
        gated: u32 = op.weight.gated.into(),
        reserved: u32 = 0,
    }
    with (scale_kind, group, scales) = scale_code(op.weight.scales);
}

mirror! {
    /// `nvb_linear_order_params` of csrc/linear/linear_order.h.
    #[repr(C)]
    struct OrderParams of(input: &Matrix, order: *const i32, output: *mut c_void, row_stride: usize) {
        input: *const c_void = input.data,
        order: *const i32,
        output: *mut c_void,
        rows: i64 = input.rows as i64,
        columns: i64 = input.columns as i64,
        input_stride: i64 = input.row_stride as i64,
        output_stride: i64 = row_stride as i64,
        dtype: u32 = input.dtype as u32,
        reserved: u32 = 0,
    }
}

extern "C" {
    fn nvb_cuda_linear_quantized_workspace(params: *const Params, launch: *const Launch) -> usize;
    fn nvb_cuda_linear_quantized(params: *const Params, launch: *const Launch) -> i32;
    fn nvb_cuda_linear_quantized_uses_tensor_cores(params: *const Params, launch: *const Launch) -> i32;
    fn nvb_cuda_linear_order(params: *const OrderParams, launch: *const Launch) -> i32;
}

/// Up to this number of rows our tensor-core kernels, which read the weight once, lead.
const OWN_ROWS: usize = 64;
/// Up to this number of rows even the plain kernel does, which reads it once every eight rows.
const PLAIN_ROWS: usize = 16;

/// The dequantised weight is made in slices of this size, most of which the product then finds in the L2 cache.
const SLICE_BYTES: usize = 64 << 20;
/// Rows of a slice are a multiple of this: whole tiles of the weight and of the product.
const SLICE_STEP: usize = 256;

pub(super) fn prefers_own_kernel(executor: &CudaExecutor, op: &LinearProduct) -> bool {
    let tensor_cores = || {
        let launch = executor.launch_on(RawHandle::NULL);
        // SAFETY: reads the two structs alone.
        unsafe { nvb_cuda_linear_quantized_uses_tensor_cores(&Params::of(op), &launch) != 0 }
    };
    op.input.rows <= PLAIN_ROWS || op.weight.columns == 0 || op.input.rows <= OWN_ROWS && tensor_cores()
}

pub(super) fn workspace_bytes(executor: &CudaExecutor, params: &Params, stream: RawHandle) -> usize {
    // SAFETY: reads the two structs alone.
    unsafe { nvb_cuda_linear_quantized_workspace(params, &executor.launch_on(stream)) }
}

/// The kernel that the launcher's table has for the shape.
pub(super) fn launch(executor: &CudaExecutor, params: &Params, stream: RawHandle) -> Result<()> {
    // SAFETY: the descriptor was validated, the workspace is as large as asked, and the context is current.
    let code = unsafe { nvb_cuda_linear_quantized(params, &executor.launch_on(stream)) };
    executor.check_launch(code, "quantised linear")
}

/// Elements from row to row of a copy of the input: 16-byte aligned rows, for the kernels that want them.
pub(super) fn ordered_stride(input: &Matrix) -> usize {
    input.columns.next_multiple_of(8)
}

/// The same product with the input's columns in the order of the weight's.
pub(super) fn in_order(
    executor: &CudaExecutor,
    op: &LinearProduct,
    scratch: &mut ScratchGuard<'_>,
    stream: RawHandle,
) -> Result<LinearProduct> {
    let input = copy_input(executor, &op.input, op.weight.order, scratch, stream)?;
    let weight = WeightView { order: std::ptr::null(), ..op.weight };
    Ok(LinearProduct { input, weight, ..*op })
}

/// The input with its columns in this order (NULL: as they are) in aligned rows.
pub(super) fn copy_input(
    executor: &CudaExecutor,
    input: &Matrix,
    order: *const i32,
    scratch: &mut ScratchGuard<'_>,
    stream: RawHandle,
) -> Result<Matrix> {
    let row_stride = ordered_stride(input);
    let data = scratch.get(WorkspaceUse::Input, linear_workspace::input_bytes(input))?;
    let params = OrderParams::of(input, order, data, row_stride);
    // SAFETY: the descriptor was validated, the buffer holds the rows, and the context is current.
    let code = unsafe { nvb_cuda_linear_order(&params, &executor.launch_on(stream)) };
    executor.check_launch(code, "ordering the input of a product")?;
    Ok(Matrix { data, row_stride, ..*input })
}

/// Rows of a slice of the weight: slices are of one size, so that they share the choice of a kernel.
pub(super) fn slice_rows(op: &LinearProduct) -> usize {
    let (rows, row_bytes) = (op.weight.rows, op.weight.columns * op.input.dtype.size());
    let slices = (rows * row_bytes).div_ceil(SLICE_BYTES).max(1);
    rows.div_ceil(slices).next_multiple_of(SLICE_STEP).min(rows)
}

/// A float product for each slice of the weight's rows, in the input's dtype; `false` if cuBLASLt has no algorithm of the
/// rank that is asked for.
pub(super) fn with_dequantized_slices(
    executor: &CudaExecutor,
    op: &LinearProduct,
    algorithm: LibraryAlgorithm<'_>,
    scratch: &mut ScratchGuard<'_>,
    stream: RawHandle,
) -> Result<bool> {
    let (weight, dtype) = (&op.weight, op.input.dtype);
    let row_bytes = weight.columns * dtype.size();
    let slice = slice_rows(op);
    let buffer = scratch.get(WorkspaceUse::Weight, slice * row_bytes)?;
    for first in (0..weight.rows).step_by(slice) {
        let rows = first..(first + slice).min(weight.rows);
        // SAFETY: the rows are the weight's, and the buffer holds a slice.
        unsafe { dequantize::rows(executor, weight, &rows, (buffer, dtype), stream)? };
        let part = part_of(op, first, rows.len(), buffer);
        if !vendor(executor, &part, dtype, algorithm, scratch, stream)? {
            if let LibraryAlgorithm::Rank(..) = algorithm {
                return Ok(false);
            }
            own(executor, &part, dtype, stream)?;
        }
    }
    Ok(true)
}

/// The columns of the result that `rows` rows of the weight from `first` on make, with these rows as floats in `data`.
fn part_of(op: &LinearProduct, first: usize, rows: usize, data: *mut c_void) -> LinearProduct {
    let (weight, columns) = (&op.weight, op.weight.columns);
    let output_first = if weight.gated { first / 2 } else { first };
    let weight = WeightView::float(data, op.input.dtype, rows, columns, columns, weight.gated);
    let bias = op.bias.map(|bias| {
        let data = bias.data.wrapping_byte_add(first * bias.strides[0] * bias.dtype.size());
        Tensor { data, ..Tensor::new(data, bias.dtype, &[rows]) }
    });
    let columns = |matrix: Matrix| Matrix {
        data: matrix.data.wrapping_byte_add(output_first * matrix.dtype.size()),
        columns: weight.output_columns(),
        ..matrix
    };
    LinearProduct { weight, bias, residual: op.residual.map(columns), output: columns(op.output), ..*op }
}

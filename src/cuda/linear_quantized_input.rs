//! `linear` of an input in 8 bits on CUDA: the quantised values times those of a weight in 8 bits where something
//! multiplies them and is ahead, else the dequantised input by `linear`.

use super::linear_quantized::prefers_own_kernel;
use super::linear_rounded::{
    prefers_quantized_product, quantized_operands, quantized_product, supports_quantized_product, By, Tokens,
};
use super::prelude::*;
use super::{
    cublaslt::{LibraryAlgorithm, Operand},
    dequantize, linear_plan, linear_workspace,
};
use crate::weight::Scales;

mirror! {
    /// `nvb_linear_quantized_input_params` of csrc/linear/linear_quantized_input.h.
    #[repr(C)]
    struct Params of(input: &QuantizedRows, copy: &QuantizedRows) {
        values: *const c_void = input.data,
        scales: *const f32 = input.scales,
        output: *mut c_void = copy.data,
        output_scales: *mut f32 = copy.scales,
        rows: i64 = input.rows as i64,
        columns: i64 = input.columns as i64,
        row_bytes: i64 = input.row_stride as i64,
        output_row_bytes: i64 = copy.row_stride as i64,
    }
}

extern "C" {
    fn nvb_cuda_linear_quantized_input(params: *const Params, launch: *const Launch) -> i32;
}

/// The product of the rows, whose shape `op` has in the place of its input.
pub(super) fn run(executor: &CudaExecutor, rows: &QuantizedRows, op: &LinearProduct, stream: RawHandle) -> Result<()> {
    if rows.rows == 0 || op.weight.rows == 0 || rows.columns == 0 {
        return linear_plan::run(executor, op, stream);
    }
    let _guard = executor.enter()?;
    let scratch = executor.scratch(stream);
    // Held while the product takes what is for itself, so that nobody puts another input in the place of this one.
    let mut inputs = scratch.lock_inputs(executor, stream, || input_workspace(rows, op))?;
    let rows = aligned(executor, rows, &mut inputs, stream)?;
    let workspace = || linear_workspace::of_quantized_input(executor, &rows, op).0;
    if multiplied(executor, &rows, op, &mut scratch.lock(executor, stream, workspace)?, stream)? {
        return Ok(());
    }
    let dtype = op.input.dtype;
    let data = inputs.get(WorkspaceUse::Kernel, value_bytes(op))?;
    // SAFETY: aligned quantised rows, and the buffer holds their values.
    unsafe { dequantize::rows(executor, &rows.view(), &(0..rows.rows), (data, dtype), stream)? };
    let input = Matrix { data, ..op.input };
    linear_plan::run(executor, &LinearProduct { input, ..*op }, stream)
}

/// What `run` asks of the stream's scratch for inputs.
pub(super) fn input_workspace(rows: &QuantizedRows, op: &LinearProduct) -> Workspace {
    let copy = if is_aligned(rows) { 0 } else { scale_bytes(rows) + rows.rows * padded(rows) };
    Workspace::none().with(WorkspaceUse::Kernel, value_bytes(op)).with(WorkspaceUse::Input, copy)
}

/// Of the dequantised input.
fn value_bytes(op: &LinearProduct) -> usize {
    op.input.rows * op.input.columns * op.input.dtype.size()
}

/// The operands of the product of quantised values, if there is one for this weight and as many rows.
pub(super) fn operands(executor: &CudaExecutor, rows: &QuantizedRows, op: &LinearProduct) -> Option<[Operand; 2]> {
    let fits = matches!(op.weight.scales, Scales::Rows(_)) && op.weight.order.is_null() && !executor.batch_invariant;
    quantized_operands(op, rows.encoding).filter(|_| fits).filter(|_| !prefers_own_kernel(executor, op))
}

/// The product of quantised values, from as many rows on as `linear` rounds its input to 8 bits; `false` where that
/// cannot be.
fn multiplied(
    executor: &CudaExecutor,
    rows: &QuantizedRows,
    op: &LinearProduct,
    scratch: &mut ScratchGuard<'_>,
    stream: RawHandle,
) -> Result<bool> {
    let Some(operands) = operands(executor, rows, op) else { return Ok(false) };
    let tokens = Tokens {
        data: rows.data,
        row_stride: rows.row_stride,
        scales: rows.scales,
        // Quantised values past the last column are zeros, or there are none.
        padded: rows.columns.next_multiple_of(16),
    };
    for by in kernels(executor, op) {
        if quantized_product(executor, op, by, &tokens, operands, scratch, stream)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Those that multiply the quantised values, the preferred one first.
fn kernels<'a>(executor: &'a CudaExecutor, op: &'a LinearProduct) -> impl Iterator<Item = By<'static>> + 'a {
    let mut kernels = [By::Vendor(LibraryAlgorithm::First), By::Own];
    if prefers_quantized_product(executor, op) {
        kernels.reverse();
    }
    kernels.into_iter().filter(|by| supports_quantized_product(executor, op, matches!(by, By::Own)))
}

/// The name of the kernel that multiplies the quantised values, if one does.
pub(super) fn kernel(executor: &CudaExecutor, rows: &QuantizedRows, op: &LinearProduct) -> Option<&'static str> {
    operands(executor, rows, op)?;
    kernels(executor, op).next().map(|by| match by {
        By::Own => "linear_rounded_wgmma",
        By::Vendor(_) => "linear_rounded_input",
    })
}

/// Whether products read the quantised values where they lie.
fn is_aligned(input: &QuantizedRows) -> bool {
    let on_boundary = |address: usize| address.is_multiple_of(16);
    let stride = if input.rows == 1 { input.columns } else { input.row_stride };
    on_boundary(input.data as usize)
        && on_boundary(input.scales as usize)
        && on_boundary(stride)
        && on_boundary(input.columns)
}

fn padded(input: &QuantizedRows) -> usize {
    input.columns.next_multiple_of(16)
}

fn scale_bytes(input: &QuantizedRows) -> usize {
    (input.rows * size_of::<f32>()).next_multiple_of(256)
}

/// The quantised values themselves or, where their rows or scales are not aligned or not padded as products want them,
/// a copy.
fn aligned(
    executor: &CudaExecutor,
    input: &QuantizedRows,
    inputs: &mut ScratchGuard<'_>,
    stream: RawHandle,
) -> Result<QuantizedRows> {
    let &QuantizedRows { rows, columns, row_stride, .. } = input;
    if is_aligned(input) {
        return Ok(QuantizedRows { row_stride: if rows == 1 { columns } else { row_stride }, ..*input });
    }
    let (row_bytes, scale_bytes) = (padded(input), scale_bytes(input));
    let buffer = inputs.get(WorkspaceUse::Input, scale_bytes + rows * row_bytes)?;
    let copy = QuantizedRows {
        data: buffer.wrapping_byte_add(scale_bytes),
        scales: buffer.cast(),
        row_stride: row_bytes,
        ..*input
    };
    let params = Params::of(input, &copy);
    // SAFETY: the descriptor was validated, the buffer holds the copy, and the context is current.
    let code = unsafe { nvb_cuda_linear_quantized_input(&params, &executor.launch_on(stream)) };
    executor.check_launch(code, "aligning the quantised input of a linear")?;
    Ok(copy)
}

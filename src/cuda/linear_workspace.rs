//! The workspace of `linear`, kernel by kernel: at most what is asked for while the product is queued.
//!
//! Of the descriptor's addresses their alignment counts, because kernels are chosen by it.

use super::cublaslt::WORKSPACE_BYTES;
use super::linear::{product_bytes, vendor_is_final};
use super::linear_quantized::{self, ordered_stride, slice_rows};
use super::linear_rounded::quantized_bytes;
use super::prelude::*;
use super::{kernel_table, linear_choice, linear_plan, linear_quantized_input, linear_quantized_output};
use crate::operation::linear::{Linear, LinearInput};
use crate::registry::choices::Choice;
use crate::registry::Family;
use crate::weight::WeightView;

/// Of the product of quantised rows, whose shape `op` has in the place of its input: for the product, and for the input
/// that is handed to it.
pub(super) fn of_quantized_input(
    executor: &CudaExecutor,
    rows: &QuantizedRows,
    op: &LinearProduct,
) -> (Workspace, Workspace) {
    if rows.rows == 0 || op.weight.rows == 0 || rows.columns == 0 {
        return (linear_plan::workspace(executor, op), Workspace::none());
    }
    let mut product = linear_plan::workspace(executor, op);
    if linear_quantized_input::operands(executor, rows, op).is_some() {
        product = product.or(by_vendor(executor, op, false));
    }
    (product, linear_quantized_input::input_workspace(rows, op))
}

/// Of a workspace for all of `linear`.
pub(super) fn bytes(executor: &CudaExecutor, op: &Linear) -> usize {
    match (op.quantized_output, op.output) {
        (None, Some(output)) => {
            let (product, inputs) = of_rows(executor, op, output);
            product.total_with(&[inputs])
        }
        _ => {
            let (product, inputs) = of_slices(executor, op);
            product.total_with(&[inputs, linear_quantized_output::workspace(op)])
        }
    }
}

/// Of the products of a quantised output, whose last slice may have fewer rows and then other kernels.
fn of_slices(executor: &CudaExecutor, op: &Linear) -> (Workspace, Workspace) {
    let (rows, slice) = (op.output_size().0, linear_quantized_output::slice_rows(op));
    let none = (Workspace::none(), Workspace::none());
    if slice == 0 {
        return none;
    }
    let slices = [slice, rows % slice].into_iter().filter(|&count| count > 0);
    slices.fold(none, |(product, inputs), count| {
        let values = linear_quantized_output::values(op, count, std::ptr::null_mut());
        let (more, more_inputs) = of_rows(executor, op, values);
        (product.or(more), inputs.or(more_inputs))
    })
}

/// Of the first rows, as many as the output has.
fn of_rows(executor: &CudaExecutor, op: &Linear, output: Matrix) -> (Workspace, Workspace) {
    let part = op.product(0, output.rows, output);
    match op.input.part(0, output.rows) {
        LinearInput::Floats(_) => (linear_plan::workspace(executor, &part), Workspace::none()),
        LinearInput::Quantized(rows) => of_quantized_input(executor, &rows, &part),
    }
}

/// Of cuBLASLt's product with a float weight.
pub(super) fn vendor(executor: &CudaExecutor, op: &LinearProduct, dtype: DType) -> Workspace {
    by_vendor(executor, op, vendor_is_final(op, dtype))
}

/// `is_final`: no unrounded product is on its way to the epilogue. Its sums are as wide whether they are f32 or i32.
fn by_vendor(executor: &CudaExecutor, op: &LinearProduct, is_final: bool) -> Workspace {
    if executor.cublaslt().is_none() {
        return Workspace::none();
    }
    let product = if is_final { 0 } else { product_bytes(op, DType::F32) };
    Workspace::none().with(WorkspaceUse::Kernel, WORKSPACE_BYTES).with(WorkspaceUse::Product, product)
}

/// Of the input in the weight's order, or in aligned rows.
pub(super) fn input_bytes(input: &Matrix) -> usize {
    input.rows * ordered_stride(input) * input.dtype.size()
}

/// Of the input in 8 bits and the product of quantised values.
fn rounded(executor: &CudaExecutor, op: &LinearProduct, own: bool) -> Workspace {
    let product = if own { Workspace::none() } else { by_vendor(executor, op, false) };
    product.with(WorkspaceUse::Input, quantized_bytes(op))
}

/// Of products with slices of the weight.
fn dequantized(executor: &CudaExecutor, op: &LinearProduct) -> Workspace {
    let (slice, columns) = (slice_rows(op), op.weight.columns);
    let weight = WeightView::float(std::ptr::null_mut(), op.input.dtype, slice, columns, columns, op.weight.gated);
    let part = LinearProduct { weight, ..*op };
    vendor(executor, &part, op.input.dtype).with(WorkspaceUse::Weight, slice * columns * op.input.dtype.size())
}

/// Of a choice of the registry's that can do the product.
pub(super) fn by_choice(executor: &CudaExecutor, op: &LinearProduct, choice: &Choice) -> Workspace {
    match (choice.kernel.kernel().family, op.weight.dtype()) {
        (Family::Vendor, Some(dtype)) => vendor(executor, op, dtype),
        (Family::QuantizedKernel, None) => {
            let params = linear_quantized::Params::of(op);
            let bytes = kernel_table::row(choice.kernel).map_or(0, |row| linear_choice::workspace_bytes(row, &params));
            Workspace::none().with(WorkspaceUse::Kernel, bytes)
        }
        (Family::Dequantized, None) => dequantized(executor, op),
        (Family::RoundedInput, None) => rounded(executor, op, false),
        (Family::RoundedWgmma, None) => rounded(executor, op, true),
        _ => Workspace::none(),
    }
}

//! What `linear` keeps in scratch, way by way: at most what is asked for while the product is queued.
//!
//! Of the descriptor's addresses their alignment counts, because kernels are chosen by it.

use super::cublaslt::WORKSPACE_BYTES;
use super::executor::CudaExecutor;
use super::linear::{product_bytes, vendor_is_final};
use super::linear_quantized::{self, ordered_stride, slice_rows};
use super::linear_rounded::code_bytes;
use super::needs::Needs;
use super::scratch::Purpose;
use super::{linear_choice, linear_plan, linear_quantized_input, linear_quantized_output};
use crate::operation::linear::{Linear, LinearInput};
use crate::operation::linear_product::LinearProduct;
use crate::operation::quantized_rows::QuantizedRows;
use crate::registry::choices::Choice;
use crate::registry::Way;
use crate::tensor::{DType, Matrix};
use crate::weight::WeightView;

/// Of the product of quantised rows, whose shape `op` has in the place of its input: for the product, and for the input
/// that is handed to it.
pub(super) fn of_quantized_input(executor: &CudaExecutor, rows: &QuantizedRows, op: &LinearProduct) -> (Needs, Needs) {
    if rows.rows == 0 || op.weight.rows == 0 || rows.columns == 0 {
        return (linear_plan::needs(executor, op), Needs::none());
    }
    let mut product = linear_plan::needs(executor, op);
    if linear_quantized_input::operands(executor, rows, op).is_some() {
        product = product.or(by_vendor(executor, op, false));
    }
    (product, linear_quantized_input::input_needs(rows, op))
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
            product.total_with(&[inputs, linear_quantized_output::needs(op)])
        }
    }
}

/// Of the products of a quantised output, whose last slice may have fewer rows and then other kernels.
fn of_slices(executor: &CudaExecutor, op: &Linear) -> (Needs, Needs) {
    let (rows, slice) = (op.output_size().0, linear_quantized_output::slice_rows(op));
    let none = (Needs::none(), Needs::none());
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
fn of_rows(executor: &CudaExecutor, op: &Linear, output: Matrix) -> (Needs, Needs) {
    let part = op.product(0, output.rows, output);
    match op.input.part(0, output.rows) {
        LinearInput::Floats(_) => (linear_plan::needs(executor, &part), Needs::none()),
        LinearInput::Quantized(rows) => of_quantized_input(executor, &rows, &part),
    }
}

/// Of cuBLASLt's product with a float weight.
pub(super) fn vendor(executor: &CudaExecutor, op: &LinearProduct, dtype: DType) -> Needs {
    by_vendor(executor, op, vendor_is_final(op, dtype))
}

/// `is_final`: no unrounded product is on its way to the epilogue. Its sums are as wide whether they are f32 or i32.
fn by_vendor(executor: &CudaExecutor, op: &LinearProduct, is_final: bool) -> Needs {
    if executor.cublaslt().is_none() {
        return Needs::none();
    }
    let product = if is_final { 0 } else { product_bytes(op, DType::F32) };
    Needs::none().with(Purpose::Workspace, WORKSPACE_BYTES).with(Purpose::Product, product)
}

/// Of the input in the weight's order, or in aligned rows.
pub(super) fn input_bytes(input: &Matrix) -> usize {
    input.rows * ordered_stride(input) * input.dtype.size()
}

/// Of the input in 8 bits and the product of codes.
fn rounded(executor: &CudaExecutor, op: &LinearProduct, own: bool) -> Needs {
    let product = if own { Needs::none() } else { by_vendor(executor, op, false) };
    product.with(Purpose::Input, code_bytes(op))
}

/// Of products with slices of the weight.
fn dequantized(executor: &CudaExecutor, op: &LinearProduct) -> Needs {
    let (slice, columns) = (slice_rows(op), op.weight.columns);
    let weight = WeightView::float(std::ptr::null_mut(), op.input.dtype, slice, columns, columns, op.weight.gated);
    let part = LinearProduct { weight, ..*op };
    vendor(executor, &part, op.input.dtype).with(Purpose::Weight, slice * columns * op.input.dtype.size())
}

/// Of a choice of the registry's that can do the product.
pub(super) fn by_choice(executor: &CudaExecutor, op: &LinearProduct, choice: &Choice) -> Needs {
    match (choice.kernel.kernel().way, op.weight.dtype()) {
        (Way::Vendor, Some(dtype)) => vendor(executor, op, dtype),
        (Way::QuantizedKernel, None) => {
            let params = linear_quantized::params(op);
            let bytes = linear_choice::row(choice.kernel).map_or(0, |row| linear_choice::workspace_bytes(row, &params));
            Needs::none().with(Purpose::Workspace, bytes)
        }
        (Way::Dequantized, None) => dequantized(executor, op),
        (Way::RoundedInput, None) => rounded(executor, op, false),
        (Way::RoundedWgmma, None) => rounded(executor, op, true),
        _ => Needs::none(),
    }
}

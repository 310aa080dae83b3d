//! What `linear` keeps in scratch, way by way: at most what is asked for while the product is queued.
//!
//! Of the descriptor's addresses their alignment counts, because kernels are chosen by it.

use super::cublaslt::WORKSPACE_BYTES;
use super::executor::CudaExecutor;
use super::linear::{prefers_vendor, prefers_wgmma, product_bytes, vendor_is_final};
use super::linear_quantized::{self, ordered_stride, slice_rows, takes_own_kernel};
use super::linear_rounded::{can_round, code_bytes, rounds_with_own};
use super::needs::Needs;
use super::scratch::Purpose;
use super::{linear_choice, linear_invariant, linear_quantized_input, linear_quantized_output, linear_wgmma};
use crate::device::RawHandle;
use crate::executor::Executor;
use crate::operation::linear::{Linear, LinearInput};
use crate::operation::linear_product::LinearProduct;
use crate::operation::quantized_rows::QuantizedRows;
use crate::registry::choices::Choice;
use crate::registry::Way;
use crate::tensor::{DType, Matrix};
use crate::weight::WeightView;

/// Of `linear` as it would run now: by the override or the tuned entry, where there is one, or by default. The context is
/// current.
pub(super) fn of(executor: &CudaExecutor, op: &LinearProduct) -> Needs {
    if op.input.rows == 0 || op.weight.rows == 0 {
        return Needs::none();
    }
    if executor.batch_invariant {
        return linear_invariant::needs(executor, op);
    }
    let default = match op.weight.dtype() {
        Some(dtype) => float(executor, op, dtype),
        None => quantized(executor, op),
    };
    executor.choices().of(op).fold(default, |needs, choice| needs.or(by_choice(executor, op, &choice)))
}

/// Of the product of quantised rows, whose shape `op` has in the place of its input: for the product, and for the input
/// that is handed to it.
pub(super) fn of_quantized_input(executor: &CudaExecutor, rows: &QuantizedRows, op: &LinearProduct) -> (Needs, Needs) {
    if rows.rows == 0 || op.weight.rows == 0 || rows.columns == 0 {
        return (of(executor, op), Needs::none());
    }
    let mut product = of(executor, op);
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
        LinearInput::Floats(_) => (of(executor, &part), Needs::none()),
        LinearInput::Quantized(rows) => of_quantized_input(executor, &rows, &part),
    }
}

fn float(executor: &CudaExecutor, op: &LinearProduct, dtype: DType) -> Needs {
    let by_wgmma = || linear_wgmma::Params::of(op, dtype).is_some_and(|params| linear_wgmma::can(executor, &params));
    match prefers_vendor(op, dtype) && !(prefers_wgmma(op) && by_wgmma()) {
        true => vendor(executor, op, dtype),
        false => Needs::none(),
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

/// The product as it is once the input's columns are in the weight's order.
fn ordered(op: &LinearProduct) -> LinearProduct {
    let row_stride = ordered_stride(&op.input);
    let input = Matrix { data: std::ptr::null_mut(), row_stride, ..op.input };
    LinearProduct { input, weight: WeightView { order: std::ptr::null(), ..op.weight }, ..*op }
}

/// Of the input in the weight's order, or in aligned rows.
pub(super) fn input_bytes(input: &Matrix) -> usize {
    input.rows * ordered_stride(input) * input.dtype.size()
}

fn quantized(executor: &CudaExecutor, op: &LinearProduct) -> Needs {
    if !op.weight.order.is_null() {
        let input = Needs::none().with(Purpose::Input, input_bytes(&op.input));
        return quantized(executor, &ordered(op)).or(input);
    }
    let params = linear_quantized::params(op);
    if takes_own_kernel(executor, op, &params, RawHandle::NULL) {
        let bytes = linear_quantized::workspace_bytes(executor, &params, RawHandle::NULL);
        return Needs::none().with(Purpose::Workspace, bytes);
    }
    if rounds_with_own(executor, op) {
        return rounded(executor, op, true);
    }
    let rounded = if can_round(executor, op, false) { rounded(executor, op, false) } else { Needs::none() };
    dequantized(executor, op).or(rounded)
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
    if op.input.rows == 0 || op.weight.rows == 0 {
        return Needs::none();
    }
    if !op.weight.order.is_null() {
        let input = Needs::none().with(Purpose::Input, input_bytes(&op.input));
        return by_choice(executor, &ordered(op), choice).or(input);
    }
    if !linear_choice::can(executor, op, choice.kernel) {
        return Needs::none();
    }
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

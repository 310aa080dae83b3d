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
use super::{linear_choice, linear_codes, linear_invariant, linear_to_codes, linear_wgmma};
use crate::device::RawHandle;
use crate::executor::Executor;
use crate::ops::linear::Linear;
use crate::ops::linear_codes::LinearCodes;
use crate::ops::linear_to_codes::{LinearProduct, LinearToCodes};
use crate::registry::choices::Choice;
use crate::registry::Way;
use crate::tensor::{DType, Matrix};
use crate::weight::WeightView;

/// Of `linear` as it would run now: by the override or the tuned entry, where there is one, or by default. The context is
/// current.
pub(super) fn of(executor: &CudaExecutor, op: &Linear) -> Needs {
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

/// Of `linear_codes`: for the product, and for the input that is handed to it.
pub(super) fn of_codes(executor: &CudaExecutor, op: &LinearCodes) -> (Needs, Needs) {
    let shape = op.shape();
    if op.input.rows == 0 || op.weight.rows == 0 || op.input.columns == 0 {
        return (of(executor, &shape), Needs::none());
    }
    let mut product = of(executor, &shape);
    if linear_codes::operands(executor, op).is_some() {
        product = product.or(by_vendor(executor, &shape, false));
    }
    (product, linear_codes::input_needs(op))
}

/// Of the products of `linear_to_codes`, whose last part may have fewer rows and then other kernels.
pub(super) fn of_parts(executor: &CudaExecutor, op: &LinearToCodes) -> (Needs, Needs) {
    let (rows, slice) = (op.product.output().rows, linear_to_codes::slice_rows(op));
    let none = (Needs::none(), Needs::none());
    if slice == 0 {
        return none;
    }
    let parts = [slice, rows % slice].into_iter().filter(|&count| count > 0);
    parts.fold(none, |(product, inputs), count| {
        let (more, more_inputs) = match linear_to_codes::part(op, 0, count, std::ptr::null_mut()) {
            LinearProduct::Floats(op) => (of(executor, &op), Needs::none()),
            LinearProduct::Codes(op) => of_codes(executor, &op),
        };
        (product.or(more), inputs.or(more_inputs))
    })
}

fn float(executor: &CudaExecutor, op: &Linear, dtype: DType) -> Needs {
    let by_wgmma = || linear_wgmma::Params::of(op, dtype).is_some_and(|params| linear_wgmma::can(executor, &params));
    match prefers_vendor(op, dtype) && !(prefers_wgmma(op) && by_wgmma()) {
        true => vendor(executor, op, dtype),
        false => Needs::none(),
    }
}

/// Of cuBLASLt's product with a float weight.
pub(super) fn vendor(executor: &CudaExecutor, op: &Linear, dtype: DType) -> Needs {
    by_vendor(executor, op, vendor_is_final(op, dtype))
}

/// `is_final`: no unrounded product is on its way to the epilogue. Its sums are as wide whether they are f32 or i32.
fn by_vendor(executor: &CudaExecutor, op: &Linear, is_final: bool) -> Needs {
    if executor.cublaslt().is_none() {
        return Needs::none();
    }
    let product = if is_final { 0 } else { product_bytes(op, DType::F32) };
    Needs::none().with(Purpose::Workspace, WORKSPACE_BYTES).with(Purpose::Product, product)
}

/// The product as it is once the input's columns are in the weight's order.
fn ordered(op: &Linear) -> Linear {
    let row_stride = ordered_stride(&op.input);
    let input = Matrix { data: std::ptr::null_mut(), row_stride, ..op.input };
    Linear { input, weight: WeightView { order: std::ptr::null(), ..op.weight }, ..*op }
}

/// Of the input in the weight's order, or in aligned rows.
pub(super) fn input_bytes(input: &Matrix) -> usize {
    input.rows * ordered_stride(input) * input.dtype.size()
}

fn quantized(executor: &CudaExecutor, op: &Linear) -> Needs {
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
fn rounded(executor: &CudaExecutor, op: &Linear, own: bool) -> Needs {
    let product = if own { Needs::none() } else { by_vendor(executor, op, false) };
    product.with(Purpose::Input, code_bytes(op))
}

/// Of products with slices of the weight.
fn dequantized(executor: &CudaExecutor, op: &Linear) -> Needs {
    let (slice, columns) = (slice_rows(op), op.weight.columns);
    let weight = WeightView::float(std::ptr::null_mut(), op.input.dtype, slice, columns, columns, op.weight.gated);
    let part = Linear { weight, ..*op };
    vendor(executor, &part, op.input.dtype).with(Purpose::Weight, slice * columns * op.input.dtype.size())
}

/// Of a choice of the registry's that can do the product.
pub(super) fn by_choice(executor: &CudaExecutor, op: &Linear, choice: &Choice) -> Needs {
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

//! `linear` on CUDA: which kernel, and the two steps around a vendor product.

use super::cublaslt::Product;
use super::executor::CudaExecutor;
use super::launch::Launch;
use super::scratch::Purpose;
use crate::error::{Error, Result};
use crate::ops::linear::Linear;
use crate::ops::Activation;
use crate::stream::RawHandle;
use crate::tensor::{DType, Tensor};
use std::ffi::c_void;

/// `nvb_linear_params` of csrc/linear/linear.h.
#[repr(C)]
struct Params {
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
const _: () = assert!(size_of::<EpilogueParams>() == 80);

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
    let Some(weight_dtype) = op.weight.dtype() else {
        return Err(Error::unsupported(format!("CUDA has no products with {} weights", op.weight.encoding)));
    };
    let _guard = executor.enter()?;
    if op.input.rows >= VENDOR_ROWS && op.input.dtype == weight_dtype && op.weight.columns > 0 {
        if let Some(done) = vendor(executor, op, weight_dtype, stream)? {
            return Ok(done);
        }
    }
    let params = Params {
        input: op.input.data,
        weight: op.weight.data,
        bias: op.bias.map_or(std::ptr::null_mut(), |bias| bias.data),
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
    };
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_linear(&params, &executor.launch_on(stream)) }, "linear")
}

fn bias_dtype(bias: Option<Tensor>) -> u32 {
    bias.map_or(DType::F32, |bias| bias.dtype) as u32
}

/// cuBLASLt's product; `None` where it is absent or has no algorithm.
fn vendor(executor: &CudaExecutor, op: &Linear, dtype: DType, stream: RawHandle) -> Result<Option<()>> {
    let Some(cublaslt) = executor.cublaslt() else { return Ok(None) };
    let scratch = executor.scratch(stream);
    let mut scratch = scratch.lock(executor, stream);
    let plain = Product {
        input: op.input.data,
        weight: op.weight.data,
        bias: None,
        output: op.output.data,
        m: op.input.rows,
        n: op.weight.rows,
        k: op.weight.columns,
        input_stride: op.input.row_stride,
        weight_stride: op.weight.row_stride,
        output_stride: op.output.row_stride,
        dtype,
        output_dtype: op.output.dtype,
    };
    let mixed = op.output.dtype != dtype && op.output.dtype != DType::F32;
    if !op.weight.gated && op.activation == Activation::None && op.bias.is_none() && !mixed {
        return Ok(cublaslt.product(&plain, &mut scratch, stream)?.then_some(()));
    }
    // The product stays f32 until the epilogue has rounded once, so every path gives the same numbers.
    let row_bytes = op.weight.rows * size_of::<f32>();
    let slice = (PRODUCT_BYTES / row_bytes).clamp(1, op.input.rows);
    let buffer = scratch.get(Purpose::Product, slice * row_bytes)?;
    for first in (0..op.input.rows).step_by(slice) {
        let rows = slice.min(op.input.rows - first);
        let input = op.input.data.wrapping_byte_add(first * op.input.row_stride * op.input.dtype.size());
        let output = op.output.data.wrapping_byte_add(first * op.output.row_stride * op.output.dtype.size());
        let product = Product {
            input,
            output: buffer,
            m: rows,
            output_stride: op.weight.rows,
            output_dtype: DType::F32,
            ..plain
        };
        if !cublaslt.product(&product, &mut scratch, stream)? {
            // Shapes differ by slice; nothing is lost by starting over with our kernel.
            return Ok(None);
        }
        let params = EpilogueParams {
            product: buffer,
            bias: op.bias.map_or(std::ptr::null_mut(), |bias| bias.data),
            output,
            rows: rows as i64,
            columns: op.weight.rows as i64,
            product_stride: op.weight.rows as i64,
            output_stride: op.output.row_stride as i64,
            product_dtype: DType::F32 as u32,
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
    Ok(Some(()))
}

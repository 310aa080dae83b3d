//! A product in cuBLASLt's terms: the matrices' layouts and the attributes of their multiplication.

use super::library::Functions;
use super::{check, data_type, Handle, Operand, Product, COMPUTE_32F, DESC_TRANSA};
use crate::error::Result;
use crate::tensor::DType;
use std::ffi::{c_int, c_void};

// Numbers of cublasLt.h.
const COMPUTE_32I: c_int = 72;
static OPERATION_T: c_int = 1;
const DESC_EPILOGUE: c_int = 7;
const DESC_BIAS_POINTER: c_int = 8;
const DESC_A_SCALE_POINTER: c_int = 17;
const DESC_B_SCALE_POINTER: c_int = 18;
const DESC_BIAS_DATA_TYPE: c_int = 26;
/// Libraries before CUDA 12.8 do not know these two.
const DESC_A_SCALE_MODE: c_int = 31;
const DESC_B_SCALE_MODE: c_int = 32;
/// A scale for each row of the first operand and each column of the second.
static SCALE_OUTER_VECTOR: c_int = 3;
/// 8-bit sums are kept as exactly as the tensor cores do, which is faster and costs some 1e-3, a thirtieth of what the
/// quantised values have lost.
const DESC_FAST_ACCUMULATION: c_int = 25;
static FAST_ACCUMULATION: i8 = 1;
static EPILOGUE_BIAS: u32 = 4;
/// The tanh form.
static EPILOGUE_GELU: u32 = 32;
static EPILOGUE_GELU_BIAS: u32 = 36;

/// What the library is told of one product.
pub(super) struct Descriptors<'a> {
    pub(super) functions: &'a Functions,
    pub(super) matmul: Handle,
    pub(super) weight: Handle,
    pub(super) input: Handle,
    pub(super) residual: Handle,
    pub(super) output: Handle,
}

impl<'a> Descriptors<'a> {
    pub(super) fn new(functions: &'a Functions, product: &Product) -> Result<Descriptors<'a>> {
        let null = std::ptr::null_mut();
        let mut this = Descriptors { functions, matmul: null, weight: null, input: null, residual: null, output: null };
        let Product { m, n, k, .. } = *product;
        let integers = product.input_operand == Operand::Int8;
        let (compute, scale_type) =
            if integers { (COMPUTE_32I, data_type(DType::I32)) } else { (COMPUTE_32F, data_type(DType::F32)) };
        let output_dtype = data_type(product.output_dtype);
        // SAFETY: valid pointers and sizes; each attribute gets a value of its documented type; what was created before a
        // failure is destroyed with `this`.
        unsafe {
            check((functions.matmul_desc_create)(&mut this.matmul, compute, scale_type), "cublasLtMatmulDescCreate")?;
            let set = |attribute: c_int, value: *const c_void, bytes: usize| {
                check(
                    (functions.matmul_desc_set)(this.matmul, attribute, value, bytes),
                    "cublasLtMatmulDescSetAttribute",
                )
            };
            set(DESC_TRANSA, (&raw const OPERATION_T).cast(), size_of::<c_int>())?;
            let epilogue = match (product.bias.is_some(), product.gelu) {
                (false, false) => None,
                (true, false) => Some(&raw const EPILOGUE_BIAS),
                (false, true) => Some(&raw const EPILOGUE_GELU),
                (true, true) => Some(&raw const EPILOGUE_GELU_BIAS),
            };
            if let Some(epilogue) = epilogue {
                set(DESC_EPILOGUE, epilogue.cast(), size_of::<u32>())?;
            }
            if matches!(product.input_operand, Operand::Fp8E4m3 | Operand::Fp8E5m2) {
                set(DESC_FAST_ACCUMULATION, (&raw const FAST_ACCUMULATION).cast(), size_of::<i8>())?;
            }
            if let Some(bias) = product.bias {
                set(DESC_BIAS_POINTER, (&raw const bias).cast(), size_of::<*const c_void>())?;
                set(DESC_BIAS_DATA_TYPE, (&raw const output_dtype).cast(), size_of::<c_int>())?;
            }
            if let Some(scales) = product.scales {
                for (attribute, scales) in
                    [(DESC_A_SCALE_POINTER, &raw const scales.weight), (DESC_B_SCALE_POINTER, &raw const scales.input)]
                {
                    set(attribute, scales.cast(), size_of::<*const f32>())?;
                }
                for attribute in [DESC_A_SCALE_MODE, DESC_B_SCALE_MODE] {
                    set(attribute, (&raw const SCALE_OUTER_VECTOR).cast(), size_of::<c_int>())?;
                }
            }
            let layout = |layout: &mut Handle, dtype, rows: usize, columns: usize, stride: usize| {
                check(
                    (functions.layout_create)(layout, dtype, rows as u64, columns as u64, stride as i64),
                    "cublasLtMatrixLayoutCreate",
                )
            };
            layout(&mut this.weight, product.weight_operand.data_type(), k, n, product.weight_stride)?;
            layout(&mut this.input, product.input_operand.data_type(), k, m, product.input_stride)?;
            let residual_stride = product.residual.map_or(product.output_stride, |residual| residual.stride);
            layout(&mut this.residual, output_dtype, n, m, residual_stride)?;
            layout(&mut this.output, output_dtype, n, m, product.output_stride)?;
        }
        Ok(this)
    }
}

impl Drop for Descriptors<'_> {
    fn drop(&mut self) {
        // SAFETY: each was created by its function or is NULL.
        unsafe {
            for layout in [self.weight, self.input, self.residual, self.output] {
                if !layout.is_null() {
                    (self.functions.layout_destroy)(layout);
                }
            }
            if !self.matmul.is_null() {
                (self.functions.matmul_desc_destroy)(self.matmul);
            }
        }
    }
}

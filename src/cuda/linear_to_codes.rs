//! `linear` to codes on CUDA: the product with its whole epilogue in f32, in slices of rows that the L2 cache holds, by
//! whatever kernel `linear` takes for it, then the kernel of quantize_tokens.rs.

use super::executor::CudaExecutor;
use super::linear::PRODUCT_BYTES;
use super::needs::Needs;
use super::scratch::Purpose;
use super::{linear, linear_codes, quantize_tokens};
use crate::device::RawHandle;
use crate::error::Result;
use crate::ops::linear_to_codes::{LinearProduct, LinearToCodes};
use crate::tensor::{DType, Matrix};
use std::ffi::c_void;

pub(super) fn run(executor: &CudaExecutor, op: &LinearToCodes, stream: RawHandle) -> Result<()> {
    let &Matrix { rows, columns, .. } = op.product.output();
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let scratch = executor.scratch(stream);
    // Held while the product takes what is for itself, so that nobody puts other values in the place of these.
    let mut outputs = scratch.lock_outputs(executor, stream, || needs(op))?;
    let (row_stride, slice) = (row_stride(op), slice_rows(op));
    let data = outputs.get(Purpose::Product, slice * row_stride * DType::F32.size())?;
    for first in (0..rows).step_by(slice) {
        let count = slice.min(rows - first);
        match part(op, first, count, data) {
            LinearProduct::Floats(op) => linear::run(executor, &op, stream)?,
            LinearProduct::Codes(op) => linear_codes::run(executor, &op, stream)?,
        }
        let output = op.output.map(|output| output.part(first, count));
        let values = Matrix { data, dtype: DType::F32, rows: count, columns, row_stride };
        let codes = op.quantized_output.part(first, count);
        // SAFETY: the descriptor was validated, the buffer holds the slice, and the context is current.
        unsafe { quantize_tokens::run(executor, &values, output, &codes, stream)? };
    }
    Ok(())
}

/// What `run` asks of the stream's scratch for outputs.
pub(super) fn needs(op: &LinearToCodes) -> Needs {
    let bytes = slice_rows(op) * row_stride(op) * DType::F32.size();
    Needs::none().with(Purpose::Product, bytes)
}

/// Rows of 16-byte aligned f32 values, for vectors.
fn row_stride(op: &LinearToCodes) -> usize {
    op.product.output().columns.next_multiple_of(4)
}

/// Rows of the product that pass through scratch at once. Sixteens of them, so that what is aligned in the first slice
/// (rows of codes and their scales) is so in all.
pub(super) fn slice_rows(op: &LinearToCodes) -> usize {
    let &Matrix { rows, columns, .. } = op.product.output();
    match rows.min(columns) {
        0 => 0,
        _ => (PRODUCT_BYTES / (row_stride(op) * DType::F32.size()) / 16 * 16).max(16).min(rows),
    }
}

/// The product of `count` rows from `first` on, with its result at `data`.
pub(super) fn part(op: &LinearToCodes, first: usize, count: usize, data: *mut c_void) -> LinearProduct {
    let (columns, row_stride) = (op.product.output().columns, row_stride(op));
    op.product.part(first, count, Matrix { data, dtype: DType::F32, rows: count, columns, row_stride })
}

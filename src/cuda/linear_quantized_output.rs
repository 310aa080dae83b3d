//! `linear` with a quantised output on CUDA: the product with its whole epilogue in f32, in slices of rows that the L2 cache
//! holds, by whatever kernel `linear` takes for it, then the kernel of quantize_tokens.rs.

use super::linear::{self, PRODUCT_BYTES};
use super::prelude::*;
use super::quantize_tokens;
use crate::operation::linear::Linear;

pub(super) fn run(executor: &CudaExecutor, op: &Linear, quantized: &QuantizedRows, stream: RawHandle) -> Result<()> {
    let (rows, columns) = op.output_size();
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let scratch = executor.scratch(stream);
    // Held while the product takes what is for itself, so that nobody puts other values in the place of these.
    let mut outputs = scratch.lock_outputs(executor, stream, || workspace(op))?;
    let slice = slice_rows(op);
    let data = outputs.get(WorkspaceUse::Product, slice * row_stride(op) * DType::F32.size())?;
    for first in (0..rows).step_by(slice) {
        let values = values(op, slice.min(rows - first), data);
        linear::rows(executor, op, first, values, stream)?;
        let output = op.output.map(|output| output.part(first, values.rows));
        let quantized = quantized.part(first, values.rows);
        // SAFETY: the descriptor was validated, the buffer holds the slice, and the context is current.
        unsafe { quantize_tokens::run(executor, &values, output, &quantized, stream)? };
    }
    Ok(())
}

/// What `run` asks of the stream's scratch for outputs.
pub(super) fn workspace(op: &Linear) -> Workspace {
    let bytes = slice_rows(op) * row_stride(op) * DType::F32.size();
    Workspace::none().with(WorkspaceUse::Product, bytes)
}

/// Rows of 16-byte aligned f32 values, for vectors.
fn row_stride(op: &Linear) -> usize {
    op.output_size().1.next_multiple_of(4)
}

/// Rows of the product that pass through scratch at once. Sixteens of them, so that what is aligned in the first slice
/// (rows of quantised values and their scales) is so in all.
pub(super) fn slice_rows(op: &Linear) -> usize {
    let (rows, columns) = op.output_size();
    match rows.min(columns) {
        0 => 0,
        _ => (PRODUCT_BYTES / (row_stride(op) * DType::F32.size()) / 16 * 16).max(16).min(rows),
    }
}

/// Where `count` rows of the product go.
pub(super) fn values(op: &Linear, count: usize, data: *mut c_void) -> Matrix {
    let ((_, columns), row_stride) = (op.output_size(), row_stride(op));
    Matrix { data, dtype: DType::F32, rows: count, columns, row_stride }
}

//! `matmul`: C = α · op(A) · op(B) for each matrix of a batch, op(X) = X or Xᵀ. What `linear` is not for: both operands
//! are tensors, their batch axes have strides of their own, and an axis of stride or extent 1 serves a whole batch.

use super::{expect_extent, Cost};
use crate::error::{Error, Result};
use crate::operation::access::{Effect, Region, Visit};
use crate::tensor::{DType, Tensor};
use std::ffi::c_void;

/// Batch axes in front of the two of a matrix.
pub const BATCH_AXES: usize = 2;

/// A batch of matrices with contiguous rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatrixBatch {
    pub data: *mut c_void,
    pub dtype: DType,
    /// Rows and columns as they lie in memory, before op().
    pub rows: usize,
    pub columns: usize,
    /// In elements.
    pub row_stride: usize,
    /// In elements; 0 repeats a matrix.
    pub batch_strides: [usize; BATCH_AXES],
}

// SAFETY: addresses and their description, dereferenced only by executors.
unsafe impl Send for MatrixBatch {}
// SAFETY: as above.
unsafe impl Sync for MatrixBatch {}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Matmul {
    /// [.., M, K], transposed [.., K, M]
    pub a: MatrixBatch,
    /// [.., K, N], transposed [.., N, K], of A's dtype
    pub b: MatrixBatch,
    /// [.., M, N]
    pub output: MatrixBatch,
    pub transpose_a: bool,
    pub transpose_b: bool,
    pub alpha: f32,
    pub batch: [usize; BATCH_AXES],
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

/// The batch axes of a tensor, and the tensor with strides for `batch`; an axis of extent 1 repeats.
fn batch_of(name: &str, tensor: &Tensor, batch: [usize; BATCH_AXES]) -> Result<MatrixBatch> {
    let axes = tensor.rank - 2;
    let mut batch_strides = [0; BATCH_AXES];
    for axis in 0..BATCH_AXES {
        let (extent, stride) = match (axis + axes).checked_sub(BATCH_AXES) {
            Some(own) => (tensor.shape[own], tensor.strides[own]),
            None => (1, 0),
        };
        if extent != batch[axis] && extent != 1 {
            return Err(Error::invalid(format!(
                "tensor `{name}` {tensor} has a batch axis of {extent}; 1 or the output's {} is needed",
                batch[axis]
            )));
        }
        batch_strides[axis] = if extent == 1 { 0 } else { stride };
    }
    let (rows, columns) = (tensor.shape[axes], tensor.shape[axes + 1]);
    // An axis of one row never steps, so its stride says nothing.
    let row_stride = if rows == 1 { columns } else { tensor.strides[axes] };
    Ok(MatrixBatch { data: tensor.data, dtype: tensor.dtype, rows, columns, row_stride, batch_strides })
}

impl Matmul {
    pub fn new(
        a: Tensor,
        b: Tensor,
        transpose_a: bool,
        transpose_b: bool,
        alpha: f32,
        output: Tensor,
    ) -> Result<Matmul> {
        for (name, tensor) in [("a", &a), ("b", &b), ("output", &output)] {
            tensor.expect_float(name)?;
            if tensor.rank < 2 {
                return Err(Error::invalid(format!("tensor `{name}` has rank {}; 2 to 4 is needed", tensor.rank)));
            }
        }
        a.expect_readable("a")?;
        b.expect_readable("b")?;
        b.expect_dtype("b", a.dtype)?;
        output.expect_writable("output")?;
        if !alpha.is_finite() {
            return Err(Error::invalid(format!("alpha is {alpha}; a finite value is needed")));
        }
        let mut batch = [1; BATCH_AXES];
        let axes = output.rank - 2;
        batch[BATCH_AXES - axes..].copy_from_slice(&output.shape[..axes]);
        let (a, b) = (batch_of("a", &a, batch)?, batch_of("b", &b, batch)?);
        let output = batch_of("output", &output, batch)?;
        let turned = |matrix: &MatrixBatch, transposed: bool| match transposed {
            true => (matrix.columns, matrix.rows),
            false => (matrix.rows, matrix.columns),
        };
        let ((m, k), (b_k, n)) = (turned(&a, transpose_a), turned(&b, transpose_b));
        if k != b_k {
            return Err(Error::invalid(format!("op(a) has {k} columns and op(b) {b_k} rows; they must agree")));
        }
        if (output.rows, output.columns) != (m, n) {
            return Err(Error::invalid(format!(
                "tensor `output` has matrices of {} × {}; {m} × {n} is needed",
                output.rows, output.columns
            )));
        }
        for (name, extent) in [
            ("the number of rows", m),
            ("the number of columns", n),
            ("the inner extent", k),
            ("the batch", batch[0] * batch[1]),
        ] {
            expect_extent(name, extent)?;
        }
        Ok(Matmul { a, b, output, transpose_a, transpose_b, alpha, batch, m, n, k })
    }

    fn region(&self, matrix: &MatrixBatch) -> Region {
        let &MatrixBatch { data, dtype, rows, columns, row_stride, batch_strides } = matrix;
        let size = dtype.size();
        let empty = self.batch.contains(&0) || rows == 0 || columns == 0;
        if empty || batch_strides == [0; BATCH_AXES] {
            let (rows, start) = (if empty { 0 } else { rows }, data as usize);
            return Region { start, rows, row_bytes: columns * size, stride: row_stride * size, exact: true }.joined();
        }
        let axes = || self.batch.into_iter().zip(batch_strides).filter(|&(_, stride)| stride != 0);
        let elements: usize = axes().map(|(extent, _)| extent).product::<usize>() * rows * columns;
        let last: usize = axes().map(|(extent, stride)| (extent - 1) * stride).sum();
        let span = last + (rows - 1) * row_stride + columns;
        // Matrices of a batch may take turns in memory, and then gaps of one are the other's.
        Region { start: data as usize, rows: 1, row_bytes: span * size, stride: 0, exact: span == elements }
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.add("a", &self.region(&self.a), Effect::Read);
        visit.add("b", &self.region(&self.b), Effect::Read);
        visit.add("output", &self.region(&self.output), Effect::Write);
    }

    pub fn cost(&self) -> Cost {
        let (m, n, k) = (self.m as f64, self.n as f64, self.k as f64);
        let batch = (self.batch[0] * self.batch[1]) as f64;
        let bytes = |matrix: &MatrixBatch, elements: f64| elements * matrix.dtype.size() as f64;
        Cost {
            operations: 2.0 * batch * m * n * k,
            bytes: batch * (bytes(&self.a, m * k) + bytes(&self.b, n * k) + bytes(&self.output, m * n)),
        }
    }
}

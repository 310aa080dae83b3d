//! Strided batches of float products for `matmul`.
//!
//! Row-major C = op(A)·op(B) is column-major Cᵀ = op(B)ᵀ·op(A)ᵀ: cuBLASLt's first operand is B, its second A, and a
//! matrix that lies untransposed here is untransposed there. The second batch axis is cuBLASLt's, the first a loop, unless
//! both fold into one.

use super::{
    alignment, check, data_type, CublasLt, Handle, HeuristicResult, COMPUTE_32F, DESC_TRANSA, PREFERENCE_MAX_WORKSPACE,
    PREFERENCE_MIN_ALIGNMENT_A, WORKSPACE_BYTES,
};
use crate::cuda::scratch::{ScratchGuard, WorkspaceUse};
use crate::device::RawHandle;
use crate::driver::exit;
use crate::error::Result;
use crate::operation::matmul::{Matmul, MatrixBatch};
use crate::tensor::DType;
use std::ffi::{c_int, c_void};

const DESC_TRANSB: c_int = 4;
const LAYOUT_BATCH_COUNT: c_int = 5;
const LAYOUT_BATCH_STRIDE: c_int = 6;

/// What the choice of an algorithm depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct BatchedKey {
    extents: [usize; 4],
    transposes: [bool; 2],
    row_strides: [usize; 3],
    batch_strides: [usize; 3],
    dtypes: [DType; 2],
    alignments: [u32; 3],
}

/// One call's worth: `count` matrices, `stride` elements apart.
struct Batches {
    count: usize,
    /// Those of B, A and C, in this order.
    strides: [usize; 3],
}

impl CublasLt {
    /// Queues the products; `Ok(false)` if cuBLASLt has no algorithm for them.
    pub fn batched(&self, op: &Matmul, scratch: &mut ScratchGuard<'_>, stream: RawHandle) -> Result<bool> {
        if op.output.dtype != op.a.dtype && op.output.dtype != DType::F32 {
            return Ok(false);
        }
        let matrices = [&op.b, &op.a, &op.output];
        let [outer, inner] = op.batch;
        let folds = |matrix: &MatrixBatch| matrix.batch_strides[0] == inner * matrix.batch_strides[1];
        let strides = |axis: usize| matrices.map(|matrix| matrix.batch_strides[axis]);
        let (loops, batches) = if inner == 1 {
            (1, Batches { count: outer, strides: strides(0) })
        } else if outer == 1 || matrices.iter().all(|matrix| folds(matrix)) {
            (1, Batches { count: outer * inner, strides: strides(1) })
        } else {
            (outer, Batches { count: inner, strides: strides(1) })
        };
        let part = |matrix: &MatrixBatch, place: usize| {
            matrix.data.wrapping_byte_add(place * matrix.batch_strides[0] * matrix.dtype.size())
        };
        let descriptors = BatchedDescriptors::new(self, op, &batches)?;
        // Every part has the alignment that all of them have.
        let mut alignments = matrices.map(|matrix| alignment(matrix.data));
        if loops > 1 {
            for (least, matrix) in alignments.iter_mut().zip(matrices) {
                *least = (*least).min(alignment((matrix.batch_strides[0] * matrix.dtype.size()) as *const c_void));
            }
        }
        let Some(choice) = self.choose_batched(op, &batches, &descriptors, alignments)? else { return Ok(false) };
        let workspace = scratch.get(WorkspaceUse::Kernel, choice.workspace_bytes)?;
        let beta = 0f32;
        for place in 0..loops {
            let [b, a, output] = matrices.map(|matrix| part(matrix, place));
            // SAFETY: operands of the descriptors' sizes, an algorithm that the heuristic gave for exactly these, and a
            // workspace of the size that it asked for.
            let code = unsafe {
                (self.functions.matmul)(
                    self.handle,
                    descriptors.matmul,
                    (&raw const op.alpha).cast(),
                    b,
                    descriptors.layouts[0],
                    a,
                    descriptors.layouts[1],
                    (&raw const beta).cast(),
                    output,
                    descriptors.layouts[2],
                    output,
                    descriptors.layouts[2],
                    choice.algorithm.as_ptr(),
                    workspace,
                    choice.workspace_bytes,
                    stream.0,
                )
            };
            check(code, "cublasLtMatmul")?;
        }
        exit::cublaslt_was_called();
        Ok(true)
    }

    fn choose_batched(
        &self,
        op: &Matmul,
        batches: &Batches,
        descriptors: &BatchedDescriptors<'_>,
        alignments: [u32; 3],
    ) -> Result<Option<HeuristicResult>> {
        let key = BatchedKey {
            extents: [op.m, op.n, op.k, batches.count],
            transposes: [op.transpose_a, op.transpose_b],
            row_strides: [op.b.row_stride, op.a.row_stride, op.output.row_stride],
            batch_strides: batches.strides,
            dtypes: [op.a.dtype, op.output.dtype],
            alignments,
        };
        let mut chosen = self.chosen_batched.lock().unwrap_or_else(|poison| poison.into_inner());
        if let Some(choice) = chosen.get(&key) {
            return Ok(*choice);
        }
        let functions = self.functions;
        let mut preference = std::ptr::null_mut();
        // SAFETY: a valid pointer.
        check(unsafe { (functions.preference_create)(&mut preference) }, "cublasLtMatmulPreferenceCreate")?;
        let set = |attribute: c_int, value: *const c_void, bytes: usize| {
            // SAFETY: each attribute gets a value of its documented type.
            check(
                unsafe { (functions.preference_set)(preference, attribute, value, bytes) },
                "cublasLtMatmulPreferenceSet",
            )
        };
        let [b, a, c] = alignments;
        let mut result =
            HeuristicResult { algorithm: [0; 8], workspace_bytes: 0, state: 0, waves: 0.0, reserved: [0; 4] };
        let mut found = 0;
        let [first, second, output] = descriptors.layouts;
        let outcome = set(PREFERENCE_MAX_WORKSPACE, (&raw const WORKSPACE_BYTES).cast(), size_of::<usize>())
            .and_then(|()| {
                [b, a, c, c]
                    .iter()
                    .zip(PREFERENCE_MIN_ALIGNMENT_A..)
                    .try_for_each(|(bytes, attribute)| set(attribute, (bytes as *const u32).cast(), size_of::<u32>()))
            })
            // SAFETY: live descriptors and room for one result.
            .map(|()| unsafe {
                (functions.heuristic)(
                    self.handle,
                    descriptors.matmul,
                    first,
                    second,
                    output,
                    output,
                    preference,
                    1,
                    &mut result,
                    &mut found,
                )
            });
        // SAFETY: created above.
        unsafe { (functions.preference_destroy)(preference) };
        exit::cublaslt_was_called();
        let choice = (outcome? == 0 && found > 0).then_some(result);
        if choice.is_none() {
            log::debug!(target: "nvbackend::cuda", "cuBLASLt has no algorithm for {key:?}");
        }
        chosen.insert(key, choice);
        Ok(choice)
    }
}

struct BatchedDescriptors<'a> {
    owner: &'a CublasLt,
    matmul: Handle,
    /// Those of B, A and C, in this order.
    layouts: [Handle; 3],
}

impl<'a> BatchedDescriptors<'a> {
    fn new(owner: &'a CublasLt, op: &Matmul, batches: &Batches) -> Result<BatchedDescriptors<'a>> {
        let null = std::ptr::null_mut();
        let functions = owner.functions;
        let mut this = BatchedDescriptors { owner, matmul: null, layouts: [null; 3] };
        // SAFETY: valid pointers and sizes; each attribute gets a value of its documented type; what was created before a
        // failure is destroyed with `this`.
        unsafe {
            check(
                (functions.matmul_desc_create)(&mut this.matmul, COMPUTE_32F, data_type(DType::F32)),
                "cublasLtMatmulDescCreate",
            )?;
            for (attribute, transposed) in [(DESC_TRANSA, op.transpose_b), (DESC_TRANSB, op.transpose_a)] {
                let operation = c_int::from(transposed);
                check(
                    (functions.matmul_desc_set)(
                        this.matmul,
                        attribute,
                        (&raw const operation).cast(),
                        size_of::<c_int>(),
                    ),
                    "cublasLtMatmulDescSetAttribute",
                )?;
            }
            let count = batches.count as i32;
            let matrices = [&op.b, &op.a, &op.output];
            for ((layout, matrix), &stride) in this.layouts.iter_mut().zip(matrices).zip(&batches.strides) {
                // A row there is a column here.
                let (rows, columns) = (matrix.columns as u64, matrix.rows as u64);
                check(
                    (functions.layout_create)(
                        layout,
                        data_type(matrix.dtype),
                        rows,
                        columns,
                        matrix.row_stride.max(matrix.columns) as i64,
                    ),
                    "cublasLtMatrixLayoutCreate",
                )?;
                let stride = stride as i64;
                for (attribute, value, bytes) in [
                    (LAYOUT_BATCH_COUNT, (&raw const count).cast::<c_void>(), size_of::<i32>()),
                    (LAYOUT_BATCH_STRIDE, (&raw const stride).cast(), size_of::<i64>()),
                ] {
                    check(
                        (functions.layout_set)(*layout, attribute, value, bytes),
                        "cublasLtMatrixLayoutSetAttribute",
                    )?;
                }
            }
        }
        Ok(this)
    }
}

impl Drop for BatchedDescriptors<'_> {
    fn drop(&mut self) {
        let functions = self.owner.functions;
        // SAFETY: each was created by its function or is NULL.
        unsafe {
            for layout in self.layouts {
                if !layout.is_null() {
                    (functions.layout_destroy)(layout);
                }
            }
            if !self.matmul.is_null() {
                (functions.matmul_desc_destroy)(self.matmul);
            }
        }
    }
}

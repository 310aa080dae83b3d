//! A factor behind an operation that multiplies by one itself becomes a part of that: of an embedding, of a product of matrices, of
//! another factor.

use super::{without_store, List, Pass};
use crate::error::Result;
use crate::graph::report::Exactness;
use crate::operation::access::Extent;
use crate::operation::elementwise::{Elementwise, ElementwiseKind};
use crate::operation::embedding::Embedding;
use crate::operation::matmul::{Matmul, MatrixBatch, BATCH_AXES};
use crate::operation::Operation;
use crate::tensor::Matrix;

pub const PASS: Pass = Pass {
    name: "scale",
    summary: "Folds a factor into the embedding, product or factor before it; exact where that has the factor 1.",
    exactness: Exactness::Exact,
    run,
};

fn run(list: &mut List) -> Result<()> {
    for place in list.places() {
        let Some(&Operation::Elementwise(Elementwise { kind: ElementwiseKind::Scale(factor), input, output, .. })) =
            list.op(place)
        else {
            continue;
        };
        let Some(producer) = list.producer_of(place, &input) else { continue };
        let Some((op, before)) = list.op(producer).and_then(|op| scaled(op, factor, &input, output)) else { continue };
        if list.is_read_by_alone(producer, &input.region(), place) {
            // Another factor before it is rounded with this one and not with the value.
            let exactness = match before == 1.0 {
                true => without_store(list.executor, input.dtype),
                false => Exactness::Approximate,
            };
            list.fuse(producer, place, op, exactness)?;
        }
    }
    Ok(())
}

/// The operation with the factor beside its own, which is given too, and with its output at `output`.
fn scaled(op: &Operation, factor: f32, value: &Matrix, output: Matrix) -> Option<(Operation, f32)> {
    let (op, before, after): (Operation, f32, f32) = match op {
        // The factor of a quantised table meets its scales first.
        Operation::Embedding(op) if op.output == *value && op.table.dtype().is_some() => {
            let scale = op.scale * factor;
            (Embedding { scale, output, ..*op }.into(), op.scale, scale)
        }
        Operation::Matmul(op) if op.batch == [1; BATCH_AXES] && is_matrix(&op.output, value) => {
            let (alpha, Matrix { data, dtype, row_stride, .. }) = (op.alpha * factor, output);
            let output = MatrixBatch { data, dtype, row_stride, ..op.output };
            (Matmul { alpha, output, ..*op }.into(), op.alpha, alpha)
        }
        Operation::Elementwise(op) if op.output == *value => match op.kind {
            ElementwiseKind::Scale(own) => {
                let kind = ElementwiseKind::Scale(own * factor);
                (Elementwise { kind, output, ..*op }.into(), own, own * factor)
            }
            _ => return None,
        },
        _ => return None,
    };
    after.is_finite().then_some((op, before))
}

fn is_matrix(batch: &MatrixBatch, matrix: &Matrix) -> bool {
    let &MatrixBatch { data, dtype, rows, columns, row_stride, .. } = batch;
    Matrix { data, dtype, rows, columns, row_stride } == *matrix
}

#[cfg(test)]
mod tests {
    use super::super::testing::{kinds, Case};
    use crate::operation::OperationKind::{Elementwise, Embedding, Matmul};

    #[test]
    fn a_factor_joins_one_that_is_1() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        let table = case.weight();
        case.embedding(&table, 1.0, y).scale(y, 0.3, z).internal(y);
        assert_eq!(kinds(&case.optimised_at("scale", 1)), [Embedding]);
        case.expect_equal("scale");
        let mut case = Case::new();
        case.matmul(x, 1.0, y).scale(y, 0.3, y).scale(x, 1.0, z).scale(z, 0.7, z);
        assert_eq!(kinds(&case.optimised_at("scale", 1)), [Matmul, Elementwise]);
        case.expect_equal("scale");
    }

    #[test]
    fn two_factors_are_multiplied_at_the_aggressive_level_alone() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        case.scale(x, 0.3, y).scale(y, 0.7, z).internal(y);
        assert_eq!(case.optimised_at("scale", 2).nodes.len(), 2);
        assert_eq!(case.optimised_at("scale", 3).nodes.len(), 1);
        case.expect_close("scale", 1e-6);
        let mut case = Case::new();
        case.scale(x, 1e30, y).scale(y, 1e30, z).internal(y);
        assert_eq!(case.optimised_at("scale", 3).nodes.len(), 2, "the product of the factors is infinite");
    }
}

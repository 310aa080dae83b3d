//! An addition and the norm of the sum become a norm with a residual, which leaves the sum too.

use super::{without_store, List, Pass};
use crate::error::Result;
use crate::graph::report::Exactness;
use crate::operation::elementwise::{Elementwise, ElementwiseKind};
use crate::operation::layer_norm::LayerNorm;
use crate::operation::rms_norm::RmsNorm;
use crate::operation::Operation;
use crate::tensor::Matrix;

pub const PASS: Pass = Pass {
    name: "norm_residual",
    summary: "Makes one norm with a residual of an addition and the norm of its sum.",
    exactness: Exactness::Exact,
    run,
};

fn run(list: &mut List) -> Result<()> {
    for place in list.places() {
        let Some(sum) = list.op(place).and_then(plain_norm_input) else { continue };
        let Some(producer) = list.producer_of(place, &sum) else { continue };
        let Some(Operation::Elementwise(Elementwise {
            kind: ElementwiseKind::Add,
            input,
            second: Some(second),
            output,
        })) = list.op(producer)
        else {
            continue;
        };
        if *output != sum {
            continue;
        }
        let exactness = without_store(list.executor, sum.dtype);
        // The sum may lie in the place of the residual and not of the other operand.
        for (residual, branch) in [(*input, *second), (*second, *input)] {
            let full = |matrix: &Matrix| matrix.rows <= 1 || matrix.row_stride >= matrix.columns;
            if residual.dtype != sum.dtype || !full(&residual) || !full(&branch) {
                continue;
            }
            let Some(op) = list.op(place).and_then(|op| with_residual(op, branch, residual, sum)) else { continue };
            if list.fuse(producer, place, op, exactness)? {
                break;
            }
        }
    }
    Ok(())
}

/// The input of a norm that nothing is added to.
pub(super) fn plain_norm_input(op: &Operation) -> Option<Matrix> {
    match op {
        Operation::RmsNorm(op) => {
            let plain = op.post_weight.is_none() && op.residual.is_none() && op.residual_output.is_none();
            plain.then_some(op.input)
        }
        Operation::LayerNorm(op) => (op.residual.is_none() && op.residual_output.is_none()).then_some(op.input),
        _ => None,
    }
}

fn with_residual(norm: &Operation, input: Matrix, residual: Matrix, sum: Matrix) -> Option<Operation> {
    let (residual, residual_output) = (Some(residual), Some(sum));
    match norm {
        Operation::RmsNorm(op) => Some(RmsNorm { input, residual, residual_output, ..*op }.into()),
        Operation::LayerNorm(op) => Some(LayerNorm { input, residual, residual_output, ..*op }.into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{kinds, Case};
    use crate::operation::OperationKind::{Elementwise, LayerNorm, RmsNorm, Softmax};

    #[test]
    fn an_addition_joins_the_norm_and_its_sum_stays() {
        for second_is_stream in [false, true] {
            let mut case = Case::new();
            let [x, y, z] = case.matrices();
            if second_is_stream {
                case.add(y, x, x)
            } else {
                case.add(x, y, x)
            };
            case.norm(x, z);
            assert_eq!(kinds(&case.optimised("norm_residual")), [RmsNorm]);
            case.expect_equal("norm_residual");
        }
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        case.add(x, y, x).layer_norm(x, z);
        assert_eq!(kinds(&case.optimised("norm_residual")), [LayerNorm]);
        case.expect_equal("norm_residual");
    }

    #[test]
    fn a_sum_that_is_read_before_the_norm_is_left_earlier() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        // The norm can go to the addition's place, in front of the reader of the sum.
        case.add(x, y, x).softmax(x, y).norm(x, z);
        assert_eq!(kinds(&case.optimised("norm_residual")), [RmsNorm, Softmax]);
        case.expect_equal("norm_residual");
        // Here it cannot: what it writes is read in between.
        let mut case = Case::new();
        case.add(x, y, x).add(x, z, y).norm(x, z);
        assert_eq!(kinds(&case.optimised("norm_residual")), [Elementwise, Elementwise, RmsNorm]);
        case.expect_equal("norm_residual");
    }

    #[test]
    fn a_row_for_all_rows_is_no_residual() {
        let mut case = Case::new();
        let [x, _, z] = case.matrices();
        let b = case.vector();
        case.add(x, b, x).norm(x, z);
        assert_eq!(kinds(&case.optimised("norm_residual")), [Elementwise, RmsNorm]);
    }
}

//! The norm of a branch joins the operation that adds the branch to the residual stream, as `post_weight` of a norm: an addition,
//! or a norm with a residual.

use super::{without_store, List, Pass};
use crate::error::Result;
use crate::graph::report::Exactness;
use crate::operation::access::Extent;
use crate::operation::elementwise::{Elementwise, ElementwiseKind};
use crate::operation::rms_norm::RmsNorm;
use crate::operation::Operation;
use crate::tensor::Matrix;

pub const PASS: Pass = Pass {
    name: "post_norm",
    summary: "Folds the norm of a branch into what adds the branch to the residual stream.",
    exactness: Exactness::Exact,
    run,
};

fn run(list: &mut List) -> Result<()> {
    for place in list.places() {
        match list.op(place) {
            Some(Operation::RmsNorm(op)) if op.post_weight.is_none() && op.residual.is_some() => {
                let op = *op;
                let Some((producer, branch)) = branch(list, place, &op.input) else { continue };
                let same = branch.epsilon == op.epsilon && branch.weight_offset == op.weight_offset;
                let dtypes = [branch.weight, op.weight].map(|weight| weight.map(|weight| weight.dtype));
                if same && (dtypes[1].is_none() || dtypes[0] == dtypes[1]) {
                    let fused = RmsNorm { input: branch.input, post_weight: branch.weight, ..op };
                    list.fuse(producer, place, fused.into(), without_store(list.executor, op.input.dtype))?;
                }
            }
            Some(Operation::Elementwise(Elementwise {
                kind: ElementwiseKind::Add,
                input,
                second: Some(second),
                output,
            })) => {
                let (input, second, output) = (*input, *second, *output);
                for (normed, residual) in [(input, second), (second, input)] {
                    let full = residual.rows <= 1 || residual.row_stride >= residual.columns;
                    if residual.dtype != output.dtype || !full || normed.region().may_share(&residual.region()) {
                        continue;
                    }
                    let Some((producer, branch)) = branch(list, place, &normed) else { continue };
                    let fused = RmsNorm {
                        post_weight: branch.weight,
                        residual: Some(residual),
                        residual_output: Some(output),
                        weight: None,
                        output: None,
                        ..branch
                    };
                    if list.fuse(producer, place, fused.into(), without_store(list.executor, normed.dtype))? {
                        break;
                    }
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// The norm, with a weight and nothing else, whose output the operation at `place` alone reads.
fn branch(list: &List, place: usize, normed: &Matrix) -> Option<(usize, RmsNorm)> {
    let producer = list.producer_of(place, normed)?;
    let Operation::RmsNorm(op) = list.op(producer)? else { return None };
    let plain = op.post_weight.is_none() && op.residual.is_none() && op.residual_output.is_none();
    let fits = plain && op.weight.is_some() && op.quantized_output.is_none() && op.output.as_ref() == Some(normed);
    (fits && list.is_read_by_alone(producer, &normed.region(), place)).then_some((producer, *op))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{kinds, Case};
    use crate::operation::OperationKind::{Elementwise, RmsNorm, Softmax};

    const ALL: &str = "norm_residual,post_norm,norm_sum";

    #[test]
    fn a_branch_its_sum_and_the_next_norm_become_one() {
        for passes in [ALL, "post_norm,norm_sum"] {
            let mut case = Case::new();
            let [x, y, z] = case.matrices();
            case.softmax(z, y).norm(y, y).add(x, y, x).norm(x, z).internal(y);
            assert_eq!(kinds(&case.optimised(passes)), [Softmax, RmsNorm]);
            case.expect_equal(passes);
        }
    }

    #[test]
    fn a_branch_without_a_norm_behind_it_joins_the_addition() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        case.norm(y, z).add(x, z, x).internal(z);
        assert_eq!(kinds(&case.optimised("post_norm")), [RmsNorm]);
        case.expect_equal("post_norm");
    }

    #[test]
    fn a_branch_that_is_read_elsewhere_stays() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        case.norm(y, z).add(x, z, x).softmax(z, y).internal(z);
        assert_eq!(kinds(&case.optimised("post_norm"))[..2], [RmsNorm, Elementwise]);
        case.expect_equal("post_norm");
    }
}

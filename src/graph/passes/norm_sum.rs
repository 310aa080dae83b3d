//! A norm that leaves a sum alone and the norm of that sum become one.

use super::norm_residual::plain_norm_input;
use super::{without_store, List, Pass};
use crate::error::Result;
use crate::graph::report::Exactness;
use crate::operation::layer_norm::LayerNorm;
use crate::operation::rms_norm::RmsNorm;
use crate::operation::Operation;

pub const PASS: Pass = Pass {
    name: "norm_sum",
    summary: "Makes one norm of one that only adds to the residual stream and the norm of the sum.",
    exactness: Exactness::Exact,
    run,
};

fn run(list: &mut List) -> Result<()> {
    for place in list.places() {
        let Some(sum) = list.op(place).and_then(plain_norm_input) else { continue };
        let Some(producer) = list.producer_of(place, &sum) else { continue };
        let fused: Operation = match (list.op(producer), list.op(place)) {
            (Some(Operation::RmsNorm(first)), Some(Operation::RmsNorm(next))) => {
                let alone = first.residual_output.as_ref() == Some(&sum) && !first.normalises_sum();
                let dtypes = [first.post_weight, next.weight].map(|weight| weight.map(|weight| weight.dtype));
                let weights_fit = dtypes.contains(&None) || dtypes[0] == dtypes[1];
                let same = first.epsilon == next.epsilon && first.weight_offset == next.weight_offset;
                if !alone || !weights_fit || (first.post_weight.is_some() && !same) {
                    continue;
                }
                let RmsNorm { weight, output, quantized_output, epsilon, weight_offset, .. } = *next;
                RmsNorm { weight, output, quantized_output, epsilon, weight_offset, ..*first }.into()
            }
            (Some(Operation::LayerNorm(first)), Some(Operation::LayerNorm(next))) => {
                if first.residual_output.as_ref() != Some(&sum) || first.output.is_some() {
                    continue;
                }
                let LayerNorm { input, residual, residual_output, .. } = *first;
                LayerNorm { input, residual, residual_output, ..*next }.into()
            }
            _ => continue,
        };
        list.fuse(producer, place, fused, without_store(list.executor, sum.dtype))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{kinds, Case};
    use crate::operation::OperationKind::RmsNorm;

    #[test]
    fn a_sum_and_its_norm_become_one_operation() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        case.sum_alone(y, x, x).norm(x, z);
        assert_eq!(kinds(&case.optimised("norm_sum")), [RmsNorm]);
        case.expect_equal("norm_sum");
    }

    #[test]
    fn a_norm_that_leaves_more_than_the_sum_stays() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        case.norm_with_sum(y, x, x, z).norm(x, y);
        assert_eq!(kinds(&case.optimised("norm_sum")), [RmsNorm, RmsNorm]);
        case.expect_equal("norm_sum");
    }
}

//! A product and a vector that is added to each of its rows become a product with a bias.

use super::{epilogue, without_store, List, Pass};
use crate::error::Result;
use crate::graph::report::Exactness;
use crate::operation::linear::Linear;
use crate::operation::Activation;
use crate::tensor::{Matrix, Tensor};

pub const PASS: Pass = Pass {
    name: "linear_bias",
    summary: "Folds the addition of one row to all rows of a product into its bias.",
    exactness: Exactness::Exact,
    run,
};

fn run(list: &mut List) -> Result<()> {
    epilogue::fuse_additions(list, with_bias, |list, sum| without_store(list.executor, sum.dtype))
}

fn with_bias(linear: &Linear, added: &Matrix) -> Option<Linear> {
    let one_row = added.row_stride == 0 || added.rows == 1;
    let free = linear.bias.is_none() && linear.activation == Activation::None && linear.residual.is_none();
    let bias = Tensor::new(added.data, added.dtype, &[added.columns]);
    // A gated product has a bias for each of the two halves, before they meet.
    (one_row && free && !linear.weight.gated).then_some(Linear { bias: Some(bias), ..*linear })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{kinds, Case};
    use crate::operation::OperationKind::{Elementwise, Linear, Softmax};

    #[test]
    fn a_row_that_is_added_becomes_the_bias() {
        for order in [false, true] {
            let mut case = Case::new();
            let [x, y, z] = case.matrices();
            let (w, b) = (case.weight(), case.vector());
            case.linear(x, &w, y);
            if order {
                case.add(b, y, z)
            } else {
                case.add(y, b, z)
            };
            case.internal(y);
            assert_eq!(kinds(&case.optimised("linear_bias")), [Linear]);
            case.expect_equal("linear_bias");
        }
    }

    #[test]
    fn a_product_that_somebody_else_may_read_stays() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        let (w, b) = (case.weight(), case.vector());
        case.linear(x, &w, y).add(y, b, z);
        assert_eq!(kinds(&case.optimised("linear_bias")), [Linear, Elementwise], "y may be an output");
        case.softmax(y, x).internal(y);
        assert_eq!(kinds(&case.optimised("linear_bias")), [Linear, Elementwise, Softmax], "the softmax reads y");
    }

    #[test]
    fn a_product_in_place_of_which_the_sum_lies_is_fused() {
        let mut case = Case::new();
        let [x, y, _] = case.matrices();
        let (w, b) = (case.weight(), case.vector());
        case.linear(x, &w, y).add(y, b, y);
        assert_eq!(kinds(&case.optimised("linear_bias")), [Linear]);
        case.expect_equal("linear_bias");
    }

    #[test]
    fn outputs_that_would_overlap_the_input_are_left() {
        let mut case = Case::new();
        let [x, y, _] = case.matrices();
        let (w, b) = (case.weight(), case.vector());
        case.linear(x, &w, y).add(y, b, x).internal(y);
        assert_eq!(kinds(&case.optimised("linear_bias")), [Linear, Elementwise]);
        case.expect_equal("linear_bias");
    }
}

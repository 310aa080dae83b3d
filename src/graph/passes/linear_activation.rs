//! A product and an activation behind it become one product.

use super::{epilogue, without_store, List, Pass};
use crate::error::Result;
use crate::graph::report::Exactness;
use crate::operation::elementwise::{Elementwise, ElementwiseKind};
use crate::operation::linear::Linear;
use crate::operation::{Activation, Operation};

pub const PASS: Pass = Pass {
    name: "linear_activation",
    summary: "Folds an activation behind a product into the product.",
    exactness: Exactness::Exact,
    run,
};

fn run(list: &mut List) -> Result<()> {
    for place in list.places() {
        let Some(Operation::Elementwise(op)) = list.op(place) else { continue };
        let &Elementwise { kind: ElementwiseKind::Activation(activation), input, output, .. } = op else { continue };
        let Some((producer, linear)) = epilogue::product(list, place, &input) else { continue };
        let free = linear.activation == Activation::None && linear.residual.is_none() && !linear.weight.gated;
        if free {
            let op = Linear { activation, output: Some(output), ..linear };
            let exactness = without_store(list.executor, input.dtype);
            list.fuse(producer, place, op.into(), exactness)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{kinds, Case};
    use crate::operation::Activation::{GeluTanh, Silu};
    use crate::operation::OperationKind::{Elementwise, Linear};

    #[test]
    fn an_activation_joins_the_product() {
        for activation in [GeluTanh, Silu] {
            let mut case = Case::new();
            let [x, y, z] = case.matrices();
            let w = case.weight();
            case.linear(x, &w, y).activation(y, activation, y).linear(y, &w, z).activation(z, activation, z);
            assert_eq!(kinds(&case.optimised("linear_activation")), [Linear, Linear]);
            case.expect_equal("linear_activation");
        }
    }

    #[test]
    fn a_second_activation_and_a_residual_in_front_stay() {
        let mut case = Case::new();
        let [x, y, _] = case.matrices();
        let w = case.weight();
        case.linear(x, &w, y).activation(y, Silu, y).activation(y, Silu, y);
        assert_eq!(kinds(&case.optimised("linear_activation")), [Linear, Elementwise]);
        case.expect_equal("linear_activation");
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        case.linear_with_residual(x, &w, z, y).activation(y, Silu, y);
        assert_eq!(kinds(&case.optimised("linear_activation")), [Linear, Elementwise]);
    }

    #[test]
    fn a_rounding_in_between_is_left_out_at_the_default_level_only() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        let (w, y) = (case.weight(), y.bf16());
        case.linear(x, &w, y).activation(y, Silu, z).internal(y);
        assert_eq!(kinds(&case.optimised_at("linear_activation", 1)), [Linear, Elementwise]);
        assert_eq!(kinds(&case.optimised_at("linear_activation", 2)), [Linear]);
        case.expect_close("linear_activation", 5e-3);
    }
}

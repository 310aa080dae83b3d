//! A product and the residual stream that it is added to become one product.

use super::{epilogue, without_store, List, Pass};
use crate::error::Result;
use crate::graph::report::Exactness;
use crate::operation::linear::Linear;
use crate::tensor::Matrix;

pub const PASS: Pass = Pass {
    name: "linear_residual",
    summary: "Folds the addition of a matrix to a product into the product's residual.",
    exactness: Exactness::Exact,
    run,
};

fn run(list: &mut List) -> Result<()> {
    epilogue::fuse_additions(list, with_residual, |list, sum| without_store(list.executor, sum.dtype))
}

fn with_residual(linear: &Linear, added: &Matrix) -> Option<Linear> {
    // Kernels read a residual by vectors of its rows.
    let rows_apart = added.rows <= 1 || added.row_stride >= added.columns;
    (rows_apart && linear.residual.is_none()).then_some(Linear { residual: Some(*added), ..*linear })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{kinds, Case};
    use crate::operation::Activation::Silu;
    use crate::operation::OperationKind::{Elementwise, Linear};

    #[test]
    fn the_residual_stream_joins_the_product() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        let w = case.weight();
        case.linear(x, &w, y).add(z, y, z).linear(z, &w, y).activation(y, Silu, y).add(y, x, x);
        case.internal(y);
        assert_eq!(kinds(&case.optimised("linear_residual")), [Linear, Linear, Elementwise, Elementwise]);
        case.expect_equal("linear_residual");
        // With the activation in the product, both go.
        assert_eq!(kinds(&case.optimised("linear_activation,linear_residual")), [Linear, Linear]);
        case.expect_equal("linear_activation,linear_residual");
    }

    #[test]
    fn a_product_that_is_added_to_itself_stays() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        let w = case.weight();
        case.linear(x, &w, y).add(y, y, z).internal(y);
        assert_eq!(kinds(&case.optimised("linear_residual")), [Linear, Elementwise]);
        case.expect_equal("linear_residual");
    }

    #[test]
    fn a_stream_that_changes_in_between_keeps_them_apart() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        let w = case.weight();
        // The product can go behind the operation that changes z, and not behind the one that changes x.
        case.linear(x, &w, y).scale(z, 0.5, z).add(y, z, z).internal(y);
        assert_eq!(kinds(&case.optimised("linear_residual")), [Elementwise, Linear]);
        case.expect_equal("linear_residual");
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        case.linear(x, &w, y).scale(z, 0.5, z).scale(z, 2.0, x).add(y, z, z).internal(y);
        assert_eq!(kinds(&case.optimised("linear_residual")), [Linear, Elementwise, Elementwise, Elementwise]);
        case.expect_equal("linear_residual");
    }
}

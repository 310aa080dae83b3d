//! A conversion behind an operation becomes the dtype of that operation's output.

use super::{without_store, List, Pass};
use crate::error::Result;
use crate::graph::report::Exactness;
use crate::operation::access::Extent;
use crate::operation::elementwise::{Elementwise, ElementwiseKind};
use crate::operation::Operation;
use crate::tensor::Matrix;

pub const PASS: Pass = Pass {
    name: "conversion",
    summary:
        "Lets an operation write the dtype, and to the place, that a conversion behind it would make of its output.",
    exactness: Exactness::Exact,
    run,
};

fn run(list: &mut List) -> Result<()> {
    for place in list.places() {
        let Some(&Operation::Elementwise(Elementwise { kind: ElementwiseKind::Convert, input, output, .. })) =
            list.op(place)
        else {
            continue;
        };
        let Some(producer) = list.producer_of(place, &input) else { continue };
        let Some(op) = list.op(producer).and_then(|op| written_to(op, &input, output)) else { continue };
        if list.is_read_by_alone(producer, &input.region(), place) {
            list.fuse(producer, place, op, without_store(list.executor, input.dtype))?;
        }
    }
    Ok(())
}

/// The operation with `output` in the place of the float output `value`.
fn written_to(op: &Operation, value: &Matrix, output: Matrix) -> Option<Operation> {
    let mut op = op.clone();
    let written = match &mut op {
        Operation::Linear(op) => op.output.as_mut(),
        Operation::RmsNorm(op) => op.output.as_mut(),
        Operation::LayerNorm(op) => op.output.as_mut(),
        Operation::GatedActivation(op) => op.output.as_mut(),
        Operation::Elementwise(op) => Some(&mut op.output),
        Operation::Softmax(op) => Some(&mut op.output),
        Operation::Embedding(op) => Some(&mut op.output),
        _ => None,
    };
    let written = written.filter(|written| *written == value)?;
    *written = output;
    Some(op)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{kinds, Case};
    use crate::operation::OperationKind::{Elementwise, Linear, RmsNorm, Softmax};

    #[test]
    fn the_operation_writes_what_was_converted() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        let w = case.weight();
        case.linear(x, &w, y).convert(y, z.bf16()).internal(y);
        assert_eq!(kinds(&case.optimised_at("conversion", 1)), [Linear]);
        case.expect_equal("conversion");
        let mut case = Case::new();
        case.norm(x, y).convert(y, z.bf16()).softmax(x, y).convert(y, x.bf16()).internal(y);
        assert_eq!(
            kinds(&case.optimised_at("conversion", 1)),
            [RmsNorm, Softmax, Elementwise],
            "x is read and written"
        );
        case.expect_equal("conversion");
    }

    #[test]
    fn a_value_that_was_rounded_keeps_its_rounding_where_all_is_exact() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        let y = y.bf16();
        case.norm(x, y).convert(y, z).internal(y);
        assert_eq!(kinds(&case.optimised_at("conversion", 1)), [RmsNorm, Elementwise]);
        assert_eq!(kinds(&case.optimised_at("conversion", 2)), [RmsNorm]);
    }
}

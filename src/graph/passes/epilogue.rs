//! What the passes have in common that let `linear` do at its end what an elementwise operation does behind it.

use super::List;
use crate::error::Result;
use crate::graph::report::Exactness;
use crate::operation::access::Extent;
use crate::operation::elementwise::{Elementwise, ElementwiseKind};
use crate::operation::linear::Linear;
use crate::operation::Operation;
use crate::tensor::Matrix;

/// The product whose float output the operation at `place` alone reads, as `matrix`.
pub fn product(list: &List, place: usize, matrix: &Matrix) -> Option<(usize, Linear)> {
    let producer = list.producer_of(place, matrix)?;
    let Operation::Linear(linear) = list.op(producer)? else { return None };
    let fits = linear.output.as_ref() == Some(matrix) && linear.quantized_output.is_none();
    let alone = || list.is_read_by_alone(producer, &matrix.region(), place);
    (fits && alone()).then_some((producer, *linear))
}

/// Tries to make `fused` of each addition and the product before it: of the product and the other operand.
pub fn fuse_additions(
    list: &mut List,
    fused: impl Fn(&Linear, &Matrix) -> Option<Linear>,
    exactness: impl Fn(&List, &Matrix) -> Exactness,
) -> Result<()> {
    for place in list.places() {
        let Some(Operation::Elementwise(Elementwise {
            kind: ElementwiseKind::Add,
            input,
            second: Some(second),
            output,
        })) = list.op(place)
        else {
            continue;
        };
        let (input, second, output) = (*input, *second, *output);
        for (sum, other) in [(input, second), (second, input)] {
            // The other operand must not be the product's own value.
            if sum.region().may_share(&other.region()) {
                continue;
            }
            let Some((producer, linear)) = product(list, place, &sum) else { continue };
            let Some(linear) = fused(&linear, &other) else { continue };
            let (op, exactness) = (Linear { output: Some(output), ..linear }, exactness(list, &sum));
            if list.fuse(producer, place, op.into(), exactness)? {
                break;
            }
        }
    }
    Ok(())
}

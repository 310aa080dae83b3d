//! Leaves out what nobody sees: operations whose outputs are all dead or which change nothing, and a norm's sum that is dead.

use super::{List, Pass};
use crate::error::Result;
use crate::graph::report::Exactness;
use crate::operation::access::{Effect, Extent};
use crate::operation::elementwise::ElementwiseKind;
use crate::operation::Operation;

pub const PASS: Pass = Pass {
    name: "dead_work",
    summary: "Leaves out operations whose results nobody can read, or which write what is there already.",
    exactness: Exactness::Exact,
    run,
};

fn run(list: &mut List) -> Result<()> {
    // From the end, so that whoever worked for an operation that is gone is dead too.
    for place in list.places().rev() {
        let Some(op) = list.op(place) else { continue };
        let is_dead = |list: &List| {
            let mut written = list.accesses(place).iter().filter(|access| access.effect == Effect::Write);
            written.all(|access| access.region.is_empty() || list.is_dead_behind(place, &access.region))
        };
        if changes_nothing(op) || is_dead(list) {
            list.remove(place)?;
        } else if let Some(op) = without_sum(list, place) {
            list.replace(place, op, Exactness::Exact)?;
        }
    }
    Ok(())
}

/// Whether the output is the input.
fn changes_nothing(op: &Operation) -> bool {
    match op {
        Operation::Elementwise(op) => {
            let same = matches!(op.kind, ElementwiseKind::Convert | ElementwiseKind::Scale(1.0));
            same && op.input == op.output
        }
        Operation::MemoryCopy(op) => op.source == op.destination.cast_const(),
        _ => false,
    }
}

/// The norm without its sum, if that is dead and something else is wanted.
fn without_sum(list: &List, place: usize) -> Option<Operation> {
    match list.op(place)? {
        Operation::RmsNorm(op) => {
            let sum = op.residual_output.filter(|_| op.normalises_sum())?;
            let mut op = *op;
            op.residual_output = None;
            list.is_dead_behind(place, &sum.region()).then(|| op.into())
        }
        Operation::LayerNorm(op) => {
            let sum = op.residual_output.filter(|_| op.output.is_some())?;
            let mut op = *op;
            op.residual_output = None;
            list.is_dead_behind(place, &sum.region()).then(|| op.into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{kinds, Case};
    use crate::operation::OperationKind::{Elementwise, MemoryCopy, MemoryFill, RmsNorm, Softmax};

    #[test]
    fn what_is_overwritten_before_it_is_read_is_left_out() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        case.fill(y, 1).softmax(x, y).softmax(y, z).add(y, z, y);
        assert_eq!(kinds(&case.optimised("dead_work")), [Softmax, Softmax, Elementwise]);
        case.expect_equal("dead_work");
    }

    #[test]
    fn what_may_be_an_output_stays_and_internal_memory_does_not() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        // z is read by nobody, and y by z alone.
        case.softmax(x, y).softmax(y, z);
        assert_eq!(case.optimised("dead_work").nodes.len(), 2);
        case.internal(z);
        assert_eq!(case.optimised("dead_work").nodes.len(), 1);
        case.internal(y);
        assert!(case.optimised("dead_work").nodes.is_empty());
    }

    #[test]
    fn internal_memory_that_the_next_launch_reads_stays() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        // y is read first and written last.
        case.softmax(y, z).softmax(x, y);
        case.internal(y);
        assert_eq!(case.optimised("dead_work").nodes.len(), 2);
        // A part of it is still the earlier launch's.
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        case.fill(y.part(0, 1), 1).softmax(y, z).softmax(x, y);
        case.internal(y);
        assert_eq!(case.optimised("dead_work").nodes.len(), 3);
    }

    #[test]
    fn a_part_that_is_overwritten_leaves_the_rest_alive() {
        let mut case = Case::new();
        let [x, y, _] = case.matrices();
        case.softmax(x, y).fill(y.part(1, 2), 7);
        assert_eq!(kinds(&case.optimised("dead_work")), [Softmax, MemoryFill]);
        case.expect_equal("dead_work");
    }

    #[test]
    fn what_writes_what_is_there_is_left_out() {
        let mut case = Case::new();
        let [x, y, _] = case.matrices();
        case.scale(x, 1.0, x).copy(x, x).scale(x, 1.0, y).scale(x, 2.0, x);
        assert_eq!(kinds(&case.optimised("dead_work")), [Elementwise, Elementwise]);
        case.expect_equal("dead_work");
        assert!(!kinds(&case.optimised("dead_work")).contains(&MemoryCopy));
    }

    #[test]
    fn a_norm_does_not_store_a_sum_that_nobody_reads() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        case.norm_with_sum(x, y, z, x);
        let sums = |case: &Case| match &case.optimised("dead_work").nodes[0].op {
            crate::operation::Operation::RmsNorm(op) => op.residual_output.is_some(),
            _ => panic!("a norm"),
        };
        assert!(sums(&case));
        case.internal(z);
        assert!(!sums(&case));
        assert_eq!(kinds(&case.optimised("dead_work")), [RmsNorm]);
    }
}

//! Makes one copy of two that continue each other, and one fill of two with the same byte.

use super::{List, Pass};
use crate::error::Result;
use crate::graph::report::Exactness;
use crate::operation::memory_copy::MemoryCopy;
use crate::operation::memory_fill::MemoryFill;
use crate::operation::Operation;

pub const PASS: Pass = Pass {
    name: "merged_copies",
    summary: "Makes one copy of two whose ranges continue each other, and one fill likewise.",
    exactness: Exactness::Exact,
    run,
};

/// How many operations behind one a second is looked for.
const REACH: usize = 8;

fn run(list: &mut List) -> Result<()> {
    for second in list.places() {
        for first in (second.saturating_sub(REACH)..second).rev() {
            let (Some(one), Some(other)) = (list.op(first), list.op(second)) else { continue };
            let Some(merged) = merged(one, other) else { continue };
            // One that was merged may continue a third: it stays at the later place.
            if list.fuse(first, second, merged, Exactness::Exact)? {
                continue;
            }
        }
    }
    Ok(())
}

fn merged(one: &Operation, other: &Operation) -> Option<Operation> {
    match (one, other) {
        (Operation::MemoryFill(one), Operation::MemoryFill(other)) if one.byte == other.byte => {
            let (low, high) = if one.destination <= other.destination { (one, other) } else { (other, one) };
            let end = low.destination as usize + low.bytes;
            let end_of_high = high.destination as usize + high.bytes;
            // SAFETY: every byte is one of the two ranges', which touch each other.
            let merge = |bytes| unsafe { MemoryFill::new(low.destination, low.byte, bytes) };
            (end >= high.destination as usize).then(|| merge(end.max(end_of_high) - low.destination as usize).into())
        }
        (Operation::MemoryCopy(one), Operation::MemoryCopy(other)) if one.kind == other.kind => {
            let (low, high) = if one.destination <= other.destination { (one, other) } else { (other, one) };
            let continued = low.destination.wrapping_byte_add(low.bytes) == high.destination
                && low.source.wrapping_byte_add(low.bytes) == high.source;
            // SAFETY: the ranges are those of the two copies, which continue each other on both sides.
            let merge = |bytes| unsafe { MemoryCopy::new(low.destination, low.source, bytes, low.kind) };
            continued.then(|| merge(low.bytes + high.bytes).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{kinds, Case};
    use crate::operation::OperationKind::{MemoryCopy, MemoryFill, Softmax};

    #[test]
    fn copies_that_continue_each_other_become_one() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        case.copy(x.part(0, 1), y.part(0, 1))
            .softmax(x, z)
            .copy(x.part(1, 1), y.part(1, 1))
            .copy(x.part(2, 1), y.part(2, 1));
        assert_eq!(kinds(&case.optimised("merged_copies")), [Softmax, MemoryCopy]);
        case.expect_equal("merged_copies");
    }

    #[test]
    fn what_is_read_or_written_in_between_keeps_copies_apart() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        // The softmax reads what the first copy leaves, and changes what the second one reads.
        case.copy(x.part(0, 1), y.part(0, 1)).softmax(y, x).copy(x.part(1, 1), y.part(1, 1));
        assert_eq!(kinds(&case.optimised("merged_copies")), [MemoryCopy, Softmax, MemoryCopy]);
        case.expect_equal("merged_copies");
        // The second reads what the first wrote.
        let mut case = Case::new();
        case.copy(x.part(0, 1), x.part(1, 1)).copy(x.part(1, 1), x.part(2, 1)).softmax(x, z);
        assert_eq!(kinds(&case.optimised("merged_copies")), [MemoryCopy, MemoryCopy, Softmax]);
    }

    #[test]
    fn fills_of_one_byte_become_one() {
        let mut case = Case::new();
        let [x, ..] = case.matrices();
        case.fill(x.part(1, 2), 3).fill(x.part(0, 2), 3).fill(x.part(3, 1), 4);
        assert_eq!(kinds(&case.optimised("merged_copies")), [MemoryFill, MemoryFill]);
        case.expect_equal("merged_copies");
    }
}

//! Does work once that the list does twice on the same inputs: where the result lies already there is nothing to do, elsewhere it is
//! copied.

use super::{List, Pass};
use crate::device::CopyKind;
use crate::error::Result;
use crate::graph::report::Exactness;
use crate::operation::access::{Access, Effect, Region};
use crate::operation::memory_copy::MemoryCopy;
use crate::operation::{Operation, OperationKind};
use std::collections::HashMap;

pub const PASS: Pass = Pass {
    name: "repeated_work",
    summary: "Leaves out work that was done before on the same inputs, or copies its result.",
    exactness: Exactness::Exact,
    run,
};

/// Earlier operations that one is compared with at the most, the latest first.
const MOST_COMPARED: usize = 8;

fn run(list: &mut List) -> Result<()> {
    let mut earlier: HashMap<(OperationKind, usize), Vec<usize>> = HashMap::new();
    for place in list.places() {
        let Some(op) = list.op(place) else { continue };
        let first = list.accesses(place).first().map_or(0, |access| access.region.start);
        let key = (op.kind(), if op.kind() == OperationKind::MemoryFill { 0 } else { first });
        let candidates = earlier.entry(key).or_default();
        let to = written(list, place);
        let compared = candidates.iter().rev().take(MOST_COMPARED).copied();
        let repeated: Vec<usize> = compared.filter(|&one| is_repeated(list, one, place)).collect();
        candidates.push(place);
        // Rather one whose result lies already where this one's goes.
        let in_place = repeated.iter().copied().find(|&one| written(list, one) == to);
        let Some(one) = in_place.or(repeated.first().copied()) else { continue };
        let from = written(list, one);
        if from == to {
            list.remove(place)?;
        } else if let ([from], [to]) = (&from[..], &to[..]) {
            if costs_more_than_a_copy(list, place) && from.rows == 1 && to.rows == 1 && from.exact && to.exact {
                let (to, from, bytes) = (to.start as *mut _, from.start as *const _, from.row_bytes);
                // SAFETY: both ranges are outputs of recorded operations, which the caller keeps as long as it launches them.
                let copy = unsafe { MemoryCopy::new(to, from, bytes, CopyKind::DeviceToDevice) };
                list.replace(place, copy.into(), Exactness::Exact)?;
            }
        }
    }
    Ok(())
}

fn written(list: &List, place: usize) -> Vec<Region> {
    let is_written = |access: &&Access| access.effect == Effect::Write && !access.region.is_empty();
    list.accesses(place).iter().filter(is_written).map(|access| access.region).collect()
}

/// Whether the operation at `place` would give what the one at `one` gave, which still lies where that left it.
fn is_repeated(list: &List, one: usize, place: usize) -> bool {
    let (Some(first), Some(second)) = (list.op(one), list.op(place)) else { return false };
    if reads_the_host(first) || !first.writes_all() {
        return false;
    }
    let mut outputs = Vec::new();
    first.clone().for_each_address(&mut |address, written| {
        if written {
            outputs.push(*address);
        }
    });
    let (mut moved, mut next) = (second.clone(), outputs.into_iter());
    let mut complete = true;
    moved.for_each_address(&mut |address, written| {
        if written {
            match next.next() {
                Some(output) => *address = output,
                None => complete = false,
            }
        }
    });
    if !complete || next.next().is_some() || !moved.is_same_work(first) {
        return false;
    }
    let unchanged = |access: &Access, from: usize| !list.is_written_in(&access.region, from..place);
    list.accesses(one).iter().all(|access| match access.effect {
        // The first may have changed its own inputs.
        Effect::Read | Effect::ReadBefore(_) => unchanged(access, one),
        Effect::Write => unchanged(access, one + 1),
    })
}

/// The host may change its memory while the list runs.
fn reads_the_host(op: &Operation) -> bool {
    matches!(op, Operation::MemoryCopy(copy) if copy.kind != CopyKind::DeviceToDevice)
}

/// Whether it reads more than the copy that would replace it.
fn costs_more_than_a_copy(list: &List, place: usize) -> bool {
    let copied: usize = written(list, place).iter().map(|region| 2 * region.rows * region.row_bytes).sum();
    let heavy = |op: &Operation| !matches!(op, Operation::MemoryFill(_) | Operation::MemoryCopy(_));
    list.op(place).is_some_and(|op| heavy(op) && op.cost().bytes > copied as f64)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{kinds, Case};
    use crate::operation::OperationKind::{Elementwise, Linear, MemoryCopy, MemoryFill, Softmax};

    #[test]
    fn the_same_work_is_done_once() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        let w = case.weight();
        case.linear(x, &w, y).softmax(x, z).linear(x, &w, y).linear(x, &w, z);
        assert_eq!(kinds(&case.optimised("repeated_work")), [Linear, Softmax, MemoryCopy]);
        case.expect_equal("repeated_work");
    }

    #[test]
    fn changed_inputs_and_results_are_no_repetition() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        let w = case.weight();
        case.linear(x, &w, y).scale(x, 0.5, x).linear(x, &w, y);
        assert_eq!(kinds(&case.optimised("repeated_work")), [Linear, Elementwise, Linear]);
        let mut case = Case::new();
        case.linear(x, &w, y).scale(y, 0.5, y).linear(x, &w, y).add(y, y, z);
        assert_eq!(case.optimised("repeated_work").nodes.len(), 4);
        // In place, the second is another one.
        let mut case = Case::new();
        let [x, ..] = case.matrices();
        case.softmax(x, x).softmax(x, x);
        assert_eq!(kinds(&case.optimised("repeated_work")), [Softmax, Softmax]);
        case.expect_equal("repeated_work");
    }

    #[test]
    fn fills_are_not_copied_and_other_arguments_are_other_work() {
        let mut case = Case::new();
        let [x, y, z] = case.matrices();
        case.fill(x, 1).fill(y, 1).fill(x, 1).scale(z, 2.0, y).scale(z, 3.0, y);
        let found = kinds(&case.optimised("repeated_work"));
        assert_eq!(found, [MemoryFill, MemoryFill, Elementwise, Elementwise]);
        case.expect_equal("repeated_work");
    }
}

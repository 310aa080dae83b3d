//! Which recorded operations wait for which, from what each reads and writes.

use super::Node;
use crate::allocation::push;
use crate::error::Result;
use crate::operation::access::{Effect, Region};

/// An access that no later write covers.
struct Live {
    region: Region,
    node: u32,
}

/// Writes to each node the earlier ones that it must run after: whoever wrote what it reads, and whoever read or wrote what it
/// writes. Where one of them waits for another one because of the same bytes, the later one alone is named.
pub fn find(nodes: &mut [Node]) -> Result<()> {
    let (mut reads, mut writes) = (Vec::<Live>::new(), Vec::<Live>::new());
    for (index, node) in nodes.iter_mut().enumerate() {
        let mut found = Vec::new();
        let mut note = |live: &Live, region: &Region| match live.region.may_share(region) {
            true => push(&mut found, live.node, "a graph's dependencies"),
            false => Ok(()),
        };
        for access in &node.accesses {
            writes.iter().try_for_each(|live| note(live, &access.region))?;
            if access.effect == Effect::Write {
                reads.iter().try_for_each(|live| note(live, &access.region))?;
            }
        }
        found.sort_unstable();
        found.dedup();
        node.dependencies = found;
        // An operation does not wait for itself, so what it does is live once all of it has been looked at.
        for access in node.accesses.iter().filter(|access| access.effect == Effect::Write) {
            reads.retain(|live| !access.region.covers(&live.region));
            writes.retain(|live| !access.region.covers(&live.region));
        }
        for access in node.accesses.iter().filter(|access| !access.region.is_empty()) {
            let list = if access.effect == Effect::Write { &mut writes } else { &mut reads };
            push(list, Live { region: access.region, node: index as u32 }, "a graph's dependencies")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::access::Access;
    use crate::operation::memory_fill::MemoryFill;
    use proptest::prelude::*;

    const BASE: usize = 1 << 20;

    fn region(start: usize, rows: usize, row_bytes: usize, stride: usize) -> Region {
        Region { start: BASE + start, rows, row_bytes, stride, exact: true }
    }

    fn node(accesses: &[(Region, bool)]) -> Node {
        // SAFETY: it never runs.
        let op = unsafe { MemoryFill::new(BASE as *mut _, 0, 1) };
        let access = |&(region, writes): &(Region, bool)| Access {
            name: "memory",
            region,
            effect: if writes { Effect::Write } else { Effect::Read },
        };
        Node {
            op: op.into(),
            owner: None,
            accesses: accesses.iter().map(access).collect(),
            dependencies: Vec::new(),
            recorded: Vec::new(),
        }
    }

    fn dependencies(mut nodes: Vec<Node>) -> Vec<Vec<u32>> {
        find(&mut nodes).unwrap();
        nodes.into_iter().map(|node| node.dependencies).collect()
    }

    #[test]
    fn reads_wait_for_writes_and_writes_for_both() {
        let (a, b) = (region(0, 1, 64, 0), region(64, 1, 64, 0));
        let found = dependencies(vec![
            node(&[(a, true)]),
            node(&[(a, false), (b, true)]),
            node(&[(a, false)]),
            node(&[(b, false)]),
            node(&[(a, true)]),
            node(&[(a, false), (b, false)]),
        ]);
        assert_eq!(found, [vec![], vec![0], vec![0], vec![1], vec![0, 1, 2], vec![1, 4]]);
    }

    #[test]
    fn columns_of_one_matrix_do_not_wait_for_each_other() {
        let columns = |at| region(at, 8, 16, 48);
        let found =
            dependencies(vec![node(&[(columns(0), true)]), node(&[(columns(16), true)]), node(&[(columns(0), false)])]);
        assert_eq!(found, [vec![], vec![], vec![0]]);
        let gaps = Region { exact: false, ..region(0, 1, 384, 0) };
        assert_eq!(dependencies(vec![node(&[(columns(0), true)]), node(&[(gaps, false)])]), [vec![], vec![0]]);
    }

    proptest! {
        /// Of two nodes that share a byte which one of them writes, the later one runs after the earlier one.
        #[test]
        fn no_conflict_is_missed(
            list in prop::collection::vec(
                prop::collection::vec((0usize..80, 1usize..4, 1usize..24, 0usize..12, any::<bool>()), 1..4), 1..12),
        ) {
            let accesses = |node: &Vec<(usize, usize, usize, usize, bool)>| -> Vec<(Region, bool)> {
                node.iter().map(|&(start, rows, bytes, gap, writes)| (region(start, rows, bytes, bytes + gap), writes)).collect()
            };
            let all: Vec<_> = list.iter().map(accesses).collect();
            let found = dependencies(all.iter().map(|accesses| node(accesses)).collect());
            let bytes = |region: &Region| -> Vec<usize> {
                let of_row = |row| (region.start + row * region.stride..).take(region.row_bytes);
                (0..region.rows).flat_map(of_row).collect()
            };
            for later in 0..all.len() {
                let mut before = vec![false; later + 1];
                before[later] = true;
                for node in (0..=later).rev() {
                    if before[node] {
                        found[node].iter().for_each(|&earlier| before[earlier as usize] = true);
                    }
                }
                for earlier in 0..later {
                    let conflict = all[later].iter().any(|(a, a_writes)| all[earlier].iter().any(|(b, b_writes)| {
                        (*a_writes || *b_writes) && bytes(a).iter().any(|byte| bytes(b).contains(byte))
                    }));
                    prop_assert!(!conflict || before[earlier], "{later} does not wait for {earlier}: {found:?}");
                }
            }
        }
    }
}

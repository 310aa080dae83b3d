//! The list that passes rewrite: operations in their order, and who uses which memory.
//!
//! Memory is divided into components, ranges of addresses that operations touch together; a question about a region looks at the
//! users of its component alone. What a pass makes of two operations touches what these touched, so components stay.
//!
//! A value is dead once nobody can read it: a later operation of the list writes all of its bytes before one reads them, or the
//! list ends and the caller said that its memory is internal. Internal memory is alive at the end all the same where the next
//! launch reads it before it writes there.

use super::region::Ranges;
use super::report::{Exactness, Note, Rewrite};
use super::Node;
use crate::allocation::{filled, push, with_room};
use crate::error::Result;
use crate::executor::Executor;
use crate::operation::access::{Access, Each, Effect, Extent, Region};
use crate::operation::Operation;
use crate::stream::Owner;
use crate::tensor::Matrix;
use std::ops::Range;

const WHAT: &str = "a graph's optimisation";

pub struct List<'a> {
    slots: Vec<Option<Node>>,
    components: Ranges,
    /// Of each component: the places of operations that touch it, in ascending order.
    users: Vec<Vec<u32>>,
    internal: &'a Ranges,
    pub executor: &'a dyn Executor,
    /// The least exact rewrites that are made.
    allowed: Exactness,
    pass: &'static str,
    pub rewrites: Vec<Rewrite>,
    pub notes: Vec<Note>,
}

/// Both are kept.
struct Both(#[expect(dead_code, reason = "held, not read")] [Owner; 2]);

impl<'a> List<'a> {
    pub fn new(recorded: &[Node], internal: &'a Ranges, executor: &'a dyn Executor) -> Result<List<'a>> {
        let mut slots = with_room(recorded.len(), WHAT)?;
        let mut spans = Vec::new();
        for (index, node) in recorded.iter().enumerate() {
            for access in node.accesses.iter().filter(|access| !access.region.is_empty()) {
                push(&mut spans, access.region.span(), WHAT)?;
            }
            slots.push(Some(Node {
                op: node.op.clone(),
                owner: node.owner.clone(),
                accesses: node.accesses.clone(),
                dependencies: Vec::new(),
                recorded: vec![index as u32],
            }));
        }
        let components = Ranges::of(spans);
        let users = filled(Vec::new(), components.count(), WHAT)?;
        let mut list = List {
            slots,
            components,
            users,
            internal,
            executor,
            allowed: Exactness::Exact,
            pass: "",
            rewrites: Vec::new(),
            notes: Vec::new(),
        };
        (0..list.slots.len()).try_for_each(|place| list.register(place))?;
        Ok(list)
    }

    /// From now on rewrites are those of this pass, and made if they are as exact as this.
    pub fn begin_pass(&mut self, name: &'static str, allowed: Exactness) {
        (self.pass, self.allowed) = (name, allowed);
    }

    pub fn into_nodes(self) -> Vec<Node> {
        self.slots.into_iter().flatten().collect()
    }

    /// Adds the operation to the users of what it touches.
    fn register(&mut self, place: usize) -> Result<()> {
        let Some(node) = &self.slots[place] else { return Ok(()) };
        for access in node.accesses.iter().filter(|access| !access.region.is_empty()) {
            let Some(component) = self.components.place(access.region.start) else { continue };
            let users = &mut self.users[component];
            if let Err(at) = users.binary_search(&(place as u32)) {
                push(users, 0, WHAT)?;
                let last = users.len() - 1;
                users.copy_within(at..last, at + 1);
                users[at] = place as u32;
            }
        }
        Ok(())
    }

    /// Places of operations, also of those that are gone.
    pub fn places(&self) -> Range<usize> {
        0..self.slots.len()
    }

    /// `None`: the operation is gone.
    pub fn op(&self, place: usize) -> Option<&Operation> {
        self.slots[place].as_ref().map(|node| &node.op)
    }

    pub fn accesses(&self, place: usize) -> &[Access] {
        self.slots[place].as_ref().map_or(&[], |node| &node.accesses)
    }

    /// The operations in a range of places that touch the region's component.
    fn users_in(&self, region: &Region, range: Range<usize>) -> impl DoubleEndedIterator<Item = usize> + '_ {
        let users = self.components.place(region.start).map_or(&[][..], |component| &self.users[component]);
        let (first, last) = (
            users.partition_point(|&user| (user as usize) < range.start),
            users.partition_point(|&user| (user as usize) < range.end),
        );
        let users = if first < last { &users[first..last] } else { &[] };
        users.iter().map(|&user| user as usize).filter(|&user| self.slots[user].is_some())
    }

    /// Whether the operation may read a byte of the region.
    fn reads(&self, place: usize, region: &Region) -> bool {
        let reads = |access: &&Access| access.effect != Effect::Write && access.region.may_share(region);
        self.accesses(place).iter().any(|access| reads(&access))
    }

    /// Whether the operation may write a byte of the region.
    pub fn writes(&self, place: usize, region: &Region) -> bool {
        let writes = |access: &Access| access.effect == Effect::Write && access.region.may_share(region);
        self.accesses(place).iter().any(writes)
    }

    /// Whether the operation writes each byte of the region.
    fn replaces(&self, place: usize, region: &Region) -> bool {
        let replaces = |access: &Access| access.effect == Effect::Write && access.region.contains(region);
        self.op(place).is_some_and(Operation::writes_all) && self.accesses(place).iter().any(replaces)
    }

    /// Whether an operation of the range may write a byte of the region.
    pub fn is_written_in(&self, region: &Region, range: Range<usize>) -> bool {
        self.users_in(region, range).any(|user| self.writes(user, region))
    }

    /// Whether nobody looks at the region's bytes between the end of the list and where the next launch writes them.
    fn is_dead_at_the_end(&self, region: &Region) -> bool {
        if !self.internal.contain(region) {
            return false;
        }
        for user in self.users_in(region, self.places()) {
            if self.reads(user, region) {
                return false;
            }
            if self.replaces(user, region) {
                break;
            }
        }
        true
    }

    /// Whether nobody reads the bytes of the region that are there behind the operation at this place.
    pub fn is_dead_behind(&self, place: usize, region: &Region) -> bool {
        for user in self.users_in(region, place + 1..self.slots.len()) {
            if self.reads(user, region) {
                return false;
            }
            if self.replaces(user, region) {
                return true;
            }
        }
        self.is_dead_at_the_end(region)
    }

    /// Whether the operation at `reader` alone reads what the one at `writer` leaves in the region, which is dead behind it.
    pub fn is_read_by_alone(&self, writer: usize, region: &Region, reader: usize) -> bool {
        let mut between = self.users_in(region, writer + 1..reader);
        !between.any(|user| self.reads(user, region) || self.writes(user, region))
            && (self.replaces(reader, region) || self.is_dead_behind(reader, region))
    }

    /// The operation whose value the region has in front of `reader`: it writes exactly this region, and nobody a part of it since.
    pub fn producer(&self, reader: usize, region: &Region) -> Option<usize> {
        let last = self.users_in(region, 0..reader).rev().find(|&user| self.writes(user, region))?;
        let same = |access: &Access| access.effect == Effect::Write && access.region == *region;
        (self.replaces(last, region) && self.accesses(last).iter().any(same)).then_some(last)
    }

    /// The last operation in front of `reader` that may write a byte of the region.
    pub fn last_writer(&self, reader: usize, region: &Region) -> Option<usize> {
        self.users_in(region, 0..reader).rev().find(|&user| self.writes(user, region))
    }

    /// The operation that left this matrix for the one at `reader`.
    pub fn producer_of(&self, reader: usize, matrix: &Matrix) -> Option<usize> {
        self.producer(reader, &matrix.region())
    }

    /// Whether the operation must not change places with one of the range: they share bytes which one of them writes.
    fn is_bound(&self, place: usize, range: Range<usize>) -> bool {
        self.accesses(place).iter().filter(|access| !access.region.is_empty()).any(|access| {
            self.users_in(&access.region, range.clone()).any(|user| {
                let conflicts = |other: &Access| {
                    (access.effect == Effect::Write || other.effect == Effect::Write)
                        && access.region.may_share(&other.region)
                };
                self.accesses(user).iter().any(conflicts)
            })
        })
    }

    /// Puts one operation in the place of two, of which the first is the earlier. What the first wrote for the second and the
    /// new one does not write must be dead behind the second. `false`, and nothing changed, where the new one is less exact than
    /// allowed, its arguments overlap, the device has no way to run it, or neither of the two can go to the other's place.
    pub fn fuse(&mut self, first: usize, second: usize, op: Operation, exactness: Exactness) -> Result<bool> {
        if exactness > self.allowed || op.expect_apart().is_err() || self.executor.plan(&op).is_err() {
            return Ok(false);
        }
        let place = match (self.is_bound(first, first + 1..second), self.is_bound(second, first + 1..second)) {
            (false, _) => second,
            (true, false) => first,
            (true, true) => return Ok(false),
        };
        let (Some(one), Some(other)) = (self.slots[first].take(), self.slots[second].take()) else { return Ok(false) };
        let owner = match (one.owner, other.owner) {
            (Some(one), Some(other)) => Some(std::sync::Arc::new(Both([one, other])) as Owner),
            (one, other) => one.or(other),
        };
        let mut recorded = one.recorded;
        recorded.extend(other.recorded);
        recorded.sort_unstable();
        let before = vec![(first as u32, one.op.kind()), (second as u32, other.op.kind())];
        self.put(place, op, owner, recorded, exactness, before)?;
        Ok(true)
    }

    /// Puts another operation in the place of one. What it does not write any more must be dead.
    pub fn replace(&mut self, place: usize, op: Operation, exactness: Exactness) -> Result<bool> {
        if exactness > self.allowed || op.expect_apart().is_err() || self.executor.plan(&op).is_err() {
            return Ok(false);
        }
        let Some(node) = self.slots[place].take() else { return Ok(false) };
        let before = vec![(place as u32, node.op.kind())];
        self.put(place, op, node.owner, node.recorded, exactness, before)?;
        Ok(true)
    }

    fn put(
        &mut self,
        place: usize,
        op: Operation,
        owner: Option<Owner>,
        recorded: Vec<u32>,
        exactness: Exactness,
        before: Vec<(u32, crate::operation::OperationKind)>,
    ) -> Result<()> {
        let mut accesses = Vec::new();
        op.accesses(&mut Each(|access| accesses.push(access)));
        let rewrite = Rewrite { pass: self.pass, exactness, before, after: Some((place as u32, op.kind())) };
        push(&mut self.rewrites, rewrite, WHAT)?;
        self.slots[place] = Some(Node { op, owner, accesses, dependencies: Vec::new(), recorded });
        self.register(place)
    }

    /// Takes an operation out, which changes nothing that anybody reads.
    pub fn remove(&mut self, place: usize) -> Result<()> {
        let Some(node) = self.slots[place].take() else { return Ok(()) };
        let before = vec![(place as u32, node.op.kind())];
        let rewrite = Rewrite { pass: self.pass, exactness: Exactness::Exact, before, after: None };
        push(&mut self.rewrites, rewrite, WHAT)
    }

    /// Says why a place was left as it is.
    pub fn note(&mut self, text: String) -> Result<()> {
        push(&mut self.notes, Note { pass: self.pass, text }, WHAT)
    }
}

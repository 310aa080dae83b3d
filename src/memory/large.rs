//! Large blocks: runs of whole units. What was freed last on a stream is kept for the next request on the same stream;
//! the rest goes back to the buddies when the work that used it has passed, or serves the stream's shorter requests before
//! new memory does.
//!
//! Asking the driver costs more than everything else here (on an H200 an event takes 0.2 µs to record and as long to
//! query), so one event stands for many blocks, and it is asked about when there is nothing else to give.

use super::order::{Events, Order, ANYBODY};
use super::pages::Pages;
use super::slab::Slab;
use super::sync::{Mutex, MutexGuard};
use crate::allocation::{has_room, push_if_room};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError};

/// Blocks that were freed on one stream and wait for no event yet.
const RECENT: usize = 64;
/// Waiting groups that may gather before a free asks about the oldest: what has passed soon joins its neighbours.
const WAITING: usize = 2;
/// Waiting groups in which a fitting block is looked for.
const SEARCHED: usize = 8;

/// What is looked for stands beside the block, so that a look at the list does not touch the blocks.
struct Recent {
    units: usize,
    label: u32,
    slab: NonNull<Slab>,
}

/// Blocks that wait for the same thing.
struct Waiting {
    order: Order,
    slabs: Vec<NonNull<Slab>>,
}

#[derive(Default)]
struct Lists {
    /// Freed last on their streams, newest last; no event yet.
    recent: Vec<Recent>,
    /// What the recent blocks of each label wait for.
    orders: Vec<Order>,
    /// Oldest first, each with its event.
    waiting: VecDeque<Waiting>,
    /// Every large block of the arena that is not in the pages' hands; each slab knows its place here.
    all: Vec<NonNull<Slab>>,
}

// SAFETY: slabs are shared between threads; these are names of them.
unsafe impl Send for Lists {}

#[derive(Default)]
pub struct LargeBlocks {
    lists: Mutex<Lists>,
}

/// SAFETY of all the dereferences below: slabs in the lists are alive, because they go to the pages only when they are
/// taken out of the lists.
fn slab<'a>(slab: NonNull<Slab>) -> &'a Slab {
    // SAFETY: see above.
    unsafe { slab.as_ref() }
}

impl LargeBlocks {
    fn lock(&self) -> MutexGuard<'_, Lists> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A block of exactly `units` that was freed last on the stream, or that everybody may use.
    pub fn take(&self, units: usize, label: u32) -> Option<&Slab> {
        let mut lists = self.lock();
        let suits = |it: &Recent| it.units == units && (it.label == label || it.label == ANYBODY);
        let found = lists.recent.iter().rposition(suits)?;
        Some(slab(lists.recent.remove(found).slab))
    }

    /// The first `units` of the shortest block that was freed on the stream and has at least as many. The others stay.
    pub fn take_part(&self, units: usize, label: u32, pages: &Pages) -> Option<&Slab> {
        let mut lists = self.lock();
        let Lists { recent, waiting, all, .. } = &mut *lists;
        let recents = recent.iter().enumerate().filter(|(_, it)| it.label == label && it.units >= units);
        let best_recent = recents.map(|(i, it)| (it.units, i)).min();
        let groups = waiting.iter().enumerate().take(SEARCHED).filter(|(_, group)| group.order.label() == label);
        let blocks = groups.flat_map(|(g, group)| group.slabs.iter().enumerate().map(move |(i, it)| (g, i, *it)));
        let fitting = blocks.map(|(g, i, it)| (slab(it).units(), g, i)).filter(|(length, ..)| *length >= units);
        let best_waiting = fitting.min();
        let mut tail_of = |found: &Slab| {
            let tail = has_room(all).then(|| pages.split(found, units)).flatten()?;
            tail.set_place(all.len());
            all.push(NonNull::from(tail));
            Some(NonNull::from(tail))
        };
        // A tail takes the block's place in its list, and so what must be waited for.
        match (best_recent, best_waiting) {
            (Some((length, i)), other) if other.is_none_or(|(other, ..)| length <= other) => {
                let found = slab(recent[i].slab);
                if length > units {
                    (recent[i].units, recent[i].slab) = (length - units, tail_of(found)?);
                } else {
                    recent.remove(i);
                }
                Some(found)
            }
            (_, Some((length, group, i))) => {
                let slabs = &mut waiting[group].slabs;
                let found = slab(slabs[i]);
                if length > units {
                    slabs[i] = tail_of(found)?;
                } else {
                    slabs.swap_remove(i);
                }
                Some(found)
            }
            _ => None,
        }
    }

    /// Whether there is room for one block more.
    pub fn make_room(&self) -> bool {
        has_room(&mut self.lock().all)
    }

    /// `false`: the host has no memory to list it.
    pub fn add(&self, new: &Slab) -> bool {
        let mut lists = self.lock();
        new.set_place(lists.all.len());
        push_if_room(&mut lists.all, NonNull::from(new))
    }

    /// A freed block. `order`: that of the label.
    pub fn give(
        &self,
        freed: &Slab,
        label: u32,
        order: impl FnOnce() -> Order,
        events: &Arc<Events>,
        pages: &Pages,
        capturing: bool,
    ) {
        let mut lists = self.lock();
        if label == ANYBODY && !capturing {
            // Nothing to wait for: it joins its neighbours at once, and any request may have it.
            return lists.release(freed, pages);
        }
        let knows = |lists: &Lists, label| lists.orders.iter().any(|known| known.label() == label);
        let mut label = label;
        if !knows(&lists, label) {
            // A stream that ends meanwhile has another order by now.
            let order = order();
            label = order.label();
            if !knows(&lists, label) {
                lists.orders.push(order);
            }
        }
        lists.recent.push(Recent { units: freed.units(), label, slab: NonNull::from(freed) });
        let full = lists.recent.len() > RECENT && lists.recent.iter().filter(|it| it.label == label).count() > RECENT;
        if full && !capturing {
            lists.seal(|other| other == label, events);
            if lists.waiting.len() > WAITING {
                lists.settle(1, events, pages);
            }
        }
    }

    /// Before memory is taken from the driver: gives some of what has passed to the pages. `false`: nothing has.
    pub fn settle_some(&self, queries: usize, events: &Arc<Events>, pages: &Pages) -> bool {
        let mut lists = self.lock();
        lists.seal(|_| true, events);
        lists.settle(queries, events, pages)
    }

    /// Gives everything that has passed to the pages. `label`: of the stream's blocks only, as it ends.
    pub fn settle(&self, label: Option<u32>, events: &Arc<Events>, pages: &Pages) {
        let mut lists = self.lock();
        lists.seal(|other| label.is_none_or(|label| other == label), events);
        lists.settle(usize::MAX, events, pages);
    }

    /// A block of at least `units` that waits for something, the longest waiting first, with what it waits for.
    pub fn take_waiting(&self, units: usize, events: &Arc<Events>) -> Option<(&Slab, Order)> {
        let mut lists = self.lock();
        lists.seal(|_| true, events);
        lists.waiting.iter_mut().find_map(|waiting| {
            let i = waiting.slabs.iter().position(|it| slab(*it).units() >= units)?;
            Some((slab(waiting.slabs.swap_remove(i)), waiting.order.clone()))
        })
    }

    /// The blocks that have waited longest, with what they wait for.
    pub fn take_oldest(&self, events: &Arc<Events>) -> Option<(Vec<NonNull<Slab>>, Order)> {
        let mut lists = self.lock();
        lists.seal(|_| true, events);
        lists.waiting.retain(|waiting| !waiting.slabs.is_empty());
        lists.waiting.pop_front().map(|waiting| (waiting.slabs, waiting.order))
    }

    /// Gives blocks of `take_oldest` to the pages, now that nothing uses them.
    pub fn release(&self, slabs: Vec<NonNull<Slab>>, pages: &Pages) {
        let mut lists = self.lock();
        for it in slabs {
            lists.release(slab(it), pages);
        }
    }

    /// Puts back what was taken and could not be used.
    pub fn put_waiting(&self, slabs: Vec<NonNull<Slab>>, order: Order) {
        self.lock().waiting.push_front(Waiting { order, slabs });
    }

    pub fn for_each(&self, each: &mut impl FnMut(&Slab)) {
        for it in &self.lock().all {
            each(slab(*it));
        }
    }
}

impl Lists {
    /// Moves recent blocks to the waiting ones, one event a stream.
    fn seal(&mut self, wanted: impl Fn(u32) -> bool, events: &Arc<Events>) {
        let mut sealed: Vec<Waiting> = Vec::new();
        self.orders.retain(|order| {
            let seals = wanted(order.label());
            if seals {
                sealed.push(Waiting { order: order.clone(), slabs: Vec::new() });
            }
            !seals
        });
        self.recent.retain(|it| {
            let group = sealed.iter_mut().find(|waiting| waiting.order.label() == it.label);
            let stays = group.is_none();
            if let Some(waiting) = group {
                waiting.slabs.push(it.slab);
            }
            stays
        });
        // A label may stay known after its last recent block was taken.
        sealed.retain(|waiting| !waiting.slabs.is_empty());
        for mut waiting in sealed {
            // A failure leaves the blocks to their streams; whoever else wants them records the event then.
            let _ = waiting.order.wait_for(events);
            self.waiting.push_back(waiting);
        }
    }

    fn settle(&mut self, queries: usize, events: &Arc<Events>, pages: &Pages) -> bool {
        let (mut asked, mut at, mut any) = (0, 0, false);
        while at < self.waiting.len() && asked < queries {
            let waiting = &mut self.waiting[at];
            asked += usize::from(!waiting.slabs.is_empty() && !matches!(waiting.order, Order::Anybody));
            if waiting.slabs.is_empty() || waiting.order.has_passed(events) {
                for it in self.waiting.remove(at).into_iter().flat_map(|waiting| waiting.slabs) {
                    self.release(slab(it), pages);
                    any = true;
                }
            } else {
                at += 1;
            }
        }
        any
    }

    fn release(&mut self, it: &Slab, pages: &Pages) {
        let place = it.get_place();
        self.all.swap_remove(place);
        if let Some(moved) = self.all.get(place) {
            slab(*moved).set_place(place);
        }
        pages.release(it);
    }
}

//! Large blocks: runs of whole units. What was freed last on a stream is kept for the next request on the same stream;
//! the rest goes back to the buddies when the work that used it has passed, or serves the stream's shorter requests before
//! new memory does.
//!
//! Asking the driver costs more than everything else here (on an H200 an event takes 0.2 µs to record and as long to
//! query), so one event stands for many blocks, and it is asked about when there is nothing else to give.

use super::order::{Events, Order};
use super::pages::Pages;
use super::slab::Slab;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Blocks that were freed on one stream and wait for no event yet.
const RECENT: usize = 32;
/// Waiting groups that may gather before a free asks the driver about as many: what has passed soon joins its neighbours.
const WAITING: usize = 2;
/// Waiting groups in which a fitting block is looked for.
const SEARCHED: usize = 8;

/// Blocks that wait for the same thing.
struct Waiting {
    order: Order,
    slabs: Vec<NonNull<Slab>>,
}

#[derive(Default)]
struct Lists {
    /// Freed last on their streams, newest last; no event yet.
    recent: Vec<(Order, NonNull<Slab>)>,
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
        let suits = |order: &Order| order.label() == label || matches!(order, Order::Anybody);
        let found = lists.recent.iter().rposition(|(order, it)| slab(*it).units() == units && suits(order))?;
        Some(slab(lists.recent.remove(found).1))
    }

    /// The first `units` of the shortest block that was freed on the stream and has at least as many. The others stay.
    pub fn take_part(&self, units: usize, label: u32, pages: &Pages) -> Option<&Slab> {
        let mut lists = self.lock();
        let Lists { recent, waiting, all } = &mut *lists;
        let fits = |it: NonNull<Slab>| Some(slab(it).units()).filter(|length| *length >= units);
        let recents = recent.iter().enumerate().filter(|(_, (order, _))| order.label() == label);
        let best_recent = recents.filter_map(|(i, (_, it))| Some((fits(*it)?, i))).min();
        let groups = waiting.iter().enumerate().take(SEARCHED).filter(|(_, group)| group.order.label() == label);
        let blocks = groups.flat_map(|(g, group)| group.slabs.iter().enumerate().map(move |(i, it)| (g, i, *it)));
        let best_waiting = blocks.filter_map(|(g, i, it)| Some((fits(it)?, g, i))).min();
        let from_recent = match (best_recent, best_waiting) {
            (Some((length, _)), Some((other, ..))) => length <= other,
            (recent, _) => recent.is_some(),
        };
        let place = if from_recent {
            &mut recent[best_recent?.1].1
        } else {
            let (_, group, i) = best_waiting?;
            &mut waiting[group].slabs[i]
        };
        let found = slab(*place);
        if found.units() > units {
            // The tail takes the block's place in its list, and so what must be waited for.
            let tail = pages.split(found, units);
            tail.set_place(all.len());
            all.push(NonNull::from(tail));
            *place = NonNull::from(tail);
        } else if from_recent {
            recent.remove(best_recent?.1);
        } else {
            let (_, group, i) = best_waiting?;
            waiting[group].slabs.swap_remove(i);
        }
        Some(found)
    }

    pub fn add(&self, new: &Slab) {
        let mut lists = self.lock();
        new.set_place(lists.all.len());
        lists.all.push(NonNull::from(new));
    }

    /// A freed block.
    pub fn give(&self, freed: &Slab, order: Order, events: &Arc<Events>, pages: &Pages, capturing: bool) {
        let mut lists = self.lock();
        let label = order.label();
        lists.recent.push((order, NonNull::from(freed)));
        let full = lists.recent.len() > RECENT
            && lists.recent.iter().filter(|(order, _)| order.label() == label).count() > RECENT;
        if full && !capturing {
            lists.seal(|order| order.label() == label, events);
            if lists.waiting.len() > WAITING {
                lists.settle(WAITING, events, pages);
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
        lists.seal(|order| label.is_none_or(|label| order.label() == label), events);
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
    fn seal(&mut self, wanted: impl Fn(&Order) -> bool, events: &Arc<Events>) {
        let mut sealed: Vec<Waiting> = Vec::new();
        self.recent.retain(|(order, it)| {
            if !wanted(order) {
                return true;
            }
            match sealed.iter_mut().find(|waiting| waiting.order.label() == order.label()) {
                Some(waiting) => waiting.slabs.push(*it),
                None => sealed.push(Waiting { order: order.clone(), slabs: vec![*it] }),
            }
            false
        });
        for mut waiting in sealed {
            // As in `give`.
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

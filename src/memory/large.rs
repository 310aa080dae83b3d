//! Large blocks: runs of whole units. Sizes that were freed a moment ago are kept for the next request on the same
//! stream; the rest goes back to the buddies when the work that used it has passed.

use super::order::{Events, Order};
use super::pages::Pages;
use super::slab::Slab;
use std::collections::{BTreeMap, VecDeque};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Blocks kept for each stream, and the largest that is kept (32 MiB): beyond it the buddies' time does not count.
const RECENT: usize = 8;
const RECENT_UNITS: usize = 16;
/// Waiting groups that one allocation asks the driver about.
const QUERIES: usize = 2;

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
    /// Every large block of the arena that is not in the pages' hands.
    all: BTreeMap<usize, NonNull<Slab>>,
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

    /// A block of exactly `units` that was freed on the stream, or that everybody may use. `events`: what has passed in
    /// the meantime goes to the pages first; `None` in a capture.
    pub fn take(&self, units: usize, label: u32, events: Option<&Arc<Events>>, pages: &Pages) -> Option<&Slab> {
        let mut lists = self.lock();
        let suits = |order: &Order| order.label() == label || matches!(order, Order::Anybody);
        if let Some(i) = lists.recent.iter().rposition(|(order, it)| slab(*it).units() == units && suits(order)) {
            return Some(slab(lists.recent.remove(i).1));
        }
        for waiting in lists.waiting.iter_mut().filter(|waiting| suits(&waiting.order)) {
            if let Some(i) = waiting.slabs.iter().position(|it| slab(*it).units() == units) {
                return Some(slab(waiting.slabs.swap_remove(i)));
            }
        }
        if let Some(events) = events {
            lists.settle(QUERIES, events, pages);
        }
        None
    }

    pub fn add(&self, new: &Slab) {
        self.lock().all.insert(new.unit(), NonNull::from(new));
    }

    /// A freed block.
    pub fn give(&self, freed: &Slab, order: Order, events: &Arc<Events>, pages: &Pages, capturing: bool) {
        let mut lists = self.lock();
        if freed.units() <= RECENT_UNITS {
            let label = order.label();
            lists.recent.push((order, NonNull::from(freed)));
            if capturing || lists.recent.iter().filter(|(order, _)| order.label() == label).count() <= RECENT {
                return;
            }
            lists.seal(|order| order.label() == label, events);
        } else {
            lists.waiting.push_back(Waiting { order, slabs: vec![NonNull::from(freed)] });
            if capturing {
                return;
            }
            if let Some(last) = lists.waiting.back_mut() {
                // A failure leaves the order as it is: the event is recorded when somebody asks next.
                let _ = last.order.wait_for(events);
            }
        }
        lists.settle(QUERIES, events, pages);
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
            lists.all.remove(&slab(it).unit());
            pages.release(slab(it));
        }
    }

    /// Puts back what was taken and could not be used.
    pub fn put_waiting(&self, slabs: Vec<NonNull<Slab>>, order: Order) {
        self.lock().waiting.push_front(Waiting { order, slabs });
    }

    pub fn for_each(&self, each: &mut impl FnMut(&Slab)) {
        for it in self.lock().all.values() {
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

    fn settle(&mut self, queries: usize, events: &Arc<Events>, pages: &Pages) {
        let mut asked = 0;
        let mut at = 0;
        while at < self.waiting.len() && asked < queries {
            let waiting = &mut self.waiting[at];
            asked += usize::from(!waiting.slabs.is_empty());
            if waiting.slabs.is_empty() || waiting.order.has_passed(events) {
                for it in self.waiting.remove(at).into_iter().flat_map(|waiting| waiting.slabs) {
                    self.all.remove(&slab(it).unit());
                    pages.release(slab(it));
                }
            } else {
                at += 1;
            }
        }
    }
}

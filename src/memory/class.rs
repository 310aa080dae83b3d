//! The slabs of one class. Blocks leave them by the dozen under a lock, and come back one by one without.

use super::pages::Pages;
use super::remote::PendingStack;
use super::size_class::slab_blocks;
use super::slab::{Block, Slab};
use super::sync::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::PoisonError;

pub struct Class {
    /// Slabs to which blocks came back since the last look.
    pending: PendingStack<Slab>,
    slabs: Mutex<Slabs>,
    /// Blocks that streams took over from each other since the class last got a slab.
    moved: AtomicUsize,
}

/// How many times the blocks of a slab must have been moved between streams before another slab is better: what is
/// moved one way comes to be missed, and moved back, at two calls of the driver a batch (about 2 µs on an H200, and all
/// threads wait for each other there). Sixteen threads with a stream each moved half of all batches for ever.
const MOVES_OF_A_SLAB: usize = 2;

#[derive(Default)]
struct Slabs {
    /// By their first unit.
    all: BTreeMap<usize, NonNull<Slab>>,
    /// The slabs with blocks to give.
    listed: BTreeMap<usize, NonNull<Slab>>,
    /// The unit of a slab that is kept although it is empty, so that a class does not come and go with one block.
    kept: Option<usize>,
}

// SAFETY: slabs are shared between threads; these are names of them.
unsafe impl Send for Slabs {}

impl Class {
    pub fn new() -> Class {
        Class { pending: PendingStack::new(), slabs: Mutex::new(Slabs::default()), moved: AtomicUsize::new(0) }
    }

    /// Blocks were taken over from another stream than the one that they were freed on.
    pub fn count_moved(&self, blocks: usize) {
        self.moved.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Whether its streams have moved so much that the class should have another slab, if there is memory for it.
    pub fn is_outgrown(&self, class: usize) -> bool {
        self.moved.load(Ordering::Relaxed) >= MOVES_OF_A_SLAB * slab_blocks(class)
    }

    fn lock(&self) -> MutexGuard<'_, Slabs> {
        self.slabs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn give_back(&self, block: &Block) {
        let slab = block.slab();
        if slab.give_back(block.index()) {
            // SAFETY: the list was empty, so the slab is not pending; with a block outside it is not released either.
            unsafe { self.pending.push(slab) };
        }
    }

    /// Up to `wanted` blocks, from the slabs at the end of the range first: those at the other side empty in time.
    pub fn take(&self, pages: &Pages, wanted: usize, blocks: &mut Vec<Block>) {
        let mut slabs = self.lock();
        self.collect(&mut slabs, pages);
        while blocks.len() < wanted {
            let Some((&unit, &slab)) = slabs.listed.last_key_value() else { break };
            // SAFETY: listed slabs are alive, and the class's lock is held.
            unsafe {
                let slab = slab.as_ref();
                if !slab.take(wanted - blocks.len(), blocks) {
                    slab.local().listed = false;
                    slabs.listed.remove(&unit);
                }
            }
        }
    }

    pub fn add(&self, slab: &Slab) {
        self.moved.store(0, Ordering::Relaxed);
        let mut slabs = self.lock();
        slabs.all.insert(slab.unit(), NonNull::from(slab));
        slabs.listed.insert(slab.unit(), NonNull::from(slab));
        // SAFETY: the class's lock is held.
        unsafe { slab.local().listed = true };
    }

    fn collect(&self, slabs: &mut Slabs, pages: &Pages) {
        self.pending.drain(|slab| {
            // SAFETY: a pending slab had a block outside until now, so it is alive; the class's lock is held.
            let (slab, local) = unsafe {
                (*slab).collect();
                (&*slab, (*slab).local())
            };
            if !local.listed {
                local.listed = true;
                slabs.listed.insert(slab.unit(), NonNull::from(slab));
            }
            if local.outstanding == 0 && slabs.kept != Some(slab.unit()) {
                match slabs.kept.filter(|unit| slabs.is_empty(*unit)) {
                    Some(_) => slabs.release(slab, pages),
                    None => slabs.kept = Some(slab.unit()),
                }
            }
        });
    }

    pub fn release_empty(&self, pages: &Pages) {
        let mut slabs = self.lock();
        self.collect(&mut slabs, pages);
        let empty: Vec<usize> = slabs.listed.keys().copied().filter(|&unit| slabs.is_empty(unit)).collect();
        for unit in empty {
            let slab = slabs.listed[&unit];
            // SAFETY: listed slabs are alive.
            slabs.release(unsafe { slab.as_ref() }, pages);
        }
        slabs.kept = None;
    }

    pub fn for_each(&self, each: &mut impl FnMut(&Slab)) {
        for slab in self.lock().all.values() {
            // SAFETY: slabs of the class are alive while its lock is held.
            each(unsafe { slab.as_ref() });
        }
    }
}

impl Slabs {
    fn is_empty(&self, unit: usize) -> bool {
        // SAFETY: listed slabs are alive, and `self` is reached under the class's lock.
        self.listed.get(&unit).is_some_and(|slab| unsafe { slab.as_ref().local().outstanding == 0 })
    }

    fn release(&mut self, slab: &Slab, pages: &Pages) {
        self.all.remove(&slab.unit());
        self.listed.remove(&slab.unit());
        pages.release(slab);
    }
}

//! An arena: slabs of every class, the depot between its threads, and the caches of those threads. A manager has one,
//! and each named pool another; all take their units from the same pages.

use super::batch::Batch;
use super::cache::Cache;
use super::class::Class;
use super::depot::Depot;
use super::large::LargeBlocks;
use super::order::{Events, ALL_WORK, ANYBODY};
use super::page_table::PageTable;
use super::pages::Pages;
use super::size_class::{class_bytes, magazine_capacity, CLASSES};
use super::slab::{Block, Slab};
use super::statistics::{Counters, Totals, Usage, UsageStatistics};
use super::sync::Mutex;
use super::trace::Trace;
use crate::allocation::has_room;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

/// Bytes of a class that wait in the depot for a taker, if that is at least the fewest slots and at most the most; the
/// rest goes home to the slabs, where it lets whole slabs become free. With 8 slots a seventh of the batches that sixteen
/// streams pass on went home.
const DEPOT_BYTES: usize = 16 << 20;
const DEPOT_SLOTS: RangeInclusive<usize> = 32..=64;
/// Slots from which threads start for one stream's batches.
const SLOTS_OF_A_STREAM: usize = 8;
/// Batches of other streams that one look into the depot asks the driver about.
const QUERIES: usize = 2;

fn depot_slots(class: usize) -> usize {
    let batch = magazine_capacity(class) / 2 * class_bytes(class);
    (DEPOT_BYTES / batch).clamp(*DEPOT_SLOTS.start(), *DEPOT_SLOTS.end())
}

/// Where a stream's batches are put and looked for first: whoever takes them should not have to pass those of others, and
/// threads of one stream should not all meet at one slot.
fn first_slot(label: u32, shard: usize) -> usize {
    label as usize * SLOTS_OF_A_STREAM + shard % SLOTS_OF_A_STREAM
}

pub struct Arena {
    /// Another one for each owner, because arenas are used again.
    id: AtomicU64,
    /// `None`: every block is a plain allocation, and of the arena only the counters are used.
    pages: Option<Arc<Pages>>,
    pub usage: Usage,
    total: Arc<Usage>,
    classes: Vec<Class>,
    depots: Vec<Depot<Batch>>,
    /// Batches that found no slot and whose events have not passed.
    overflow: Mutex<Vec<Batch>>,
    overflowing: AtomicUsize,
    pub large: LargeBlocks,
    caches: AtomicPtr<Cache>,
    /// The name of the pool that the arena serves; `None` for the main arena and those that wait for a pool.
    name: Mutex<Option<String>>,
    /// The number of that name in the trace; 0: none.
    traced_pool: AtomicU16,
    /// A capture has allocated from it.
    captured: AtomicBool,
    /// The next arena of the manager; written before the arena is listed.
    pub next: AtomicPtr<Arena>,
}

// SAFETY: the caches' list is only added to; the rest is locked or atomic.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Totals for Arena {
    fn totals(&self) -> [&Usage; 2] {
        [&self.usage, &self.total]
    }
}

impl Arena {
    /// It must not move once a thread has a cache of it.
    pub fn new(id: u64, pages: Option<Arc<Pages>>, total: Arc<Usage>) -> Arena {
        let classes = if pages.is_some() { CLASSES } else { 0 };
        Arena {
            id: id.into(),
            pages,
            usage: Usage::default(),
            total,
            classes: (0..classes).map(|_| Class::new()).collect(),
            depots: (0..classes).map(|class| Depot::new(depot_slots(class))).collect(),
            overflow: Mutex::new(Vec::new()),
            overflowing: AtomicUsize::new(0),
            large: LargeBlocks::default(),
            caches: AtomicPtr::new(std::ptr::null_mut()),
            name: Mutex::default(),
            traced_pool: AtomicU16::new(0),
            captured: AtomicBool::new(false),
            next: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    pub fn name(&self) -> Option<String> {
        self.name.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn set_name(&self, name: Option<&str>, trace: Option<&Trace>) {
        let number = name.zip(trace).map_or(0, |(name, trace)| trace.number_of(name));
        self.traced_pool.store(number, Ordering::Relaxed);
        *self.name.lock().unwrap_or_else(PoisonError::into_inner) = name.map(str::to_string);
    }

    pub fn traced_pool(&self) -> u16 {
        self.traced_pool.load(Ordering::Relaxed)
    }

    pub fn is_captured(&self) -> bool {
        self.captured.load(Ordering::Relaxed)
    }

    pub fn set_captured(&self, captured: bool) {
        self.captured.store(captured, Ordering::Relaxed);
    }

    #[inline]
    pub fn id(&self) -> u64 {
        self.id.load(Ordering::Relaxed)
    }

    pub fn set_id(&self, id: u64) {
        self.id.store(id, Ordering::Relaxed);
    }

    /// The table of pages, which only arenas with pages have; threads have caches of no others.
    #[inline]
    pub fn table(&self) -> &PageTable {
        &self.pages.as_ref().expect("caches belong to arenas with pages").table
    }

    pub fn class(&self, class: usize) -> &Class {
        &self.classes[class]
    }

    /// Every cache that a thread ever had, in use or not.
    pub fn caches(&self) -> impl Iterator<Item = &Cache> {
        let mut at = self.caches.load(Ordering::Acquire);
        std::iter::from_fn(move || {
            // SAFETY: the arena keeps a reference to each listed cache until it is dropped.
            let cache = unsafe { at.as_ref() }?;
            at = cache.next.load(Ordering::Relaxed);
            Some(cache)
        })
    }

    /// Lists a cache for as long as the arena lives.
    pub fn add_cache(&self, cache: Arc<Cache>) {
        let cache = Arc::into_raw(cache).cast_mut();
        let mut head = self.caches.load(Ordering::Relaxed);
        loop {
            // SAFETY: not listed yet, so this thread alone writes the link.
            unsafe { &*cache }.next.store(head, Ordering::Relaxed);
            match self.caches.compare_exchange_weak(head, cache, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    pub fn counters(&self) -> impl Iterator<Item = &Counters> {
        self.caches().map(|cache| &cache.counters)
    }

    pub fn statistics(&self) -> UsageStatistics {
        self.usage.sum(self.counters())
    }

    /// Blocks that nobody has to wait for go back to their slabs.
    pub fn give_back(&self, blocks: &[Block]) {
        for block in blocks {
            self.classes[block.slab().class()].give_back(block);
        }
    }

    /// Passes a batch on. Where it finds no slot, its blocks go home if they may.
    pub fn put(&self, shard: usize, batch: Batch) {
        match self.place(shard, batch) {
            Some(batch) if batch.order.is_known_to_have_passed() => self.give_back(&batch.blocks),
            Some(batch) => self.lay_over(batch),
            None => {}
        }
    }

    /// Puts a batch without a question to the driver, which may block, or be gone at the end of a process.
    pub fn put_unasked(&self, shard: usize, batch: Batch) {
        self.place(shard, batch).into_iter().for_each(|batch| self.lay_over(batch));
    }

    /// Returns a batch that finds no slot.
    fn place(&self, shard: usize, mut batch: Batch) -> Option<Batch> {
        batch.order.pass_on();
        let (class, label) = (batch.class, batch.order.label());
        self.depots[class].put(first_slot(label, shard), label, Box::new(batch)).err().map(|batch| *batch)
    }

    fn lay_over(&self, batch: Batch) {
        let mut overflow = self.overflow.lock().unwrap_or_else(PoisonError::into_inner);
        overflow.push(batch);
        self.overflowing.store(overflow.len(), Ordering::Relaxed);
    }

    /// Blocks of the class that work on the stream called `label` may use at once, without a question to the driver.
    pub fn take_batch(&self, shard: usize, class: usize, label: u32) -> Option<Vec<Block>> {
        let depot = &self.depots[class];
        let suits = |other| other == label || other == ANYBODY;
        // Labels may be out of date, so what was taken by mistake goes back and the search goes on.
        for _ in 0..QUERIES {
            match depot.take(first_slot(label, shard), suits) {
                Some(batch) if suits(batch.order.label()) => return Some(batch.blocks),
                Some(batch) => self.put(shard, *batch),
                None => break,
            }
        }
        if self.overflowing.load(Ordering::Relaxed) > 0 {
            let mut overflow = self.overflow.lock().unwrap_or_else(PoisonError::into_inner);
            let found = overflow.iter().position(|batch| batch.class == class && suits(batch.order.label()))?;
            let batch = overflow.swap_remove(found);
            self.overflowing.store(overflow.len(), Ordering::Relaxed);
            return Some(batch.blocks);
        }
        None
    }

    /// Blocks of the class that were freed on other streams, whose work has passed.
    pub fn take_passed_batch(
        &self,
        shard: usize,
        class: usize,
        label: u32,
        events: &Arc<Events>,
    ) -> Option<Vec<Block>> {
        let others = |other| other != label && other != ANYBODY && other != ALL_WORK;
        // What has not passed goes back after the last look, or the next one would meet it again.
        let mut busy = Vec::new();
        let mut passed = None;
        while passed.is_none() && busy.len() < QUERIES {
            let Some(mut batch) = self.depots[class].take(shard, others) else { break };
            if batch.order.has_passed(events) {
                if !batch.order.has_no_taker() {
                    self.classes[class].count_moved(batch.blocks.len());
                }
                passed = Some(batch.blocks);
            } else {
                busy.push(batch);
            }
        }
        busy.into_iter().for_each(|batch| self.put(shard, *batch));
        passed
    }

    /// Blocks of the class whatever they wait for, the longest waiting of those that were looked at.
    pub fn take_any_batch(&self, shard: usize, class: usize) -> Option<Batch> {
        self.depots[class].take(shard, |_| true).map(|batch| *batch).or_else(|| {
            let mut overflow = self.overflow.lock().unwrap_or_else(PoisonError::into_inner);
            let found = overflow.iter().position(|batch| batch.class == class)?;
            let batch = overflow.swap_remove(found);
            self.overflowing.store(overflow.len(), Ordering::Relaxed);
            Some(batch)
        })
    }

    /// Empties the magazines of all threads into the depot: those of one stream, or all.
    pub fn drain_caches(&self, label: Option<u32>) {
        for (shard, cache) in self.caches().enumerate() {
            for batch in cache.drain(label) {
                self.put(shard, batch);
            }
        }
    }

    /// Takes every batch out of the depot.
    pub fn drain_depot(&self) -> Vec<Batch> {
        let mut batches = std::mem::take(&mut *self.overflow.lock().unwrap_or_else(PoisonError::into_inner));
        self.overflowing.store(0, Ordering::Relaxed);
        for depot in &self.depots {
            // What there is no room for stays.
            while has_room(&mut batches) {
                let Some(batch) = depot.take(0, |_| true) else { break };
                batches.push(*batch);
            }
        }
        batches
    }

    /// Gives the units of slabs without a block in use back to the pages.
    pub fn release_empty_slabs(&self) {
        if let Some(pages) = &self.pages {
            for class in &self.classes {
                class.release_empty(pages);
            }
        }
    }

    /// Every slab of a class, for looking at its blocks.
    pub fn for_each_slab(&self, mut each: impl FnMut(&Slab)) {
        for class in &self.classes {
            class.for_each(&mut each);
        }
        self.large.for_each(&mut each);
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let mut at = *self.caches.get_mut();
        while !at.is_null() {
            // SAFETY: `add_cache` made a raw pointer of a reference, which is taken back once. Threads may still hold
            // their own references; the claims have ended, so they do not use the arena.
            let cache = unsafe { Arc::from_raw(at) };
            at = cache.next.load(Ordering::Relaxed);
        }
    }
}

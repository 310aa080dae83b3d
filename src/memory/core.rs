//! What a manager is made of, shared by its handle, its pools and the threads' way in.

use super::arena::Arena;
use super::budget::Budget;
use super::cache::{Settings, ALL_WORK_KEY, ANYBODY_KEY};
use super::callbacks::Callbacks;
use super::capture::Captures;
use super::direct::DirectBlocks;
use super::ladder::RecoverySteps;
use super::leak::LeakTracker;
use super::options::{Decided, LeakTracking, MemoryOptions};
use super::order::{End, Events, Order, Streams, ALL_WORK, ANYBODY};
use super::pages::{Pages, Shortage};
use super::source::Source;
use super::statistics::{MemoryStatistics, Usage, UsageStatistics};
use super::sync::Mutex;
use super::threads::with_cache;
use super::trace::{EventKind, Trace, TraceEvent};
use crate::allocation::no_memory;
use crate::device::{wait_past_captures, RawHandle, StreamObserver};
use crate::error::{Result, Status};
use crate::fork::PerProcess;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};

pub struct Core {
    pub source: Arc<dyn Source>,
    pub options: MemoryOptions,
    pub budget: Arc<Budget>,
    /// `None`: no pooling.
    pub pages: Option<Arc<Pages>>,
    pub total: Arc<Usage>,
    /// The arena of blocks that belong to no pool.
    pub main: Box<Arena>,
    /// Arenas of pools, each linked to the next. Those of pools that are gone stay for new ones, since threads may still
    /// know them.
    pools: AtomicPtr<Arena>,
    pub idle_arenas: Mutex<Vec<NonNull<Arena>>>,
    pub streams: Streams,
    pub events: Arc<Events>,
    pub direct: DirectBlocks,
    pub captures: Captures,
    pub recovery_steps: RecoverySteps,
    pub callbacks: Callbacks,
    pub tracker: LeakTracker,
    pub trace: Option<Trace>,
    pub spilled: AtomicU64,
    pub synchronous: bool,
    pub device_total: u64,
}

// SAFETY: the pointers name arenas, which are shared between threads and live as long as the core.
unsafe impl Send for Core {}
// SAFETY: as above; the rest is locked or atomic.
unsafe impl Sync for Core {}

/// Ids of arenas, never used twice in a process.
static NEXT_ARENA: AtomicU64 = AtomicU64::new(1);

pub fn next_arena_id() -> u64 {
    NEXT_ARENA.fetch_add(1, Ordering::Relaxed)
}

/// CUDA's handle for each thread's own default stream: one name for many streams.
const PER_THREAD_STREAM: usize = 2;
/// The least range that is worth pooling in.
const LEAST_RANGE: u64 = 1 << 30;

/// All managers' cores.
static CORES: PerProcess<std::sync::Mutex<Vec<Weak<Core>>>> = PerProcess::new(Default::default);

pub fn all_cores() -> Vec<Arc<Core>> {
    let cores = CORES.lock().unwrap_or_else(PoisonError::into_inner).clone();
    cores.iter().filter_map(Weak::upgrade).collect()
}

pub fn remember(core: &Arc<Core>) {
    let mut cores = CORES.lock().unwrap_or_else(PoisonError::into_inner);
    cores.retain(|core| core.strong_count() > 0);
    cores.push(Arc::downgrade(core));
}

/// Whether blocks are logged has changed: threads that keep some are told.
pub fn log_level_changed() {
    all_cores().iter().for_each(|core| core.renew_settings());
}

impl Core {
    pub fn new(source: Arc<dyn Source>, options: MemoryOptions) -> Result<Core> {
        options.validate()?;
        let (free, total) = source.memory_info()?;
        let synchronous = source.is_synchronous();
        let limit = options.limit_bytes(free, total, synchronous);
        let budget = Arc::new(Budget::new(limit, options.margin_bytes(total, synchronous)));
        budget.note_free(free, total, 0);
        let pages = if options.pools(limit) {
            let range = if options.range_bytes > 0 { options.range_bytes } else { total.saturating_mul(4) };
            Pages::new(source.clone(), budget.clone(), range, LEAST_RANGE.min(range)).map(Arc::new)
        } else {
            None
        };
        let no_trace = || no_memory(options.trace_events.saturating_mul(64), "the trace's events");
        let trace = match options.trace_events {
            0 => None,
            events => Some(Trace::new(events).ok_or_else(no_trace)?),
        };
        let usage = Arc::new(Usage::default());
        let captures = Captures::default();
        let core = Core {
            main: Box::new(Arena::new(next_arena_id(), pages.clone(), usage.clone())),
            events: Events::new(source.clone(), captures.count()),
            tracker: LeakTracker::new(options.leak_tracking),
            trace,
            total: usage,
            pools: AtomicPtr::new(std::ptr::null_mut()),
            idle_arenas: Mutex::default(),
            streams: Streams::default(),
            direct: DirectBlocks::default(),
            captures,
            recovery_steps: RecoverySteps::default(),
            callbacks: Callbacks::default(),
            spilled: AtomicU64::new(0),
            device_total: total,
            source,
            options,
            budget,
            pages,
            synchronous,
        };
        let initial = core.options.initial_bytes;
        let taken = match &core.pages {
            Some(pages) if initial > 0 => pages.grow_to(initial),
            _ if initial > core.budget.limit() => Err(Shortage::Limit),
            _ => Ok(()),
        };
        taken.map_err(|shortage| core.out_of_memory(initial, &shortage, &[]).context("the initial size"))?;
        Ok(core)
    }

    pub fn decided(&self) -> Decided {
        Decided {
            limit: self.budget.limit(),
            margin: self.budget.margin(),
            pooling: self.pages.is_some(),
            range_bytes: self.pages.as_ref().map_or(0, |pages| pages.range().1 as u64),
            thread_cache_bytes: self.options.thread_cache(self.device_total) as u64,
        }
    }

    /// What a thread's cache is told.
    pub fn settings(&self) -> Settings {
        let asleep = self.pages.as_ref().is_some_and(|pages| pages.asleep.load(Ordering::Relaxed));
        // Where streams share magazines, a capture's allocations are told apart on the long way only.
        let shared_capture = self.synchronous && self.captures.any();
        let seen = asleep
            || shared_capture
            || self.trace.is_some()
            || log::log_enabled!(target: "nvbackend::memory", log::Level::Trace);
        Settings {
            capacity: self.options.thread_cache(self.device_total),
            credit: self.tracker.next_sample(),
            slow_allocations: seen,
            slow_frees: seen || self.options.zero_on_free,
            tracked: self.tracker.mode() != LeakTracking::Off,
        }
    }

    /// The key of blocks that work on the stream may use.
    #[inline]
    pub fn key(&self, stream: RawHandle) -> usize {
        let raw = stream.0 as usize;
        if self.synchronous || raw == PER_THREAD_STREAM {
            ANYBODY_KEY
        } else {
            raw
        }
    }

    /// The key of blocks that are freed on the stream.
    #[inline]
    pub fn free_key(&self, stream: RawHandle) -> usize {
        match self.key(stream) {
            ANYBODY_KEY if !self.synchronous => ALL_WORK_KEY,
            key => key,
        }
    }

    /// What blocks of a key's magazines wait for. The thread mostly has magazines for the stream, which know; the list of
    /// all streams is behind a lock. Of a stream that is not there any more: all work.
    pub fn order(&self, arena: &Arena, key: usize) -> Order {
        match key {
            ANYBODY_KEY => Order::Anybody,
            ALL_WORK_KEY => Order::AllWork,
            raw => {
                let known = with_cache(arena, || self.settings(), |cache, token| cache.order_of(token, key)).flatten();
                let found = || self.streams.find(RawHandle(raw as *mut _)).map(Order::of);
                known.or_else(found).unwrap_or(Order::AllWork)
            }
        }
    }

    /// The label of that order, where the thread has magazines for the stream.
    pub fn own_label(&self, arena: &Arena, key: usize) -> Option<u32> {
        match key {
            ANYBODY_KEY => Some(ANYBODY),
            ALL_WORK_KEY => Some(ALL_WORK),
            _ => with_cache(arena, || self.settings(), |cache, token| cache.label_of(token, key)).flatten(),
        }
    }

    /// Makes a record of the stream unless there is one and, with `keep`, magazines for it in the thread's cache. The caller
    /// holds the stream: after its end the handle means nothing, or another stream.
    pub fn meet_stream(&self, arena: &Arena, key: usize, keep: bool) {
        let known = with_cache(arena, || self.settings(), |cache, token| cache.label_of(token, key)).flatten();
        if known.is_some() {
            return;
        }
        if key != ANYBODY_KEY && key != ALL_WORK_KEY {
            self.streams.add(RawHandle(key as *mut _));
        }
        if keep {
            let order = self.order(arena, key);
            with_cache(arena, || self.settings(), |cache, token| cache.add_stream(token, key, order));
        }
    }

    /// Tells every thread which ways are long from now on.
    pub fn renew_settings(&self) {
        for arena in self.arenas() {
            arena.caches().for_each(|cache| cache.set_slow(self.settings()));
        }
    }

    /// The events to ask, unless a capture forbids asking.
    pub fn askable_events(&self) -> Option<&Arc<Events>> {
        (!self.synchronous && !self.captures.any()).then_some(&self.events)
    }

    /// The main arena and those of pools, in use or not. Takes no lock.
    pub fn arenas(&self) -> impl Iterator<Item = &Arena> {
        let mut at = self.pools.load(Ordering::Acquire);
        let pools = std::iter::from_fn(move || {
            // SAFETY: listed arenas live as long as the core.
            let arena = unsafe { at.as_ref() }?;
            at = arena.next.load(Ordering::Relaxed);
            Some(arena)
        });
        std::iter::once(&*self.main).chain(pools)
    }

    /// Lists a new arena for a pool.
    pub fn add_arena(&self) -> &Arena {
        let arena = Box::leak(Box::new(Arena::new(next_arena_id(), self.pages.clone(), self.total.clone())));
        let mut head = self.pools.load(Ordering::Relaxed);
        loop {
            arena.next.store(head, Ordering::Relaxed);
            match self.pools.compare_exchange_weak(head, arena, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return arena,
                Err(now) => head = now,
            }
        }
    }

    /// Use by all arenas together.
    pub fn usage(&self) -> UsageStatistics {
        self.total.sum(self.arenas().flat_map(Arena::counters))
    }

    pub fn statistics(&self) -> MemoryStatistics {
        let usage = self.usage();
        let reserved = self.budget.held();
        let free_pages = self.pages.as_ref().map_or(0, |pages| pages.free_backed_bytes());
        let largest_free = self.pages.as_ref().map_or(0, |pages| pages.largest_free_bytes());
        let limit = self.budget.limit();
        let lost = reserved.saturating_sub(usage.allocated + free_pages);
        MemoryStatistics {
            allocated: usage.allocated,
            peak: usage.peak,
            blocks: usage.blocks,
            allocations: usage.allocations,
            frees: usage.frees,
            failures: usage.failures,
            limit: if limit == u64::MAX { 0 } else { limit },
            margin: self.budget.margin(),
            reserved,
            peak_reserved: self.budget.peak(),
            cached: reserved.saturating_sub(usage.allocated),
            free_pages,
            largest_free,
            fragmentation: if reserved == 0 { 0.0 } else { lost as f64 / reserved as f64 },
            spilled: self.spilled.load(Ordering::Relaxed),
            captured: self.arenas().filter(|arena| arena.is_captured()).map(|arena| arena.statistics().allocated).sum(),
            unaccounted: self.budget.unaccounted(),
            device_free: self.budget.device_free(),
            device_total: self.device_total,
            recovery_steps: self.recovery_steps.statistics(),
        }
    }

    pub fn note(&self, kind: EventKind, address: usize, bytes: u64, stream: RawHandle) {
        self.note_in(None, kind, address, bytes, stream);
    }

    /// `arena`: that of the block, whose pool the event names.
    pub fn note_in(&self, arena: Option<&Arena>, kind: EventKind, address: usize, bytes: u64, stream: RawHandle) {
        if let Some(trace) = &self.trace {
            trace.write(TraceEvent {
                nanoseconds: self.source.nanoseconds(),
                kind,
                address: address as u64,
                bytes,
                stream: stream.0 as u64,
                reserved: self.budget.held(),
                pool: arena.map_or(0, Arena::traced_pool),
            });
        }
    }
}

impl StreamObserver for Core {
    /// The handle may soon mean another stream, so every block that waits for this one gets an event to wait for.
    fn stream_ends(&self, stream: RawHandle) {
        if self.synchronous {
            return;
        }
        let Some(record) = self.streams.retire(stream) else { return };
        // What cannot be recorded can only be waited for. Where a capture that has failed forbids both, blocks wait for all
        // work when they are wanted; a device that is lost is idle.
        record.end(|| match self.events.record(stream) {
            Ok(event) => End::Event(event),
            Err(_) => match self.source.synchronize() {
                Err(error) if error.status != Status::DeviceLost => End::AllWork,
                _ => End::Passed,
            },
        });
        for arena in self.arenas() {
            arena.drain_caches(Some(record.label));
            // A capture forbids asking; then the blocks find the stream's last event when they are wanted.
            if let (Some(pages), false) = (&self.pages, self.captures.any()) {
                arena.large.settle(Some(record.label), &self.events, pages);
            }
        }
    }

    fn owns_live(&self, address: usize, bytes: usize) -> Option<bool> {
        let managed = self.pages.as_ref().is_some_and(|pages| pages.table.contains(address));
        let owned = self.owns(address, bytes);
        (owned || managed || self.owns(address, 1)).then_some(owned)
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.end_sleep();
        // Work may still use memory that goes now. A device that is lost does not.
        let waited = wait_past_captures(|| self.source.synchronize());
        if let Some(error) = waited.err().filter(|error| error.status != Status::DeviceLost) {
            log::warn!(target: "nvbackend::memory", "while a memory manager was destroyed: {error}");
        }
        for arena in self.arenas() {
            for cache in arena.caches() {
                drop(cache.close(arena));
            }
        }
        for (address, block) in self.direct.remove_all(None) {
            self.release_direct(address, block, RawHandle::NULL);
        }
        self.release_leaving(true);
        let mut at = *self.pools.get_mut();
        while !at.is_null() {
            // SAFETY: leaked by `add_arena`; no thread has a claim on its caches any more.
            let arena = unsafe { Box::from_raw(at) };
            at = arena.next.load(Ordering::Relaxed);
        }
    }
}

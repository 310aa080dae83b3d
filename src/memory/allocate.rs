//! The way of an allocation: the thread's magazine, the depot, the slabs, new memory, and then the ladder.

use super::arena::Arena;
use super::batch::Batch;
use super::cache::{Taken, ANYBODY_KEY};
use super::core::Core;
use super::direct::{DirectBlock, Kind};
use super::options::{LeakTracking, Spill};
use super::order::ANYBODY;
use super::page_table::UNIT_BYTES;
use super::pages::{asleep, Pages, Shortage};
use super::size_class::{class_bytes, class_for, refill, GRANULE, LARGE};
use super::slab::{Block, Slab, TRACKED};
use super::threads::with_cache;
use super::trace::EventKind;
use crate::device::RawHandle;
use crate::error::{Error, Result, Status};
use std::ffi::c_void;
use std::sync::atomic::Ordering;

/// What is wanted, and for whom.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    pub arena: &'a Arena,
    /// `LARGE`: `units` units.
    pub class: usize,
    pub units: usize,
    pub bytes: usize,
    pub alignment: usize,
    pub stream: RawHandle,
    pub key: usize,
    pub label: u32,
    /// Slabs may take memory that large blocks would need in one piece: there is no other.
    pub borrow: bool,
}

/// Memory that is nobody else's, its life not yet begun.
pub enum Found {
    Block(Block),
    /// The address of a block in the list of direct ones.
    Direct(*mut c_void),
}

impl Request<'_> {
    /// Bytes that the device must have for it.
    pub fn footprint(&self) -> u64 {
        match self.class {
            LARGE => (self.units as u64).saturating_mul(UNIT_BYTES as u64).max(self.bytes as u64),
            class => (super::size_class::slab_units(class) * UNIT_BYTES) as u64,
        }
    }
}

/// Events that are asked about before what a stream freed is split, and before new memory is mapped: an answer takes
/// 0.2 µs on an H200, and a mapping 31.
const FEW_QUERIES: usize = 2;
const MANY_QUERIES: usize = 32;

impl Core {
    #[inline]
    pub fn allocate(&self, arena: &Arena, bytes: usize, alignment: usize, stream: RawHandle) -> Result<*mut c_void> {
        // No driver call would tell where a block is at hand.
        self.source.refuse_lost()?;
        if self.pages.is_some() && bytes != 0 && alignment.is_power_of_two() {
            if let Some(class) = class_for(bytes, alignment) {
                let key = self.key(stream);
                let take = |cache: &super::cache::Cache, token| cache.take(token, key, class, bytes);
                if let Some(Taken::Block(pointer)) = with_cache(arena, || self.settings(), take) {
                    return Ok(pointer);
                }
            }
        }
        self.allocate_slowly(arena, bytes, alignment, stream)
    }

    /// In the main arena, wherever the stream's own allocations go.
    pub fn allocate_outside_captures(&self, bytes: usize, stream: RawHandle) -> Result<*mut c_void> {
        match self.captures.arena(stream) {
            None => self.allocate(&self.main, bytes, GRANULE, stream),
            Some(_) => self.allocate_in(&self.main, bytes, GRANULE, stream),
        }
    }

    #[cold]
    pub fn allocate_slowly(
        &self,
        arena: &Arena,
        bytes: usize,
        alignment: usize,
        stream: RawHandle,
    ) -> Result<*mut c_void> {
        // SAFETY: arenas live as long as the core.
        let arena = self.captures.arena(stream).map_or(arena, |arena| unsafe { &*arena });
        self.allocate_in(arena, bytes, alignment, stream)
    }

    fn allocate_in(&self, arena: &Arena, bytes: usize, alignment: usize, stream: RawHandle) -> Result<*mut c_void> {
        if bytes == 0 {
            return Err(Error::invalid("bytes is 0; at least 1 is needed"));
        }
        if !alignment.is_power_of_two() || alignment > UNIT_BYTES {
            return Err(Error::invalid(format!(
                "alignment is {alignment}; a power of two of at most {UNIT_BYTES} is needed"
            )));
        }
        if bytes > isize::MAX as usize {
            self.count_failure(arena, bytes, stream);
            let shortage = Shortage::Device(Error::new(Status::OutOfMemory, "no device has as many"));
            return Err(self.out_of_memory(bytes as u64, &shortage, &[]));
        }
        if bytes as u64 > self.device_total && self.options.spill == Spill::Never {
            // What no device of this kind could hold never reaches the driver, which answers odd sizes in odd ways.
            let text = format!("the device has {} bytes in all", self.device_total);
            let shortage = Shortage::Device(Error::new(Status::OutOfMemory, text));
            self.count_failure(arena, bytes, stream);
            return Err(self.out_of_memory(bytes as u64, &shortage, &[]));
        }
        let key = self.key(stream);
        let class = class_for(bytes, alignment).unwrap_or(LARGE);
        let units = bytes.div_ceil(UNIT_BYTES);
        self.meet_stream(arena, key, self.captures.arena(stream).is_none());
        let (label, borrow) = (self.order(arena, key).label(), self.captures.any());
        let request = Request { arena, class, units, bytes, alignment, stream, key, label, borrow };
        let found = match self.find(&request) {
            Ok(found) => found,
            Err(shortage) => {
                self.recover(&request, shortage).inspect_err(|_| self.count_failure(arena, bytes, stream))?
            }
        };
        Ok(self.hand_out(&request, found))
    }

    /// A block for a request without oddities, as long as nobody need be waited for or asked. The stream may end meanwhile, as
    /// in `free_at_once`.
    pub fn allocate_at_once(&self, arena: &Arena, bytes: usize, stream: RawHandle) -> Option<*mut c_void> {
        if bytes == 0 || bytes as u64 > self.device_total || self.captures.any() {
            return None;
        }
        let key = self.key(stream);
        let class = class_for(bytes, GRANULE).unwrap_or(LARGE);
        let (units, label) = (bytes.div_ceil(UNIT_BYTES), self.own_label(arena, key)?);
        let request = Request { arena, class, units, bytes, alignment: GRANULE, stream, key, label, borrow: false };
        self.find(&request).ok().map(|found| self.hand_out(&request, found))
    }

    fn count_failure(&self, arena: &Arena, bytes: usize, stream: RawHandle) {
        arena.usage.failed();
        self.total.failed();
        self.note(EventKind::OutOfMemory, 0, bytes as u64, stream);
    }

    /// Memory without disturbing anybody.
    pub fn find(&self, request: &Request) -> std::result::Result<Found, Shortage> {
        let Some(pages) = &self.pages else { return self.find_direct(request, Kind::Plain, false).map(Found::Direct) };
        if pages.asleep.load(Ordering::Relaxed) {
            return Err(Shortage::Fatal(asleep()));
        }
        let &Request { arena, class, key, label, .. } = request;
        let events = self.askable_events();
        if class == LARGE {
            let slab = self.find_large(request, pages)?;
            return Ok(Found::Block(Block::large(slab)));
        }
        // The long way is also that of samples and traces, whose magazines may be full.
        let own = with_cache(arena, || self.settings(), |cache, token| (cache.take_block(token, key, class), token));
        let shard = match own {
            Some((Some(block), _)) => return Ok(Found::Block(block)),
            Some((None, token)) => token as usize,
            None => 0,
        };
        if let Some(blocks) = arena.take_batch(shard, class, label) {
            return Ok(Found::Block(self.keep_rest(request, blocks)));
        }
        let (slabs, wanted) = (arena.class(class), refill(class));
        let mut blocks = Vec::with_capacity(wanted);
        slabs.take(pages, wanted, &mut blocks);
        if blocks.is_empty() && !(slabs.is_outgrown(class) && pages.has_plenty()) {
            let passed = events.and_then(|events| arena.take_passed_batch(shard, class, label, events));
            blocks = passed.unwrap_or(blocks);
        }
        // Other threads may have taken all of a slab before this one does, but not of a second slab and a third.
        while blocks.is_empty() {
            slabs.add(pages.allocate(arena, class, 0, request.borrow)?);
            slabs.take(pages, wanted, &mut blocks);
        }
        Ok(Found::Block(self.keep_rest(request, blocks)))
    }

    /// What costs no call of the driver comes first, then what has passed, then what the same stream freed with more
    /// units than needed, and new memory last.
    fn find_large<'a>(&'a self, request: &Request<'a>, pages: &'a Pages) -> std::result::Result<&'a Slab, Shortage> {
        let &Request { arena, units, label, .. } = request;
        if let Some(slab) = arena.large.take(units, label) {
            return Ok(slab);
        }
        let settles = |queries| !self.captures.any() && arena.large.settle_some(queries, &self.events, pages);
        let mut backed = pages.allocate_backed(arena, units);
        if backed.is_none() && settles(FEW_QUERIES) {
            backed = pages.allocate_backed(arena, units);
        }
        if let Some(slab) = backed.or_else(|| arena.large.take_part(units, label, pages)) {
            return Ok(slab);
        }
        if settles(MANY_QUERIES) {
            if let Some(slab) = pages.allocate_backed(arena, units) {
                return Ok(slab);
            }
        }
        pages.allocate(arena, LARGE, units, false)
    }

    /// One block for the request; the others go to the thread's magazine, or on to other threads.
    pub fn keep_rest(&self, request: &Request, mut blocks: Vec<Block>) -> Block {
        let &Request { arena, class, key, .. } = request;
        let block = blocks.pop().expect("batches and slabs give at least one block");
        if blocks.is_empty() {
            return block;
        }
        let captured = self.captures.arena(request.stream);
        let keep = |cache: &super::cache::Cache, token| {
            (cache.keep(token, key, class, std::mem::take(&mut blocks)), token as usize)
        };
        // In a capture the stream finds blocks of the capture's arena alone in its magazines.
        let kept = match captured {
            Some(owner) if !std::ptr::eq(owner, arena) => None,
            _ => with_cache(arena, || self.settings(), keep),
        };
        let ((rest, evicted), shard) = kept.unwrap_or(((blocks, Vec::new()), 0));
        evicted.into_iter().for_each(|batch| self.pass_on(arena, shard, batch));
        if !rest.is_empty() {
            self.pass_on(arena, shard, Batch { class, blocks: rest, order: self.order(arena, key) });
        }
        block
    }

    /// An allocation of its own, within the budget.
    pub fn find_direct(
        &self,
        request: &Request,
        kind: Kind,
        spilled: bool,
    ) -> std::result::Result<*mut c_void, Shortage> {
        let too_much = || Shortage::Fatal(Error::new(Status::OutOfMemory, "the size overflows"));
        // Sources align to a granule; more is got by asking for more.
        let padding = if request.alignment > GRANULE { request.alignment } else { 0 };
        let origin_bytes = request.bytes.checked_add(padding).ok_or_else(too_much)?;
        let admission = match kind {
            Kind::Plain => Some(self.budget.admit(origin_bytes as u64, &*self.source)?),
            Kind::Pinned | Kind::Managed => None,
        };
        let result = match kind {
            Kind::Plain => self.source.allocate(origin_bytes, request.stream),
            Kind::Pinned => self.source.host_allocate(origin_bytes),
            Kind::Managed => self.source.managed_allocate(origin_bytes),
        };
        let origin = result.map_err(|error| match error.status {
            Status::OutOfMemory => Shortage::Device(error),
            _ => Shortage::Fatal(error),
        })?;
        if let Some(admission) = admission {
            admission.keep();
        }
        let address = (origin as usize).next_multiple_of(request.alignment.max(1));
        let block = DirectBlock {
            kind,
            bytes: request.bytes,
            origin,
            origin_bytes,
            usage: &request.arena.usage,
            tracked: self.tracker.mode() != LeakTracking::Off,
            spilled,
        };
        self.direct.insert(address, block);
        Ok(address as *mut c_void)
    }

    /// A block of memory that is not the device's own.
    pub fn allocate_of_kind(&self, bytes: usize, kind: Kind) -> Result<*mut c_void> {
        self.source.refuse_lost()?;
        if bytes == 0 {
            return Err(Error::invalid("bytes is 0; at least 1 is needed"));
        }
        let (arena, stream) = (&*self.main, RawHandle::NULL);
        let units = bytes.div_ceil(UNIT_BYTES);
        let request = Request {
            arena,
            class: LARGE,
            units,
            bytes,
            alignment: GRANULE,
            stream,
            key: ANYBODY_KEY,
            label: ANYBODY,
            borrow: false,
        };
        match self.find_direct(&request, kind, false) {
            Ok(pointer) => Ok(self.hand_out(&request, Found::Direct(pointer))),
            Err(shortage) => {
                self.count_failure(arena, bytes, stream);
                Err(self.out_of_memory(bytes as u64, &shortage, &[]))
            }
        }
    }

    /// Begins the block's life and counts it.
    pub fn hand_out(&self, request: &Request, found: Found) -> *mut c_void {
        let &Request { arena, bytes, stream, .. } = request;
        let (pointer, block) = match found {
            Found::Direct(pointer) => (pointer, None),
            Found::Block(block) => (block.address() as *mut c_void, Some(block)),
        };
        let counted = with_cache(
            arena,
            || self.settings(),
            |cache, token| match block {
                Some(block) => {
                    cache.count_allocated(bytes, arena);
                    let small = !block.slab().is_large();
                    self.sample(cache, token, if small { class_bytes(request.class) } else { bytes })
                }
                None => {
                    // Direct blocks are counted for all threads at once, on top of what each has counted so far.
                    cache.flush_counters(arena);
                    self.sample(cache, token, bytes)
                }
            },
        );
        if block.is_none() || counted.is_none() {
            arena.usage.allocated(bytes as u64);
            self.total.allocated(bytes as u64);
        }
        // Without a cache there is no credit.
        let sampled = counted.unwrap_or(self.tracker.mode() != LeakTracking::Off);
        if let Some(block) = block {
            block.begin_life(bytes, if sampled { TRACKED } else { 0 });
        }
        if sampled {
            self.tracker.allocated(pointer as usize, bytes as u64, self.source.nanoseconds());
        }
        self.note_in(Some(arena), EventKind::Allocate, pointer as usize, bytes as u64, stream);
        log::trace!(target: "nvbackend::memory", "allocated {bytes} bytes at {pointer:p}");
        pointer
    }

    /// Whether this block is one of the tracker's samples.
    fn sample(&self, cache: &super::cache::Cache, token: u64, bytes: usize) -> bool {
        match self.tracker.mode() {
            LeakTracking::Off => false,
            LeakTracking::Full => true,
            LeakTracking::Sampled(interval) => {
                cache.spend_credit(token, bytes, self.tracker.next_sample()) || bytes as u64 >= interval
            }
        }
    }
}

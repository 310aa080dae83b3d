//! Named pools: blocks that are counted by themselves and can be freed all at once.

use super::arena::Arena;
use super::batch::Batch;
use super::core::{next_arena_id, Core};
use super::direct::Kind;
use super::order::Order;
use super::size_class::GRANULE;
use super::slab::{Block, SLACK_SHIFT, TRACKED};
use super::statistics::UsageStatistics;
use super::trace::EventKind;
use super::MemoryManager;
use crate::allocation::{has_room, no_memory, push_if_room};
use crate::device::RawHandle;
use crate::error::{Error, Result};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError};

pub struct Pool {
    manager: Arc<MemoryManager>,
    name: String,
    arena: *const Arena,
}

// SAFETY: the arena is shared between threads and lives as long as the manager.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    pub fn new(manager: &Arc<MemoryManager>, name: &str) -> Result<Pool> {
        if name.is_empty() {
            return Err(Error::invalid("the pool's name is empty"));
        }
        let arena = manager.core().open_arena();
        // SAFETY: the core keeps it.
        unsafe { &*arena }.set_name(Some(name), manager.core().trace.as_ref());
        log::debug!(target: "nvbackend::memory", "pool \"{name}\" opened");
        Ok(Pool { manager: manager.clone(), name: name.to_string(), arena })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn manager(&self) -> &Arc<MemoryManager> {
        &self.manager
    }

    fn core(&self) -> &Core {
        self.manager.core()
    }

    pub(super) fn arena(&self) -> &Arena {
        // SAFETY: `open_arena`'s, which the core keeps.
        unsafe { &*self.arena }
    }

    pub fn allocate(&self, bytes: usize, stream: RawHandle) -> Result<*mut c_void> {
        self.core().allocate(self.arena(), bytes, GRANULE, stream)
    }

    pub fn allocate_aligned(&self, bytes: usize, alignment: usize, stream: RawHandle) -> Result<*mut c_void> {
        self.core().allocate(self.arena(), bytes, alignment, stream)
    }

    /// Frees as `MemoryManager::free` does, but blocks of this pool only.
    pub fn free(&self, pointer: *mut c_void, stream: RawHandle) -> Result<()> {
        self.core().free(self.arena(), pointer, stream, true)
    }

    /// Waits for the device's work and frees every block of the pool. No other thread uses the pool meanwhile.
    pub fn clear(&self) -> Result<u64> {
        let (blocks, _) = self.core().clear_arena(self.arena(), false)?;
        log::debug!(target: "nvbackend::memory", "pool \"{}\" cleared of {blocks} blocks", self.name);
        Ok(blocks)
    }

    pub fn statistics(&self) -> UsageStatistics {
        self.arena().statistics()
    }

    /// From now on, until `end_capture`, what is allocated on the stream comes from this pool, and no memory of it goes
    /// elsewhere before the pool does. Call it before the stream's capture begins.
    pub fn begin_capture(&self, stream: RawHandle) -> Result<()> {
        let core = self.core();
        if stream == RawHandle::NULL {
            return Err(Error::invalid("the default stream cannot be captured"));
        }
        // The stream's magazines hold blocks of other arenas, which must not get into the graph.
        let key = core.key(stream);
        core.meet_stream(self.arena(), key, false);
        let label = core.order(self.arena(), key).label();
        core.captures.begin(stream, self.arena())?;
        self.arena().set_captured(true);
        if core.synchronous {
            core.renew_settings();
        } else {
            let others = core.arenas().filter(|arena| !std::ptr::eq(*arena, self.arena()));
            others.for_each(|arena| arena.drain_caches(Some(label)));
        }
        Ok(())
    }

    pub fn end_capture(&self, stream: RawHandle) -> Result<()> {
        let core = self.core();
        core.captures.end(stream)?;
        core.release_leaving(false);
        if core.synchronous {
            core.renew_settings();
        }
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let core = self.core();
        core.captures.end_all(self.arena());
        core.release_leaving(false);
        if core.synchronous {
            core.renew_settings();
        }
        match core.clear_arena(self.arena(), true) {
            Ok((blocks, idle)) => {
                log::debug!(target: "nvbackend::memory", "pool \"{}\" went with {blocks} live blocks", self.name);
                core.close_arena(self.arena(), idle);
            }
            // The blocks could not be overwritten, so nobody gets them while the manager lives.
            Err(error) => log::warn!(target: "nvbackend::memory", "pool \"{}\" cannot be cleared: {error}", self.name),
        }
    }
}

impl Core {
    fn open_arena(&self) -> *const Arena {
        let idle = self.idle_arenas.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match idle {
            // Its id was renewed when it was closed.
            Some(arena) => arena.as_ptr(),
            None => self.add_arena(),
        }
    }

    /// Ends threads' claims and takes the units back, at once if nothing can be using them (`idle`), else in time. The
    /// arena has no live block.
    fn close_arena(&self, arena: &Arena, idle: bool) {
        arena.set_id(next_arena_id());
        arena.set_name(None, None);
        arena.set_captured(false);
        for (shard, cache) in arena.caches().enumerate() {
            cache.close(arena).into_iter().for_each(|batch| arena.put(shard, batch));
        }
        if let (Some(pages), true) = (&self.pages, idle) {
            for batch in arena.drain_depot() {
                arena.give_back(&batch.blocks);
            }
            while let Some((slabs, _)) = arena.large.take_oldest(&self.events) {
                arena.large.release(slabs, pages);
            }
        }
        arena.release_empty_slabs();
        arena.usage.reset();
        self.idle_arenas.lock().unwrap_or_else(PoisonError::into_inner).push(NonNull::from(arena));
    }

    /// Frees every live block. Returns how many there were, and whether nothing can be using them any more: in a
    /// capture, or with `force` when waiting failed, they wait for all work like blocks freed without a stream.
    fn clear_arena(&self, arena: &Arena, force: bool) -> Result<(u64, bool)> {
        let idle = if self.captures.any() {
            false
        } else {
            match self.source.synchronize() {
                Ok(()) => true,
                Err(_) if force => false,
                Err(error) => return Err(error),
            }
        };
        if self.options.zero_on_free {
            self.zero_live_blocks(arena)?;
        }
        // The blocks leave the sums and not the counts of the threads that allocated them, which so can hold no peak.
        self.total.keep_peak(self.arenas().flat_map(Arena::counters));
        arena.caches().for_each(|cache| cache.flush_counters(arena));
        let mut blocks = 0;
        let mut live = Vec::new();
        // Each turn takes as many blocks as there is room to remember: mostly all.
        let mut more = true;
        while std::mem::take(&mut more) {
            arena.for_each_slab(|slab| {
                for index in 0..slab.count() {
                    if more || !has_room(&mut live) {
                        more = !live.is_empty();
                        return;
                    }
                    if let Some(word) = slab.end_life(index, 0) {
                        if word & TRACKED != 0 {
                            self.tracker.freed(slab.address(index));
                        }
                        live.push((Block::new(slab, index), slab.block_bytes() - (word >> SLACK_SHIFT) as usize));
                    }
                }
            });
            for (block, bytes) in live.drain(..) {
                self.note(EventKind::Free, block.address(), bytes as u64, RawHandle::NULL);
                arena.usage.freed(bytes as u64);
                self.total.freed(bytes as u64);
                blocks += 1;
                self.give_back_cleared(arena, block, idle);
            }
        }
        for (address, block) in self.direct.remove_all(Some(&arena.usage)) {
            self.note(EventKind::Free, address, block.bytes as u64, RawHandle::NULL);
            self.release_direct(address, block, RawHandle::NULL);
            blocks += 1;
        }
        arena.release_empty_slabs();
        Ok((blocks, idle))
    }

    fn give_back_cleared(&self, arena: &Arena, block: Block, idle: bool) {
        let Some(pages) = &self.pages else { return };
        let slab = NonNull::from(block.slab());
        match (block.slab().is_large(), idle) {
            (true, true) => arena.large.release(vec![slab], pages),
            (true, false) => arena.large.put_waiting(vec![slab], Order::AllWork),
            (false, true) => arena.give_back(&[block]),
            (false, false) => {
                arena.put(0, Batch { class: block.slab().class(), blocks: vec![block], order: Order::AllWork });
            }
        }
    }

    /// Before any life ends: should overwriting fail, every block stays its owner's.
    fn zero_live_blocks(&self, arena: &Arena) -> Result<()> {
        let (mut live, mut complete) = (Vec::new(), true);
        arena.for_each_slab(|slab| {
            for index in (0..slab.count()).filter(|&index| slab.live_bytes(index).is_some()) {
                complete &= push_if_room(&mut live, (slab.address(index), slab.block_bytes()));
            }
        });
        self.direct.for_each(|address, block| {
            if block.kind == Kind::Plain && std::ptr::eq(block.usage, &arena.usage) {
                complete &= push_if_room(&mut live, (address, block.bytes));
            }
        });
        if !complete {
            return Err(no_memory(2 * size_of_val(&*live), "the list of a pool's blocks"));
        }
        if live.is_empty() {
            return Ok(());
        }
        for (address, bytes) in live {
            self.zero(address as *mut c_void, bytes, RawHandle::NULL)?;
        }
        self.source.synchronize()
    }
}

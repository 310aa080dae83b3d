//! The way back of a block: to the thread's magazine, or wherever it belongs.

use super::arena::Arena;
use super::batch::Batch;
use super::cache::{Given, ALL_WORK_KEY, ANYBODY_KEY};
use super::core::Core;
use super::direct::{DirectBlock, Kind};
use super::order::{Order, ALL_WORK, ANYBODY};
use super::slab::{Block, Slab, SLACK_SHIFT, TRACKED};
use super::threads::with_cache;
use super::trace::EventKind;
use crate::device::RawHandle;
use crate::error::{Error, Result, Status};
use std::ffi::c_void;
use std::sync::atomic::Ordering;

fn not_live(pointer: *mut c_void) -> Error {
    Error::invalid(format!("{pointer:p} is not a live block of this memory manager"))
        .with_advice("it was freed before, came from elsewhere, or points into a block")
}

impl Core {
    /// `home`: the arena whose blocks come by most. `only_home`: others' blocks are refused.
    #[inline]
    pub fn free(&self, home: &Arena, pointer: *mut c_void, stream: RawHandle, only_home: bool) -> Result<()> {
        if pointer.is_null() {
            return Ok(());
        }
        let paged = self.pages.as_ref().is_some_and(|pages| pages.table.contains(pointer as usize));
        if paged && self.free_to_magazine(home, pointer, stream) {
            return Ok(());
        }
        self.free_slowly(home, pointer, stream, only_home)
    }

    #[cold]
    pub fn free_slowly(&self, home: &Arena, pointer: *mut c_void, stream: RawHandle, only_home: bool) -> Result<()> {
        let address = pointer as usize;
        let slab = self.pages.as_ref().and_then(|pages| pages.table.find(address));
        let Some(slab) = slab else { return self.free_direct(home, pointer, stream, only_home) };
        let Some((index, 0)) = slab.locate(address) else { return Err(not_live(pointer)) };
        if only_home && !std::ptr::eq(slab.arena(), home) {
            return Err(Error::invalid(format!("{pointer:p} is not a block of this pool")));
        }
        if self.options.zero_on_free && slab.live_bytes(index).is_some() {
            // Before the life ends: a block that could not be overwritten stays its owner's.
            self.zero(pointer, slab.block_bytes(), stream)?;
        }
        let Some(word) = slab.end_life(index, 0) else { return Err(not_live(pointer)) };
        let bytes = slab.block_bytes() - (word >> SLACK_SHIFT) as usize;
        if word & TRACKED != 0 {
            self.tracker.freed(address);
        }
        self.note(EventKind::Free, address, bytes as u64, stream);
        log::trace!(target: "nvbackend::memory", "freed {bytes} bytes at {pointer:p}");
        // SAFETY: arenas live as long as the core, and a live block has one.
        let arena = unsafe { &*slab.arena() };
        if slab.is_large() {
            self.meet_stream(arena, self.free_key(stream), !self.captures.any());
            self.free_large(arena, slab, bytes, stream);
        } else {
            self.free_small(arena, Block::new(slab, index), bytes, stream);
        }
        Ok(())
    }

    /// Frees a block of the arena, as long as nobody need be waited for. `false`: nothing has changed. The stream may end
    /// meanwhile, so its handle is looked up among those that are known, and the driver never sees it.
    pub fn free_at_once(&self, home: &Arena, pointer: *mut c_void, stream: RawHandle) -> bool {
        let Some(slab) = self.pages.as_ref().and_then(|pages| pages.table.find(pointer as usize)) else { return false };
        let waits = !self.synchronous && self.key(stream) == ANYBODY_KEY;
        if !std::ptr::eq(slab.arena(), home) || waits || self.options.zero_on_free {
            return false;
        }
        if !slab.is_large() {
            return self.free_to_magazine(home, pointer, stream);
        }
        let Some((0, 0)) = slab.locate(pointer as usize) else { return false };
        let Some(word) = slab.end_life(0, TRACKED) else { return false };
        let bytes = slab.block_bytes() - (word >> SLACK_SHIFT) as usize;
        self.note(EventKind::Free, pointer as usize, bytes as u64, stream);
        self.free_large(home, slab, bytes, stream);
        true
    }

    /// To the thread's magazine for the stream, which may pass its older half on. `false`: nothing has changed.
    #[inline]
    fn free_to_magazine(&self, home: &Arena, pointer: *mut c_void, stream: RawHandle) -> bool {
        let key = self.free_key(stream);
        let give = |cache: &super::cache::Cache, token| (cache.give(token, key, pointer as usize, true), token);
        match with_cache(home, || self.settings(), give) {
            Some((Given::Done, _)) => true,
            Some((Given::Spilled(batch), shard)) => {
                self.pass_on(home, shard as usize, batch);
                true
            }
            _ => false,
        }
    }

    pub fn zero(&self, pointer: *mut c_void, bytes: usize, stream: RawHandle) -> Result<()> {
        if self.pages.as_ref().is_some_and(|pages| pages.zero_asleep(pointer as usize, bytes)) {
            return Ok(());
        }
        if !self.synchronous && self.key(stream) == ANYBODY_KEY {
            if self.captures.any() {
                let text = "blocks are overwritten when they are freed, which takes a stream while a capture runs";
                return Err(Error::invalid(text).with_advice("free it on a stream, or end the capture first"));
            }
            // Without a stream, whatever still reads the block must be done first.
            self.source.synchronize()?;
        }
        // SAFETY: a block of the manager whose life has just ended.
        unsafe { self.source.zero(pointer, bytes, stream) }
    }

    fn free_small(&self, arena: &Arena, block: Block, bytes: usize, stream: RawHandle) {
        let key = self.free_key(stream);
        let captured = self.captures.arena(stream);
        // In a capture the stream keeps magazines of the capture's arena alone, where its allocations find theirs.
        self.meet_stream(arena, key, captured.is_none_or(|owner| std::ptr::eq(owner, arena)));
        let give = |cache: &super::cache::Cache, token| (cache.give_block(token, key, block, bytes), token as usize);
        let given = with_cache(arena, || self.settings(), give);
        match given {
            Some((Ok(None), _)) => {}
            Some((Ok(Some(batch)), shard)) => self.pass_on(arena, shard, batch),
            Some((Err(_), _)) | None => {
                arena.usage.freed(bytes as u64);
                self.total.freed(bytes as u64);
                let batch = Batch { class: block.slab().class(), blocks: vec![block], order: self.order(arena, key) };
                self.pass_on(arena, 0, batch);
            }
        }
    }

    fn free_large(&self, arena: &Arena, slab: &Slab, bytes: usize, stream: RawHandle) {
        let key = self.free_key(stream);
        let count = |cache: &super::cache::Cache, token| cache.count_freed(token, key, bytes, arena);
        let counted = with_cache(arena, || self.settings(), count);
        if counted.is_none() {
            arena.usage.freed(bytes as u64);
            self.total.freed(bytes as u64);
        }
        let capturing = self.captures.any();
        let label = match key {
            ALL_WORK_KEY if !capturing && self.source.synchronize().is_ok() => ANYBODY,
            ALL_WORK_KEY => ALL_WORK,
            ANYBODY_KEY => ANYBODY,
            _ => counted.flatten().unwrap_or_else(|| self.order(arena, key).label()),
        };
        let order = || match label {
            ANYBODY => Order::Anybody,
            _ => self.order(arena, key),
        };
        if let Some(pages) = &self.pages {
            arena.large.give(slab, label, order, &self.events, pages, capturing);
        }
    }

    /// A batch leaves its thread.
    pub fn pass_on(&self, arena: &Arena, shard: usize, mut batch: Batch) {
        if batch.order.pass_on() && !self.captures.any() {
            if let Order::Stream { record, .. } = &batch.order {
                if !record.is_capturing(&*self.source) {
                    // A failure leaves the batch to its stream; whoever else wants it records the event then.
                    let _ = batch.order.wait_for(&self.events);
                }
            }
        }
        arena.put(shard, batch);
    }

    fn free_direct(&self, home: &Arena, pointer: *mut c_void, stream: RawHandle, only_home: bool) -> Result<()> {
        let mine = |block: &DirectBlock| !only_home || std::ptr::eq(block.usage, &home.usage);
        if self.options.zero_on_free {
            // The block is zeroed before it is removed: one that could not be overwritten stays its owner's.
            match self.direct.find(pointer as usize) {
                Some((start, block)) if start == pointer as usize && mine(&block) && block.kind == Kind::Plain => {
                    self.zero(pointer, block.bytes, stream)?;
                }
                _ => {}
            }
        }
        let block = self.direct.remove(pointer as usize, mine).ok_or_else(|| not_live(pointer))?;
        self.note(EventKind::Free, pointer as usize, block.bytes as u64, stream);
        self.release_direct(pointer as usize, block, stream);
        Ok(())
    }

    /// Gives a direct block, which the list no longer holds, back to where it came from.
    pub fn release_direct(&self, address: usize, block: DirectBlock, stream: RawHandle) {
        if block.tracked {
            self.tracker.freed(address);
        }
        // SAFETY: the counters of an arena, which lives as long as the core.
        unsafe { &*block.usage }.freed(block.bytes as u64);
        self.total.freed(block.bytes as u64);
        // SAFETY: the list held the block, so it came from the source, and this is its only release.
        unsafe {
            match block.kind {
                Kind::Plain => {
                    self.source.free(block.origin, block.origin_bytes, stream);
                    self.budget.give_back(block.origin_bytes as u64);
                }
                Kind::Pinned | Kind::Managed => {
                    if block.spilled {
                        self.spilled.fetch_sub(block.bytes as u64, Ordering::Relaxed);
                    }
                    self.direct.leave(block);
                    self.release_leaving(false);
                }
            }
        }
    }

    /// Gives back host and unified memory that was freed. It goes at once, so the work that uses it must be over, which a
    /// capture forbids waiting for: then it stays until the capture has ended, as it does when waiting fails. `last`: all
    /// work has been waited for as well as could be, and nobody comes after this.
    pub fn release_leaving(&self, last: bool) {
        if self.captures.any() && !last {
            return;
        }
        let leaving = self.direct.take_leaving();
        if leaving.is_empty() {
            return;
        }
        let done = |result: Result<()>| result.map_or_else(|error| error.status == Status::DeviceLost, |()| true);
        let waited = last || done(self.source.synchronize());
        if !waited || !done(self.zero_leaving(&leaving)) && !last {
            leaving.into_iter().for_each(|block| self.direct.leave(block));
            return;
        }
        for block in leaving {
            // SAFETY: it came from the source and was freed once, and `take_leaving` gives it to one caller.
            unsafe {
                if block.kind == Kind::Pinned {
                    self.source.host_free(block.origin, block.origin_bytes);
                } else {
                    self.source.managed_free(block.origin, block.origin_bytes);
                }
            }
        }
    }

    fn zero_leaving(&self, leaving: &[DirectBlock]) -> Result<()> {
        if !self.options.zero_on_free {
            return Ok(());
        }
        for block in leaving {
            // SAFETY: allocated with this size, freed, and no work uses it any more.
            unsafe { self.source.zero(block.origin, block.origin_bytes, RawHandle::NULL)? };
        }
        self.source.synchronize()
    }

    /// Bytes from the address to the end of the live block that it lies in.
    #[inline]
    pub fn room(&self, address: usize) -> Option<usize> {
        if let Some(slab) = self.pages.as_ref().and_then(|pages| pages.table.find(address)) {
            let (index, offset) = slab.locate(address)?;
            return slab.live_bytes(index)?.checked_sub(offset).filter(|&room| room > 0);
        }
        let (start, block) = self.direct.find(address)?;
        Some(block.bytes - (address - start))
    }

    /// Whether `bytes` from the address on lie inside one live block.
    pub fn owns(&self, address: usize, bytes: usize) -> bool {
        self.room(address).is_some_and(|room| bytes <= room)
    }
}

//! The memory manager: stream-ordered allocation of one device's memory with a limit, statistics and ownership checks.
//!
//! Every live block is known by address, which is how a foreign or twice-freed pointer becomes an error instead of a
//! crash, and how a tensor's memory space is checked without asking the driver.

use crate::error::{Error, Result, Status};
use crate::executor::Executor;
use crate::stream::{RawHandle, Stream};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, RwLock};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryStatistics {
    /// Bytes in live blocks.
    pub allocated: u64,
    pub peak: u64,
    pub blocks: u64,
    pub allocations: u64,
    pub frees: u64,
    pub failures: u64,
    /// 0: none
    pub limit: u64,
}

pub struct MemoryManager {
    executor: Arc<dyn Executor>,
    /// Address → bytes of each live block.
    blocks: RwLock<BTreeMap<usize, usize>>,
    statistics: Mutex<MemoryStatistics>,
}

impl MemoryManager {
    /// `limit` in bytes bounds what is allocated at a time; 0 for none.
    pub fn new(executor: Arc<dyn Executor>, limit: u64) -> MemoryManager {
        let statistics = Mutex::new(MemoryStatistics { limit, ..MemoryStatistics::default() });
        MemoryManager { executor, blocks: RwLock::new(BTreeMap::new()), statistics }
    }

    pub fn executor(&self) -> &Arc<dyn Executor> {
        &self.executor
    }

    pub fn allocate(&self, bytes: usize, stream: RawHandle) -> Result<*mut c_void> {
        if bytes == 0 {
            return Err(Error::invalid("bytes is 0; at least 1 is needed"));
        }
        self.reserve(bytes)?;
        let pointer = self.executor.allocate(bytes, stream).inspect_err(|_| {
            let mut statistics = self.statistics();
            statistics.allocated -= bytes as u64;
            statistics.failures += 1;
        })?;
        self.blocks.write().unwrap_or_else(|poison| poison.into_inner()).insert(pointer as usize, bytes);
        let mut statistics = self.statistics();
        statistics.blocks += 1;
        statistics.allocations += 1;
        statistics.peak = statistics.peak.max(statistics.allocated);
        log::trace!(target: "nvbackend::memory", "allocated {bytes} bytes at {pointer:p}, {} live", statistics.allocated);
        Ok(pointer)
    }

    /// Counts the bytes before the device is asked, so that threads together never pass the limit.
    fn reserve(&self, bytes: usize) -> Result<()> {
        let mut statistics = self.statistics();
        let (limit, name, advice) = match statistics.limit {
            // What no device of this kind could hold never reaches the driver, which answers odd sizes in odd ways.
            0 => (self.executor.device().total_memory, "device's memory", "free blocks first"),
            limit => (limit, "limit", "free blocks first, or raise memory_limit"),
        };
        let after = statistics.allocated.checked_add(bytes as u64).filter(|&after| after <= limit);
        let Some(after) = after else {
            statistics.failures += 1;
            return Err(Error::new(
                Status::OutOfMemory,
                format!("{bytes} bytes requested with {} of the {name} of {limit} in use", statistics.allocated),
            )
            .with_limit(bytes as u64, limit)
            .with_advice(advice));
        };
        statistics.allocated = after;
        Ok(())
    }

    /// NULL is fine. The block is reused only after the work queued on `stream` so far.
    // A pointer that the map does not hold is refused, not followed.
    #[allow(clippy::not_unsafe_ptr_arg_deref)]
    pub fn free(&self, pointer: *mut c_void, stream: RawHandle) -> Result<()> {
        if pointer.is_null() {
            return Ok(());
        }
        let removed = self.blocks.write().unwrap_or_else(|poison| poison.into_inner()).remove(&(pointer as usize));
        let Some(bytes) = removed else {
            return Err(Error::invalid(format!("{pointer:p} is not a live block of this memory manager"))
                .with_advice("it was freed before, came from elsewhere, or points into a block"));
        };
        // SAFETY: the map held the block, so it came from `allocate` and this is its only free.
        unsafe { self.executor.free(pointer, bytes, stream) };
        let mut statistics = self.statistics();
        statistics.allocated -= bytes as u64;
        statistics.blocks -= 1;
        statistics.frees += 1;
        Ok(())
    }

    /// A block that frees itself, ordered after the work queued on `stream` at creation; owners synchronise before
    /// they drop it if another stream still uses it.
    pub fn allocate_owned(self: &Arc<Self>, bytes: usize, stream: &Stream) -> Result<Allocation> {
        let pointer = self.allocate(bytes, stream.raw())?;
        Ok(Allocation { memory: self.clone(), pointer, bytes })
    }

    /// Whether `bytes` from `pointer` on lie inside one live block.
    pub fn owns(&self, pointer: *const c_void, bytes: usize) -> bool {
        let address = pointer as usize;
        let blocks = self.blocks.read().unwrap_or_else(|poison| poison.into_inner());
        blocks
            .range(..=address)
            .next_back()
            .is_some_and(|(start, length)| address - start < *length && bytes <= start + length - address)
    }

    pub fn get_statistics(&self) -> MemoryStatistics {
        *self.statistics()
    }

    fn statistics(&self) -> std::sync::MutexGuard<'_, MemoryStatistics> {
        self.statistics.lock().unwrap_or_else(|poison| poison.into_inner())
    }
}

impl Drop for MemoryManager {
    fn drop(&mut self) {
        let blocks = std::mem::take(self.blocks.get_mut().unwrap_or_else(|poison| poison.into_inner()));
        if !blocks.is_empty() {
            let bytes: usize = blocks.values().sum();
            log::warn!(target: "nvbackend::memory", "{} blocks of {bytes} bytes were never freed", blocks.len());
        }
        for (address, bytes) in blocks {
            // SAFETY: the map's blocks came from `allocate` and were not freed; nobody else holds the manager.
            unsafe { self.executor.free(address as *mut c_void, bytes, RawHandle::NULL) };
        }
    }
}

/// Memory owned by a library object (a weight, a KV cache).
pub struct Allocation {
    memory: Arc<MemoryManager>,
    pointer: *mut c_void,
    bytes: usize,
}

// SAFETY: the address of device memory; access is ordered by streams, and freeing is synchronised by the manager.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Allocation {
    pub fn pointer(&self) -> *mut c_void {
        self.pointer
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn memory(&self) -> &Arc<MemoryManager> {
        &self.memory
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Err(error) = self.memory.free(self.pointer, RawHandle::NULL) {
            log::error!(target: "nvbackend::memory", "an owned block was lost: {error}");
        }
    }
}

//! The memory manager: stream-ordered allocation of one device's memory, or the host's.
//!
//! Small blocks come from slabs, four classes for each doubling up to 1 MiB; larger ones are runs of 2 MiB units of one
//! reserved range of addresses, halved and joined as buddies, with physical memory mapped behind them as it is needed.
//! A thread allocates from magazines of its own. What it frees is used again on the same stream at once, and leaves
//! the stream in batches, each with one event. `docs/memory.md` tells the whole story.

mod allocate;
pub mod allocator;
mod arena;
mod batch;
mod bitmap;
mod buddy;
mod budget;
mod cache;
mod callbacks;
mod capture;
mod class;
mod core;
mod depot;
mod direct;
mod free;
mod free_memory;
pub mod ladder;
mod large;
pub mod leak;
mod magazines;
mod managed;
pub mod options;
mod order;
mod page_table;
mod pages;
pub mod pool;
mod regions;
mod remote;
mod ring;
mod shortage;
mod shortcut;
pub mod size_class;
mod slab;
mod sleep;
mod snapshot;
pub mod source;
mod spin;
pub mod statistics;
pub(crate) mod sync;
mod threads;
pub mod trace;
#[cfg(nvb_thread_sanitizer)]
mod watched_locks;
mod zeroed;

pub use options::{Decided, MemoryOptions};
pub use pool::Pool;
pub use shortcut::{Blocks, Shortcut};
pub use sleep::{all_awake, expect_awake, sleeps};
pub use statistics::MemoryStatistics;

use self::core::Core;
use crate::device::{observe, Device, ManagedAdvice, RawHandle, StreamObserver};
use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor, MAX_RANK};
pub use core::log_level_changed;
use core::remember;
use size_class::GRANULE;
use source::{DeviceSource, Source};
use std::ffi::c_void;
use std::sync::{Arc, Weak};

pub struct MemoryManager {
    device: Arc<dyn Device>,
    core: Arc<Core>,
}

impl MemoryManager {
    pub fn new(device: Arc<dyn Device>, options: MemoryOptions) -> Result<MemoryManager> {
        let source = DeviceSource::new(device.clone(), options.allocator)?;
        MemoryManager::with_source(device, Arc::new(source), options)
    }

    /// A manager over memory of another source, as tests use it. The device does copies and fills.
    pub fn with_source(
        device: Arc<dyn Device>,
        source: Arc<dyn Source>,
        options: MemoryOptions,
    ) -> Result<MemoryManager> {
        let core = Arc::new(Core::new(source, options)?);
        remember(&core);
        let observer: Weak<dyn StreamObserver> = Arc::downgrade(&(core.clone() as Arc<dyn StreamObserver>));
        observe(&device, observer);
        Ok(MemoryManager { device, core })
    }

    pub fn device(&self) -> &dyn Device {
        &*self.device
    }

    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    /// `bytes` > 0, aligned to 256 bytes. Work queued on `stream` from now on may use the block at once.
    #[inline]
    pub fn allocate(&self, bytes: usize, stream: RawHandle) -> Result<*mut c_void> {
        self.core.allocate(&self.core.main, bytes, GRANULE, stream)
    }

    /// `alignment`: a power of two of at most 2 MiB.
    pub fn allocate_aligned(&self, bytes: usize, alignment: usize, stream: RawHandle) -> Result<*mut c_void> {
        self.core.allocate(&self.core.main, bytes, alignment, stream)
    }

    /// A contiguous tensor with at least one element.
    pub fn allocate_tensor(&self, dtype: DType, shape: &[usize], stream: RawHandle) -> Result<Tensor> {
        let bytes = tensor_bytes(dtype, shape)?;
        let data = self.allocate(bytes, stream)?;
        Ok(Tensor::new(data, dtype, shape))
    }

    /// Memory that host and device both address.
    pub fn allocate_managed(&self, bytes: usize) -> Result<*mut c_void> {
        self.core.allocate_of_kind(bytes, direct::Kind::Managed)
    }

    /// Page-locked host memory near the device.
    pub fn allocate_pinned(&self, bytes: usize) -> Result<*mut c_void> {
        self.core.allocate_of_kind(bytes, direct::Kind::Pinned)
    }

    /// How a range of unified memory will be used. Memory of this manager that is not unified stays as it is.
    pub fn advise(&self, pointer: *mut c_void, bytes: usize, advice: ManagedAdvice) -> Result<()> {
        self.core.advise(pointer, bytes, advice)
    }

    /// Moves a range of unified memory to the device, or to the host, ordered on the stream. As above for other memory.
    pub fn prefetch(&self, pointer: *mut c_void, bytes: usize, to_host: bool, stream: RawHandle) -> Result<()> {
        self.core.prefetch(pointer, bytes, to_host, stream)
    }

    /// NULL is fine. The block is reused only after the work queued on `stream` so far; NULL stands for all streams.
    #[inline]
    pub fn free(&self, pointer: *mut c_void, stream: RawHandle) -> Result<()> {
        self.core.free(&self.core.main, pointer, stream, false)
    }

    /// A block that frees itself, ordered after all work of the device; owners synchronise before they drop it if they
    /// must not wait then. It lies in no pool, even while one captures the stream: its owner may outlive any.
    pub fn allocate_owned(self: &Arc<Self>, bytes: usize, stream: RawHandle) -> Result<Allocation> {
        let pointer = self.core.allocate_outside_captures(bytes, stream)?;
        Ok(Allocation { memory: self.clone(), pointer, bytes })
    }

    /// Bytes from the address to the end of the live block that it lies in.
    #[inline]
    pub fn room(&self, pointer: *const c_void) -> Option<usize> {
        self.core.room(pointer as usize)
    }

    /// Whether `bytes` from `pointer` on lie inside one live block.
    pub fn owns(&self, pointer: *const c_void, bytes: usize) -> bool {
        self.core.owns(pointer as usize, bytes)
    }

    /// Whether `bytes` could be had now; if not, the error that `allocate` would give.
    pub fn check_available(&self, bytes: u64) -> Result<()> {
        self.core.check_available(bytes)
    }

    /// Waits for the device's work and gives back what no live block needs, down to `keep` bytes held. Returns the bytes
    /// given back; none while a capture runs.
    pub fn trim(&self, keep: u64) -> Result<u64> {
        self.core.trim(keep)
    }

    /// See `sleep.rs`.
    pub fn sleep(&self, keep_content: bool) -> Result<u64> {
        self.core.sleep(keep_content)
    }

    pub fn wake(&self) -> Result<u64> {
        self.core.wake()
    }

    /// 0: none. What is held already stays.
    pub fn set_limit(&self, bytes: u64) {
        log::debug!(target: "nvbackend::memory", "the limit is {bytes} from now on, {} held", self.core.budget.held());
        self.core.budget.set_limit(bytes);
    }

    /// `reclaim` is asked for bytes when there are none left, and says how many it freed. Lower priorities come first.
    pub fn add_reclaim(&self, priority: i32, reclaim: Box<callbacks::Reclaim>) -> u64 {
        self.core.callbacks.add(priority, reclaim)
    }

    pub fn remove_reclaim(&self, id: u64) -> Result<()> {
        if self.core.callbacks.remove(id) {
            return Ok(());
        }
        Err(Error::invalid(format!("{id} is no reclaim callback of this memory manager")))
    }

    /// What became of the options: limits in bytes, and whether blocks are pooled at all.
    pub fn decided(&self) -> Decided {
        self.core.decided()
    }

    pub fn get_statistics(&self) -> MemoryStatistics {
        self.core.statistics()
    }

    /// (free, total) bytes of the device, which is asked; the statistics repeat its answer.
    pub fn ask_device(&self) -> Result<(u64, u64)> {
        self.core.budget.ask(&*self.core.source)
    }

    /// Peaks start again at what is in use now.
    pub fn reset_peaks(&self) {
        let core = &self.core;
        // Threads count for the manager and for a pool at once, and the pools' peaks stay.
        core.arenas().for_each(|arena| arena.usage.keep_peak(arena.counters()));
        core.total.reset_peak(core.arenas().flat_map(arena::Arena::counters));
        core.budget.reset_peak();
    }

    /// Live blocks by the place that allocated them, for people.
    pub fn leak_report(&self) -> Result<String> {
        let usage = self.core.usage();
        self.core.tracker.report(self.core.source.nanoseconds(), usage.blocks, usage.allocated)
    }

    /// The whole state and the trace as JSON; see `snapshot.rs`.
    pub fn write_snapshot(&self, out: &mut dyn std::io::Write) -> std::io::Result<()> {
        snapshot::write(&self.core, &self.device.info().name, out)
    }
}

/// Bytes of a contiguous tensor; an error when they overflow or there are none.
pub fn tensor_bytes(dtype: DType, shape: &[usize]) -> Result<usize> {
    if shape.is_empty() || shape.len() > MAX_RANK {
        return Err(Error::invalid(format!("the rank is {}; 1 to {MAX_RANK} is supported", shape.len())));
    }
    let bytes = shape.iter().try_fold(dtype.size(), |bytes, &extent| bytes.checked_mul(extent));
    match bytes.filter(|&bytes| bytes <= isize::MAX as usize) {
        Some(0) => Err(Error::invalid(format!("a tensor of shape {shape:?} has no elements"))),
        Some(bytes) => Ok(bytes),
        None => Err(Error::invalid(format!("the size of a tensor of shape {shape:?} and dtype {dtype} overflows"))),
    }
}

impl Drop for MemoryManager {
    fn drop(&mut self) {
        let usage = self.core.usage();
        if usage.blocks > 0 {
            log::warn!(
                target: "nvbackend::memory",
                "{} blocks of {} bytes were never freed", usage.blocks, usage.allocated
            );
            if self.core.tracker.mode() != options::LeakTracking::Off {
                match self.leak_report() {
                    Ok(report) => log::warn!(target: "nvbackend::memory", "{report}"),
                    Err(error) => log::warn!(target: "nvbackend::memory", "where they came from: {error}"),
                }
            }
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

//! Where memory comes from: address ranges with physical memory behind parts of them, or plain allocations, and the
//! order of streams that decides when a freed block may be used again.
//!
//! An [`ExecutorSource`] speaks to a device through its executor; tests put a device in virtual time in its place.

use super::allocator::EngineAllocator;
use crate::device::DeviceKind;
use crate::error::Result;
use crate::executor::{wait_past_captures, CopyKind, Executor, ManagedAdvice, VirtualMemory};
use crate::stream::RawHandle;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;

/// A device as the memory manager sees it.
pub trait Source: Send + Sync {
    /// (free, total) bytes of the device's memory.
    fn memory_info(&self) -> Result<(u64, u64)>;
    /// `None`: every block is a plain allocation.
    fn virtual_memory(&self) -> Option<&dyn VirtualMemory>;

    /// A plain allocation, 256-byte aligned. `bytes` > 0.
    fn allocate(&self, bytes: usize, stream: RawHandle) -> Result<*mut c_void>;
    /// # Safety
    /// `pointer` came from `allocate` with the same `bytes` and has not been freed.
    unsafe fn free(&self, pointer: *mut c_void, bytes: usize, stream: RawHandle);
    /// Page-locked host memory, 256-byte aligned. `bytes` > 0.
    fn host_allocate(&self, bytes: usize) -> Result<*mut c_void>;
    /// # Safety
    /// `pointer` came from `host_allocate` with the same `bytes`, has not been freed, and no work uses it.
    unsafe fn host_free(&self, pointer: *mut c_void, bytes: usize);
    /// Memory that host and device both address, 256-byte aligned. `bytes` > 0.
    fn managed_allocate(&self, bytes: usize) -> Result<*mut c_void>;
    /// # Safety
    /// `pointer` came from `managed_allocate` with the same `bytes`, has not been freed, and no work uses it.
    unsafe fn managed_free(&self, pointer: *mut c_void, bytes: usize);
    /// # Safety
    /// The range lies inside a block of `managed_allocate`.
    unsafe fn managed_advise(&self, pointer: *mut c_void, bytes: usize, advice: ManagedAdvice) -> Result<()>;
    /// Moves the range to the device, or to the host, ordered on the stream.
    ///
    /// # Safety
    /// The conditions of `managed_advise` hold.
    unsafe fn managed_prefetch(
        &self,
        pointer: *mut c_void,
        bytes: usize,
        to_host: bool,
        stream: RawHandle,
    ) -> Result<()>;
    /// # Safety
    /// The range is valid for `bytes` of the source's memory.
    unsafe fn fill(&self, to: *mut c_void, byte: u8, bytes: usize, stream: RawHandle) -> Result<()>;
    /// Makes every byte of a block 0 that nobody uses any more.
    ///
    /// # Safety
    /// The range lies inside a block of the source, or a mapped range of its addresses.
    unsafe fn zero(&self, to: *mut c_void, bytes: usize, stream: RawHandle) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.fill(to, 0, bytes, stream) }
    }
    /// # Safety
    /// Both ranges are valid for `bytes` in the memory that `kind` says.
    unsafe fn copy(&self, to: *mut c_void, from: *const c_void, bytes: usize, kind: CopyKind) -> Result<()>;
    /// Gives back what the source itself keeps of freed plain allocations.
    fn trim(&self) {}
    /// An error once the device is lost. It calls no driver.
    fn refuse_lost(&self) -> Result<()> {
        Ok(())
    }

    /// Whether work has finished when the call that queued it returns, so that streams and events mean nothing.
    fn is_synchronous(&self) -> bool;
    /// Whether calls on the stream are recorded into a graph just now instead of run.
    fn is_capturing(&self, stream: RawHandle) -> Result<bool>;
    /// Waits for all work of the device.
    fn synchronize(&self) -> Result<()>;
    fn event_create(&self) -> Result<RawHandle>;
    fn event_destroy(&self, event: RawHandle);
    fn event_record(&self, event: RawHandle, stream: RawHandle) -> Result<()>;
    fn event_query(&self, event: RawHandle) -> Result<bool>;
    fn event_synchronize(&self, event: RawHandle) -> Result<()>;
    fn stream_wait_event(&self, stream: RawHandle, event: RawHandle) -> Result<()>;

    /// Time since some fixed point, for traces and ages.
    fn nanoseconds(&self) -> u64;
}

/// The memory of an executor's device.
pub struct ExecutorSource {
    executor: Arc<dyn Executor>,
    virtual_memory: Option<Arc<dyn VirtualMemory>>,
    /// Plain allocations are the engine's. Its memory has no addresses that could be backed piece by piece.
    allocator: Option<EngineAllocator>,
    start: Instant,
}

impl ExecutorSource {
    pub fn new(executor: Arc<dyn Executor>, allocator: Option<EngineAllocator>) -> Result<ExecutorSource> {
        let virtual_memory = if allocator.is_none() { executor.virtual_memory()? } else { None };
        Ok(ExecutorSource { executor, virtual_memory, allocator, start: Instant::now() })
    }

    /// What the engine knows the stream by.
    fn native(&self, stream: RawHandle) -> *mut c_void {
        if self.is_synchronous() {
            std::ptr::null_mut()
        } else {
            stream.0
        }
    }
}

impl Source for ExecutorSource {
    fn memory_info(&self) -> Result<(u64, u64)> {
        self.executor.memory_info()
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.virtual_memory.as_deref()
    }

    fn refuse_lost(&self) -> Result<()> {
        self.executor.refuse_lost()
    }

    fn allocate(&self, bytes: usize, stream: RawHandle) -> Result<*mut c_void> {
        match &self.allocator {
            Some(allocator) => allocator.allocate(bytes, self.native(stream)),
            None => self.executor.allocate(bytes, stream),
        }
    }

    unsafe fn free(&self, pointer: *mut c_void, bytes: usize, stream: RawHandle) {
        let Some(allocator) = &self.allocator else {
            // SAFETY: the caller's contract.
            return unsafe { self.executor.free(pointer, bytes, stream) };
        };
        if stream == RawHandle::NULL && !self.is_synchronous() {
            // No stream stands for all of them. A device that is lost has stopped using memory.
            let _ = wait_past_captures(|| self.synchronize());
        }
        // SAFETY: the caller's contract.
        unsafe { allocator.free(pointer, bytes, self.native(stream)) }
    }

    fn host_allocate(&self, bytes: usize) -> Result<*mut c_void> {
        self.executor.host_allocate(bytes)
    }

    unsafe fn host_free(&self, pointer: *mut c_void, bytes: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.executor.host_free(pointer, bytes) }
    }

    fn managed_allocate(&self, bytes: usize) -> Result<*mut c_void> {
        self.executor.managed_allocate(bytes)
    }

    unsafe fn managed_free(&self, pointer: *mut c_void, bytes: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.executor.managed_free(pointer, bytes) }
    }

    unsafe fn managed_advise(&self, pointer: *mut c_void, bytes: usize, advice: ManagedAdvice) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.executor.managed_advise(pointer, bytes, advice) }
    }

    unsafe fn managed_prefetch(
        &self,
        pointer: *mut c_void,
        bytes: usize,
        to_host: bool,
        stream: RawHandle,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.executor.managed_prefetch(pointer, bytes, to_host, stream) }
    }

    unsafe fn fill(&self, to: *mut c_void, byte: u8, bytes: usize, stream: RawHandle) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.executor.fill(to, byte, bytes, stream) }
    }

    unsafe fn zero(&self, to: *mut c_void, bytes: usize, stream: RawHandle) -> Result<()> {
        match self.allocator {
            None => self.executor.zero(to, bytes, stream),
            // What kind of memory an engine hands out is its own affair.
            Some(_) => self.executor.fill(to, 0, bytes, stream),
        }
    }

    unsafe fn copy(&self, to: *mut c_void, from: *const c_void, bytes: usize, kind: CopyKind) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.executor.copy(to, from, bytes, kind, RawHandle::NULL)? };
        self.executor.stream_synchronize(RawHandle::NULL)
    }

    fn trim(&self) {
        self.executor.trim();
    }

    fn is_synchronous(&self) -> bool {
        self.executor.device().kind == DeviceKind::Cpu
    }

    fn is_capturing(&self, stream: RawHandle) -> Result<bool> {
        self.executor.stream_is_capturing(stream)
    }

    fn synchronize(&self) -> Result<()> {
        self.executor.synchronize()
    }

    fn event_create(&self) -> Result<RawHandle> {
        self.executor.event_create()
    }

    fn event_destroy(&self, event: RawHandle) {
        self.executor.event_destroy(event)
    }

    fn event_record(&self, event: RawHandle, stream: RawHandle) -> Result<()> {
        self.executor.event_record(event, stream)
    }

    fn event_query(&self, event: RawHandle) -> Result<bool> {
        self.executor.event_query(event)
    }

    fn event_synchronize(&self, event: RawHandle) -> Result<()> {
        self.executor.event_synchronize(event)
    }

    fn stream_wait_event(&self, stream: RawHandle, event: RawHandle) -> Result<()> {
        self.executor.stream_wait_event(stream, event)
    }

    fn nanoseconds(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}

//! An engine's own allocator in the place of the device's: what the manager hands out comes from the engine, and is
//! counted, limited, tracked and reclaimed as ever.

use super::size_class::GRANULE;
use super::source::{ExecutorSource, Source};
use crate::error::{Error, Result, Status};
use crate::executor::{CopyKind, ManagedAdvice, VirtualMemory};
use crate::stream::RawHandle;
use std::ffi::c_void;

/// Bytes (not 0), alignment (a power of two), stream (a `cudaStream_t`) and user data; NULL: there are none.
pub type Allocate = unsafe extern "C" fn(usize, usize, *mut c_void, *mut c_void) -> *mut c_void;
/// Pointer, bytes as they were asked for, stream and user data.
pub type Free = unsafe extern "C" fn(*mut c_void, usize, *mut c_void, *mut c_void);

/// Functions of the engine. They may be called from any thread, do not throw, and outlive the manager.
#[derive(Debug, Clone, Copy)]
pub struct EngineAllocator {
    pub allocate: Allocate,
    pub free: Free,
    pub user_data: *mut c_void,
}

// SAFETY: handed back to the engine's functions only, which may be called from any thread.
unsafe impl Send for EngineAllocator {}
// SAFETY: as above.
unsafe impl Sync for EngineAllocator {}

impl PartialEq for EngineAllocator {
    fn eq(&self, other: &EngineAllocator) -> bool {
        let parts = |it: &EngineAllocator| (it.allocate as usize, it.free as usize, it.user_data);
        parts(self) == parts(other)
    }
}

/// A device whose plain allocations are the engine's.
pub struct EngineSource {
    device: ExecutorSource,
    allocator: EngineAllocator,
}

impl EngineSource {
    pub fn new(device: ExecutorSource, allocator: EngineAllocator) -> EngineSource {
        EngineSource { device, allocator }
    }

    /// What the engine knows the stream by.
    fn native(&self, stream: RawHandle) -> *mut c_void {
        if self.device.is_synchronous() {
            std::ptr::null_mut()
        } else {
            stream.0
        }
    }
}

impl Source for EngineSource {
    fn allocate(&self, bytes: usize, stream: RawHandle) -> Result<*mut c_void> {
        let EngineAllocator { allocate, user_data, .. } = self.allocator;
        // SAFETY: the engine's function, with the arguments that it was promised.
        let pointer = unsafe { allocate(bytes, GRANULE, self.native(stream), user_data) };
        if pointer.is_null() {
            let text = format!("the engine's allocator has no {bytes} bytes");
            return Err(Error::new(Status::OutOfMemory, text).with_limit(bytes as u64, 0));
        }
        if !(pointer as usize).is_multiple_of(GRANULE) {
            // SAFETY: allocated just now.
            unsafe { self.free(pointer, bytes, stream) };
            let text = format!("the engine's allocator returned {pointer:p}, which is no multiple of {GRANULE}");
            return Err(Error::new(Status::MemoryAllocation, text));
        }
        Ok(pointer)
    }

    unsafe fn free(&self, pointer: *mut c_void, bytes: usize, stream: RawHandle) {
        if stream == RawHandle::NULL && !self.device.is_synchronous() {
            // No stream stands for all of them. A device that is lost has stopped using memory.
            let _ = self.device.synchronize();
        }
        // SAFETY: the engine's function, with what it returned.
        unsafe { (self.allocator.free)(pointer, bytes, self.native(stream), self.allocator.user_data) }
    }

    /// The engine's memory has no addresses that could be backed piece by piece, so each block is one of its own.
    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        None
    }

    fn memory_info(&self) -> Result<(u64, u64)> {
        self.device.memory_info()
    }

    fn host_allocate(&self, bytes: usize) -> Result<*mut c_void> {
        self.device.host_allocate(bytes)
    }

    unsafe fn host_free(&self, pointer: *mut c_void, bytes: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.device.host_free(pointer, bytes) }
    }

    fn managed_allocate(&self, bytes: usize) -> Result<*mut c_void> {
        self.device.managed_allocate(bytes)
    }

    unsafe fn managed_free(&self, pointer: *mut c_void, bytes: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.device.managed_free(pointer, bytes) }
    }

    unsafe fn managed_advise(&self, pointer: *mut c_void, bytes: usize, advice: ManagedAdvice) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.device.managed_advise(pointer, bytes, advice) }
    }

    unsafe fn managed_prefetch(
        &self,
        pointer: *mut c_void,
        bytes: usize,
        to_host: bool,
        stream: RawHandle,
    ) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.device.managed_prefetch(pointer, bytes, to_host, stream) }
    }

    unsafe fn fill(&self, to: *mut c_void, byte: u8, bytes: usize, stream: RawHandle) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.device.fill(to, byte, bytes, stream) }
    }

    unsafe fn copy(&self, to: *mut c_void, from: *const c_void, bytes: usize, kind: CopyKind) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.device.copy(to, from, bytes, kind) }
    }

    fn is_synchronous(&self) -> bool {
        self.device.is_synchronous()
    }

    fn is_capturing(&self, stream: RawHandle) -> Result<bool> {
        self.device.is_capturing(stream)
    }

    fn synchronize(&self) -> Result<()> {
        self.device.synchronize()
    }

    fn event_create(&self) -> Result<RawHandle> {
        self.device.event_create()
    }

    fn event_destroy(&self, event: RawHandle) {
        self.device.event_destroy(event)
    }

    fn event_record(&self, event: RawHandle, stream: RawHandle) -> Result<()> {
        self.device.event_record(event, stream)
    }

    fn event_query(&self, event: RawHandle) -> Result<bool> {
        self.device.event_query(event)
    }

    fn event_synchronize(&self, event: RawHandle) -> Result<()> {
        self.device.event_synchronize(event)
    }

    fn stream_wait_event(&self, stream: RawHandle, event: RawHandle) -> Result<()> {
        self.device.stream_wait_event(stream, event)
    }

    fn nanoseconds(&self) -> u64 {
        self.device.nanoseconds()
    }
}

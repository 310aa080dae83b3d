//! Where memory comes from: address ranges with physical memory behind parts of them, or plain allocations, and the
//! order of streams that decides when a freed block may be used again.
//!
//! A [`DeviceSource`] is a device of the machine; tests put a device in virtual time in its place.

use super::allocator::EngineAllocator;
use crate::device::{wait_past_captures, CopyKind, Device, DeviceKind, ManagedAdvice, RawHandle, VirtualMemory};
use crate::error::Result;
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

/// The memory of a device of the machine.
pub struct DeviceSource {
    device: Arc<dyn Device>,
    virtual_memory: Option<Arc<dyn VirtualMemory>>,
    /// Plain allocations are the engine's. Its memory has no addresses that could be backed piece by piece.
    allocator: Option<EngineAllocator>,
    start: Instant,
}

impl DeviceSource {
    pub fn new(device: Arc<dyn Device>, allocator: Option<EngineAllocator>) -> Result<DeviceSource> {
        let virtual_memory = if allocator.is_none() { device.virtual_memory()? } else { None };
        Ok(DeviceSource { device, virtual_memory, allocator, start: Instant::now() })
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

/// Methods that the device has by the same name.
macro_rules! by_device {
    () => {};
    (fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?; $($rest:tt)*) => {
        fn $name(&self, $($argument: $type),*) $(-> $result)? {
            self.device.$name($($argument),*)
        }
        by_device! { $($rest)* }
    };
    (unsafe fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?; $($rest:tt)*) => {
        unsafe fn $name(&self, $($argument: $type),*) $(-> $result)? {
            // SAFETY: the caller's contract.
            unsafe { self.device.$name($($argument),*) }
        }
        by_device! { $($rest)* }
    };
}

impl Source for DeviceSource {
    by_device! {
        fn memory_info() -> Result<(u64, u64)>;
        fn refuse_lost() -> Result<()>;
        fn host_allocate(bytes: usize) -> Result<*mut c_void>;
        fn managed_allocate(bytes: usize) -> Result<*mut c_void>;
        fn trim();
        fn synchronize() -> Result<()>;
        fn event_create() -> Result<RawHandle>;
        fn event_destroy(event: RawHandle);
        fn event_record(event: RawHandle, stream: RawHandle) -> Result<()>;
        fn event_query(event: RawHandle) -> Result<bool>;
        fn event_synchronize(event: RawHandle) -> Result<()>;
        fn stream_wait_event(stream: RawHandle, event: RawHandle) -> Result<()>;
        unsafe fn managed_free(pointer: *mut c_void, bytes: usize);
        unsafe fn managed_advise(pointer: *mut c_void, bytes: usize, advice: ManagedAdvice) -> Result<()>;
        unsafe fn managed_prefetch(pointer: *mut c_void, bytes: usize, to_host: bool, stream: RawHandle) -> Result<()>;
        unsafe fn fill(to: *mut c_void, byte: u8, bytes: usize, stream: RawHandle) -> Result<()>;
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.virtual_memory.as_deref()
    }

    fn allocate(&self, bytes: usize, stream: RawHandle) -> Result<*mut c_void> {
        match &self.allocator {
            Some(allocator) => allocator.allocate(bytes, self.native(stream)),
            None => self.device.allocate(bytes, stream),
        }
    }

    unsafe fn free(&self, pointer: *mut c_void, bytes: usize, stream: RawHandle) {
        let Some(allocator) = &self.allocator else {
            // SAFETY: the caller's contract.
            return unsafe { self.device.free(pointer, bytes, stream) };
        };
        if stream == RawHandle::NULL && !self.is_synchronous() {
            // No stream stands for all of them. A device that is lost has stopped using memory.
            let _ = wait_past_captures(|| self.synchronize());
        }
        // SAFETY: the caller's contract.
        unsafe { allocator.free(pointer, bytes, self.native(stream)) }
    }

    unsafe fn host_free(&self, pointer: *mut c_void, bytes: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.device.host_free(pointer, bytes) }
    }

    unsafe fn zero(&self, to: *mut c_void, bytes: usize, stream: RawHandle) -> Result<()> {
        match self.allocator {
            None => self.device.zero(to, bytes, stream),
            // What kind of memory an engine hands out is its own affair.
            Some(_) => self.device.fill(to, 0, bytes, stream),
        }
    }

    unsafe fn copy(&self, to: *mut c_void, from: *const c_void, bytes: usize, kind: CopyKind) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.device.copy(to, from, bytes, kind, RawHandle::NULL)? };
        self.device.stream_synchronize(RawHandle::NULL)
    }

    fn is_synchronous(&self) -> bool {
        self.device.info().kind == DeviceKind::Cpu
    }

    fn is_capturing(&self, stream: RawHandle) -> Result<bool> {
        self.device.stream_is_capturing(stream)
    }

    fn nanoseconds(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}

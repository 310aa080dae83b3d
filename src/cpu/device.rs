//! The machine's memory, and streams and events where work has finished when its call returns.

use super::{machine, memory, virtual_memory, CpuExecutor};

use super::virtual_memory::HostVirtualMemory;
use crate::device::{CopyKind, Device, DeviceInfo, RawHandle, VirtualMemory};
use crate::error::{Error, Result};
use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// When the event was last recorded.
type EventTime = Mutex<Option<Instant>>;

fn event_time(event: RawHandle) -> Result<Instant> {
    // SAFETY: events come from `event_create` and live until `event_destroy`.
    let time = unsafe { &*event.0.cast::<EventTime>() };
    let time = *time.lock().unwrap_or_else(PoisonError::into_inner);
    time.ok_or_else(|| Error::invalid("the event has not been recorded"))
}

impl Device for CpuExecutor {
    fn info(&self) -> &DeviceInfo {
        &self.device
    }

    fn memory_info(&self) -> Result<(u64, u64)> {
        machine::memory()
    }

    fn allocate(&self, bytes: usize, _stream: RawHandle) -> Result<*mut c_void> {
        memory::allocate(bytes)
    }

    unsafe fn free(&self, pointer: *mut c_void, bytes: usize, _stream: RawHandle) {
        memory::free(pointer, bytes)
    }

    unsafe fn copy(
        &self,
        to: *mut c_void,
        from: *const c_void,
        bytes: usize,
        _kind: CopyKind,
        _stream: RawHandle,
    ) -> Result<()> {
        // The ranges may overlap: all memory is one.
        std::ptr::copy(from.cast::<u8>(), to.cast::<u8>(), bytes);
        Ok(())
    }

    unsafe fn fill(&self, to: *mut c_void, byte: u8, bytes: usize, _stream: RawHandle) -> Result<()> {
        std::ptr::write_bytes(to.cast::<u8>(), byte, bytes);
        Ok(())
    }

    unsafe fn zero(&self, to: *mut c_void, bytes: usize, _stream: RawHandle) -> Result<()> {
        virtual_memory::zero(to.cast(), bytes);
        Ok(())
    }

    fn can_access(&self, _pointer: *const c_void) -> Result<bool> {
        Ok(true)
    }

    fn host_allocate(&self, bytes: usize) -> Result<*mut c_void> {
        memory::allocate(bytes)
    }

    unsafe fn host_free(&self, pointer: *mut c_void, bytes: usize) {
        memory::free(pointer, bytes)
    }

    fn virtual_memory(&self) -> Result<Option<Arc<dyn VirtualMemory>>> {
        Ok(Some(Arc::new(HostVirtualMemory::new(|| machine::memory().map(|(available, _)| available)))))
    }

    fn managed_allocate(&self, bytes: usize) -> Result<*mut c_void> {
        memory::allocate(bytes)
    }

    unsafe fn managed_free(&self, pointer: *mut c_void, bytes: usize) {
        memory::free(pointer, bytes)
    }

    fn stream_create(&self, _priority: i32) -> Result<RawHandle> {
        Ok(RawHandle(self.streams.fetch_add(1, Ordering::Relaxed) as *mut c_void))
    }

    fn stream_destroy(&self, _stream: RawHandle) {}

    fn stream_synchronize(&self, _stream: RawHandle) -> Result<()> {
        Ok(())
    }

    fn stream_query(&self, _stream: RawHandle) -> Result<bool> {
        Ok(true)
    }

    fn stream_wait_event(&self, _stream: RawHandle, _event: RawHandle) -> Result<()> {
        Ok(())
    }

    fn event_create(&self) -> Result<RawHandle> {
        Ok(RawHandle(Box::into_raw(Box::<EventTime>::default()).cast()))
    }

    fn event_destroy(&self, event: RawHandle) {
        // SAFETY: the box of `event_create`, which nobody uses any more.
        drop(unsafe { Box::from_raw(event.0.cast::<EventTime>()) });
    }

    fn event_record(&self, event: RawHandle, _stream: RawHandle) -> Result<()> {
        // SAFETY: as in `event_time`.
        let time = unsafe { &*event.0.cast::<EventTime>() };
        *time.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        Ok(())
    }

    fn event_query(&self, _event: RawHandle) -> Result<bool> {
        Ok(true)
    }

    fn event_synchronize(&self, _event: RawHandle) -> Result<()> {
        Ok(())
    }

    fn event_elapsed(&self, start: RawHandle, end: RawHandle) -> Result<f32> {
        let (start, end) = (event_time(start)?, event_time(end)?);
        let milliseconds = |from: Instant, to: Instant| to.duration_since(from).as_secs_f32() * 1e3;
        Ok(if end >= start { milliseconds(start, end) } else { -milliseconds(end, start) })
    }
}

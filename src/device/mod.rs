//! A device: how it is described, and the memory, streams and events that it has.

mod capture;
pub mod features;
mod handle;
mod info;
mod loss;
mod observers;
mod virtual_memory;

use crate::error::{Error, Result};
use std::ffi::c_void;
use std::ops::RangeInclusive;
use std::sync::Arc;

pub use capture::wait_past_captures;
pub use handle::RawHandle;
pub use info::{DeviceInfo, DeviceKind};
#[cfg(feature = "cuda")]
pub use loss::a_device_is_lost;
pub use loss::when_a_device_is_lost;
pub use observers::{observe, observers_of, StreamObserver};
pub use virtual_memory::{VirtualMemory, PAGE_BYTES};

/// A function of the engine's that a stream calls.
pub type HostCallback = unsafe extern "C" fn(user_data: *mut c_void);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyKind {
    HostToDevice,
    DeviceToHost,
    DeviceToDevice,
}

/// Rows of as many bytes each, whose starts lie steps apart.
#[derive(Debug, Clone, Copy)]
pub struct RowsCopy {
    pub to: *mut c_void,
    pub to_step: usize,
    pub from: *const c_void,
    pub from_step: usize,
    pub bytes: usize,
    pub rows: usize,
    pub kind: CopyKind,
}

impl RowsCopy {
    /// One copy after the other.
    ///
    /// # Safety
    /// As of [`Device::copy`], for each row.
    pub unsafe fn copy_each(&self, device: &(impl Device + ?Sized), stream: RawHandle) -> Result<()> {
        (0..self.rows).try_for_each(|row| {
            let to = self.to.wrapping_byte_add(row * self.to_step);
            let from = self.from.wrapping_byte_add(row * self.from_step);
            // SAFETY: the caller's contract.
            unsafe { device.copy(to, from, self.bytes, self.kind, stream) }
        })
    }
}

/// How unified memory will be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ManagedAdvice {
    /// Read by many and written rarely: each processor keeps a copy.
    ReadMostly,
    /// Stays on the device unless it must move.
    PreferDevice,
    PreferHost,
    /// The device keeps a mapping wherever the memory is.
    AccessedByDevice,
    /// Takes all of the above back.
    Nothing,
}

/// Memory, streams and events of a device. Work is queued on the stream and the call returns; an error that shows up later (a
/// sticky CUDA error) is latched and returned by every later call as `DeviceLost`.
pub trait Device: Send + Sync {
    fn info(&self) -> &DeviceInfo;

    /// (free, total) bytes of the device's memory.
    fn memory_info(&self) -> Result<(u64, u64)>;
    /// At least 256-byte aligned memory, usable by work queued on `stream` after this call. `bytes` > 0.
    fn allocate(&self, bytes: usize, stream: RawHandle) -> Result<*mut c_void>;
    /// Gives the memory back once the work queued on `stream` so far has finished.
    ///
    /// # Safety
    /// `pointer` came from `allocate` of this device with the same `bytes` and has not been freed.
    unsafe fn free(&self, pointer: *mut c_void, bytes: usize, stream: RawHandle);
    /// Host memory must stay valid until the stream has passed the copy.
    ///
    /// # Safety
    /// Both ranges are valid for `bytes` in the memory that `kind` says.
    unsafe fn copy(
        &self,
        to: *mut c_void,
        from: *const c_void,
        bytes: usize,
        kind: CopyKind,
        stream: RawHandle,
    ) -> Result<()>;
    /// The same for rows, one after the other where the device has nothing better.
    ///
    /// # Safety
    /// As of `copy`, for each row.
    unsafe fn copy_rows(&self, rows: &RowsCopy, stream: RawHandle) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { rows.copy_each(self, stream) }
    }
    /// # Safety
    /// The range is valid for `bytes` in the device's memory.
    unsafe fn fill(&self, to: *mut c_void, byte: u8, bytes: usize, stream: RawHandle) -> Result<()>;
    /// Makes every byte 0, of memory that this device allocated and nobody uses any more.
    ///
    /// # Safety
    /// The range is valid for `bytes` in the device's memory, and lies in blocks or mapped ranges of this device.
    unsafe fn zero(&self, to: *mut c_void, bytes: usize, stream: RawHandle) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.fill(to, 0, bytes, stream) }
    }
    /// Whether the device can reach this address; `Ok(false)` for, say, plain host memory on CUDA.
    fn can_access(&self, pointer: *const c_void) -> Result<bool>;
    /// Page-locked host memory where the device profits from it. `bytes` > 0.
    fn host_allocate(&self, bytes: usize) -> Result<*mut c_void>;
    /// # Safety
    /// `pointer` came from `host_allocate` of this device with the same `bytes` and has not been freed.
    unsafe fn host_free(&self, pointer: *mut c_void, bytes: usize);

    /// Address ranges for the memory manager; `None`: it allocates every block singly.
    fn virtual_memory(&self) -> Result<Option<Arc<dyn VirtualMemory>>> {
        Ok(None)
    }
    /// Gives back to the driver what `free` kept.
    fn trim(&self) {}
    /// An error once the device is lost. It calls no driver.
    fn refuse_lost(&self) -> Result<()> {
        Ok(())
    }
    /// Waits for all work of the device.
    fn synchronize(&self) -> Result<()> {
        self.stream_synchronize(RawHandle::NULL)
    }
    /// The NUMA node that the device is nearest to, if the machine says.
    fn numa_node(&self) -> Option<u32> {
        None
    }
    /// Unified memory, at least 256-byte aligned. `bytes` > 0.
    fn managed_allocate(&self, _bytes: usize) -> Result<*mut c_void> {
        Err(Error::unsupported("this device has no unified memory"))
    }
    /// # Safety
    /// `pointer` came from `managed_allocate` with the same `bytes`, has not been freed, and no work uses it.
    unsafe fn managed_free(&self, _pointer: *mut c_void, _bytes: usize) {}
    /// # Safety
    /// The range lies inside a block of `managed_allocate`.
    unsafe fn managed_advise(&self, _pointer: *mut c_void, _bytes: usize, _advice: ManagedAdvice) -> Result<()> {
        Ok(())
    }
    /// # Safety
    /// The conditions of `managed_advise` hold.
    unsafe fn managed_prefetch(
        &self,
        _pointer: *mut c_void,
        _bytes: usize,
        _to_host: bool,
        _stream: RawHandle,
    ) -> Result<()> {
        Ok(())
    }

    /// The priorities that streams have, the most urgent first. By default those of today's GPUs, so that an engine meets
    /// the same streams everywhere.
    fn stream_priorities(&self) -> Result<RangeInclusive<i32>> {
        Ok(-5..=0)
    }

    fn stream_create(&self, priority: i32) -> Result<RawHandle>;
    fn stream_destroy(&self, stream: RawHandle);
    /// Gives back what the device keeps for a stream that is not its own, because nobody will name it again.
    fn stream_release(&self, _stream: RawHandle) {}
    fn stream_synchronize(&self, stream: RawHandle) -> Result<()>;
    fn stream_query(&self, stream: RawHandle) -> Result<bool>;
    fn stream_wait_event(&self, stream: RawHandle, event: RawHandle) -> Result<()>;

    /// Whether calls on the stream are being recorded into a graph instead of running.
    fn stream_is_capturing(&self, _stream: RawHandle) -> Result<bool> {
        Ok(false)
    }
    /// Calls `callback(user_data)` once the work queued so far has finished, from a thread of the driver's; at once
    /// where work finishes with its call. The callback must not call the library or CUDA.
    ///
    /// # Safety
    /// `callback` may be called with `user_data` from any thread until it has run.
    unsafe fn stream_callback(&self, _stream: RawHandle, callback: HostCallback, user_data: *mut c_void) -> Result<()> {
        callback(user_data);
        Ok(())
    }

    fn event_create(&self) -> Result<RawHandle>;
    fn event_destroy(&self, event: RawHandle);
    fn event_record(&self, event: RawHandle, stream: RawHandle) -> Result<()>;
    fn event_query(&self, event: RawHandle) -> Result<bool>;
    fn event_synchronize(&self, event: RawHandle) -> Result<()>;
    /// Milliseconds between two recorded events.
    fn event_elapsed(&self, start: RawHandle, end: RawHandle) -> Result<f32>;

    /// Lets work of this device reach the memory of `peer`, in this direction only. Repeating it is fine.
    fn enable_peer_access(&self, peer: &dyn Device) -> Result<()> {
        match (self.info().kind, peer.info().kind) {
            (DeviceKind::Cpu, DeviceKind::Cpu) => Ok(()),
            _ => Err(Error::unsupported(format!(
                "{} cannot reach the memory of {} directly",
                self.info().name,
                peer.info().name
            ))
            .with_advice("copy through host memory")),
        }
    }
    /// The peer's side of `enable_peer_access`: opens this device's memory to CUDA device `ordinal`.
    fn share_memory_with(&self, _ordinal: i32) -> Result<()> {
        Ok(())
    }
}

//! Memory, streams and events of a CUDA device.

use super::CudaExecutor;
use crate::cuda::{managed, memory_pool, numa, pinned, pointer};
use crate::device::{CopyKind, Device, DeviceInfo, HostCallback, ManagedAdvice, RawHandle, RowsCopy, VirtualMemory};
use crate::error::{Error, Result};
use cust::sys::{self, cudaError_enum};
use std::ffi::c_void;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Bytes from one row to the next, at most, as every device's `CU_DEVICE_ATTRIBUTE_MAX_PITCH` has been so far.
const MOST_PITCH: usize = i32::MAX as usize;

impl Device for CudaExecutor {
    fn info(&self) -> &DeviceInfo {
        &self.device
    }

    fn memory_info(&self) -> Result<(u64, u64)> {
        let _guard = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid pointers.
        self.check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, "cuMemGetInfo")?;
        Ok((free as u64, total as u64))
    }

    fn allocate(&self, bytes: usize, stream: RawHandle) -> Result<*mut c_void> {
        let _guard = self.enter()?;
        memory_pool::allocate(self, self.pool.get(&self.context, self.device.ordinal)?, bytes, stream)
    }

    unsafe fn free(&self, pointer: *mut c_void, _bytes: usize, stream: RawHandle) {
        let Some(_guard) = self.context.enter_to_release() else { return };
        if stream == RawHandle::NULL || self.pool.raw().is_none() {
            // NULL stands for all streams, so their work is waited for.
            self.wait_for_all_work();
            if self.context.is_lost() {
                return;
            }
        }
        // SAFETY: the caller's contract.
        let result = unsafe {
            match self.pool.raw() {
                None => sys::cuMemFree_v2(pointer as u64),
                Some(_) => sys::cuMemFreeAsync(pointer as u64, stream.0.cast()),
            }
        };
        self.log_failure(result, "freeing device memory");
    }

    unsafe fn copy(
        &self,
        to: *mut c_void,
        from: *const c_void,
        bytes: usize,
        kind: CopyKind,
        stream: RawHandle,
    ) -> Result<()> {
        let _guard = self.enter()?;
        let stream = stream.0.cast();
        // SAFETY: the caller's contract.
        let result = unsafe {
            match kind {
                CopyKind::HostToDevice => sys::cuMemcpyHtoDAsync_v2(to as u64, from, bytes, stream),
                CopyKind::DeviceToHost => sys::cuMemcpyDtoHAsync_v2(to, from as u64, bytes, stream),
                CopyKind::DeviceToDevice => sys::cuMemcpyDtoDAsync_v2(to as u64, from as u64, bytes, stream),
            }
        };
        self.check(result, "copying memory")
    }

    unsafe fn copy_rows(&self, rows: &RowsCopy, stream: RawHandle) -> Result<()> {
        let RowsCopy { to, to_step, from, from_step, bytes, kind, .. } = *rows;
        if rows.rows == 1 || (to_step == bytes && from_step == bytes) {
            // SAFETY: the caller's contract, and the rows follow one another.
            return unsafe { self.copy(to, from, rows.rows * bytes, kind, stream) };
        }
        if to_step.max(from_step) > MOST_PITCH {
            // SAFETY: the caller's contract.
            return unsafe { rows.copy_each(self, stream) };
        }
        let (host, device) = (sys::CUmemorytype::CU_MEMORYTYPE_HOST, sys::CUmemorytype::CU_MEMORYTYPE_DEVICE);
        // Field by field, because the default has zeros, which no memory type is.
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcArray: std::ptr::null_mut(),
            dstXInBytes: 0,
            dstY: 0,
            dstArray: std::ptr::null_mut(),
            srcMemoryType: if kind == CopyKind::HostToDevice { host } else { device },
            srcHost: from,
            srcDevice: from as u64,
            srcPitch: from_step,
            dstMemoryType: if kind == CopyKind::DeviceToHost { host } else { device },
            dstHost: to,
            dstDevice: to as u64,
            dstPitch: to_step,
            WidthInBytes: bytes,
            Height: rows.rows,
        };
        let _guard = self.enter()?;
        // SAFETY: the caller's contract; the struct is read before the call returns.
        self.check(unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream.0.cast()) }, "copying rows of memory")
    }

    unsafe fn fill(&self, to: *mut c_void, byte: u8, bytes: usize, stream: RawHandle) -> Result<()> {
        let _guard = self.enter()?;
        // SAFETY: the caller's contract.
        self.check(unsafe { sys::cuMemsetD8Async(to as u64, byte, bytes, stream.0.cast()) }, "filling memory")
    }

    fn can_access(&self, pointer: *const c_void) -> Result<bool> {
        let _guard = self.enter()?;
        pointer::can_access(self, &self.peers, pointer)
    }

    fn host_allocate(&self, bytes: usize) -> Result<*mut c_void> {
        let _guard = self.enter()?;
        pinned::allocate(bytes, self.numa_node(), &self.context)
    }

    unsafe fn host_free(&self, pointer: *mut c_void, _bytes: usize) {
        let Some(_guard) = self.context.enter_to_release() else { return };
        // SAFETY: the caller's contract.
        unsafe { pinned::free(pointer, &self.context) };
    }

    fn virtual_memory(&self) -> Result<Option<Arc<dyn VirtualMemory>>> {
        Ok(self.ranges.get(self.device.ordinal)?.map(|memory| memory as Arc<dyn VirtualMemory>))
    }

    fn trim(&self) {
        let Ok(_guard) = self.enter() else { return };
        // A failure leaves memory where it is.
        if let Some(pool) = self.pool.raw() {
            // SAFETY: this executor's pool.
            self.log_failure(unsafe { sys::cuMemPoolTrimTo(pool, 0) }, "trimming the memory pool");
        }
        if !self.context.is_lost() {
            // SAFETY: a listed device.
            self.log_failure(unsafe { sys::cuDeviceGraphMemTrim(self.device.ordinal) }, "trimming memory of graphs");
        }
    }

    fn refuse_lost(&self) -> Result<()> {
        self.context.refuse_lost()
    }

    fn synchronize(&self) -> Result<()> {
        let _guard = self.enter()?;
        self.context.wait_for_all_work()
    }

    fn numa_node(&self) -> Option<u32> {
        *self.numa_node.get_or_init(|| {
            self.context.refuse_lost().ok()?;
            numa::node_of(self.device.ordinal, &self.context)
        })
    }

    fn managed_allocate(&self, bytes: usize) -> Result<*mut c_void> {
        let _guard = self.enter()?;
        managed::allocate(bytes, &self.context)
    }

    unsafe fn managed_free(&self, pointer: *mut c_void, _bytes: usize) {
        let Some(_guard) = self.context.enter_to_release() else { return };
        // SAFETY: the caller's contract.
        self.log_failure(unsafe { sys::cuMemFree_v2(pointer as u64) }, "freeing unified memory");
    }

    unsafe fn managed_advise(&self, pointer: *mut c_void, bytes: usize, advice: ManagedAdvice) -> Result<()> {
        let _guard = self.enter()?;
        managed::advise(pointer, bytes, advice, self.device.ordinal, &self.context)
    }

    unsafe fn managed_prefetch(
        &self,
        pointer: *mut c_void,
        bytes: usize,
        to_host: bool,
        stream: RawHandle,
    ) -> Result<()> {
        let _guard = self.enter()?;
        managed::prefetch(pointer, bytes, to_host, self.device.ordinal, stream, &self.context)
    }

    fn stream_priorities(&self) -> Result<RangeInclusive<i32>> {
        let _guard = self.enter()?;
        let (mut least, mut most) = (0, 0);
        // SAFETY: valid pointers.
        let result = unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut most) };
        self.check(result, "asking for the priorities of streams").map(|()| most.min(least)..=least)
    }

    fn stream_create(&self, priority: i32) -> Result<RawHandle> {
        let _guard = self.enter()?;
        let mut stream = std::ptr::null_mut();
        const NON_BLOCKING: u32 = 1;
        // SAFETY: a valid pointer; the driver clamps the priority.
        let result = unsafe { sys::cuStreamCreateWithPriority(&mut stream, NON_BLOCKING, priority) };
        self.check(result, "creating a stream")?;
        Ok(RawHandle(stream.cast()))
    }

    fn stream_destroy(&self, stream: RawHandle) {
        let Some(_guard) = self.context.enter_to_release() else { return };
        self.stream_release(stream);
        if !self.context.is_lost() {
            // SAFETY: created by `stream_create` and destroyed once; queued work runs to its end.
            self.log_failure(unsafe { sys::cuStreamDestroy_v2(stream.0.cast()) }, "destroying a stream");
        }
    }

    fn stream_release(&self, stream: RawHandle) {
        self.scratch.release(stream, self);
    }

    fn stream_synchronize(&self, stream: RawHandle) -> Result<()> {
        let _guard = self.enter()?;
        // SAFETY: a live stream of this context, or NULL.
        self.check(unsafe { sys::cuStreamSynchronize(stream.0.cast()) }, "waiting for a stream")
    }

    fn stream_query(&self, stream: RawHandle) -> Result<bool> {
        let _guard = self.enter()?;
        // SAFETY: a live stream of this context, or NULL.
        match unsafe { sys::cuStreamQuery(stream.0.cast()) } {
            cudaError_enum::CUDA_ERROR_NOT_READY => Ok(false),
            result => self.check(result, "asking for a stream's progress").map(|()| true),
        }
    }

    fn stream_wait_event(&self, stream: RawHandle, event: RawHandle) -> Result<()> {
        let _guard = self.enter()?;
        // SAFETY: live handles, the event's perhaps of another device, which the driver allows.
        self.check(unsafe { sys::cuStreamWaitEvent(stream.0.cast(), event.0.cast(), 0) }, "making a stream wait")
    }

    fn stream_is_capturing(&self, stream: RawHandle) -> Result<bool> {
        let _guard = self.enter()?;
        let mut status = sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: a valid pointer and a live stream of this context, or NULL.
        let result = unsafe { sys::cuStreamIsCapturing(stream.0.cast(), &mut status) };
        // The legacy default stream does not answer while another stream is captured; it never is itself.
        if result == cudaError_enum::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
            return Ok(false);
        }
        self.check(result, "asking whether a stream is captured")?;
        Ok(status != sys::CUstreamCaptureStatus_enum::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    unsafe fn stream_callback(&self, stream: RawHandle, callback: HostCallback, user_data: *mut c_void) -> Result<()> {
        let _guard = self.enter()?;
        // SAFETY: the caller's contract.
        self.check(unsafe { sys::cuLaunchHostFunc(stream.0.cast(), Some(callback), user_data) }, "queuing a callback")
    }

    fn event_create(&self) -> Result<RawHandle> {
        let _guard = self.enter()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: a valid pointer.
        self.check(unsafe { sys::cuEventCreate(&mut event, 0) }, "creating an event")?;
        Ok(RawHandle(event.cast()))
    }

    fn event_destroy(&self, event: RawHandle) {
        let Some(_guard) = self.context.enter_to_release() else { return };
        // SAFETY: created by `event_create` and destroyed once.
        self.log_failure(unsafe { sys::cuEventDestroy_v2(event.0.cast()) }, "destroying an event");
    }

    fn event_record(&self, event: RawHandle, stream: RawHandle) -> Result<()> {
        let _guard = self.enter()?;
        // SAFETY: live handles of this context.
        self.check(unsafe { sys::cuEventRecord(event.0.cast(), stream.0.cast()) }, "recording an event")
    }

    fn event_query(&self, event: RawHandle) -> Result<bool> {
        let _guard = self.enter()?;
        // SAFETY: a live event of this context.
        match unsafe { sys::cuEventQuery(event.0.cast()) } {
            cudaError_enum::CUDA_ERROR_NOT_READY => Ok(false),
            result => self.check(result, "asking for an event").map(|()| true),
        }
    }

    fn event_synchronize(&self, event: RawHandle) -> Result<()> {
        let _guard = self.enter()?;
        // SAFETY: a live event of this context.
        self.check(unsafe { sys::cuEventSynchronize(event.0.cast()) }, "waiting for an event")
    }

    fn event_elapsed(&self, start: RawHandle, end: RawHandle) -> Result<f32> {
        let _guard = self.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: live events of this context.
        match unsafe { sys::cuEventElapsedTime(&mut milliseconds, start.0.cast(), end.0.cast()) } {
            cudaError_enum::CUDA_ERROR_NOT_READY => {
                Err(Error::invalid("an event has not finished yet: synchronise it first"))
            }
            cudaError_enum::CUDA_ERROR_INVALID_HANDLE => Err(Error::invalid("an event has not been recorded")),
            result => self.check(result, "timing events").map(|()| milliseconds),
        }
    }

    fn enable_peer_access(&self, peer: &dyn Device) -> Result<()> {
        self.peers.enable_access(self, peer)
    }

    fn share_memory_with(&self, ordinal: i32) -> Result<()> {
        let _guard = self.enter()?;
        // What cuMemAlloc gives is open to every peer context; ranges and pools have lists of their own, which are there
        // before any memory.
        if let Some(ranges) = self.ranges.get(self.device.ordinal)? {
            ranges.share_with(ordinal)?;
        }
        self.pool.share_with(ordinal, &self.context)
    }
}

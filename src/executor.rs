//! What a device must be able to do: one method an operation, and the memory, streams and events under them.
//!
//! Descriptors arrive validated. Work is queued on the stream and the call returns; an error that shows up later (a
//! sticky CUDA error) is latched and returned by every later call as `DeviceLost`.

use crate::device::{DeviceInfo, DeviceKind};
use crate::error::{Error, Result};
use crate::operation::Operation;
use crate::ops::dequantize::Dequantize;
use crate::ops::linear::Linear;
use crate::ops::quantize::{Quantize, Quantized};
use crate::registry::choices::{Choice, Choices};
use crate::registry::KernelId;
use crate::stream::RawHandle;
use crate::weight::{Format, WeightLayout};
use std::cell::Cell;
use std::ffi::c_void;
use std::ops::RangeInclusive;
use std::sync::atomic::{fence, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// A function of the engine's that a stream calls.
pub type HostCallback = unsafe extern "C" fn(user_data: *mut c_void);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyKind {
    HostToDevice,
    DeviceToHost,
    DeviceToDevice,
}

/// The granularity of physical memory behind addresses: the smallest page that a GPU maps at its full speed.
pub const PAGE_BYTES: usize = 2 << 20;

/// Address space that is reserved at once and backed with physical memory piece by piece.
pub trait VirtualMemory: Send + Sync {
    /// Reserves `bytes` (a multiple of 2 MiB) at a multiple of 2 MiB, with no memory behind them.
    fn reserve(&self, bytes: usize) -> Result<usize>;
    /// # Safety
    /// The range is one of `reserve`'s, nothing is mapped in it, and it has not been released.
    unsafe fn release(&self, address: usize, bytes: usize);
    /// Puts physical memory behind the range. On failure nothing changed.
    ///
    /// # Safety
    /// The range lies inside a reservation, on 2 MiB boundaries, with nothing mapped.
    unsafe fn map(&self, address: usize, bytes: usize) -> Result<()>;
    /// Gives the physical memory back; the addresses stay reserved. On failure the memory may be gone or not: nobody uses
    /// the range before a later call has succeeded.
    ///
    /// # Safety
    /// The range is that of one `map`, or of an `unmap` that failed, and no work uses the memory.
    unsafe fn unmap(&self, address: usize, bytes: usize) -> Result<()>;
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

pub trait Executor: Send + Sync {
    fn device(&self) -> &DeviceInfo;

    /// (free, total) bytes of the device's memory.
    fn memory_info(&self) -> Result<(u64, u64)>;
    /// At least 256-byte aligned memory, usable by work queued on `stream` after this call. `bytes` > 0.
    fn allocate(&self, bytes: usize, stream: RawHandle) -> Result<*mut c_void>;
    /// Gives the memory back once the work queued on `stream` so far has finished.
    ///
    /// # Safety
    /// `pointer` came from `allocate` of this executor with the same `bytes` and has not been freed.
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
    /// # Safety
    /// The range is valid for `bytes` in the device's memory.
    unsafe fn fill(&self, to: *mut c_void, byte: u8, bytes: usize, stream: RawHandle) -> Result<()>;
    /// Makes every byte 0, of memory that this executor allocated and nobody uses any more.
    ///
    /// # Safety
    /// The range is valid for `bytes` in the device's memory, and lies in blocks or mapped ranges of this executor.
    unsafe fn zero(&self, to: *mut c_void, bytes: usize, stream: RawHandle) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.fill(to, 0, bytes, stream) }
    }
    /// Whether the device can reach this address; `Ok(false)` for, say, plain host memory on CUDA.
    fn can_access(&self, pointer: *const c_void) -> Result<bool>;
    /// How this executor reads Int4 weights.
    fn weight_layout(&self) -> WeightLayout;
    /// Page-locked host memory where the device profits from it. `bytes` > 0.
    fn host_allocate(&self, bytes: usize) -> Result<*mut c_void>;
    /// # Safety
    /// `pointer` came from `host_allocate` of this executor with the same `bytes` and has not been freed.
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
    /// Gives back what the executor keeps for a stream that it does not own, because nobody will name it again.
    fn stream_release(&self, _stream: RawHandle) {}
    /// Bytes of workspace with which the operation runs as it would be chosen now; it runs with no less if a workspace is
    /// set for its stream. Of the descriptor's addresses their alignment counts alone.
    fn workspace_bytes(&self, _op: &Operation) -> Result<usize> {
        Ok(0)
    }
    /// From now on the operations on `stream` take their workspace from these bytes and allocate none; NULL: as before. An
    /// executor whose operations need no workspace ignores it.
    ///
    /// # Safety
    /// `data` is NULL, or memory that the device reaches, 256-byte aligned, which nobody else uses until it is replaced or
    /// the stream released, and what is queued until then has run. One thread at a time queues work on the stream.
    unsafe fn stream_set_workspace(&self, _stream: RawHandle, _data: *mut c_void, _bytes: usize) -> Result<()> {
        Ok(())
    }
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

    /// Lets work of this executor reach the memory of `peer`, in this direction only. Repeating it is fine.
    fn enable_peer_access(&self, peer: &dyn Executor) -> Result<()> {
        match (self.device().kind, peer.device().kind) {
            (DeviceKind::Cpu, DeviceKind::Cpu) => Ok(()),
            _ => Err(Error::unsupported(format!(
                "{} cannot reach the memory of {} directly",
                self.device().name,
                peer.device().name
            ))
            .with_advice("copy through host memory")),
        }
    }
    /// The peer's side of `enable_peer_access`: opens this executor's memory to CUDA device `ordinal`.
    fn share_memory_with(&self, _ordinal: i32) -> Result<()> {
        Ok(())
    }

    /// Queues the operation on the stream.
    fn run(&self, op: &Operation, stream: RawHandle) -> Result<()>;

    /// What was chosen among the kernels that this executor has for products.
    fn choices(&self) -> &Choices;
    /// The kernels that can do the product, of the registry, each of a vendor library's algorithms by its rank. The memory
    /// behind the descriptor is not touched.
    fn linear_candidates(&self, op: &Linear) -> Vec<Choice>;
    /// Why a kernel that is none of the candidates, though the product lies within its limits, cannot do it: which of the
    /// device, the options and the product's own shape ("device: …") is in the way.
    fn linear_obstacle(&self, op: &Linear, kernel: KernelId) -> String;
    /// Further algorithms of a vendor library for the product, beyond those that it names itself: without `fastest` some of
    /// every kind, else those that differ little from the first of these, which ran. Some may be candidates as well.
    fn linear_variations(&self, _op: &Linear, _fastest: &[Choice]) -> Vec<Choice> {
        Vec::new()
    }
    /// What a product takes where nothing was chosen; `None` for an empty product. The memory is not touched.
    fn linear_default(&self, op: &Linear) -> Option<Choice>;
    /// The product by this choice: what it came to, with an algorithm's rank as what the library knows it by; `None`, and nothing
    /// queued that changes the output, where it cannot do the product.
    fn linear_with(&self, op: &Linear, choice: &Choice, stream: RawHandle) -> Result<Option<Choice>>;
    /// The product by the plainest means that the executor has, which other kernels are held against. Slow.
    fn linear_reference(&self, op: &Linear, stream: RawHandle) -> Result<()>;

    /// `false`: the executor has no kernel, and the weight's host side dequantises.
    fn dequantize(&self, _op: &Dequantize, _stream: RawHandle) -> Result<bool> {
        Ok(false)
    }
    /// Whether `quantize` makes this format of as many parts; otherwise the weight's host side does.
    fn can_quantize(&self, _format: &Format, _parts: usize) -> bool {
        false
    }
    /// Waits for the stream.
    fn quantize(&self, _op: &Quantize, _stream: RawHandle) -> Result<Quantized> {
        Err(Error::unsupported("this executor quantises on the host"))
    }
}

static ON_LOSS: OnceLock<fn()> = OnceLock::new();

/// Has `act` called whenever a device has been lost, in the thread whose driver call failed, whatever locks it holds: `act`
/// takes none. The first `act` of a process is the one that is called.
pub fn when_a_device_is_lost(act: fn()) {
    ON_LOSS.get_or_init(|| act);
    // Who asks `refuse_lost` after this and is not refused did all before it in time for `act`: of this fence and the other
    // one, one comes first.
    fence(Ordering::SeqCst);
}

/// For the executor whose `refuse_lost` has begun to refuse.
#[cfg(feature = "cuda")]
pub fn a_device_is_lost() {
    fence(Ordering::SeqCst);
    if let Some(act) = ON_LOSS.get() {
        act();
    }
}

/// Waits by `wait` for the whole device before memory goes that its work may use. While any thread captures a stream CUDA
/// refuses that, and invalidates the capture; that thread then ends it, so what was refused is tried again, for a second at
/// most: the capture may be the caller's own. Who gave up is not made to wait again for the next block, but for a second.
pub fn wait_past_captures(wait: impl Fn() -> Result<()>) -> Result<()> {
    const STREAM_CAPTURE_UNSUPPORTED: i32 = 900;
    const PATIENCE: Duration = Duration::from_secs(1);
    thread_local! {
        static GAVE_UP: Cell<Option<Instant>> = const { Cell::new(None) };
    }
    let start = Instant::now();
    let patient = GAVE_UP.get().is_none_or(|then| then.elapsed() > PATIENCE);
    loop {
        match wait() {
            Err(error) if error.cuda_code == STREAM_CAPTURE_UNSUPPORTED => {
                if !patient {
                    return Err(error);
                }
                if start.elapsed() > PATIENCE {
                    GAVE_UP.set(Some(Instant::now()));
                    return Err(error);
                }
                std::thread::sleep(Duration::from_micros(100));
            }
            waited => return waited,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_blocks_wait_for_a_capture_together() {
        let tries = Cell::new(0);
        let refuse = || {
            tries.set(tries.get() + 1);
            Err(crate::error::Error::new(crate::error::Status::Device, "captured").with_cuda_code(900))
        };
        (0..1000).for_each(|_| assert!(wait_past_captures(refuse).is_err()));
        assert!(tries.get() > 1000, "the first was tried again");
        let before = tries.get();
        assert!(wait_past_captures(refuse).is_err());
        assert_eq!(tries.get(), before + 1);
        assert!(wait_past_captures(|| Ok(())).is_ok());
    }
}

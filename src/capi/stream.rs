//! Streams: queues of work on a device.

use super::event::{nvb_event, EVENTS};
use super::prelude::*;
use crate::device::{DeviceKind, RawHandle};
use crate::stream::Stream;
use std::time::Duration;

/// Work queued on one stream runs in order; different streams are ordered by events. On the CPU every call has
/// finished when it returns, so programs written for streams run unchanged.
///
/// Threads: one at a time may queue work on a stream.
pub struct nvb_stream {
    _private: [u8; 0],
}

pub(super) static STREAMS: Table<Stream> = Table::new("stream", 3);

pub(super) fn insert(stream: Stream, out: *mut *mut nvb_stream) -> Result<()> {
    let handle = STREAMS.insert(Arc::new(stream))?;
    // SAFETY: checked for NULL by the callers, valid by the header's contract.
    unsafe { write_out("out", out, handle) }
}

/// Creates a stream. `priority`: 0 is normal, negative more urgent; clamped to what the device offers.
#[no_mangle]
pub unsafe extern "C" fn nvb_stream_create(
    backend: *const nvb_backend,
    priority: i32,
    stream: *mut *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_stream_create, {
        let object = BACKENDS.get(backend)?;
        expect_out("stream", stream)?;
        insert(Stream::new(object.backend.executor(), priority)?, stream)
    })
}

/// Makes a handle for a `cudaStream_t` (`CUstream`) of the caller, who keeps it alive until the handle is destroyed.
/// It must belong to the primary context of the backend's device. NULL is CUDA's legacy default stream. On the CPU the
/// value is ignored. Several handles may name one stream: what was freed on it and its workspace go on until the last of
/// them is destroyed.
#[no_mangle]
pub unsafe extern "C" fn nvb_stream_wrap(
    backend: *const nvb_backend,
    cuda_stream: *mut c_void,
    stream: *mut *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_stream_wrap, {
        let object = BACKENDS.get(backend)?;
        expect_out("stream", stream)?;
        insert(object.backend.wrap_stream(RawHandle(cuda_stream)), stream)
    })
}

/// Destroys the handle; NULL is fine. Work already queued runs to its end; a wrapped stream itself is left alone.
#[no_mangle]
pub unsafe extern "C" fn nvb_stream_destroy(stream: *mut nvb_stream) -> nvb_status {
    guard!(nvb_stream_destroy, { STREAMS.remove(stream) })
}

/// Waits until all work queued so far has finished, and returns the first error that any of it met. For the default
/// stream of a backend, which has no handle, there is `nvb_backend_synchronize`.
#[no_mangle]
pub unsafe extern "C" fn nvb_stream_synchronize(stream: *mut nvb_stream) -> nvb_status {
    guard!(nvb_stream_synchronize, {
        let found = STREAMS.get_optional(stream.cast_const())?;
        let no_handle = || {
            Error::invalid("stream is NULL").with_advice("nvb_backend_synchronize waits for a backend's default stream")
        };
        found.ok_or_else(no_handle)?.synchronize()
    })
}

/// Waits as `nvb_stream_synchronize` does, for at most `timeout_ns` nanoseconds: writes 1 to `finished` if the work has
/// finished, 0 if the time was over first. The work goes on either way.
#[no_mangle]
pub unsafe extern "C" fn nvb_stream_synchronize_for(
    stream: *mut nvb_stream,
    timeout_ns: u64,
    finished: *mut u32,
) -> nvb_status {
    guard!(nvb_stream_synchronize_for, {
        let stream = STREAMS.get(stream)?;
        expect_out("finished", finished)?;
        let value = stream.synchronize_for(Duration::from_nanos(timeout_ns))?;
        // SAFETY: NULL is checked; otherwise valid by the header's contract.
        unsafe { write_out("finished", finished, value.into()) }
    })
}

/// Receives the `user_data` that it was queued with. It must not call the library or CUDA.
pub type nvb_stream_callback = Option<unsafe extern "C" fn(user_data: *mut c_void)>;

/// Calls `callback(user_data)` once the work queued on `stream` so far has finished, from a thread of the driver's; on
/// the CPU before this call returns. Work queued later waits for it. After a sticky CUDA error it is not called. May be
/// captured; it is then called with every replay.
#[no_mangle]
pub unsafe extern "C" fn nvb_stream_add_callback(
    stream: *mut nvb_stream,
    callback: nvb_stream_callback,
    user_data: *mut c_void,
) -> nvb_status {
    guard!(nvb_stream_add_callback, {
        let stream = STREAMS.get(stream)?;
        let callback = callback.ok_or_else(|| Error::invalid("callback is NULL"))?;
        // SAFETY: the callback may be called with its data from any thread, by the header's contract.
        unsafe { stream.add_callback(callback, user_data) }
    })
}

/// Writes 1 to `finished` if all work queued so far has finished, else 0. Does not wait.
#[no_mangle]
pub unsafe extern "C" fn nvb_stream_query(stream: *mut nvb_stream, finished: *mut u32) -> nvb_status {
    guard!(nvb_stream_query, {
        let stream = STREAMS.get(stream)?;
        expect_out("finished", finished)?;
        let value = stream.query()?;
        // SAFETY: NULL is checked; otherwise valid by the header's contract.
        unsafe { write_out("finished", finished, value.into()) }
    })
}

/// Work queued on `stream` from now on waits for what `event` last recorded. Both may be of different backends, also on
/// different GPUs. Does not block the host. May be captured.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (one is a GPU's, the other the CPU's).
#[no_mangle]
pub unsafe extern "C" fn nvb_stream_wait_event(stream: *mut nvb_stream, event: *mut nvb_event) -> nvb_status {
    guard!(nvb_stream_wait_event, {
        let stream = STREAMS.get(stream)?;
        let object = EVENTS.get(event)?;
        let event = &object.event;
        if stream.executor().info().kind != event.executor().info().kind {
            return Err(Error::invalid("one of stream and event is a GPU's, the other the CPU's"));
        }
        stream.wait(event)
    })
}

/// Writes the `CUstream` (also a `cudaStream_t`) behind the handle, NULL on the CPU. It stays the library's.
#[no_mangle]
pub unsafe extern "C" fn nvb_stream_get_native(stream: *mut nvb_stream, cuda_stream: *mut *mut c_void) -> nvb_status {
    guard!(nvb_stream_get_native, {
        let stream = STREAMS.get(stream)?;
        // The CPU's streams have names that are no addresses.
        let native = match stream.executor().info().kind {
            DeviceKind::Cuda => stream.raw().0,
            DeviceKind::Cpu | DeviceKind::Tpu => std::ptr::null_mut(),
        };
        // SAFETY: NULL is checked; otherwise valid by the header's contract.
        unsafe { write_out("cuda_stream", cuda_stream, native) }
    })
}

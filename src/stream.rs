//! Streams and events: an executor's raw handle with the executor that gives it meaning.
//!
//! On the CPU every call has finished when it returns, so a stream is a name only and an event a point in time.

use crate::error::Result;
use crate::executor::Executor;
use std::ffi::c_void;
use std::sync::Arc;

/// A `CUstream` or `CUevent` on CUDA; the CPU executor gives its own meaning to the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawHandle(pub *mut c_void);

// SAFETY: a token that only its executor interprets; CUDA's handles may be used from any thread.
unsafe impl Send for RawHandle {}
// SAFETY: as above.
unsafe impl Sync for RawHandle {}

impl RawHandle {
    pub const NULL: RawHandle = RawHandle(std::ptr::null_mut());
}

pub struct Stream {
    executor: Arc<dyn Executor>,
    raw: RawHandle,
    owned: bool,
}

impl Stream {
    /// `priority`: 0 is normal, negative is more urgent; clamped to what the device offers.
    pub fn new(executor: &Arc<dyn Executor>, priority: i32) -> Result<Stream> {
        let raw = executor.stream_create(priority)?;
        Ok(Stream { executor: executor.clone(), raw, owned: true })
    }

    /// A stream that the caller owns and outlives this object.
    pub fn wrap(executor: &Arc<dyn Executor>, raw: RawHandle) -> Stream {
        Stream { executor: executor.clone(), raw, owned: false }
    }

    pub fn raw(&self) -> RawHandle {
        self.raw
    }

    pub fn executor(&self) -> &Arc<dyn Executor> {
        &self.executor
    }

    pub fn synchronize(&self) -> Result<()> {
        self.executor.stream_synchronize(self.raw)
    }

    /// Whether all work queued so far has finished.
    pub fn query(&self) -> Result<bool> {
        self.executor.stream_query(self.raw)
    }

    pub fn wait(&self, event: &Event) -> Result<()> {
        self.executor.stream_wait_event(self.raw, event.raw)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned {
            self.executor.stream_destroy(self.raw);
        } else {
            self.executor.stream_release(self.raw);
        }
    }
}

pub struct Event {
    executor: Arc<dyn Executor>,
    raw: RawHandle,
}

impl Event {
    pub fn new(executor: &Arc<dyn Executor>) -> Result<Event> {
        Ok(Event { executor: executor.clone(), raw: executor.event_create()? })
    }

    pub fn executor(&self) -> &Arc<dyn Executor> {
        &self.executor
    }

    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.executor.event_record(self.raw, stream.raw)
    }

    pub fn query(&self) -> Result<bool> {
        self.executor.event_query(self.raw)
    }

    pub fn synchronize(&self) -> Result<()> {
        self.executor.event_synchronize(self.raw)
    }

    pub fn milliseconds_since(&self, start: &Event) -> Result<f32> {
        self.executor.event_elapsed(start.raw, self.raw)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.executor.event_destroy(self.raw);
    }
}

//! Streams and events: an executor's raw handle with the executor that gives it meaning.
//!
//! On the CPU every call has finished when it returns, so a stream is a name only and an event a point in time.

mod event;
pub mod manager;
mod wait;

use crate::error::Result;
use crate::executor::{Executor, HostCallback};
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

pub use event::Event;

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
    owner: Owner,
}

/// Whose the raw stream is.
enum Owner {
    This,
    Caller,
    /// A stream manager's; the lease tells it when this object is gone.
    Manager {
        _lease: manager::Lease,
    },
}

impl Stream {
    /// `priority`: 0 is normal, negative is more urgent; clamped to what the device offers.
    pub fn new(executor: &Arc<dyn Executor>, priority: i32) -> Result<Stream> {
        let raw = executor.stream_create(priority)?;
        Ok(Stream { executor: executor.clone(), raw, owner: Owner::This })
    }

    /// A stream that the caller owns and outlives this object.
    pub fn wrap(executor: &Arc<dyn Executor>, raw: RawHandle) -> Stream {
        Stream { executor: executor.clone(), raw, owner: Owner::Caller }
    }

    fn leased(stream: &Stream, lease: manager::Lease) -> Stream {
        Stream { executor: stream.executor.clone(), raw: stream.raw, owner: Owner::Manager { _lease: lease } }
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

    /// As `synchronize`, for at most `timeout`; false if the time is over. The work itself goes on.
    pub fn synchronize_for(&self, timeout: Duration) -> Result<bool> {
        wait::until(|| self.query(), timeout)
    }

    /// Calls back once the work queued so far has finished; at once on the CPU.
    ///
    /// # Safety
    /// `callback` may be called with `user_data` from any thread until it has run.
    pub unsafe fn add_callback(&self, callback: HostCallback, user_data: *mut c_void) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.executor.stream_callback(self.raw, callback, user_data) }
    }

    /// Whether all work queued so far has finished.
    pub fn query(&self) -> Result<bool> {
        self.executor.stream_query(self.raw)
    }

    pub fn wait(&self, event: &Event) -> Result<()> {
        self.executor.stream_wait_event(self.raw, event.raw())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        match self.owner {
            Owner::This => self.executor.stream_destroy(self.raw),
            Owner::Caller => self.executor.stream_release(self.raw),
            Owner::Manager { .. } => {}
        }
    }
}

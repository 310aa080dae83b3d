//! Streams and events: an executor's raw handle with the executor that gives it meaning.
//!
//! On the CPU every call has finished when it returns, so a stream is a name only and an event a point in time.

mod event;
mod handles;
pub mod manager;
mod sink;
mod wait;

use crate::device::{observers_of, Device, HostCallback, RawHandle};
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::memory::expect_awake;
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::Arc;
use std::time::Duration;

pub use event::Event;
use sink::SinkSlot;
pub use sink::{Owner, Purpose, Sink};

fn announce_end(device: &dyn Device, stream: RawHandle) {
    observers_of(device).iter().for_each(|observer| observer.stream_ends(stream));
}

/// Refuses memory that is no live block of the managers', or that the device cannot reach.
fn expect_live(device: &dyn Device, data: *const c_void, bytes: usize) -> Result<()> {
    let what = format!("the workspace of {bytes} bytes at {data:p}");
    match observers_of(device).iter().find_map(|observer| observer.owns_live(data as usize, bytes)) {
        Some(true) => Ok(()),
        Some(false) => Err(Error::invalid(format!("{what} does not lie inside a live block of memory"))),
        None if device.can_access(data)? => Ok(()),
        None => Err(Error::invalid(format!("{what} is not memory of {}", device.info().name))
            .with_advice("allocate it with nvb_memory_allocate")),
    }
}

/// Of a workspace that the caller sets: what allocations have.
pub const WORKSPACE_ALIGNMENT: usize = 256;

pub struct Stream {
    executor: Arc<dyn Executor>,
    raw: RawHandle,
    owner: Ownership,
    /// What this object has set; NULL: nothing.
    workspace: AtomicPtr<c_void>,
    sink: SinkSlot,
}

/// Whose the raw stream is.
enum Ownership {
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
        handles::enter(executor, raw);
        Ok(Stream::of(executor, raw, Ownership::This))
    }

    /// A stream that the caller owns and outlives this object. Others may wrap it as well.
    pub fn wrap(executor: &Arc<dyn Executor>, raw: RawHandle) -> Stream {
        handles::enter(executor, raw);
        Stream::of(executor, raw, Ownership::Caller)
    }

    fn leased(stream: &Stream, lease: manager::Lease) -> Stream {
        Stream::of(&stream.executor, stream.raw, Ownership::Manager { _lease: lease })
    }

    fn of(executor: &Arc<dyn Executor>, raw: RawHandle, owner: Ownership) -> Stream {
        Stream { executor: executor.clone(), raw, owner, workspace: AtomicPtr::default(), sink: SinkSlot::default() }
    }

    pub fn raw(&self) -> RawHandle {
        self.raw
    }

    /// Refuses work while the workspace that was set sleeps.
    #[inline]
    pub fn expect_awake(&self) -> Result<()> {
        expect_awake(self.workspace.load(Ordering::Relaxed)).map_err(|error| error.context("the stream's workspace"))
    }

    pub fn executor(&self) -> &Arc<dyn Executor> {
        &self.executor
    }

    pub fn synchronize(&self) -> Result<()> {
        self.expect_unrecorded("a wait of the host")?;
        self.executor.stream_synchronize(self.raw)
    }

    /// As `synchronize`, for at most `timeout`; false if the time is over. The work itself goes on.
    pub fn synchronize_for(&self, timeout: Duration) -> Result<bool> {
        self.expect_unrecorded("a wait of the host")?;
        wait::until(|| self.query(), timeout)
    }

    /// Calls back once the work queued so far has finished; at once on the CPU.
    ///
    /// # Safety
    /// `callback` may be called with `user_data` from any thread until it has run.
    pub unsafe fn add_callback(&self, callback: HostCallback, user_data: *mut c_void) -> Result<()> {
        self.expect_unrecorded("a callback")?;
        // SAFETY: the caller's contract.
        unsafe { self.executor.stream_callback(self.raw, callback, user_data) }
    }

    /// Whether all work queued so far has finished.
    pub fn query(&self) -> Result<bool> {
        self.executor.stream_query(self.raw)
    }

    /// From now on the stream's operations take their workspace from these bytes and allocate none; NULL: as before.
    ///
    /// # Safety
    /// As for `Executor::stream_set_workspace`.
    pub unsafe fn set_workspace(&self, data: *mut c_void, bytes: usize) -> Result<()> {
        self.expect_unrecorded("a change of the stream's workspace")?;
        if let Ownership::Manager { .. } = self.owner {
            return Err(Error::invalid("a stream of a stream manager may have several users: it takes no workspace"));
        }
        if data.is_null() && bytes != 0 {
            return Err(Error::invalid(format!("data is NULL and bytes {bytes}; memory, or NULL and 0, is needed")));
        }
        if !data.is_null() && bytes == 0 {
            return Err(Error::invalid("bytes is 0; NULL takes the workspace away"));
        }
        if !(data as usize).is_multiple_of(WORKSPACE_ALIGNMENT) {
            return Err(Error::invalid(format!(
                "the workspace is at {data:p}; a multiple of {WORKSPACE_ALIGNMENT} is needed"
            )));
        }
        if self.executor.stream_is_capturing(self.raw)? {
            return Err(Error::invalid("the stream is being captured; set its workspace before"));
        }
        if !data.is_null() {
            expect_awake(data)?;
            expect_live(&*self.executor, data, bytes)?;
        }
        // SAFETY: the caller's contract.
        unsafe { self.executor.stream_set_workspace(self.raw, data, bytes)? };
        self.workspace.store(data, Ordering::Relaxed);
        Ok(())
    }

    pub fn wait(&self, event: &Event) -> Result<()> {
        self.expect_unrecorded("a wait for an event")?;
        self.executor.stream_wait_event(self.raw, event.raw())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Stream { executor, raw, owner, .. } = self;
        match owner {
            Ownership::This => handles::leave(executor, *raw, true, || {
                announce_end(&**executor, *raw);
                executor.stream_destroy(*raw);
            }),
            Ownership::Caller => handles::leave(executor, *raw, false, || {
                announce_end(&**executor, *raw);
                executor.stream_release(*raw);
            }),
            // The manager's own object ends it.
            Ownership::Manager { .. } => {}
        }
    }
}

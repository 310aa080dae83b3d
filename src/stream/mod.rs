//! Streams and events: an executor's raw handle with the executor that gives it meaning.
//!
//! On the CPU every call has finished when it returns, so a stream is a name only and an event a point in time.

mod event;
pub mod manager;
mod wait;

use crate::error::Result;
use crate::executor::{Executor, HostCallback};
use std::ffi::c_void;
use std::sync::{Arc, PoisonError, RwLock, Weak};
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

/// Is told when a stream's handle is about to lose its meaning, while work may still be queued on it.
pub trait StreamObserver: Send + Sync {
    fn stream_ends(&self, stream: RawHandle);
}

/// Observers with the executor whose streams they care about.
type Observers = Vec<(Weak<dyn Executor>, Weak<dyn StreamObserver>)>;

static OBSERVERS: RwLock<Observers> = RwLock::new(Vec::new());

/// `observer` hears of every `Stream` of the executor that is dropped from now on, for as long as it lives.
pub fn observe(executor: &Arc<dyn Executor>, observer: Weak<dyn StreamObserver>) {
    let mut observers = OBSERVERS.write().unwrap_or_else(PoisonError::into_inner);
    observers.retain(|(_, observer)| observer.strong_count() > 0);
    observers.push((Arc::downgrade(executor), observer));
}

fn announce_end(executor: &Arc<dyn Executor>, stream: RawHandle) {
    let mut concerned = Vec::new();
    for (other, observer) in OBSERVERS.read().unwrap_or_else(PoisonError::into_inner).iter() {
        if std::ptr::addr_eq(other.as_ptr(), Arc::as_ptr(executor)) {
            concerned.extend(observer.upgrade());
        }
    }
    // Outside the lock: an observer may be the last to hold a manager, whose end takes time.
    concerned.iter().for_each(|observer| observer.stream_ends(stream));
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
        announce_end(&self.executor, self.raw);
        match self.owner {
            Owner::This => self.executor.stream_destroy(self.raw),
            Owner::Caller => self.executor.stream_release(self.raw),
            Owner::Manager { .. } => {}
        }
    }
}

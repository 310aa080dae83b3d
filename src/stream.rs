//! Streams and events: an executor's raw handle with the executor that gives it meaning.
//!
//! On the CPU every call has finished when it returns, so a stream is a name only and an event a point in time.

use crate::error::Result;
use crate::executor::Executor;
use std::ffi::c_void;
use std::sync::{Arc, PoisonError, RwLock, Weak};

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
        announce_end(&self.executor, self.raw);
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

//! Where the operations of a stream go: to the device, or to a sink that takes them in its place, which an explanation and a
//! recorded graph are.

use super::Stream;
use crate::error::{Error, Result};
use crate::operation::Operation;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Takes checked operations, in the order in which they are called.
pub trait Sink: Send + Sync {
    fn take(&self, op: &Operation) -> Result<()>;
}

#[derive(Default)]
pub(super) struct SinkSlot {
    /// Whether there is one, for operations that run: they look at no lock.
    is_set: AtomicBool,
    sink: Mutex<Option<Arc<dyn Sink>>>,
}

impl SinkSlot {
    fn lock(&self) -> MutexGuard<'_, Option<Arc<dyn Sink>>> {
        self.sink.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stream {
    /// What takes the stream's operations; `None`: they run.
    #[inline]
    pub fn sink(&self) -> Option<Arc<dyn Sink>> {
        if !self.sink.is_set.load(Ordering::Relaxed) {
            return None;
        }
        self.sink.lock().clone()
    }

    /// From now on `sink` takes the stream's operations, which do not run.
    pub fn begin_sink(&self, sink: Arc<dyn Sink>) -> Result<()> {
        let mut slot = self.sink.lock();
        if slot.is_some() {
            return Err(Error::invalid("the stream's operations are taken already: end that first"));
        }
        *slot = Some(sink);
        self.sink.is_set.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The stream's operations run again.
    pub fn end_sink(&self) {
        self.sink.is_set.store(false, Ordering::Relaxed);
        self.sink.lock().take();
    }
}

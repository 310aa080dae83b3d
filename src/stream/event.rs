//! Events: points in a stream's work, for ordering streams and for timing.

use super::{wait, RawHandle, Stream};
use crate::error::Result;
use crate::executor::Executor;
use std::sync::Arc;
use std::time::Duration;

pub struct Event {
    executor: Arc<dyn Executor>,
    raw: RawHandle,
}

impl Event {
    pub fn new(executor: &Arc<dyn Executor>) -> Result<Event> {
        Ok(Event { executor: executor.clone(), raw: executor.event_create()? })
    }

    pub fn raw(&self) -> RawHandle {
        self.raw
    }

    pub fn executor(&self) -> &Arc<dyn Executor> {
        &self.executor
    }

    pub fn record(&self, stream: &Stream) -> Result<()> {
        stream.expect_unrecorded("an event")?;
        self.executor.event_record(self.raw, stream.raw())
    }

    pub fn query(&self) -> Result<bool> {
        self.executor.event_query(self.raw)
    }

    pub fn synchronize(&self) -> Result<()> {
        self.executor.event_synchronize(self.raw)
    }

    /// Waits as `synchronize` does, for at most `timeout`; false if the time is over.
    pub fn synchronize_for(&self, timeout: Duration) -> Result<bool> {
        wait::until(|| self.query(), timeout)
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

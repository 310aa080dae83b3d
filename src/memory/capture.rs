//! Streams whose calls are being recorded into a graph. What they allocate comes from an arena that the graph owns and
//! stays there until the graph goes, because every replay uses the same addresses. While any capture runs, no event is
//! asked about and no memory is unmapped: the driver would refuse, or break the capture.

use super::arena::Arena;
use super::sync::{Mutex, MutexGuard};
use crate::device::RawHandle;
use crate::error::{Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

#[derive(Default)]
pub struct Captures {
    /// Shared with the events, which the driver is not asked about while there are any.
    count: Arc<AtomicUsize>,
    streams: Mutex<Vec<(usize, usize)>>,
}

impl Captures {
    fn lock(&self) -> MutexGuard<'_, Vec<(usize, usize)>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn count(&self) -> Arc<AtomicUsize> {
        self.count.clone()
    }

    #[inline]
    pub fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    /// The arena of the capture that the stream is in.
    pub fn arena(&self, stream: RawHandle) -> Option<*const Arena> {
        if !self.any() {
            return None;
        }
        let found = self.lock().iter().find(|(raw, _)| *raw == stream.0 as usize).map(|(_, arena)| *arena);
        found.map(|arena| arena as *const Arena)
    }

    pub fn begin(&self, stream: RawHandle, arena: &Arena) -> Result<()> {
        let mut streams = self.lock();
        if streams.iter().any(|(raw, _)| *raw == stream.0 as usize) {
            return Err(Error::invalid("the stream's allocations are being captured already"));
        }
        streams.push((stream.0 as usize, arena as *const Arena as usize));
        self.count.store(streams.len(), Ordering::Release);
        Ok(())
    }

    pub fn end(&self, stream: RawHandle) -> Result<()> {
        let mut streams = self.lock();
        let before = streams.len();
        streams.retain(|(raw, _)| *raw != stream.0 as usize);
        self.count.store(streams.len(), Ordering::Release);
        if streams.len() == before {
            return Err(Error::invalid("the stream's allocations are not being captured"));
        }
        Ok(())
    }

    /// The arena's captures end with it.
    pub fn end_all(&self, arena: &Arena) {
        let mut streams = self.lock();
        streams.retain(|(_, other)| *other != arena as *const Arena as usize);
        self.count.store(streams.len(), Ordering::Release);
    }
}

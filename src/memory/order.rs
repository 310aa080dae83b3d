//! When a freed block may be used again: the streams that blocks were freed on, and the events that end their use.

use super::source::Source;
use super::sync::Mutex;
use crate::error::{Result, Status};
use crate::stream::RawHandle;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, PoisonError};

/// Events are kept for reuse: making one costs more than recording it.
pub struct Events {
    source: Arc<dyn Source>,
    idle: Mutex<Vec<RawHandle>>,
}

/// One recorded event. Whatever was freed on its stream before may be used once it has passed.
pub struct Event {
    raw: RawHandle,
    passed: AtomicBool,
    events: Arc<Events>,
}

impl Events {
    pub fn new(source: Arc<dyn Source>) -> Arc<Events> {
        Arc::new(Events { source, idle: Mutex::new(Vec::new()) })
    }

    pub fn record(self: &Arc<Self>, stream: RawHandle) -> Result<Arc<Event>> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let raw = idle.map_or_else(|| self.source.event_create(), Ok)?;
        let event = Arc::new(Event { raw, passed: AtomicBool::new(false), events: self.clone() });
        self.source.event_record(raw, stream)?;
        Ok(event)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        for raw in self.idle.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            self.source.event_destroy(raw);
        }
    }
}

impl Event {
    /// Does not wait. On a lost device nothing runs any more, so every event has passed.
    pub fn has_passed(&self) -> bool {
        if self.passed.load(Ordering::Acquire) {
            return true;
        }
        let passed = match self.events.source.event_query(self.raw) {
            Ok(passed) => passed,
            Err(error) => error.status == Status::DeviceLost,
        };
        if passed {
            self.passed.store(true, Ordering::Release);
        }
        passed
    }

    pub fn wait(&self) -> Result<()> {
        if !self.passed.load(Ordering::Acquire) {
            match self.events.source.event_synchronize(self.raw) {
                Err(error) if error.status != Status::DeviceLost => return Err(error),
                _ => self.passed.store(true, Ordering::Release),
            }
        }
        Ok(())
    }

    pub fn make_wait(&self, stream: RawHandle) -> Result<()> {
        self.events.source.stream_wait_event(stream, self.raw)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.events.idle.lock().unwrap_or_else(PoisonError::into_inner).push(self.raw);
    }
}

/// A stream that blocks are freed on. The record outlives the stream: its handle may come to mean another one.
pub struct StreamRecord {
    /// Never used for another stream of the manager.
    pub label: u32,
    pub raw: RawHandle,
    /// Recorded when the stream's object went away; `None` when that failed and all work was waited for instead.
    end: OnceLock<Option<Arc<Event>>>,
}

/// Label of blocks that anybody may use at once.
pub const ANYBODY: u32 = 0;
/// Label of blocks that were freed without a stream: all of the device's work comes first.
pub const ALL_WORK: u32 = u32::MAX;

/// What must have happened before blocks are used on another stream.
#[derive(Clone)]
pub enum Order {
    Anybody,
    /// The stream's work up to the event; without one, all that it has been given so far.
    Stream(Arc<StreamRecord>, Option<Arc<Event>>),
    AllWork,
}

impl Order {
    pub fn label(&self) -> u32 {
        match self {
            Order::Anybody => ANYBODY,
            Order::Stream(record, _) => record.label,
            Order::AllWork => ALL_WORK,
        }
    }

    /// What is to be waited for. An event that nobody recorded before is recorded now.
    pub fn wait_for(&mut self, events: &Arc<Events>) -> Result<WaitFor> {
        let (record, event) = match self {
            Order::Anybody => return Ok(WaitFor::Nothing),
            Order::AllWork => return Ok(WaitFor::AllWork),
            Order::Stream(record, event) => (record, event),
        };
        if event.is_none() {
            *event = match record.end.get() {
                Some(None) => return Ok(WaitFor::Nothing),
                Some(end) => end.clone(),
                None => Some(events.record(record.raw)?),
            };
        }
        Ok(event.clone().map_or(WaitFor::Nothing, WaitFor::Event))
    }

    /// Whether everybody may use what is ordered so, by now. Does not wait.
    pub fn has_passed(&mut self, events: &Arc<Events>) -> bool {
        match self.wait_for(events) {
            Ok(WaitFor::Nothing) => true,
            Ok(WaitFor::Event(event)) => event.has_passed(),
            Ok(WaitFor::AllWork) => false,
            Err(error) => error.status == Status::DeviceLost,
        }
    }
}

pub enum WaitFor {
    Nothing,
    Event(Arc<Event>),
    AllWork,
}

/// The streams in use, by handle.
#[derive(Default)]
pub struct Streams {
    records: Mutex<HashMap<usize, Arc<StreamRecord>, BuildHasherDefault<AddressHasher>>>,
    labels: AtomicU32,
}

/// Addresses differ enough in their middle bits for one multiplication (by 2^64 over the golden ratio).
#[derive(Default)]
pub struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_usize(byte.into()));
    }

    fn write_usize(&mut self, value: usize) {
        self.0 = (self.0 ^ value as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl Streams {
    fn with<R>(&self, raw: RawHandle, body: impl FnOnce(&Arc<StreamRecord>) -> R) -> R {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        let record = || {
            let label = 1 + self.labels.fetch_add(1, Ordering::Relaxed) % (u32::MAX - 1);
            Arc::new(StreamRecord { label, raw, end: OnceLock::new() })
        };
        body(records.entry(raw.0 as usize).or_insert_with(record))
    }

    pub fn get(&self, raw: RawHandle) -> Arc<StreamRecord> {
        self.with(raw, Arc::clone)
    }

    pub fn label(&self, raw: RawHandle) -> u32 {
        self.with(raw, |record| record.label)
    }

    /// Forgets the handle; `None` if no block was ever freed on it.
    pub fn retire(&self, raw: RawHandle) -> Option<Arc<StreamRecord>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner).remove(&(raw.0 as usize))
    }
}

impl StreamRecord {
    pub fn end_with(&self, event: Option<Arc<Event>>) {
        let _ = self.end.set(event);
    }
}

//! When a freed block may be used again: the streams that blocks were freed on, and the events that end their use.

use super::source::Source;
use super::sync::{Mutex, MutexGuard};
use crate::device::RawHandle;
use crate::error::{Result, Status};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError};

/// Events are kept for reuse: making one costs more than recording it.
pub struct Events {
    source: Arc<dyn Source>,
    /// How many captures run.
    captures: Arc<AtomicUsize>,
    idle: Mutex<Vec<RawHandle>>,
}

/// One recorded event. Whatever was freed on its stream before may be used once it has passed.
pub struct Event {
    raw: RawHandle,
    passed: AtomicBool,
    events: Arc<Events>,
}

impl Events {
    pub fn new(source: Arc<dyn Source>, captures: Arc<AtomicUsize>) -> Arc<Events> {
        Arc::new(Events { source, captures, idle: Mutex::new(Vec::new()) })
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
    /// Does not wait. On a lost device nothing runs any more, so every event has passed. While a capture runs,
    /// an event counts as passed only where that is known already, because a question to the driver would break the capture.
    pub fn has_passed(&self) -> bool {
        if self.passed.load(Ordering::Acquire) {
            return true;
        }
        if self.events.captures.load(Ordering::Acquire) > 0 {
            return false;
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
    raw: RawHandle,
    /// Set with `latest` locked, as `raw` is used.
    end: OnceLock<End>,
    /// Batches that left their threads so far; each has its count for a number.
    batches: AtomicU64,
    latest: Mutex<Latest>,
}

/// What covers all of a stream's work once the stream is gone.
#[derive(Clone)]
pub enum End {
    /// Recorded behind its last work.
    Event(Arc<Event>),
    /// That could not be recorded, but all of the device's work was waited for.
    Passed,
    /// Nor could that.
    AllWork,
}

/// The event that was recorded last for batches, and the number of the last batch that it covers.
#[derive(Default)]
struct Latest {
    number: u64,
    event: Option<Arc<Event>>,
}

impl StreamRecord {
    fn new(label: u32, raw: RawHandle) -> StreamRecord {
        let (batches, latest) = (AtomicU64::new(0), Mutex::default());
        StreamRecord { label, raw, end: OnceLock::new(), batches, latest }
    }

    fn number_batch(&self) -> u64 {
        // Release: who reads the count and records an event does so after the work that came before the frees.
        1 + self.batches.fetch_add(1, Ordering::AcqRel)
    }

    fn latest(&self) -> MutexGuard<'_, Latest> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What `ask` says of the stream, or how it ended. The stream's handle is good for as long as `ask`
    /// takes, whichever thread calls: the end waits for it.
    fn ask<R>(&self, ask: impl FnOnce(&mut Latest) -> R) -> std::result::Result<R, End> {
        // ThreadSanitizer does not see what orders std's cell with its reader; with the lock held it does.
        #[cfg(not(nvb_thread_sanitizer))]
        if let Some(end) = self.end.get() {
            return Err(end.clone());
        }
        let mut latest = self.latest();
        match self.end.get() {
            Some(end) => Err(end.clone()),
            None => Ok(ask(&mut latest)),
        }
    }

    /// Whether a capture of the stream is under way.
    pub fn is_capturing(&self, source: &dyn Source) -> bool {
        self.ask(|_| source.is_capturing(self.raw).unwrap_or(true)).unwrap_or(false)
    }

    /// The stream's handle is no longer used from here on. `last` records its last event.
    pub fn end(&self, last: impl FnOnce() -> End) {
        let _latest = self.latest();
        let _ = self.end.set(last());
    }

    /// An event that covers what `until` names, of a stream that lives.
    fn cover(&self, until: &Until, latest: &mut Latest, events: &Arc<Events>) -> Result<Arc<Event>> {
        let Until::Batch(number) = *until else { return events.record(self.raw) };
        match &latest.event {
            Some(event) if latest.number >= number => Ok(event.clone()),
            _ => {
                let covered = self.batches.load(Ordering::Acquire);
                let event = events.record(self.raw)?;
                *latest = Latest { number: covered, event: Some(event.clone()) };
                Ok(event)
            }
        }
    }
}

/// Label of blocks that anybody may use at once.
pub const ANYBODY: u32 = 0;
/// Label of blocks that were freed without a stream: all of the device's work comes first.
pub const ALL_WORK: u32 = u32::MAX;

/// Batches of a stream for which one event is recorded unasked: an event takes 1 to 1.5 µs on an H200, and holds up every
/// other thread in the driver. Batches mostly go back to their own stream, which waits for nothing.
const BATCHES_OF_AN_EVENT: u64 = 32;

/// What must have happened before blocks are used on another stream.
#[derive(Clone)]
pub enum Order {
    Anybody,
    /// The label stands beside the record, which whoever frees and whoever allocates on the stream take from each other.
    Stream {
        label: u32,
        record: Arc<StreamRecord>,
        until: Until,
    },
    AllWork,
}

/// Which part of a stream's work blocks wait for.
#[derive(Clone)]
pub enum Until {
    /// All that it has been given when somebody asks.
    Asked,
    /// What it had been given when it passed on the batch of this number.
    Batch(u64),
    Event(Arc<Event>),
}

impl Order {
    /// The order of blocks that are freed on the stream from now on.
    pub fn of(record: Arc<StreamRecord>) -> Order {
        Order::Stream { label: record.label, record, until: Until::Asked }
    }

    pub fn label(&self) -> u32 {
        match self {
            Order::Anybody => ANYBODY,
            Order::Stream { label, .. } => *label,
            Order::AllWork => ALL_WORK,
        }
    }

    /// Whether no work will ever ask for blocks of this order again as its own.
    pub fn has_no_taker(&self) -> bool {
        matches!(self, Order::Stream { record, .. } if record.end.get().is_some())
    }

    /// A batch leaves its thread, and is numbered unless it has been. `true`: enough have left for an event.
    pub fn pass_on(&mut self) -> bool {
        match self {
            Order::Stream { record, until: until @ Until::Asked, .. } => {
                let number = record.number_batch();
                *until = Until::Batch(number);
                number.is_multiple_of(BATCHES_OF_AN_EVENT)
            }
            _ => false,
        }
    }

    /// What is to be waited for. An event that nobody recorded before is recorded now.
    pub fn wait_for(&mut self, events: &Arc<Events>) -> Result<WaitFor> {
        let (record, until) = match self {
            Order::Anybody => return Ok(WaitFor::Nothing),
            Order::AllWork => return Ok(WaitFor::AllWork),
            Order::Stream { record, until, .. } => (record, until),
        };
        if let Until::Event(event) = until {
            return Ok(WaitFor::Event(event.clone()));
        }
        let event = match record.ask(|latest| record.cover(until, latest, events)) {
            Ok(event) => event?,
            Err(End::Event(event)) => event,
            Err(End::Passed) => return Ok(WaitFor::Nothing),
            Err(End::AllWork) => return Ok(WaitFor::AllWork),
        };
        *until = Until::Event(event.clone());
        Ok(WaitFor::Event(event))
    }

    /// Whether everybody may use what is ordered so, as far as an event that is there already tells.
    pub fn is_known_to_have_passed(&self) -> bool {
        match self {
            Order::Anybody => true,
            Order::AllWork => false,
            Order::Stream { until: Until::Event(event), .. } => event.has_passed(),
            Order::Stream { until: Until::Asked, .. } => false,
            Order::Stream { record, until: Until::Batch(number), .. } => {
                let latest = record.latest();
                let event = latest.event.clone().filter(|_| latest.number >= *number);
                drop(latest);
                event.is_some_and(|event| event.has_passed())
            }
        }
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
    /// A tree, whose nodes are small: a table that grows by doubling would one day ask for more than there is. One of a
    /// few streams is a single node, searched as fast as a table.
    records: Mutex<BTreeMap<usize, Arc<StreamRecord>>>,
    labels: AtomicU32,
}

impl Streams {
    pub fn find(&self, raw: RawHandle) -> Option<Arc<StreamRecord>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner).get(&(raw.0 as usize)).cloned()
    }

    /// Makes a record, unless there is one.
    pub fn add(&self, raw: RawHandle) {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        records.entry(raw.0 as usize).or_insert_with(|| {
            let label = 1 + self.labels.fetch_add(1, Ordering::Relaxed) % (u32::MAX - 1);
            Arc::new(StreamRecord::new(label, raw))
        });
    }

    /// Forgets the handle; `None` if no block was ever freed on it.
    pub fn retire(&self, raw: RawHandle) -> Option<Arc<StreamRecord>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner).remove(&(raw.0 as usize))
    }
}

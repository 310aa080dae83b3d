//! What measures a candidate: the device's events, or the host's clock. Tests have one that reads times from a script.

use crate::error::Result;
use crate::memory::Allocation;
use crate::registry::choices::Choice;
use crate::stream::{Event, Stream};
use std::time::Instant;

pub trait Timer {
    /// Seconds of one launch: `launches` of them are queued with `launch(0)`, `launch(1)` … and waited for, on a GPU behind
    /// as many that are not timed.
    fn time(
        &mut self,
        choice: &Choice,
        stream: &Stream,
        launches: usize,
        launch: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<f64>;
}

/// The time between two events of the stream, which on a GPU leaves out what the host does meanwhile.
pub struct EventTimer {
    start: Event,
    end: Event,
    /// Filled before the first event, so that the launches are all queued before the first of them runs; `None` where calls
    /// have finished when they return.
    lead: Option<Allocation>,
}

/// Fills before the launches: some ten microseconds each.
const LEAD_FILLS: usize = 4;

impl EventTimer {
    pub fn new(stream: &Stream, lead: Option<Allocation>) -> Result<EventTimer> {
        Ok(EventTimer { start: Event::new(stream.executor())?, end: Event::new(stream.executor())?, lead })
    }
}

impl Timer for EventTimer {
    fn time(
        &mut self,
        _choice: &Choice,
        stream: &Stream,
        launches: usize,
        launch: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<f64> {
        if let Some(lead) = &self.lead {
            for _ in 0..LEAD_FILLS {
                // SAFETY: the block has these bytes, and nothing reads them.
                unsafe { stream.executor().fill(lead.pointer(), 0, lead.bytes(), stream.raw())? };
            }
            // What is timed runs in front of it, too: large products draw so much power that the clock falls, and how
            // far depends on the kernel. On an H200 two algorithms a tenth apart in a long run were level in batches
            // after a pause.
            (0..launches).try_for_each(&mut *launch)?;
        }
        self.start.record(stream)?;
        (0..launches).try_for_each(&mut *launch)?;
        self.end.record(stream)?;
        self.end.synchronize()?;
        Ok(f64::from(self.end.milliseconds_since(&self.start)?) * 1e-3 / launches as f64)
    }
}

/// The host's clock around the launches and the wait for them.
pub struct HostTimer;

impl Timer for HostTimer {
    fn time(
        &mut self,
        _choice: &Choice,
        stream: &Stream,
        launches: usize,
        launch: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<f64> {
        stream.synchronize()?;
        let start = Instant::now();
        (0..launches).try_for_each(&mut *launch)?;
        stream.synchronize()?;
        Ok(start.elapsed().as_secs_f64() / launches as f64)
    }
}

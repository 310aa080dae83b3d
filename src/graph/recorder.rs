//! The sink of a recording.

use crate::allocation::push;
use crate::device::CopyKind;
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::operation::Operation;
use crate::stream::{Owner, Purpose, Sink};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub type Taken = Vec<(Operation, Option<Owner>)>;

pub struct Recorder {
    executor: Arc<dyn Executor>,
    /// `None` once the recording has ended.
    taken: Mutex<Option<Taken>>,
}

impl Recorder {
    pub fn new(executor: Arc<dyn Executor>) -> Recorder {
        Recorder { executor, taken: Mutex::new(Some(Vec::new())) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Taken>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was recorded. From now on operations of threads that found the sink before are refused.
    pub fn finish(&self) -> Taken {
        self.lock().take().unwrap_or_default()
    }

    /// Refuses what would not run as a part of a replay.
    fn expect_replayable(&self, op: &Operation) -> Result<()> {
        let Operation::MemoryCopy(copy) = op else { return Ok(()) };
        let host = match copy.kind {
            CopyKind::HostToDevice => copy.source,
            CopyKind::DeviceToHost => copy.destination.cast_const(),
            CopyKind::DeviceToDevice => return Ok(()),
        };
        match self.executor.can_access(host)? {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "the graph cannot hold a copy of pageable host memory ({host:p}), for which the host may have to wait"
            ))
            .with_advice("use page-locked memory (nvb_host_allocate, nvb_memory_allocate_pinned)")),
        }
    }
}

impl Sink for Recorder {
    fn purpose(&self) -> Purpose {
        Purpose::Recording
    }

    fn take(&self, op: Operation, owner: Option<Owner>) -> Result<()> {
        self.expect_replayable(&op)?;
        match &mut *self.lock() {
            Some(taken) => push(taken, (op, owner), "a graph's operations"),
            None => Err(Error::invalid("the recording has ended")),
        }
    }
}

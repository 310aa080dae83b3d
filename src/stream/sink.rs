//! Where the operations of a stream go: to the device, or to a sink that takes them in its place, which an explanation and a
//! recorded graph are.

use super::Stream;
use crate::error::{Error, Result};
use crate::operation::Operation;
use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Keeps alive the weight or the cache whose memory an operation names.
pub type Owner = Arc<dyn Any + Send + Sync>;

/// What becomes of the operations that a sink takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Explanation,
    Recording,
}

impl fmt::Display for Purpose {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Purpose::Explanation => "explained",
            Purpose::Recording => "recorded into a graph",
        })
    }
}

/// Takes checked operations, in the order in which they are called.
pub trait Sink: Send + Sync {
    fn purpose(&self) -> Purpose;
    /// `owner` is that of the operation's weight or cache, for whoever keeps the operation.
    fn take(&self, op: Operation, owner: Option<Owner>) -> Result<()>;
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
        if let Some(other) = &*slot {
            return Err(Error::invalid(format!(
                "the stream's operations are {} already: end that first",
                other.purpose()
            )));
        }
        *slot = Some(sink);
        self.sink.is_set.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The stream's operations run again, if nothing took them or `is_meant` knows what did.
    pub fn end_sink(&self, is_meant: impl FnOnce(&Arc<dyn Sink>) -> bool) -> Result<()> {
        let mut slot = self.sink.lock();
        if let Some(other) = slot.as_ref().filter(|sink| !is_meant(sink)) {
            return Err(Error::invalid(format!(
                "the stream's operations are {} by another call: end that one",
                other.purpose()
            )));
        }
        self.sink.is_set.store(false, Ordering::Relaxed);
        slot.take();
        Ok(())
    }

    /// Refuses a change on the host that goes with work on the device, while that work does not run.
    pub fn expect_no_sink(&self, change: &str) -> Result<()> {
        let Some(sink) = self.sink() else { return Ok(()) };
        Err(Error::invalid(format!("the stream's operations are {}; {change} on others alone", sink.purpose())))
    }

    /// Refuses what a graph cannot hold, while the stream is recorded into one.
    #[inline]
    pub fn expect_unrecorded(&self, what: &str) -> Result<()> {
        match self.sink() {
            Some(sink) if sink.purpose() == Purpose::Recording => Err(Error::invalid(format!(
                "the stream's operations are recorded into a graph, which cannot hold {what}"
            ))
            .with_advice("do it before nvb_graph_begin, after nvb_graph_end, or on another stream")),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuExecutor;
    use crate::executor::Executor;
    use crate::stream::Event;

    struct Nothing(Purpose);

    impl Sink for Nothing {
        fn purpose(&self) -> Purpose {
            self.0
        }

        fn take(&self, _op: Operation, _owner: Option<Owner>) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_sink_is_ended_by_whoever_began_it() {
        let executor: Arc<dyn Executor> = Arc::new(CpuExecutor::new(1).unwrap());
        let stream = Stream::new(&executor, 0).unwrap();
        let ours: Arc<dyn Sink> = Arc::new(Nothing(Purpose::Recording));
        stream.begin_sink(ours.clone()).unwrap();
        let error = stream.begin_sink(Arc::new(Nothing(Purpose::Explanation))).unwrap_err();
        assert!(error.message.contains("recorded into a graph already"), "{error}");
        assert!(stream.end_sink(|sink| sink.purpose() == Purpose::Explanation).is_err() && stream.sink().is_some());
        stream.end_sink(|sink| Arc::ptr_eq(sink, &ours)).unwrap();
        assert!(stream.sink().is_none());
        stream.end_sink(|_| false).unwrap();
    }

    #[test]
    fn a_recorded_stream_refuses_what_a_graph_cannot_hold() {
        let executor: Arc<dyn Executor> = Arc::new(CpuExecutor::new(1).unwrap());
        let (stream, event) = (Stream::new(&executor, 0).unwrap(), Event::new(&executor).unwrap());
        stream.begin_sink(Arc::new(Nothing(Purpose::Explanation))).unwrap();
        assert!(stream.synchronize().is_ok() && event.record(&stream).is_ok() && stream.expect_no_sink("it").is_err());
        stream.end_sink(|_| true).unwrap();
        stream.begin_sink(Arc::new(Nothing(Purpose::Recording))).unwrap();
        for refused in [stream.synchronize(), event.record(&stream), stream.wait(&event), stream.expect_no_sink("it")] {
            assert!(refused.unwrap_err().message.contains("recorded into a graph"));
        }
    }
}

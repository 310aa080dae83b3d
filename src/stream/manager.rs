//! A device's streams, shared out: whoever needs one gets the least loaded of the wanted priority.
//!
//! Load is first the number of users a stream has, then whether work is queued on it, then how long ago it was given
//! out. A stream is made when all of its priority are in use and the limit allows one more, so an engine with two
//! users at a time never has more than two.

use super::Stream;
use crate::error::{Error, Result, Status};
use crate::executor::Executor;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The most hardware queues that CUDA offers a process (CUDA C++ Programming Guide, CUDA_DEVICE_MAX_CONNECTIONS).
pub const MAX_STREAMS: usize = 32;

pub struct StreamManager {
    executor: Arc<dyn Executor>,
    /// Streams of one priority at most.
    limit: usize,
    /// What the device distinguishes: other priorities are the nearest of these.
    priorities: RangeInclusive<i32>,
    slots: Mutex<Slots>,
}

#[derive(Default)]
struct Slots {
    slots: Vec<Arc<Slot>>,
    /// Streams given out so far: the clock behind `given`.
    given: usize,
}

struct Slot {
    stream: Stream,
    priority: i32,
    users: AtomicUsize,
    /// When it was last given out.
    given: AtomicUsize,
}

/// Keeps a slot's stream alive for one user and counts that user.
pub struct Lease(Arc<Slot>);

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::AcqRel);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StreamStatistics {
    pub streams: usize,
    pub users: usize,
    /// Streams with unfinished work.
    pub busy: usize,
}

impl StreamManager {
    /// `limit`: streams of one priority at most, 1 to [`MAX_STREAMS`]; 0: 4.
    pub fn new(executor: &Arc<dyn Executor>, limit: usize) -> Result<StreamManager> {
        if limit > MAX_STREAMS {
            return Err(Error::invalid(format!("{limit} streams of a priority; at most {MAX_STREAMS} are supported"))
                .with_limit(limit as u64, MAX_STREAMS as u64));
        }
        let limit = if limit == 0 { 4 } else { limit };
        let priorities = executor.stream_priorities()?;
        Ok(StreamManager { executor: executor.clone(), limit, priorities, slots: Mutex::default() })
    }

    /// The least loaded stream of this priority (0 normal, negative more urgent; clamped to what the device offers). It
    /// goes back when the returned object is dropped; several users may share one, whose work then runs in the order in
    /// which it was queued.
    pub fn acquire(&self, priority: i32) -> Result<Stream> {
        let priority = priority.clamp(*self.priorities.start(), *self.priorities.end());
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let mut best: Option<((usize, bool, usize), Arc<Slot>)> = None;
        let mut count = 0;
        for slot in slots.slots.iter().filter(|slot| slot.priority == priority) {
            count += 1;
            let load = (slot.users.load(Ordering::Acquire), slot.is_busy()?, slot.given.load(Ordering::Relaxed));
            if best.as_ref().is_none_or(|(least, _)| load < *least) {
                best = Some((load, slot.clone()));
            }
        }
        let slot = match best {
            Some(((0, false, _), slot)) => slot,
            Some((_, slot)) if count >= self.limit => slot,
            _ => {
                let stream = Stream::new(&self.executor, priority)?;
                let slot = Slot { stream, priority, users: AtomicUsize::new(0), given: AtomicUsize::new(0) };
                slots.slots.push(Arc::new(slot));
                slots.slots[slots.slots.len() - 1].clone()
            }
        };
        slots.given += 1;
        slot.given.store(slots.given, Ordering::Relaxed);
        slot.users.fetch_add(1, Ordering::AcqRel);
        Ok(Stream::leased(&slot.stream, Lease(slot.clone())))
    }

    /// Waits for the work of every stream, also of those that have no user now.
    pub fn synchronize(&self) -> Result<()> {
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner).slots.clone();
        slots.iter().try_for_each(|slot| slot.stream.synchronize())
    }

    pub fn get_statistics(&self) -> Result<StreamStatistics> {
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner).slots.clone();
        let mut statistics = StreamStatistics { streams: slots.len(), ..StreamStatistics::default() };
        for slot in &slots {
            statistics.users += slot.users.load(Ordering::Acquire);
            statistics.busy += usize::from(match slot.is_busy() {
                // Nothing runs on it any more.
                Err(error) if error.status == Status::DeviceLost => false,
                busy => busy?,
            });
        }
        Ok(statistics)
    }
}

impl Slot {
    /// A stream under capture counts as busy: asking for its progress would break the capture.
    fn is_busy(&self) -> Result<bool> {
        let executor = self.stream.executor();
        Ok(executor.stream_is_capturing(self.stream.raw())? || !self.stream.query()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuExecutor;

    fn manager(limit: usize) -> StreamManager {
        let executor: Arc<dyn Executor> = Arc::new(CpuExecutor::new(1).unwrap());
        StreamManager::new(&executor, limit).unwrap()
    }

    #[test]
    fn an_idle_stream_is_used_again() {
        let manager = manager(4);
        let first = manager.acquire(0).unwrap().raw();
        assert_eq!(manager.acquire(0).unwrap().raw(), first);
        assert_eq!(manager.get_statistics().unwrap(), StreamStatistics { streams: 1, users: 0, busy: 0 });
    }

    #[test]
    fn users_are_spread_over_the_streams_up_to_the_limit() {
        let manager = manager(2);
        let streams: Vec<Stream> = (0..5).map(|_| manager.acquire(0).unwrap()).collect();
        let count = |raw| streams.iter().filter(|stream| stream.raw() == raw).count();
        let (first, second) = (streams[0].raw(), streams[1].raw());
        assert_ne!(first, second);
        assert_eq!((count(first), count(second)), (3, 2));
        drop(streams);
        assert_eq!(manager.get_statistics().unwrap(), StreamStatistics { streams: 2, users: 0, busy: 0 });
        // With equal load the stream that rested longest is taken.
        assert_eq!(manager.acquire(0).unwrap().raw(), second);
    }

    #[test]
    fn priorities_have_streams_of_their_own() {
        let manager = manager(1);
        let (normal, urgent) = (manager.acquire(0).unwrap(), manager.acquire(-1).unwrap());
        assert_ne!(normal.raw(), urgent.raw());
        assert_eq!(manager.acquire(-1).unwrap().raw(), urgent.raw());
        manager.synchronize().unwrap();
    }

    #[test]
    fn priorities_beyond_the_device_share_its_streams() {
        let manager = manager(1);
        let streams: Vec<Stream> = (-50..50).map(|priority| manager.acquire(priority).unwrap()).collect();
        assert_eq!(manager.get_statistics().unwrap().streams, 6, "-5 to 0");
        assert_eq!((streams[0].raw(), streams[99].raw()), (streams[45].raw(), streams[50].raw()));
        assert_ne!(streams[45].raw(), streams[46].raw());
    }

    #[test]
    fn a_stream_outlives_its_manager() {
        let manager = manager(1);
        let stream = manager.acquire(0).unwrap();
        drop(manager);
        stream.synchronize().unwrap();
    }

    #[test]
    fn too_many_streams_are_refused() {
        let executor: Arc<dyn Executor> = Arc::new(CpuExecutor::new(1).unwrap());
        let error = StreamManager::new(&executor, 33).err().unwrap();
        assert_eq!((error.status, error.requested, error.limit), (Status::InvalidArgument, 33, 32));
    }

    #[test]
    fn threads_may_share_a_manager() {
        let manager = manager(3);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..200).for_each(|i| drop(manager.acquire(-(i % 2)).unwrap())));
            }
        });
        let statistics = manager.get_statistics().unwrap();
        assert!(statistics.users == 0 && statistics.streams <= 6, "{statistics:?}");
    }
}

//! What the manager did, event by event, for looking at afterwards.

use super::ring::Ring;
use super::sync::Mutex;
use crate::allocation::push_if_room;
use crate::error::numbered;
use std::sync::PoisonError;

numbered! {
    pub enum EventKind: u8 {
        Allocate = 1,
        Free = 2,
        /// An allocation that failed.
        OutOfMemory = 3,
        /// `address` is the number of the recovery step.
        RecoveryStep = 4,
        Trim = 5,
        Sleep = 6,
        Wake = 7,
    }
}

impl EventKind {
    pub fn name(self) -> &'static str {
        match self {
            EventKind::Allocate => "allocate",
            EventKind::Free => "free",
            EventKind::OutOfMemory => "out_of_memory",
            EventKind::RecoveryStep => "recovery_step",
            EventKind::Trim => "trim",
            EventKind::Sleep => "sleep",
            EventKind::Wake => "wake",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceEvent {
    pub nanoseconds: u64,
    pub kind: EventKind,
    pub address: u64,
    pub bytes: u64,
    pub stream: u64,
    /// What the manager held at the time.
    pub reserved: u64,
    /// The pool that an allocated block belongs to, a number of `Trace::number_of`; 0: none.
    pub pool: u16,
}

/// Kind and address share a word, as addresses leave the upper byte free; so do the held bytes and the pool's number.
pub struct Trace {
    events: Ring<5>,
    /// Names outlive their pools, whose blocks the trace still has.
    pools: Mutex<Vec<String>>,
}

const KIND_SHIFT: u32 = 56;
const POOL_SHIFT: u32 = 48;
/// An engine may name a pool after each request; those past the last number share the name of the last.
const MOST_POOLS: usize = 4096;
const MOST_CHARACTERS: usize = 64;

impl Trace {
    /// `None`: there is no memory for as many events.
    pub fn new(events: usize) -> Option<Trace> {
        Some(Trace { events: Ring::new(events)?, pools: Mutex::default() })
    }

    /// The number of pools of this name in events; 0 where there is no memory for the name.
    pub fn number_of(&self, pool: &str) -> u16 {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        let name = || pool.chars().take(MOST_CHARACTERS);
        let known = pools.iter().position(|known| known.chars().eq(name()));
        let place = known.unwrap_or_else(|| match pools.len() {
            MOST_POOLS => MOST_POOLS - 1,
            last => {
                let name = if last + 1 == MOST_POOLS { "other pools".to_string() } else { name().collect() };
                if push_if_room(&mut pools, name) {
                    last
                } else {
                    usize::MAX
                }
            }
        });
        place.checked_add(1).map_or(0, |number| number as u16)
    }

    /// The name of pool number k at k − 1.
    pub fn pools(&self) -> Vec<String> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn write(&self, event: TraceEvent) {
        let address = event.address & ((1 << KIND_SHIFT) - 1);
        let first = (event.kind as u64) << KIND_SHIFT | address;
        let last = u64::from(event.pool) << POOL_SHIFT | event.reserved & ((1 << POOL_SHIFT) - 1);
        self.events.write([event.nanoseconds, first, event.bytes, event.stream, last]);
    }

    /// The events still held, oldest first, and how many there ever were. `None`: there is no memory for them.
    pub fn read(&self) -> Option<(impl Iterator<Item = TraceEvent>, u64)> {
        let decode = |[nanoseconds, first, bytes, stream, last]: [u64; 5]| {
            let kind = EventKind::from_code((first >> KIND_SHIFT) as u8)?;
            let (address, reserved) = (first & ((1 << KIND_SHIFT) - 1), last & ((1 << POOL_SHIFT) - 1));
            let pool = (last >> POOL_SHIFT) as u16;
            Some(TraceEvent { nanoseconds, kind, address, bytes, stream, reserved, pool })
        };
        Some((self.events.read()?.into_iter().filter_map(decode), self.events.written()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_keep_their_numbers_and_the_last_one_stands_for_the_rest() {
        let trace = Trace::new(8).unwrap();
        assert_eq!((trace.number_of("a"), trace.number_of("b"), trace.number_of("a")), (1, 2, 1));
        let long = "x".repeat(1000);
        assert_eq!((trace.number_of(&long), trace.number_of(&long)), (3, 3));
        for i in 0..MOST_POOLS + 10 {
            trace.number_of(&format!("request {i}"));
        }
        assert_eq!(trace.number_of("one more") as usize, MOST_POOLS);
        let pools = trace.pools();
        assert_eq!((pools.len(), pools[2].len(), pools[MOST_POOLS - 1].as_str()), (MOST_POOLS, 64, "other pools"));
    }

    #[test]
    fn an_event_comes_back_whole() {
        let trace = Trace::new(8).unwrap();
        let event = TraceEvent {
            nanoseconds: 7,
            kind: EventKind::Allocate,
            address: 0x7fff_ffff_f000,
            bytes: 1 << 40,
            stream: u64::MAX,
            reserved: (1 << 48) - 1,
            pool: 4096,
        };
        trace.write(event);
        assert_eq!(trace.read().unwrap().0.collect::<Vec<_>>(), [event]);
    }
}

//! What the manager did, event by event, for looking at afterwards.

use super::ring::Ring;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum EventKind {
    Allocate = 1,
    Free = 2,
    /// An allocation that failed.
    OutOfMemory = 3,
    /// `address` is the number of the rung.
    Rung = 4,
    Trim = 5,
    Sleep = 6,
    Wake = 7,
}

impl EventKind {
    const ALL: [EventKind; 7] = [
        EventKind::Allocate,
        EventKind::Free,
        EventKind::OutOfMemory,
        EventKind::Rung,
        EventKind::Trim,
        EventKind::Sleep,
        EventKind::Wake,
    ];

    pub fn name(self) -> &'static str {
        match self {
            EventKind::Allocate => "allocate",
            EventKind::Free => "free",
            EventKind::OutOfMemory => "out_of_memory",
            EventKind::Rung => "rung",
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
}

/// Kind and address share a word: addresses leave the upper byte free.
pub struct Trace(Ring<5>);

const KIND_SHIFT: u32 = 56;

impl Trace {
    /// `None`: there is no memory for as many events.
    pub fn new(events: usize) -> Option<Trace> {
        Ring::new(events).map(Trace)
    }

    pub fn write(&self, event: TraceEvent) {
        let address = event.address & ((1 << KIND_SHIFT) - 1);
        let first = (event.kind as u64) << KIND_SHIFT | address;
        self.0.write([event.nanoseconds, first, event.bytes, event.stream, event.reserved]);
    }

    /// The events still held, oldest first, and how many there ever were. `None`: there is no memory for them.
    pub fn read(&self) -> Option<(impl Iterator<Item = TraceEvent>, u64)> {
        let decode = |[nanoseconds, first, bytes, stream, reserved]: [u64; 5]| {
            let kind = EventKind::ALL.into_iter().find(|kind| *kind as u64 == first >> KIND_SHIFT)?;
            Some(TraceEvent { nanoseconds, kind, address: first & ((1 << KIND_SHIFT) - 1), bytes, stream, reserved })
        };
        Some((self.0.read()?.into_iter().filter_map(decode), self.0.written()))
    }
}

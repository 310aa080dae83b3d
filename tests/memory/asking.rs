//! How seldom the driver is asked once a manager holds what its work needs.

use super::fixture::{Fixture, MIB};
use super::simulated::{Call, Simulated};
use nvbackend::memory::MemoryOptions;

/// Nanoseconds that the host takes for a step, and that an event takes to be seen: as measured on an H200.
const STEP: u64 = 500;
const EVENT_LATENCY: u64 = 5_000;

const STEPS: usize = 1400;
const CALLS: [Call; 4] = [Call::Map, Call::EventRecord, Call::EventQuery, Call::Synchronize];

/// RMM's random allocations: 73 % allocate 1 byte to `largest`, the rest and what would pass the cap free.
fn round(fixture: &Fixture, largest: usize, steps: usize) -> [usize; 4] {
    let stream = fixture.stream(0);
    let before = fixture.device.state().calls.len();
    let (mut live, mut held, mut random) = (Vec::new(), 0, 1u64);
    let mut next = |bound: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % bound
    };
    for _ in 0..steps {
        let bytes = 1 + next(largest);
        if live.is_empty() || next(100) < 73 && held + bytes <= 16_000 * MIB {
            let block = fixture.manager.allocate(bytes, stream.raw()).expect("enough memory");
            live.push((block, bytes));
            held += bytes;
        } else {
            let (block, bytes) = live.swap_remove(next(live.len()));
            fixture.free(block, &stream);
            held -= bytes;
        }
        fixture.device.advance(STEP);
    }
    while let Some((block, _)) = live.pop() {
        fixture.free(block, &stream);
        fixture.device.advance(STEP);
    }
    let calls = fixture.device.state().calls.split_off(before);
    CALLS.map(|call| calls.iter().filter(|other| **other == call).count())
}

#[test]
fn random_work_soon_needs_no_new_memory() {
    for largest in [MIB, 4 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB] {
        let mut device = Simulated::new(140 << 30);
        device.event_latency = EVENT_LATENCY;
        let fixture = Fixture::over(device, MemoryOptions::default());
        for _ in 0..3 {
            round(&fixture, largest, STEPS);
        }
        let [maps, events, queries, synchronizations] = round(&fixture, largest, STEPS);
        assert!(maps <= STEPS / 100, "{maps} mappings for blocks of up to {largest} bytes");
        assert!(
            events + queries <= STEPS / 4,
            "{events} events and {queries} queries for blocks of up to {largest} bytes"
        );
        assert_eq!(synchronizations, 0);
    }
}

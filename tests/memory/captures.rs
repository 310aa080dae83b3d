//! What a capture allows: the simulated device panics when it is asked, waited for or unmapped from while one runs.

use super::fixture::{Fixture, MIB};
use super::simulated::Call;
use nvbackend::device::RawHandle;
use nvbackend::error::Status;
use nvbackend::memory::options::{Limit, Spill};
use nvbackend::memory::{MemoryOptions, Pool};
use nvbackend::stream::Stream;

/// Runs `body` while the stream is captured into the pool.
fn capturing(fixture: &Fixture, pool: &Pool, stream: &Stream, body: impl FnOnce()) {
    pool.begin_capture(stream.raw()).expect("no capture yet");
    fixture.device.state().capturing.push(stream.raw().0 as usize);
    body();
    fixture.device.state().capturing.clear();
    pool.end_capture(stream.raw()).expect("the capture ends");
}

#[test]
fn every_allocation_on_the_stream_is_the_captures() {
    let fixture = Fixture::new(1 << 30, MemoryOptions::default());
    let stream = fixture.stream(0);
    let [graph, other] = ["graph", "other"].map(|name| Pool::new(&fixture.manager, name).expect("a pool"));
    // Both leave magazines for the stream behind.
    for _ in 0..8 {
        let block = fixture.allocate(4096, &stream);
        fixture.free(block, &stream);
        let block = other.allocate(4096, stream.raw()).expect("enough memory");
        other.free(block, stream.raw()).expect("a live block");
    }
    capturing(&fixture, &graph, &stream, || {
        fixture.allocate(4096, &stream);
        other.allocate(4096, stream.raw()).expect("enough memory");
    });
    assert_eq!((graph.statistics().blocks, other.statistics().blocks), (2, 0));
}

#[test]
fn spilled_blocks_stay_until_the_capture_has_ended() {
    let options = MemoryOptions { limit: Limit::Bytes(64 << 20), spill: Spill::Pinned, ..MemoryOptions::default() };
    let fixture = Fixture::new(1 << 30, options);
    let (stream, captured) = (fixture.stream(0), fixture.stream(1));
    let graph = Pool::new(&fixture.manager, "graph").expect("a pool");
    let first = fixture.allocate(60 * MIB, &stream);
    let spilled = fixture.allocate(50 * MIB, &stream);
    let held = fixture.device.mapped_bytes();
    capturing(&fixture, &graph, &captured, || {
        fixture.free(spilled, &stream);
        assert_eq!(fixture.manager.get_statistics().spilled, 0);
        assert_eq!(fixture.device.mapped_bytes(), held, "the work that uses it cannot be waited for");
    });
    assert_eq!(fixture.device.mapped_bytes(), held - 50 * MIB);
    fixture.free(first, &stream);
}

#[test]
fn overwriting_takes_a_stream() {
    let fixture = Fixture::new(1 << 30, MemoryOptions { zero_on_free: true, ..MemoryOptions::default() });
    let (stream, captured) = (fixture.stream(0), fixture.stream(1));
    let graph = Pool::new(&fixture.manager, "graph").expect("a pool");
    let block = fixture.allocate(4096, &stream);
    capturing(&fixture, &graph, &captured, || {
        let error = fixture.manager.free(block, RawHandle::NULL).expect_err("all work would have to be waited for");
        assert_eq!(error.status, Status::InvalidArgument, "{error}");
        fixture.free(block, &stream);
    });
}

#[test]
fn a_failed_growth_unmaps_nothing() {
    let fixture = Fixture::new(1 << 30, MemoryOptions { limit: Limit::Bytes(96 << 20), ..MemoryOptions::default() });
    let captured = fixture.stream(0);
    let graph = Pool::new(&fixture.manager, "graph").expect("a pool");
    capturing(&fixture, &graph, &captured, || {
        let block = fixture.allocate(20 * MIB, &captured);
        fixture.manager.allocate(90 * MIB, captured.raw()).expect_err("over the limit");
        let second = fixture.allocate(60 * MIB, &captured);
        fixture.free(second, &captured);
        fixture.free(block, &captured);
    });
    let unmapped = fixture.device.state().calls.iter().filter(|call| **call == Call::Unmap).count();
    assert_eq!(unmapped, 0);
}

#[test]
fn a_stream_may_end_while_another_one_is_captured() {
    let fixture = Fixture::new(1 << 30, MemoryOptions::default());
    let (stream, captured) = (fixture.stream(0), fixture.stream(1));
    let graph = Pool::new(&fixture.manager, "graph").expect("a pool");
    let block = fixture.allocate(4 * MIB, &stream);
    fixture.device.work(stream.raw(), block as usize, 4 * MIB, 1000);
    capturing(&fixture, &graph, &captured, || {
        fixture.free(block, &stream);
        drop(stream);
    });
    fixture.device.advance(2000);
    let other = fixture.stream(2);
    let again = fixture.allocate(4 * MIB, &other);
    fixture.free(again, &other);
}

#[test]
fn memory_stays_until_captures_that_nobody_told_of_let_the_device_be_waited_for() {
    let fixture = Fixture::new(1 << 30, MemoryOptions::default());
    let stream = fixture.stream(0);
    let block = fixture.allocate(50 * MIB, &stream);
    fixture.device.work(stream.raw(), block as usize, 50 * MIB, 1_000_000);
    fixture.device.state().untold_captures = 3;
    let device = fixture.device.clone();
    // The simulated device panics if memory in use is unmapped.
    drop((stream, fixture));
    assert_eq!((device.mapped_bytes(), device.state().untold_captures), (0, 0));
}

//! When a freed block may be used again, and what that costs.

use super::fixture::{Fixture, MIB};
use super::simulated::{Call, Simulated};
use nvbackend::device::RawHandle;
use nvbackend::memory::options::Limit;
use nvbackend::memory::{Blocks, MemoryOptions};
use std::sync::atomic::Ordering;

fn calls(fixture: &Fixture, call: Call) -> usize {
    fixture.device.state().calls.iter().filter(|other| **other == call).count()
}

#[test]
fn the_same_stream_reuses_at_once_and_asks_nobody() {
    let fixture = Fixture::new(1 << 30, MemoryOptions::default());
    let stream = fixture.stream(0);
    for bytes in [4096, MIB, 8 * MIB] {
        let first = fixture.allocate(bytes, &stream);
        fixture.device.work(stream.raw(), first as usize, bytes, 1000);
        fixture.free(first, &stream);
        assert_eq!(fixture.allocate(bytes, &stream), first);
        fixture.free(first, &stream);
    }
    assert_eq!((calls(&fixture, Call::EventRecord), calls(&fixture, Call::Synchronize)), (0, 0));
}

#[test]
fn another_stream_gets_other_memory_until_the_work_has_passed() {
    let fixture = Fixture::new(1 << 30, MemoryOptions::default());
    let (one, two) = (fixture.stream(0), fixture.stream(1));
    let blocks: Vec<_> = (0..1000).map(|_| fixture.allocate(4096, &one)).collect();
    for &block in &blocks {
        fixture.device.work(one.raw(), block as usize, 4096, 10);
        fixture.free(block, &one);
    }
    let others: Vec<_> = (0..1000).map(|_| fixture.allocate(4096, &two)).collect();
    assert!(others.iter().all(|other| !blocks.contains(other)), "the first stream is still busy");
    others.into_iter().for_each(|other| fixture.free(other, &two));
    assert_eq!(fixture.device.state().waits_in_streams, 0);
}

#[test]
fn events_are_recorded_for_batches() {
    let fixture = Fixture::new(1 << 30, MemoryOptions::default());
    let stream = fixture.stream(0);
    let blocks: Vec<_> = (0..4096).map(|_| fixture.allocate(1024, &stream)).collect();
    blocks.into_iter().for_each(|block| fixture.free(block, &stream));
    let recorded = calls(&fixture, Call::EventRecord);
    assert!((1..=4096 / 32 / 32).contains(&recorded), "{recorded} events for 4096 frees");
}

#[test]
fn one_event_frees_all_that_came_before_it_for_another_stream() {
    let options = MemoryOptions { thread_cache_bytes: Some(0), ..MemoryOptions::default() };
    let fixture = Fixture::new(1 << 30, options);
    let (one, two) = (fixture.stream(0), fixture.stream(1));
    let blocks = [(); 4].map(|()| fixture.allocate(MIB, &one));
    for block in blocks {
        fixture.device.work(one.raw(), block as usize, MIB, 100);
        fixture.free(block, &one);
    }
    assert_eq!(calls(&fixture, Call::EventRecord), 0, "the batches mostly go back to their stream");
    let early = fixture.allocate(MIB, &two);
    assert!(!blocks.contains(&early), "the first stream is still busy");
    assert_eq!(calls(&fixture, Call::EventRecord), 1, "recorded for who asked");
    fixture.device.advance(1000);
    let before = calls(&fixture, Call::EventRecord);
    let reused: Vec<_> = (0..100).map(|_| fixture.allocate(MIB, &two)).collect();
    assert!(blocks.iter().all(|block| reused.contains(block)), "their work has passed");
    let recorded = calls(&fixture, Call::EventRecord) - before;
    assert!(
        recorded <= 100 / 32,
        "{recorded} events: the first covers all four, others mark the second stream's batches"
    );

    // What is freed after an event is not covered by it.
    let late = fixture.allocate(MIB, &one);
    fixture.device.work(one.raw(), late as usize, MIB, 100_000);
    fixture.free(late, &one);
    assert_ne!(fixture.allocate(MIB, &two), late);
}

#[test]
fn freeing_without_a_stream_synchronises_once_for_many_blocks() {
    let fixture = Fixture::new(1 << 30, MemoryOptions::default());
    let stream = fixture.stream(0);
    let blocks: Vec<_> = (0..1000).map(|_| fixture.allocate(1024, &stream)).collect();
    for block in blocks {
        fixture.device.work(stream.raw(), block as usize, 1024, 5);
        fixture.manager.free(block, RawHandle::NULL).expect("a live block");
    }
    assert_eq!(calls(&fixture, Call::Synchronize), 0);
    fixture.manager.trim(0).expect("no failures");
    assert_eq!(calls(&fixture, Call::Synchronize), 1);
}

#[test]
fn a_handle_that_is_used_again_is_another_stream() {
    let fixture = Fixture::new(1 << 30, MemoryOptions::default());
    let stream = fixture.stream(0);
    let block = fixture.allocate(4096, &stream);
    let large = fixture.allocate(4 * MIB, &stream);
    fixture.device.work(stream.raw(), block as usize, 4096, 100);
    fixture.device.work(stream.raw(), large as usize, 4 * MIB, 100);
    fixture.free(block, &stream);
    fixture.free(large, &stream);
    drop(stream);
    // The driver gives the same handle to a new stream, whose work is not behind the old one's.
    fixture.device.state().forget_stream(RawHandle(0x100 as *mut _));
    let again = fixture.stream(0);
    let other = fixture.allocate(4096, &again);
    let other_large = fixture.allocate(4 * MIB, &again);
    assert!(other != block && other_large != large);
    fixture.device.advance(1000);
    fixture.free(other, &again);
    fixture.free(other_large, &again);
}

#[test]
fn a_thread_that_ends_leaves_its_blocks_to_others() {
    let fixture = Fixture::new(1 << 30, MemoryOptions::default());
    let stream = fixture.stream(0);
    let made = std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let blocks: Vec<_> = (0..20).map(|_| fixture.allocate(4096, &stream) as usize).collect();
            blocks.iter().for_each(|&block| fixture.free(block as *mut _, &stream));
            blocks
        });
        worker.join().expect("no panic")
    });
    let reused: Vec<_> = (0..20).map(|_| fixture.allocate(4096, &stream) as usize).collect();
    assert!(reused.iter().any(|block| made.contains(block)), "the other thread's magazine is not lost");
    reused.into_iter().for_each(|block| fixture.free(block as *mut _, &stream));
    assert_eq!(calls(&fixture, Call::EventRecord), 0, "an ending thread does not call the driver");
}

#[test]
fn a_thread_that_keeps_nothing_passes_every_block_on() {
    // One event stands for 32 batches, which here are single blocks, and what is left of those that allocations took.
    for (thread_cache_bytes, events) in [(Some(0), 2..=4), (None, 0..=0)] {
        let fixture = Fixture::new(1 << 30, MemoryOptions { thread_cache_bytes, ..MemoryOptions::default() });
        let stream = fixture.stream(0);
        let blocks = [(); 64].map(|()| fixture.allocate(4096, &stream));
        blocks.into_iter().for_each(|block| fixture.free(block, &stream));
        assert!(events.contains(&calls(&fixture, Call::EventRecord)));
    }
}

#[test]
fn a_stream_whose_end_can_be_neither_recorded_nor_waited_for_keeps_its_blocks() {
    // A capture forbids it, a capture is broken by it, the operating system fails. The device is busy as before.
    for code in [900, 901, 304] {
        let fixture = Fixture::new(1 << 30, MemoryOptions::default());
        let (stream, other) = (fixture.stream(0), fixture.stream(1));
        let sizes = [4096, MIB, MIB, 4 * MIB];
        let blocks = sizes.map(|bytes| fixture.allocate(bytes, &stream));
        for (block, bytes) in blocks.into_iter().zip(sizes) {
            fixture.device.work(stream.raw(), block as usize, bytes, 1000);
            fixture.free(block, &stream);
        }
        let handle = stream.raw().0 as usize;
        fixture.device.state().refusing = Some(code);
        drop(stream);
        fixture.device.state().destroyed.push(handle);
        // The fixture panics if a block comes whose work has not passed, while the driver refuses and afterwards.
        let mut taken = Vec::new();
        for refusing in [Some(code), None] {
            fixture.device.state().refusing = refusing;
            taken.extend(sizes.into_iter().flat_map(|bytes| [bytes; 20]).map(|bytes| fixture.allocate(bytes, &other)));
        }
        fixture.device.advance(10_000);
        taken.into_iter().for_each(|block| fixture.free(block, &other));
        fixture.manager.trim(0).expect("no failures any more");
        assert_eq!(fixture.manager.get_statistics().reserved, 0, "the blocks are lost after {code}");
    }
}

/// Streams that use a class in turns, each what the one before it freed: `rounds` times. Returns the calls about events and
/// the mappings of each round.
fn take_turns(fixture: &Fixture, rounds: usize) -> Vec<(usize, usize)> {
    let streams = [0, 1, 2].map(|number| fixture.stream(number));
    let count = |call| calls(fixture, call);
    let asked = || count(Call::EventRecord) + count(Call::EventQuery);
    (0..rounds)
        .map(|_| {
            let before = (asked(), count(Call::Map));
            for stream in &streams {
                let blocks = [(); 2].map(|()| fixture.allocate(MIB, stream));
                blocks.into_iter().for_each(|block| fixture.free(block, stream));
            }
            (asked() - before.0, count(Call::Map) - before.1)
        })
        .collect()
}

#[test]
fn streams_that_keep_taking_over_each_others_blocks_get_some_of_their_own() {
    let options = MemoryOptions { thread_cache_bytes: Some(0), ..MemoryOptions::default() };
    let fixture = Fixture::new(1 << 30, options);
    let rounds = take_turns(&fixture, 40);
    assert!(rounds[0].0 > 0 && rounds[0].1 == 1, "first they share one slab: {rounds:?}");
    let mapped: usize = rounds.iter().map(|(_, maps)| maps).sum();
    assert!(mapped <= 4, "{mapped} slabs of two blocks for three streams with two blocks each");
    // An event for every 32 batches is recorded unasked.
    let asked: usize = rounds[20..].iter().map(|(asked, _)| asked).sum();
    assert!(asked <= 20 * 6 / 32 + 3, "{asked} calls about events in the last rounds: {rounds:?}");
}

#[test]
fn where_memory_is_not_plenty_blocks_keep_moving_between_streams() {
    let options =
        MemoryOptions { thread_cache_bytes: Some(0), limit: Limit::Bytes(64 << 20), ..MemoryOptions::default() };
    let fixture = Fixture::new(1 << 30, options);
    let stream = fixture.stream(9);
    let held = [(); 15].map(|()| fixture.allocate(4 * MIB, &stream));
    let mapped = calls(&fixture, Call::Map);
    let rounds = take_turns(&fixture, 40);
    assert_eq!(calls(&fixture, Call::Map) - mapped, 1, "one slab serves all: {rounds:?}");
    assert!(rounds[39].0 > 0, "with a question to the driver whenever another stream takes over");
    held.into_iter().for_each(|block| fixture.free(block, &stream));
}

/// One thread asks when another stream's block may be used, while that stream ends in a second one.
#[test]
fn nobody_uses_a_stream_that_has_ended() {
    let options = MemoryOptions { thread_cache_bytes: Some(0), ..MemoryOptions::default() };
    let mut device = Simulated::new(1 << 30);
    device.slow_events = true;
    let fixture = Fixture::over(device, options);
    let (one, two) = (fixture.stream(0), fixture.stream(1));
    let block = fixture.allocate(MIB, &one);
    fixture.device.work(one.raw(), block as usize, MIB, 100);
    fixture.free(block, &one);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| fixture.allocate(MIB, &two) as usize);
        while !fixture.device.making_event.load(Ordering::Acquire) {
            assert!(!asking.is_finished(), "the slab has no block left, so the other stream's is asked about");
            std::thread::yield_now();
        }
        let handle = one.raw().0 as usize;
        drop(one);
        fixture.device.state().destroyed.push(handle);
        let other = asking.join().expect("the event was recorded before the stream was destroyed");
        assert_ne!(other, block as usize, "its work has not passed");
    });
}

/// The short way of the C functions does not hold the stream, which another thread may end meanwhile.
#[test]
fn what_is_done_at_once_never_shows_the_driver_a_stream_that_has_ended() {
    let fixture = Fixture::new(1 << 30, MemoryOptions::default());
    let (one, two) = (fixture.stream(0), fixture.stream(1));
    let raw = one.raw();
    let blocks = [8 * MIB, 8 * MIB].map(|bytes| fixture.allocate(bytes, &one));
    fixture.free(blocks[1], &one);
    assert!(fixture.manager.allocate_at_once(8 * MIB, raw).is_some_and(|block| block == blocks[1]));
    blocks.iter().for_each(|&block| fixture.device.work(raw, block as usize, 8 * MIB, 100));
    drop(one);
    fixture.device.state().destroyed.push(raw.0 as usize);
    assert!(fixture.manager.allocate_at_once(4096, raw).is_none(), "the thread knows the stream no more");
    for block in blocks {
        assert!(fixture.manager.free_at_once(block, raw));
    }
    let other = fixture.allocate(8 * MIB, &two);
    assert!(!blocks.contains(&other), "the work of the stream that has ended has not passed");
    // The handle comes to mean another stream, whose work would run beside that of the first one.
    fixture.device.state().destroyed.retain(|&handle| handle != raw.0 as usize);
    let again = fixture.manager.allocate(8 * MIB, raw).expect("there is memory");
    fixture.device.expect_usable(raw, again as usize, 8 * MIB);
    fixture.manager.free(again, raw).expect("a live block");
    fixture.free(other, &two);
}

//! Each recovery step of the out-of-memory ladder, forced alone, and the error when all have been taken.

use super::fixture::{Fixture, MIB};
use super::simulated::Simulated;
use nvbackend::device::RawHandle;
use nvbackend::error::Status;
use nvbackend::memory::ladder::RecoveryStep;
use nvbackend::memory::options::{Limit, Spill};
use nvbackend::memory::{MemoryManager, MemoryOptions};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

fn limited(mib: u64) -> MemoryOptions {
    MemoryOptions { limit: Limit::Bytes(mib << 20), ..MemoryOptions::default() }
}

#[test]
fn freed_blocks_of_one_class_serve_another() {
    let mut device = Simulated::new(1 << 30);
    device.synchronous = true;
    let fixture = Fixture::over(device, limited(64));
    let stream = fixture.stream(0);
    let blocks: Vec<_> = (0..64).map(|_| fixture.allocate(MIB, &stream)).collect();
    blocks.into_iter().for_each(|block| fixture.free(block, &stream));
    let large = fixture.allocate(60 * MIB, &stream);
    assert_eq!(fixture.step(RecoveryStep::Caches), (1, 1));
    fixture.free(large, &stream);
}

#[test]
fn passed_work_of_another_stream_is_used_before_anybody_waits() {
    let fixture = Fixture::new(1 << 30, limited(64));
    let (one, two) = (fixture.stream(0), fixture.stream(1));
    let block = fixture.allocate(40 * MIB, &one);
    fixture.device.work(one.raw(), block as usize, 40 * MIB, 100);
    fixture.free(block, &one);
    fixture.device.advance(200);
    let other = fixture.allocate(50 * MIB, &two);
    assert_eq!(fixture.device.state().waits_in_streams, 0);
    fixture.free(other, &two);
}

#[test]
fn a_stream_waits_for_another_ones_block_without_stopping_the_host() {
    let fixture = Fixture::new(1 << 30, limited(64));
    let (one, two) = (fixture.stream(0), fixture.stream(1));
    let block = fixture.allocate(60 * MIB, &one);
    fixture.device.work(one.raw(), block as usize, 60 * MIB, 100);
    fixture.free(block, &one);
    let part = fixture.allocate(20 * MIB, &two);
    assert_eq!(part, block, "the first part of what the other stream still uses");
    assert_eq!(fixture.step(RecoveryStep::Wait), (1, 1));
    let state = fixture.device.state();
    assert_eq!((state.waits_in_streams, state.now), (1, 0), "only the stream waits");
    drop(state);
    let rest = fixture.allocate(40 * MIB, &two);
    fixture.free(part, &two);
    fixture.free(rest, &two);
}

#[test]
fn the_host_waits_when_no_single_block_is_enough() {
    let fixture = Fixture::new(1 << 30, limited(64));
    let (one, two) = (fixture.stream(0), fixture.stream(1));
    let blocks: Vec<_> = (0..60).map(|_| fixture.allocate(MIB, &one)).collect();
    for block in blocks {
        fixture.device.work(one.raw(), block as usize, MIB, 1);
        fixture.free(block, &one);
    }
    let large = fixture.allocate(60 * MIB, &two);
    assert_eq!(fixture.step(RecoveryStep::Wait), (1, 1));
    assert!(fixture.device.state().now > 0, "the host has waited");
    fixture.free(large, &two);
}

#[test]
fn memory_behind_short_runs_moves_behind_a_long_one() {
    let fixture = Fixture::new(1 << 30, limited(64));
    let stream = fixture.stream(0);
    let blocks: Vec<_> = (0..16).map(|_| fixture.allocate(4 * MIB, &stream)).collect();
    let (kept, freed): (Vec<_>, Vec<_>) = blocks.into_iter().enumerate().partition(|(i, _)| i % 2 == 0);
    freed.into_iter().for_each(|(_, block)| fixture.free(block, &stream));
    // 32 MiB are free in runs of 4 MiB.
    let large = fixture.allocate(30 * MIB, &stream);
    assert_eq!(fixture.step(RecoveryStep::Trim), (1, 1));
    fixture.free(large, &stream);
    kept.into_iter().for_each(|(_, block)| fixture.free(block, &stream));
}

#[test]
fn callbacks_free_what_the_engine_can_spare() {
    let fixture = Fixture::new(1 << 30, limited(64));
    let stream = fixture.stream(0);
    let spare = Arc::new(Mutex::new(vec![fixture.allocate(30 * MIB, &stream) as usize]));
    let (manager, blocks): (Weak<MemoryManager>, _) = (Arc::downgrade(&fixture.manager), spare.clone());
    let raw = stream.raw();
    let id = fixture.manager.add_reclaim(
        0,
        Box::new(move |wanted| {
            assert!(wanted >= 40 << 20);
            let (Some(manager), Some(block)) = (manager.upgrade(), blocks.lock().unwrap().pop()) else { return 0 };
            manager.free(block as *mut _, raw).expect("a live block");
            30 << 20
        }),
    );
    let block = fixture.allocate(40 * MIB, &stream);
    assert_eq!(fixture.step(RecoveryStep::Callbacks), (1, 1));
    let error = fixture.manager.allocate(40 * MIB, stream.raw()).expect_err("nothing is left to spare");
    assert_eq!(error.status, Status::OutOfMemory);
    assert_eq!(fixture.step(RecoveryStep::Callbacks), (2, 1));
    fixture.manager.remove_reclaim(id).expect("added above");
    assert!(fixture.manager.remove_reclaim(id).is_err());
    fixture.free(block, &stream);
}

#[test]
fn what_a_callback_freed_is_waited_for_before_the_next_one_is_asked() {
    let fixture = Fixture::new(1 << 30, limited(64));
    let stream = fixture.stream(0);
    let asked = Arc::new(Mutex::new(0));
    for _ in 0..2 {
        let block = fixture.allocate(30 * MIB, &stream);
        fixture.device.work(stream.raw(), block as usize, 30 * MIB, 100);
        let (manager, asked) = (Arc::downgrade(&fixture.manager), asked.clone());
        let (raw, spare) = (stream.raw(), Mutex::new(Some(block as usize)));
        fixture.manager.add_reclaim(
            0,
            Box::new(move |_| {
                *asked.lock().unwrap() += 1;
                let (Some(manager), Some(block)) = (manager.upgrade(), spare.lock().unwrap().take()) else { return 0 };
                manager.free(block as *mut _, raw).expect("a live block");
                30 << 20
            }),
        );
    }
    let block = fixture.allocate(20 * MIB, &stream);
    assert_eq!(*asked.lock().unwrap(), 1);
    fixture.free(block, &stream);
}

#[test]
fn an_allocation_waits_for_other_threads_as_long_as_it_may() {
    let options = MemoryOptions { wait: Duration::from_secs(20), ..limited(64) };
    let fixture = Fixture::new(1 << 30, options);
    let stream = fixture.stream(0);
    let block = fixture.allocate(60 * MIB, &stream) as usize;
    std::thread::scope(|scope| {
        let waiter =
            scope.spawn(|| fixture.manager.allocate(50 * MIB, stream.raw()).expect("freed meanwhile") as usize);
        while fixture.step(RecoveryStep::OtherThreads).0 == 0 {
            std::thread::yield_now();
        }
        fixture.free(block as *mut _, &stream);
        fixture.free(waiter.join().expect("no panic") as *mut _, &stream);
    });
    assert_eq!(fixture.step(RecoveryStep::OtherThreads), (1, 1));
}

#[test]
fn blocks_spill_to_the_host_if_that_is_allowed() {
    let fixture = Fixture::new(1 << 30, MemoryOptions { spill: Spill::Pinned, ..limited(64) });
    let stream = fixture.stream(0);
    let first = fixture.allocate(60 * MIB, &stream);
    let second = fixture.manager.allocate(50 * MIB, stream.raw()).expect("spilled");
    assert_eq!(fixture.manager.get_statistics().spilled, 50 << 20);
    assert_eq!(fixture.step(RecoveryStep::Spill), (1, 1));
    assert!(fixture.manager.owns(second, 50 * MIB));
    fixture.free(second, &stream);
    fixture.free(first, &stream);
    assert_eq!(fixture.manager.get_statistics().spilled, 0);
}

#[test]
fn the_error_says_everything() {
    let fixture = Fixture::new(1 << 30, limited(64));
    let stream = fixture.stream(0);
    let block = fixture.allocate(30 * MIB, &stream);
    let error = fixture.manager.allocate(50 * MIB, stream.raw()).expect_err("over the limit");
    assert_eq!((error.status, error.requested, error.limit), (Status::OutOfMemory, 50 << 20, 64 << 20));
    for part in ["52428800 bytes requested", "limit is 67108864", "31457280 allocated", "tried caches"] {
        assert!(error.message.contains(part), "{error}");
    }
    assert!(error.advice.contains("raise the memory limit"), "{}", error.advice);
    let failure = error.memory.expect("the manager's state");
    assert_eq!((failure.allocated, failure.limit), (30 << 20, 64 << 20));
    assert!(failure.recovery_steps_tried & 1 == 1 && failure.largest_free > 0);
    assert_eq!(fixture.manager.get_statistics().failures, 1);
    assert!(fixture.manager.check_available(34 << 20).is_ok());
    assert_eq!(fixture.manager.check_available(35 << 20).expect_err("over the limit").status, Status::OutOfMemory);
    let error = fixture.manager.check_available(u64::MAX).expect_err("more than there can be");
    assert_eq!((error.status, error.requested), (Status::OutOfMemory, u64::MAX));
    fixture.free(block, &stream);
    let error = fixture.manager.allocate(2 << 30, RawHandle::NULL).expect_err("more than the device has");
    assert!(error.message.contains("1073741824 bytes in all"), "{error}");
}

#[test]
fn threads_together_never_pass_the_limit() {
    let fixture = Fixture::new(1 << 30, limited(64));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let fixture = &fixture;
            scope.spawn(move || {
                let stream = fixture.stream(thread);
                for i in 0..300 {
                    let bytes = [3 * MIB, 17 * MIB, 30_000, 900_000][(i + thread) % 4];
                    if let Ok(pointer) = fixture.manager.allocate(bytes, stream.raw()) {
                        assert!(fixture.device.mapped_bytes() <= 64 * MIB);
                        fixture.free(pointer, &stream);
                    }
                }
            });
        }
    });
    assert!(fixture.manager.get_statistics().peak_reserved <= 64 << 20);
}

#[test]
fn callbacks_give_up_no_more_than_is_needed() {
    let mut device = Simulated::new(1 << 30);
    device.event_latency = 5_000;
    let fixture = Fixture::over(device, limited(64));
    let stream = fixture.stream(0);
    let [mut first, mut last] = [Vec::new(), Vec::new()];
    for _ in 0..2 {
        first.push(fixture.allocate(10 * MIB, &stream) as usize);
        last.push(fixture.allocate(10 * MIB, &stream) as usize);
    }
    let spare = [(-10, Arc::new(Mutex::new(first))), (10, Arc::new(Mutex::new(last)))];
    for (priority, blocks) in &spare {
        let (manager, raw, blocks) = (Arc::downgrade(&fixture.manager), stream.raw(), blocks.clone());
        fixture.manager.add_reclaim(
            *priority,
            Box::new(move |_| {
                let (Some(manager), Some(block)) = (manager.upgrade(), blocks.lock().unwrap().pop()) else { return 0 };
                manager.free(block as *mut _, raw).expect("a live block");
                10 << 20
            }),
        );
    }
    let block = fixture.allocate(20 * MIB, &stream);
    let other = fixture.allocate(24 * MIB, &stream);
    let left = spare.map(|(_, blocks)| blocks.lock().unwrap().len());
    assert_eq!(left, [0, 2], "60 of 64 MiB are live, and 24 more need two blocks of 10");
    fixture.free(block, &stream);
    fixture.free(other, &stream);
}

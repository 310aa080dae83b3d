//! Every call to the device fails in turn, once and for ever, over a whole scenario: nothing leaks, nothing panics, and
//! after a fault that passes the manager works on.

use super::fixture::{Fixture, MIB};
use super::simulated::Simulated;
use nvbackend::error::Status;
use nvbackend::memory::{MemoryOptions, Pool};
use std::ffi::c_void;

/// Everything that talks to the device; failures are somebody else's to judge.
fn scenario(fixture: &Fixture) {
    let streams = [fixture.stream(0), fixture.stream(1)];
    let mut live: Vec<*mut c_void> = Vec::new();
    let sizes = [300, 4096, 70_000, MIB, 3 * MIB, 20 * MIB, 40 * MIB];
    for round in 0..3 {
        for (i, &bytes) in sizes.iter().enumerate() {
            let stream = &streams[(i + round) % 2];
            if let Ok(pointer) = fixture.manager.allocate(bytes, stream.raw()) {
                fixture.device.expect_usable(stream.raw(), pointer as usize, bytes);
                fixture.device.work(stream.raw(), pointer as usize, bytes, 50);
                fixture.manager.free(pointer, stream.raw()).expect("a live block");
            }
            if let Ok(pointer) = fixture.manager.allocate(bytes, streams[0].raw()) {
                live.push(pointer);
            }
        }
        fixture.device.advance(30);
    }
    if let Ok(pool) = Pool::new(&fixture.manager, "scenario") {
        for bytes in [1000, 5 * MIB] {
            let _ = pool.allocate(bytes, streams[1].raw());
        }
        let _ = pool.clear();
    }
    let _ = fixture.manager.trim(0);
    let _ = fixture.manager.sleep(true);
    let _ = fixture.manager.wake();
    for pointer in live {
        fixture.manager.free(pointer, streams[0].raw()).expect("a live block");
    }
    drop(streams);
    let _ = fixture.manager.trim(0);
}

fn sweep(options: &MemoryOptions, count: usize) {
    for unmaps_in_secret in [false, true] {
        sweep_device(options, count, unmaps_in_secret);
    }
}

fn sweep_device(options: &MemoryOptions, count: usize, unmaps_in_secret: bool) {
    for first in 0.. {
        let mut device = Simulated::new(160 * MIB as u64);
        device.unmaps_in_secret = unmaps_in_secret;
        let fixture = Fixture::over(device, options.clone());
        let before = fixture.device.state().calls.len();
        fixture.device.fail(first, count);
        scenario(&fixture);
        let calls = fixture.device.state().calls.len() - before;
        fixture.device.stop_failing();
        fixture.device.advance(1 << 40);
        // A fault during `wake` leaves it asleep, from where it can be tried again.
        let _ = fixture.manager.wake();
        let stream = fixture.stream(2);
        for bytes in [500, 30 * MIB] {
            let pointer = fixture.allocate(bytes, &stream);
            fixture.free(pointer, &stream);
        }
        drop(stream);
        assert_eq!(fixture.manager.get_statistics().blocks, 0, "call {first} failed");
        fixture.manager.trim(0).expect("no failures any more");
        assert_eq!(fixture.manager.get_statistics().reserved, 0, "call {first} failed");
        let Fixture { device, manager, executor } = fixture;
        drop(manager);
        drop(executor);
        device.expect_nothing_left();
        if first >= calls {
            assert!(first > 30, "the scenario makes {first} calls only");
            return;
        }
    }
}

#[test]
fn any_call_may_fail_once() {
    sweep(&MemoryOptions::default(), 1);
}

#[test]
fn calls_may_fail_from_any_one_on() {
    sweep(&MemoryOptions::default(), usize::MAX);
}

#[test]
fn plain_allocations_may_fail_too() {
    let options = MemoryOptions { pooling: false, ..MemoryOptions::default() };
    sweep(&options, 1);
    sweep(&options, usize::MAX);
}

#[test]
fn a_lost_device_leaves_statistics_frees_and_the_end_working() {
    let fixture = Fixture::new(64 * MIB, MemoryOptions::default());
    let stream = fixture.stream(0);
    let small = fixture.allocate(1000, &stream);
    let large = fixture.allocate(4 * MIB, &stream);
    fixture.device.work(stream.raw(), small as usize, 1000, 100);
    fixture.device.state().lost = true;
    let error = fixture.manager.allocate(20 * MIB, stream.raw()).expect_err("the device is lost");
    assert_eq!(error.status, Status::DeviceLost, "{error}");
    assert_eq!(fixture.manager.get_statistics().blocks, 2);
    fixture.free(small, &stream);
    fixture.free(large, &stream);
    drop(stream);
    assert_eq!(fixture.manager.get_statistics().allocated, 0);
    let Fixture { manager, device, .. } = fixture;
    drop(manager);
    assert!(device.state().lost);
}

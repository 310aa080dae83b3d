//! What there is to be had, what is said when it is too little, and options that ask for too little.

use super::fixture::{Fixture, MIB};
use super::simulated::Simulated;
use nvbackend::device::RawHandle;
use nvbackend::error::Status;
use nvbackend::memory::options::{Limit, Margin, Spill};
use nvbackend::memory::{MemoryManager, MemoryOptions};
use std::sync::Arc;

fn limited(mib: u64) -> MemoryOptions {
    MemoryOptions { limit: Limit::Bytes(mib << 20), ..MemoryOptions::default() }
}

#[test]
fn no_size_is_too_large_to_be_refused() {
    for spill in [Spill::Never, Spill::Pinned, Spill::Managed] {
        let fixture = Fixture::new(1 << 30, MemoryOptions { spill, ..MemoryOptions::default() });
        let stream = fixture.stream(0);
        for bytes in (30..usize::BITS).map(|bit| (1usize << bit) + 1).chain([usize::MAX, isize::MAX as usize]) {
            let error = fixture.manager.allocate(bytes, stream.raw()).expect_err("more than the device has");
            assert_eq!(error.status, Status::OutOfMemory, "{error}");
            assert_eq!(error.memory.expect("the manager's state").requested, bytes as u64);
        }
        fixture.free(fixture.allocate(MIB, &stream), &stream);
    }
}

#[test]
fn a_range_has_room_for_a_unit_at_least() {
    let create = |range_bytes| {
        let device = Arc::new(Simulated::new(1 << 30));
        let options = MemoryOptions { range_bytes, ..MemoryOptions::default() };
        MemoryManager::with_source(super::sequence::executor(), device, options)
    };
    for bytes in [1, 4096, (2 << 20) - 1] {
        let error = create(bytes).err().expect("less than a unit");
        assert_eq!(error.status, Status::Configuration);
        assert!(error.message.contains(&format!("range_bytes is {bytes}; 0 or at least 2097152")), "{error}");
    }
    for bytes in [2 << 20, (2 << 20) + 1, 6 << 20] {
        let manager = create(bytes).expect("a unit");
        let pointer = manager.allocate(4096, RawHandle::NULL).expect("a block");
        let large = manager.allocate(5 << 20, RawHandle::NULL).expect("a block with addresses of its own");
        manager.free(pointer, RawHandle::NULL).expect("a live block");
        manager.free(large, RawHandle::NULL).expect("a live block");
    }
}

#[test]
fn a_part_of_nothing_is_a_limit() {
    let device = Simulated::new(1 << 30);
    nvbackend::memory::source::Source::allocate(&device, 1 << 30, RawHandle::NULL).expect("all of the device");
    for (device, limit) in [(device, Limit::OfFree(0.5)), (Simulated::new(1 << 30), Limit::OfTotal(1e-12))] {
        let fixture = Fixture::over(device, MemoryOptions { limit, ..MemoryOptions::default() });
        assert_eq!(fixture.manager.get_statistics().limit, 1);
        let error = fixture.manager.allocate(4096, RawHandle::NULL).expect_err("no room");
        assert_eq!((error.status, error.limit), (Status::OutOfMemory, 1));
    }
}

#[test]
fn more_than_the_limit_is_not_taken_at_the_start() {
    let create = |initial_bytes, mib, pooling| {
        let device = Arc::new(Simulated::new(1 << 30));
        let options = MemoryOptions { initial_bytes, pooling, margin: Margin::Bytes(0), ..limited(mib) };
        MemoryManager::with_source(super::sequence::executor(), device, options)
    };
    for (mib, pooling) in [(128, true), (128, false), (32, true)] {
        let error = create((mib << 20) + 1, mib, pooling).err().expect("more than the limit");
        assert_eq!((error.status, error.limit), (Status::OutOfMemory, mib << 20));
        create(mib << 20, mib, pooling).expect("all of the limit");
    }
    // What was taken on the way to failing is no part of what is missing.
    let error = create(129 << 20, 128, true).err().expect("more than the limit");
    assert!(error.advice.contains("by at least 2097152 bytes"), "{}", error.advice);
}

#[test]
fn what_is_called_available_can_be_had() {
    let fixture = Fixture::new(1 << 30, limited(128));
    let stream = fixture.stream(0);
    let blocks: Vec<_> = (0..128).map(|_| fixture.allocate(MIB, &stream)).collect();
    // Every second one: half of the memory is free, and no unit of it.
    blocks.iter().step_by(2).for_each(|&block| fixture.free(block, &stream));
    for bytes in [4096, 4 * MIB, 40 * MIB] {
        let error = fixture.manager.check_available(bytes as u64).expect_err("in pieces");
        assert_eq!(error.status, Status::OutOfMemory);
        let failure = error.memory.expect("the manager's state");
        assert_eq!((failure.cached, failure.largest_free), (64 << 20, 0), "that is fragmentation");
        fixture.manager.allocate(bytes, stream.raw()).expect_err("in pieces");
    }
    fixture.device.advance(1);
    fixture.manager.check_available(MIB as u64).expect("the size that was freed");
    blocks.iter().skip(1).step_by(2).for_each(|&block| fixture.free(block, &stream));
    for bytes in [4096, 4 * MIB, 40 * MIB, 128 * MIB] {
        fixture.manager.check_available(bytes as u64).expect("all is free");
        fixture.free(fixture.allocate(bytes, &stream), &stream);
    }
    fixture.manager.sleep(false).expect("asleep");
    let error = fixture.manager.check_available(4096).expect_err("asleep");
    assert_eq!(error.status, fixture.manager.allocate(4096, stream.raw()).expect_err("asleep").status);
    fixture.manager.wake().expect("awake");

    let fixture = Fixture::new(1 << 30, MemoryOptions { spill: Spill::Pinned, ..limited(128) });
    fixture.manager.check_available(200 << 20).expect("it spills");
    fixture.allocate(200 * MIB, &fixture.stream(0));
}

#[test]
fn following_the_advice_helps() {
    let fixture = Fixture::new(1 << 30, limited(128));
    let stream = fixture.stream(0);
    let blocks: Vec<_> = (0..64).map(|_| fixture.allocate(2 * MIB, &stream)).collect();
    for bytes in [4096, 5 * MIB] {
        let error = fixture.manager.allocate(bytes, stream.raw()).expect_err("full");
        assert!(error.advice.contains("by at least"), "{}", error.advice);
        let more: u64 = error.advice.split(' ').filter_map(|word| word.parse().ok()).next().expect("a number");
        let limit = fixture.manager.get_statistics().limit;
        fixture.manager.set_limit(limit + more - 1);
        fixture.manager.allocate(bytes, stream.raw()).expect_err("one byte too few");
        fixture.manager.set_limit(limit + more);
        fixture.allocate(bytes, &stream);
    }
    blocks.into_iter().for_each(|block| fixture.free(block, &stream));
    let error = fixture.manager.allocate_managed(usize::MAX / 2).expect_err("more than there is");
    assert!(error.memory.is_some() && error.advice.contains("no limit helps"), "{error}");
    assert_eq!(fixture.manager.get_statistics().failures, 5);
}

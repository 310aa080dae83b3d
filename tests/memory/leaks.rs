//! What leak tracking that samples knows of blocks of every kind.

use super::fixture::{Fixture, MIB};
use nvbackend::memory::options::{LeakTracking, Limit};
use nvbackend::memory::MemoryOptions;

fn sampled(interval: usize) -> MemoryOptions {
    MemoryOptions { leak_tracking: LeakTracking::Sampled(interval as u64), ..MemoryOptions::default() }
}

/// Bytes that the report knows the places of.
fn reported(fixture: &Fixture) -> usize {
    let report = fixture.manager.leak_report().expect("a report");
    let sites = report.lines().filter(|line| line.contains(" blocks, oldest "));
    sites.map(|line| line.split(' ').next().and_then(|bytes| bytes.parse::<usize>().ok()).expect("bytes")).sum()
}

#[test]
fn freed_blocks_are_no_leaks_whatever_they_were() {
    for limit in [Limit::None, Limit::Bytes(32 << 20)] {
        let fixture = Fixture::new(1 << 30, MemoryOptions { limit, ..sampled(4096) });
        let stream = fixture.stream(0);
        for bytes in [256, 4096, MIB, 5 * MIB] {
            let block = fixture.allocate(bytes, &stream);
            fixture.free(block, &stream);
        }
        for pointer in [fixture.manager.allocate_pinned(MIB), fixture.manager.allocate_managed(MIB)] {
            fixture.free(pointer.expect("host memory"), &stream);
        }
        assert_eq!(reported(&fixture), 0, "{}", fixture.manager.leak_report().expect("a report"));
    }
}

#[test]
fn one_in_so_many_bytes_is_known_whatever_its_size() {
    for (interval, bytes, count, pooling) in [
        (16 * MIB, 8 * MIB, 100, true),
        (64 * MIB, 2 * MIB, 300, true),
        (64 << 10, 512, 20_000, true),
        (4096, 256, 10_000, false),
    ] {
        let fixture = Fixture::new(4 << 30, MemoryOptions { pooling, ..sampled(interval) });
        let stream = fixture.stream(0);
        let blocks: Vec<_> = (0..count).map(|_| fixture.allocate(bytes, &stream)).collect();
        let (samples, expected) = (reported(&fixture) / bytes, count * bytes / (interval + bytes));
        assert!(
            (expected / 2..=2 * expected + 1).contains(&samples),
            "{samples} of {expected} samples of {bytes} bytes"
        );
        blocks.into_iter().for_each(|block| fixture.free(block, &stream));
        assert_eq!(reported(&fixture), 0);
    }
}

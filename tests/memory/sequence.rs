//! Sequences of operations, read from bytes, run against a manager over the simulated device and a naive model of what
//! must be true after each of them. Random tests, the kept corpus and the fuzzer share it.

use super::simulated::Simulated;
use nvbackend::cpu::CpuExecutor;
use nvbackend::error::Status;
use nvbackend::executor::Executor;
use nvbackend::memory::options::{Limit, Margin};
use nvbackend::memory::{MemoryManager, MemoryOptions, Pool};
use nvbackend::stream::{RawHandle, Stream};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

const STREAMS: usize = 4;

struct Live {
    bytes: usize,
    pool: Option<usize>,
}

pub struct Sequence {
    pub device: Arc<Simulated>,
    pub manager: Arc<MemoryManager>,
    executor: Arc<dyn Executor>,
    streams: Vec<Option<Stream>>,
    next_stream: usize,
    pools: Vec<Option<Pool>>,
    live: BTreeMap<usize, Live>,
    limit: u64,
    pooling: bool,
    asleep: bool,
}

pub fn executor() -> Arc<dyn Executor> {
    Arc::new(CpuExecutor::new(1).expect("one thread"))
}

/// Sizes around the interesting edges.
fn size(choice: u8, detail: u8) -> usize {
    let detail = usize::from(detail);
    match choice % 8 {
        0 => 1 + detail,
        1 => 256 * (1 + detail % 16),
        2 => 4096 + detail,
        3 => (64 << 10) + detail * 1000,
        4 => (1 << 20) - 128 + detail,
        5 => (2 << 20) * (1 + detail % 5) - detail % 2,
        6 => (2 << 20) + detail * 100_000,
        _ => (16 << 20) + detail * (1 << 20),
    }
}

impl Sequence {
    pub fn new(total: u64, limit: u64, options: MemoryOptions) -> Sequence {
        let device = Arc::new(Simulated::new(total));
        let executor = executor();
        let options = MemoryOptions { limit: Limit::Bytes(limit), margin: Margin::Bytes(0), ..options };
        let pooling = options.pooling;
        let manager = MemoryManager::with_source(executor.clone(), device.clone(), options).expect("a manager");
        let mut sequence = Sequence {
            device,
            manager: Arc::new(manager),
            executor,
            streams: Vec::new(),
            next_stream: 0x1000,
            pools: (0..2).map(|_| None).collect(),
            live: BTreeMap::new(),
            limit,
            pooling,
            asleep: false,
        };
        for _ in 0..STREAMS {
            let stream = sequence.new_stream();
            sequence.streams.push(Some(stream));
        }
        sequence
    }

    fn new_stream(&mut self) -> Stream {
        // Handles are used again, as drivers do.
        self.next_stream = 0x1000 + (self.next_stream - 0x1000 + 0x10) % 0x60;
        Stream::wrap(&self.executor, RawHandle(self.next_stream as *mut c_void))
    }

    fn stream(&self, choice: u8) -> RawHandle {
        match usize::from(choice) % (STREAMS + 1) {
            STREAMS => RawHandle::NULL,
            i => self.streams[i].as_ref().expect("replaced at once").raw(),
        }
    }

    /// Runs operations of three bytes each.
    pub fn run(&mut self, bytes: &[u8]) {
        for operation in bytes.chunks_exact(3) {
            let [kind, a, b] = operation else { unreachable!("chunks of three") };
            self.step(*kind, *a, *b);
            self.check();
        }
    }

    fn step(&mut self, kind: u8, a: u8, b: u8) {
        match kind % 16 {
            0..=5 => self.allocate(None, size(a, b), self.stream(kind / 16)),
            6 => self.allocate(Some(usize::from(kind / 16) % 2), size(a, b), self.stream(a)),
            7..=10 => self.free(usize::from(a), self.stream(b)),
            11 => self.use_block(usize::from(a), self.stream(b), u64::from(b) * 10),
            12 => self.device.advance(u64::from(a) * u64::from(b)),
            13 => match a % 4 {
                0 => drop(self.manager.trim(u64::from(b) << 20).expect("no failures")),
                1 => self.end_stream(usize::from(b) % STREAMS),
                2 => self.clear_pool(usize::from(b) % 2),
                _ => self.manager.reset_peaks(),
            },
            14 => self.sleep_or_wake(b.is_multiple_of(2)),
            _ => self.free_wrongly(usize::from(a), usize::from(b)),
        }
    }

    fn allocate(&mut self, pool: Option<usize>, bytes: usize, stream: RawHandle) {
        let result = match pool {
            None => self.manager.allocate(bytes, stream),
            Some(i) => {
                let pool = self.pools[i].get_or_insert_with(|| Pool::new(&self.manager, "pool").expect("a pool"));
                pool.allocate(bytes, stream)
            }
        };
        match result {
            Ok(pointer) => {
                let address = pointer as usize;
                assert_eq!(address % 256, 0);
                let before = self.live.range(..address + bytes).next_back();
                assert!(before.is_none_or(|(at, live)| at + live.bytes <= address), "{address:#x} is live already");
                self.device.expect_usable(stream, address, bytes);
                self.live.insert(address, Live { bytes, pool });
            }
            Err(error) => {
                let asleep = self.asleep && bytes as u64 <= self.device.total;
                let expected = if asleep { Status::MemoryAllocation } else { Status::OutOfMemory };
                assert_eq!(error.status, expected, "{error}");
            }
        }
    }

    fn pick(&self, choice: usize) -> Option<usize> {
        self.live.keys().nth(choice % self.live.len().max(1)).copied()
    }

    fn free(&mut self, choice: usize, stream: RawHandle) {
        let Some(address) = self.pick(choice) else { return };
        let live = self.live.remove(&address).expect("picked");
        // The caller's part: other streams that use the block were waited for.
        if stream != RawHandle::NULL {
            self.device.wait_for_uses(stream, address, live.bytes);
        }
        let pointer = address as *mut c_void;
        match live.pool.filter(|_| choice.is_multiple_of(2)) {
            Some(i) => self.pools[i].as_ref().expect("its block is live").free(pointer, stream),
            None => self.manager.free(pointer, stream),
        }
        .expect("a live block");
    }

    fn use_block(&mut self, choice: usize, stream: RawHandle, nanoseconds: u64) {
        if self.asleep || stream == RawHandle::NULL {
            return;
        }
        let Some(address) = self.pick(choice) else { return };
        let bytes = self.live[&address].bytes;
        self.device.wait_for_uses(stream, address, bytes);
        self.device.work(stream, address, bytes, nanoseconds);
    }

    fn end_stream(&mut self, i: usize) {
        drop(self.streams[i].take());
        let stream = self.new_stream();
        self.streams[i] = Some(stream);
    }

    fn clear_pool(&mut self, i: usize) {
        let Some(pool) = &self.pools[i] else { return };
        let expected = self.live.values().filter(|live| live.pool == Some(i)).count();
        assert_eq!(pool.clear().expect("no failures") as usize, expected);
        self.live.retain(|_, live| live.pool != Some(i));
        if expected % 2 == 1 {
            self.pools[i] = None;
        }
    }

    fn sleep_or_wake(&mut self, keep: bool) {
        if !self.pooling {
            assert_eq!(self.manager.sleep(keep).expect_err("no range").status, Status::Unsupported);
            return;
        }
        if self.asleep {
            self.manager.wake().expect("the memory is there");
        } else {
            self.manager.sleep(keep).expect("awake");
        }
        self.asleep = !self.asleep;
    }

    fn free_wrongly(&mut self, choice: usize, offset: usize) {
        let Some(address) = self.pick(choice) else { return };
        let inside = address + 1 + offset;
        if !self.live.contains_key(&inside) {
            let error = self.manager.free(inside as *mut c_void, RawHandle::NULL).expect_err("not a block");
            assert_eq!(error.status, Status::InvalidArgument);
        }
    }

    fn check(&self) {
        let statistics = self.manager.get_statistics();
        let bytes: usize = self.live.values().map(|live| live.bytes).sum();
        assert_eq!(statistics.allocated, bytes as u64);
        assert_eq!(statistics.blocks, self.live.len() as u64);
        assert!(statistics.peak >= statistics.allocated);
        if self.limit > 0 {
            assert!(statistics.reserved <= self.limit, "{} held of {}", statistics.reserved, self.limit);
        }
        assert_eq!(self.device.mapped_bytes() as u64, statistics.reserved);
        if let Some((&address, live)) = self.live.first_key_value() {
            let pointer = address as *const c_void;
            assert!(self.manager.owns(pointer, live.bytes) && !self.manager.owns(pointer, live.bytes + 1));
        }
        for (i, pool) in self.pools.iter().enumerate() {
            let bytes: usize = self.live.values().filter(|live| live.pool == Some(i)).map(|live| live.bytes).sum();
            assert_eq!(pool.as_ref().map_or(0, |pool| pool.statistics().allocated), bytes as u64);
        }
    }

    /// Frees everything and lets the manager go: nothing may be left anywhere.
    pub fn finish(mut self) {
        if self.asleep {
            self.sleep_or_wake(false);
        }
        while !self.live.is_empty() {
            self.free(0, RawHandle::NULL);
        }
        self.pools.clear();
        self.streams.clear();
        self.device.advance(1 << 40);
        self.manager.trim(0).expect("no failures");
        let statistics = self.manager.get_statistics();
        assert_eq!((statistics.allocated, statistics.blocks), (0, 0));
        assert_eq!(statistics.reserved, 0, "all of it could be given back");
        let device = self.device.clone();
        drop(self);
        device.expect_nothing_left();
    }
}

/// The fuzzer's entry: the first byte chooses the options.
pub fn run(bytes: &[u8]) {
    let Some((&choice, bytes)) = bytes.split_first() else { return };
    let options = MemoryOptions {
        pooling: choice & 1 == 0,
        zero_on_free: choice & 2 != 0,
        trace_events: if choice & 4 != 0 { 64 } else { 0 },
        leak_tracking: if choice & 8 != 0 {
            nvbackend::memory::options::LeakTracking::Full
        } else {
            nvbackend::memory::options::LeakTracking::Off
        },
        thread_cache_bytes: if choice & 16 != 0 { 1 << 20 } else { 16 << 20 },
        ..MemoryOptions::default()
    };
    let limit = if choice & 32 != 0 { 96 << 20 } else { 0 };
    let mut sequence = Sequence::new(256 << 20, limit, options);
    sequence.run(bytes);
    sequence.finish();
}

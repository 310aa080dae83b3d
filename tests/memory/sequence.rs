//! Sequences of operations, read from bytes, run against a manager over the simulated device and a naive model of what
//! must be true after each of them. Random tests, the kept corpus and the fuzzer share it.

use super::simulated::Simulated;
use nvbackend::cpu::CpuExecutor;
use nvbackend::device::RawHandle;
use nvbackend::error::Status;
use nvbackend::executor::Executor;
use nvbackend::memory::options::{LeakTracking, Limit, Margin, Spill};
use nvbackend::memory::{MemoryManager, MemoryOptions, Pool};
use nvbackend::stream::Stream;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, Weak};

const STREAMS: usize = 4;
/// The handle of the stream that callbacks free on.
const RECLAIM_STREAM: usize = 0x900;

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
    /// Live blocks that the reclaim callback may free.
    spares: Arc<Mutex<BTreeMap<usize, Live>>>,
    callback: Option<u64>,
    /// The pool that each stream is being captured into.
    captures: Vec<Option<usize>>,
    /// What may be held: the limit, or what was held when it was lowered.
    bound: u64,
    pooling: bool,
    spilling: bool,
    zeroing: bool,
    asleep: bool,
}

thread_local! {
    /// Looking at the machine takes longer than a sequence. Of another thread's streams nobody here may hear.
    static EXECUTOR: Arc<dyn Executor> = Arc::new(CpuExecutor::new(1).expect("one thread"));
}

pub fn executor() -> Arc<dyn Executor> {
    EXECUTOR.with(Arc::clone)
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
        let (pooling, spilling) = (options.pooling, options.spill != Spill::Never);
        let zeroing = options.zero_on_free;
        let manager = MemoryManager::with_source(executor.clone(), device.clone(), options).expect("a manager");
        let mut sequence = Sequence {
            device,
            manager: Arc::new(manager),
            executor,
            streams: Vec::new(),
            next_stream: 0x1000,
            pools: (0..2).map(|_| None).collect(),
            live: BTreeMap::new(),
            spares: Arc::default(),
            callback: None,
            captures: vec![None; STREAMS],
            bound: if limit == 0 { u64::MAX } else { limit },
            pooling,
            spilling,
            zeroing,
            asleep: false,
        };
        for _ in 0..STREAMS {
            let stream = sequence.new_stream();
            sequence.streams.push(Some(stream));
        }
        sequence
    }

    fn new_stream(&mut self) -> Stream {
        // Handles of streams that have ended are used again, as drivers do.
        let in_use = |raw: usize| self.streams.iter().flatten().any(|stream| stream.raw().0 as usize == raw);
        let mut next = self.next_stream;
        loop {
            next = 0x1000 + (next - 0x1000 + 0x10) % 0x60;
            if !in_use(next) {
                break;
            }
        }
        self.next_stream = next;
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
            0..=4 => self.allocate(None, size(a, b), 256, kind / 16),
            5 => self.allocate(None, size(a, b), 256 << (kind / 16 % 14), b),
            6 => self.allocate(Some(usize::from(kind / 16) % 2), size(a, b), 256 << (a / 8 % 4), a),
            7..=10 => self.free(usize::from(a), self.stream(b)),
            11 => self.use_block(usize::from(a), self.stream(b), u64::from(b) * 10),
            12 => self.device.advance(u64::from(a) * u64::from(b)),
            13 => match a % 10 {
                0 | 1 => drop(self.manager.trim(u64::from(b) << 20).expect("no failures")),
                2 => self.end_stream(usize::from(b) % STREAMS),
                3 => self.clear_pool(usize::from(b) % 2),
                4 => self.manager.reset_peaks(),
                5 => self.set_limit(u64::from(b) << 20),
                6 => self.begin_capture(usize::from(b) % STREAMS, usize::from(b / 4) % 2),
                7 => self.end_capture(usize::from(b) % STREAMS),
                8 => self.add_or_remove_callback(),
                _ => self.spare(usize::from(b)),
            },
            14 => self.sleep_or_wake(b.is_multiple_of(2)),
            _ => self.free_wrongly(usize::from(a), usize::from(b)),
        }
    }

    fn pool(&mut self, i: usize) -> &Pool {
        self.pools[i].get_or_insert_with(|| Pool::new(&self.manager, "pool").expect("a pool"))
    }

    fn allocate(&mut self, pool: Option<usize>, bytes: usize, alignment: usize, stream: u8) {
        let captured = self.captures.get(usize::from(stream) % (STREAMS + 1)).copied().flatten();
        let stream = self.stream(stream);
        let result = match pool {
            None => self.manager.allocate_aligned(bytes, alignment, stream),
            Some(i) => self.pool(i).allocate_aligned(bytes, alignment, stream),
        };
        match result {
            Ok(pointer) => {
                let address = pointer as usize;
                assert_eq!(address % alignment, 0);
                for live in [&self.live, &*self.spares.lock().expect("no panic")] {
                    let before = live.range(..address + bytes).next_back();
                    assert!(before.is_none_or(|(at, live)| at + live.bytes <= address), "{address:#x} is live already");
                }
                self.device.expect_usable(stream, address, bytes);
                self.live.insert(address, Live { bytes, pool: captured.or(pool) });
            }
            Err(error) => {
                let asleep = self.asleep && (self.spilling || bytes as u64 <= self.device.total);
                let expected = if asleep { Status::MemoryAllocation } else { Status::OutOfMemory };
                assert_eq!(error.status, expected, "{error}");
            }
        }
    }

    fn pick(&self, choice: usize) -> Option<usize> {
        self.live.keys().nth(choice % self.live.len().max(1)).copied()
    }

    /// Overwriting without a stream waits for all work, which captures forbid.
    fn needs_streams(&self) -> bool {
        self.zeroing && self.captures.iter().any(Option::is_some)
    }

    fn free(&mut self, choice: usize, stream: RawHandle) {
        let stream = if stream == RawHandle::NULL && self.needs_streams() { self.stream(0) } else { stream };
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
        // What is captured runs when the graph does.
        if self.asleep || stream == RawHandle::NULL || self.device.is_recording(stream) {
            return;
        }
        let Some(address) = self.pick(choice) else { return };
        let bytes = self.live[&address].bytes;
        self.device.wait_for_uses(stream, address, bytes);
        self.device.work(stream, address, bytes, nanoseconds);
    }

    fn end_stream(&mut self, i: usize) {
        self.end_capture(i);
        drop(self.streams[i].take());
        let stream = self.new_stream();
        self.streams[i] = Some(stream);
    }

    fn clear_pool(&mut self, i: usize) {
        if self.needs_streams() {
            return;
        }
        let Some(pool) = &self.pools[i] else { return };
        let expected = self.live.values().filter(|live| live.pool == Some(i)).count();
        assert_eq!(pool.clear().expect("no failures") as usize, expected);
        self.live.retain(|_, live| live.pool != Some(i));
        if expected % 2 == 1 {
            (0..STREAMS).filter(|&stream| self.captures[stream] == Some(i)).for_each(|stream| {
                self.device.state().capturing.retain(|raw| *raw != self.stream(stream as u8).0 as usize);
            });
            self.captures.iter_mut().filter(|pool| **pool == Some(i)).for_each(|pool| *pool = None);
            self.pools[i] = None;
        }
    }

    fn set_limit(&mut self, limit: u64) {
        self.manager.set_limit(limit);
        let limit = if limit == 0 { u64::MAX } else { limit };
        self.bound = limit.max(self.manager.get_statistics().reserved);
    }

    fn begin_capture(&mut self, stream: usize, pool: usize) {
        if self.asleep || self.captures[stream].is_some() {
            return;
        }
        self.pool(pool);
        let (pool_object, handle) = (self.pools[pool].as_ref(), self.streams[stream].as_ref());
        let (pool_object, handle) = (pool_object.expect("made above"), handle.expect("replaced at once"));
        pool_object.begin_capture(handle.raw()).expect("a stream that is not captured");
        self.device.state().capturing.push(handle.raw().0 as usize);
        self.captures[stream] = Some(pool);
    }

    fn end_capture(&mut self, stream: usize) {
        let Some(pool) = self.captures[stream].take() else { return };
        let handle = self.streams[stream].as_ref().expect("replaced at once");
        self.device.state().capturing.retain(|raw| *raw != handle.raw().0 as usize);
        self.pools[pool].as_ref().expect("its capture ran").end_capture(handle.raw()).expect("a capture that runs");
    }

    fn add_or_remove_callback(&mut self) {
        if let Some(id) = self.callback.take() {
            return self.manager.remove_reclaim(id).expect("added below");
        }
        let (manager, spares): (Weak<MemoryManager>, _) = (Arc::downgrade(&self.manager), self.spares.clone());
        let device = self.device.clone();
        let reclaim = move |wanted: u64| {
            let (Some(manager), mut freed) = (manager.upgrade(), 0) else { return 0 };
            while freed < wanted {
                let Some((address, live)) = spares.lock().expect("no panic").pop_first() else { break };
                let stream = RawHandle(RECLAIM_STREAM as *mut c_void);
                device.wait_for_uses(stream, address, live.bytes);
                manager.free(address as *mut c_void, stream).expect("a live block");
                freed += live.bytes as u64;
            }
            freed
        };
        self.callback = Some(self.manager.add_reclaim(0, Box::new(reclaim)));
    }

    fn spare(&mut self, choice: usize) {
        let Some(address) = self.pick(choice) else { return };
        if self.live[&address].pool.is_none() {
            let live = self.live.remove(&address).expect("picked");
            self.spares.lock().expect("no panic").insert(address, live);
        }
    }

    fn sleep_or_wake(&mut self, keep: bool) {
        if !self.pooling {
            assert_eq!(self.manager.sleep(keep).expect_err("no range").status, Status::Unsupported);
            return;
        }
        if self.asleep {
            // The limit may have been lowered below what comes back, or other blocks may have taken the room.
            if let Err(error) = self.manager.wake() {
                assert_eq!(error.status, Status::OutOfMemory, "{error}");
                return;
            }
        } else if self.captures.iter().any(Option::is_some) {
            assert_eq!(self.manager.sleep(keep).expect_err("a capture runs").status, Status::InvalidArgument);
            return;
        } else {
            self.manager.sleep(keep).expect("awake");
        }
        self.asleep = !self.asleep;
    }

    fn free_wrongly(&mut self, choice: usize, offset: usize) {
        let Some(address) = self.pick(choice) else { return };
        let inside = address + 1 + offset;
        let starts_block = |live: &BTreeMap<usize, Live>| live.contains_key(&inside);
        if !starts_block(&self.live) && !starts_block(&self.spares.lock().expect("no panic")) {
            let error = self.manager.free(inside as *mut c_void, RawHandle::NULL).expect_err("not a block");
            assert_eq!(error.status, Status::InvalidArgument);
        }
    }

    fn check(&self) {
        let statistics = self.manager.get_statistics();
        let spares = self.spares.lock().expect("no panic");
        let bytes: usize = self.live.values().chain(spares.values()).map(|live| live.bytes).sum();
        assert_eq!(statistics.allocated, bytes as u64);
        assert_eq!(statistics.blocks as usize, self.live.len() + spares.len());
        assert!(statistics.peak >= statistics.allocated);
        assert!(statistics.reserved <= self.bound, "{} held of {}", statistics.reserved, self.bound);
        let mapped = self.device.mapped_bytes() as u64;
        assert!(mapped == statistics.reserved || self.spilling && mapped >= statistics.reserved + statistics.spilled);
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
        (0..STREAMS).for_each(|stream| self.end_capture(stream));
        if self.asleep {
            self.set_limit(0);
            self.sleep_or_wake(false);
            assert!(!self.asleep, "nothing holds it back");
        }
        let spares = std::mem::take(&mut *self.spares.lock().expect("no panic"));
        self.live.extend(spares);
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
        leak_tracking: if choice & 8 != 0 { LeakTracking::Full } else { LeakTracking::Off },
        thread_cache_bytes: Some(if choice & 16 != 0 { 1 << 20 } else { 16 << 20 }),
        spill: if choice & 64 != 0 { Spill::Pinned } else { Spill::Never },
        ..MemoryOptions::default()
    };
    let limit = if choice & 32 != 0 { 96 << 20 } else { 0 };
    let mut sequence = Sequence::new(256 << 20, limit, options);
    sequence.run(bytes);
    sequence.finish();
}

//! Many threads over the device in virtual time, which panics when a block is handed out, unmapped or waited for too early.
//! Over host memory (threads.rs) streams mean nothing; here they end, are shared and are captured while others allocate.

use super::fixture::{Fixture, MIB};
use super::gate::Gate;
use super::random::Random;
use super::simulated::{Call, Simulated};
use nvbackend::device::RawHandle;
use nvbackend::error::{Error, Status};
use nvbackend::memory::options::Limit;
use nvbackend::memory::{MemoryOptions, Pool};
use nvbackend::stream::Stream;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const WORKERS: usize = 3;
const STEPS: usize = 1200;
const HELD: usize = 24;
/// The driver's streams that all workers have handles of. They live as long as the fixture.
const SHARED: usize = 2;
/// Numbers of the streams of one thread each.
const OWN: usize = 10;
const POOLING: usize = 20;
const CAPTURED: usize = 21;
/// Places at the gate, after the workers'.
const POOLING_PLACE: usize = WORKERS;
const CAPTURING_PLACE: usize = WORKERS + 1;

/// Few sizes, so that threads want each other's blocks.
fn size(random: &mut Random) -> usize {
    [4096, 64 << 10, MIB, 2 * MIB, 4 * MIB, 6 * MIB][random.index(6)]
}

#[derive(Clone, Copy)]
struct Block {
    pointer: *mut c_void,
    bytes: usize,
}

impl Block {
    fn address(self) -> usize {
        self.pointer as usize
    }
}

/// No memory, asleep, or a capture that keeps the driver from saying whether there is some.
fn expect_temporary(error: &Error) {
    let expected = matches!(error.status, Status::OutOfMemory | Status::MemoryAllocation) || error.cuda_code == 900;
    assert!(expected, "{error}");
}

/// Allocates, and once nobody sleeps queues work on the block. `None`: there was none.
fn use_block(
    fixture: &Fixture,
    gate: &Gate,
    place: usize,
    stream: &Stream,
    bytes: usize,
    allocate: impl FnOnce(usize, RawHandle) -> nvbackend::error::Result<*mut c_void>,
) -> Option<Block> {
    let result = allocate(bytes, stream.raw());
    // Whoever finds the manager asleep goes on when it is awake.
    let _awake = gate.enter(place);
    let pointer = result.inspect_err(expect_temporary).ok()?;
    let block = Block { pointer, bytes };
    if !fixture.device.is_recording(stream.raw()) {
        fixture.device.expect_usable(stream.raw(), block.address(), bytes);
        fixture.device.work(stream.raw(), block.address(), bytes, 200);
    }
    Some(block)
}

/// A worker's handles: of its own stream, and of those that all share.
struct Handles {
    streams: Vec<Stream>,
    numbers: Vec<usize>,
}

impl Handles {
    fn new(fixture: &Fixture, thread: usize) -> Handles {
        let numbers: Vec<_> = (0..SHARED).chain([OWN + thread]).collect();
        Handles { streams: numbers.iter().map(|&number| fixture.stream(number)).collect(), numbers }
    }

    /// One handle ends and another one is made, of a stream that others use, or of a new stream where the old one was.
    fn renew(&mut self, fixture: &Fixture, which: usize) {
        let raw = self.streams[which].raw();
        let number = self.numbers[which];
        drop(self.streams.swap_remove(which));
        self.numbers.swap_remove(which);
        if number >= OWN {
            fixture.device.state().forget_stream(raw);
        }
        self.streams.push(fixture.stream(number));
        self.numbers.push(number);
    }
}

/// Replaces random blocks by new ones, on streams that end and begin.
fn work(fixture: &Fixture, gate: &Gate, thread: usize) {
    let mut random = Random(thread as u64 + 1);
    let mut handles = Handles::new(fixture, thread);
    let mut held: Vec<Block> = Vec::new();
    let free = |random: &mut Random, handles: &Handles, block: Block| {
        let raw = handles.streams[random.index(SHARED + 1)].raw();
        fixture.device.wait_for_uses(raw, block.address(), block.bytes);
        // Now and then without a stream, which stands for all of them.
        let raw = if random.index(16) == 0 { RawHandle::NULL } else { raw };
        fixture.manager.free(block.pointer, raw).expect("a live block");
    };
    for _ in 0..STEPS {
        if held.len() == HELD {
            let block = held.swap_remove(random.index(HELD));
            free(&mut random, &handles, block);
        }
        let stream = &handles.streams[random.index(SHARED + 1)];
        let manager = &fixture.manager;
        held.extend(use_block(fixture, gate, thread, stream, size(&mut random), |bytes, raw| {
            manager.allocate(bytes, raw)
        }));
        match random.index(16) {
            0 | 1 => handles.renew(fixture, random.index(SHARED + 1)),
            2..=4 => fixture.device.advance(random.index(2000) as u64),
            _ => {}
        }
    }
    held.into_iter().for_each(|block| free(&mut random, &handles, block));
}

/// Pools whose blocks go with them, or back on a stream that others use.
fn pool(fixture: &Fixture, gate: &Gate, done: &AtomicBool) {
    let mut random = Random(77);
    let streams = [fixture.stream(0), fixture.stream(POOLING)];
    while !done.load(Ordering::Relaxed) {
        let pool = Pool::new(&fixture.manager, "short-lived").expect("a pool");
        for _ in 0..8 {
            let stream = &streams[random.index(2)];
            let block = use_block(fixture, gate, POOLING_PLACE, stream, size(&mut random), |bytes, raw| {
                pool.allocate(bytes, raw)
            });
            if let (Some(block), 0) = (block, random.index(2)) {
                pool.free(block.pointer, stream.raw()).expect("a live block of the pool");
            }
        }
    }
}

/// Graphs: their memory is used by what is replayed after the capture, until the pool goes.
fn capture(fixture: &Fixture, gate: &Gate, done: &AtomicBool) {
    let mut random = Random(99);
    let stream = fixture.stream(CAPTURED);
    let raw = stream.raw();
    while !done.load(Ordering::Relaxed) {
        let graph = Pool::new(&fixture.manager, "graph").expect("a pool");
        let mut blocks = Vec::new();
        {
            // Nobody captures and sleeps at once.
            let _awake = gate.enter(CAPTURING_PLACE);
            graph.begin_capture(stream.raw()).expect("no capture yet");
            fixture.device.state().capturing.push(raw.0 as usize);
            for _ in 0..4 {
                let bytes = size(&mut random);
                match fixture.manager.allocate(bytes, raw) {
                    Ok(pointer) => blocks.push(Block { pointer, bytes }),
                    Err(error) => expect_temporary(&error),
                }
            }
            fixture.device.state().capturing.clear();
            graph.end_capture(stream.raw()).expect("the capture ends");
            for block in &blocks {
                fixture.device.expect_usable(raw, block.address(), block.bytes);
                fixture.device.work(raw, block.address(), block.bytes, 500);
            }
        }
        drop(graph);
        // Outside of captures the stream is like any other, and its blocks are for all who wait for it.
        for _ in 0..8 {
            let manager = &fixture.manager;
            let allocate = |bytes, raw| manager.allocate(bytes, raw);
            if let Some(block) = use_block(fixture, gate, CAPTURING_PLACE, &stream, size(&mut random), allocate) {
                manager.free(block.pointer, raw).expect("a live block");
            }
        }
    }
}

fn trim(fixture: &Fixture, done: &AtomicBool) {
    let mut keep = 0;
    while !done.load(Ordering::Relaxed) {
        keep = (32 << 20) - keep;
        // A capture that has begun meanwhile refuses the wait.
        let _ = fixture.manager.trim(keep).inspect_err(expect_temporary);
        assert!(fixture.manager.get_statistics().reserved <= fixture.device.total);
    }
}

fn sleep(fixture: &Fixture, gate: &Gate, done: &AtomicBool) {
    let mut keep = false;
    while !done.load(Ordering::Relaxed) {
        keep = !keep;
        let closed = gate.close();
        fixture.manager.sleep(keep).expect("no capture runs");
        for _ in 0..20 {
            std::thread::yield_now();
        }
        fixture.manager.wake().expect("what was given back is there");
        drop(closed);
        // Others get a turn.
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn expect_all_given_back(fixture: Fixture) {
    fixture.device.advance(1 << 40);
    let statistics = fixture.manager.get_statistics();
    assert_eq!((statistics.blocks, statistics.allocated), (0, 0));
    fixture.manager.trim(0).expect("no failures");
    assert_eq!(fixture.manager.get_statistics().reserved, 0, "held by nobody, and lost");
    let device = fixture.device.clone();
    drop(fixture);
    device.expect_nothing_left();
}

/// What a thread does until the workers are done.
type Other<'a> = &'a (dyn Fn(&Fixture, &Gate, &AtomicBool) + Sync);

/// Workers, and the others beside them.
fn beside_workers(others: &[Other]) {
    let mut device = Simulated::new(256 << 20);
    device.threaded = true;
    let fixture = Fixture::over(device, MemoryOptions { limit: Limit::Bytes(200 << 20), ..MemoryOptions::default() });
    let shared: Vec<_> = (0..SHARED).map(|number| fixture.stream(number)).collect();
    let (gate, done) = (Gate::default(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (fixture, gate, done) = (&fixture, &gate, &done);
        let workers: Vec<_> = (0..WORKERS).map(|thread| scope.spawn(move || work(fixture, gate, thread))).collect();
        let others: Vec<_> = others.iter().map(|other| scope.spawn(move || other(fixture, gate, done))).collect();
        let results: Vec<_> = workers.into_iter().map(|thread| thread.join()).collect();
        done.store(true, Ordering::Relaxed);
        let rest: Vec<_> = others.into_iter().map(|thread| thread.join()).collect();
        results.into_iter().chain(rest).for_each(|result| result.expect("no panic"));
    });
    drop(shared);
    expect_all_given_back(fixture);
}

#[test]
fn streams_end_while_others_use_them() {
    beside_workers(&[]);
}

#[test]
fn pools_come_and_go_while_streams_do() {
    beside_workers(&[&pool, &|fixture, _, done| trim(fixture, done)]);
}

#[test]
fn captures_begin_and_end_while_others_work() {
    beside_workers(&[&capture, &pool, &|fixture, _, done| trim(fixture, done)]);
}

#[test]
fn the_manager_sleeps_while_others_allocate() {
    beside_workers(&[&sleep, &pool, &|fixture, _, done| trim(fixture, done)]);
}

/// One of two handles of a stream ends, while work is queued through the other behind the event that is recorded then.
#[test]
fn a_handle_ends_while_its_stream_is_used_through_another() {
    let fixture = Fixture::new(1 << 30, MemoryOptions::default());
    let (one, same, two) = (fixture.stream(0), fixture.stream(0), fixture.stream(1));
    let sizes = [MIB, MIB, 4 * MIB, 4 * MIB];
    let allocate = || sizes.map(|bytes| fixture.allocate(bytes, &one));
    let free = |blocks: [*mut c_void; 4]| blocks.into_iter().for_each(|block| fixture.free(block, &one));
    free(allocate());
    fixture.device.hold(Call::EventRecord);
    std::thread::scope(|scope| {
        let ending = scope.spawn(|| drop(same));
        while !fixture.device.is_holding() && !ending.is_finished() {
            std::thread::yield_now();
        }
        let blocks = allocate();
        for (block, bytes) in blocks.into_iter().zip(sizes) {
            fixture.device.work(one.raw(), block as usize, bytes, 1000);
        }
        free(blocks);
        fixture.device.let_go();
        ending.join().expect("no panic");
    });
    // The fixture panics if the other stream gets what the first one still uses.
    for bytes in [MIB, 4 * MIB] {
        (0..20).map(|_| fixture.allocate(bytes, &two)).for_each(|block| assert!(!block.is_null()));
    }
}

/// An allocation that has begun before the manager falls asleep goes on when it is asleep.
#[test]
fn an_allocation_that_sleep_overtakes_loses_no_memory() {
    let options = MemoryOptions { thread_cache_bytes: Some(0), ..MemoryOptions::default() };
    let fixture = Fixture::new(1 << 30, options);
    let (one, two) = (fixture.stream(0), fixture.stream(1));
    // Both blocks of a slab. The one that is freed is asked about for another stream, which needs new memory meanwhile.
    let [live, freed] = [(); 2].map(|()| fixture.allocate(MIB, &one));
    fixture.device.work(one.raw(), freed as usize, MIB, 1000);
    fixture.free(freed, &one);
    fixture.device.hold(Call::EventQuery);
    let allocated = std::thread::scope(|scope| {
        let allocating = scope.spawn(|| fixture.manager.allocate(MIB, two.raw()).map(|pointer| pointer as usize));
        while !fixture.device.is_holding() {
            assert!(!allocating.is_finished(), "the other stream's block is asked about");
            std::thread::yield_now();
        }
        fixture.manager.sleep(true).expect("awake");
        fixture.device.let_go();
        allocating.join().expect("no panic")
    });
    fixture.manager.wake().expect("enough memory");
    match allocated {
        Ok(address) => {
            fixture.device.expect_usable(two.raw(), address, MIB);
            fixture.free(address as *mut c_void, &two);
        }
        Err(error) => assert_eq!(error.status, Status::MemoryAllocation, "{error}"),
    }
    fixture.free(live, &one);
    drop((one, two));
    expect_all_given_back(fixture);
}

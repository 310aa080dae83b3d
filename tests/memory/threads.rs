//! Many threads at once over host memory, which they write to: a block that two have, or that comes to its next owner without
//! what the last one did being over, shows in its bytes, and ThreadSanitizer (`make test-tsan`) sees it even where it does
//! not.

use super::gate::Gate;
use super::random::Random;
use super::sequence::executor;
use nvbackend::device::RawHandle;
use nvbackend::error::Status;
use nvbackend::memory::options::{LeakTracking, Limit};
use nvbackend::memory::{MemoryManager, MemoryOptions, Pool};
use nvbackend::stream::Stream;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::Arc;
use std::time::Duration;

const THREADS: u64 = 4;
const STEPS: u64 = 10_000;
const HELD: usize = 40;

/// Mostly small, now and then runs of units; at least two words.
fn size(random: &mut Random) -> usize {
    match random.below(64) {
        0 => (1 << 20) + random.index(5 << 20),
        1..=8 => 16 + random.index(1 << 20),
        _ => 16 + random.index(16 << 10),
    }
}

/// A block with its first and last words written.
struct Block {
    pointer: *mut c_void,
    bytes: usize,
    word: u64,
}

// SAFETY: an owned block of host memory.
unsafe impl Send for Block {}

impl Block {
    fn new(pointer: *mut c_void, bytes: usize, word: u64) -> Block {
        let block = Block { pointer, bytes, word };
        // SAFETY: `bytes` of the host's memory from there on are this block's.
        unsafe { block.words().into_iter().for_each(|at| at.write_unaligned(word)) };
        block
    }

    fn words(&self) -> [*mut u64; 2] {
        let start = self.pointer.cast::<u8>();
        // SAFETY: inside the block, which has room for both.
        [start.cast(), unsafe { start.add(self.bytes - 8) }.cast()]
    }

    /// Whoever frees it looks whether anybody else wrote to it.
    fn check(self) -> *mut c_void {
        for at in self.words() {
            // SAFETY: as in `new`.
            assert_eq!(unsafe { at.read_unaligned() }, self.word, "another owner wrote to the block");
        }
        self.pointer
    }
}

fn manager(options: MemoryOptions) -> Arc<MemoryManager> {
    let options = MemoryOptions { range_bytes: 4 << 30, ..options };
    Arc::new(MemoryManager::new(executor(), options).expect("a manager"))
}

fn allocate(manager: &MemoryManager, gate: &Gate, random: &mut Random, thread: u64, step: u64) -> Option<Block> {
    let bytes = size(random);
    let result = manager.allocate(bytes, RawHandle::NULL);
    // Whoever finds the manager asleep goes on when it is awake, and so does whoever has got a block.
    let _awake = gate.enter(thread as usize);
    match result {
        Ok(pointer) => Some(Block::new(pointer, bytes, thread << 32 | step)),
        Err(error) => {
            assert!(matches!(error.status, Status::OutOfMemory | Status::MemoryAllocation), "{error}");
            None
        }
    }
}

/// Replaces random blocks by new ones.
fn churn(manager: &MemoryManager, gate: &Gate, thread: u64) {
    let free = |block: Block| {
        let awake = gate.enter(thread as usize);
        let pointer = block.check();
        drop(awake);
        manager.free(pointer, RawHandle::NULL).expect("a live block");
    };
    let mut random = Random(thread + 1);
    let mut held: Vec<Block> = Vec::new();
    for step in 0..STEPS {
        if held.len() == HELD {
            free(held.swap_remove(random.index(HELD)));
        }
        held.extend(allocate(manager, gate, &mut random, thread, step));
    }
    held.into_iter().for_each(free);
}

/// Joins each thread by its handle: of what a scope's end waits for, ThreadSanitizer sees nothing.
fn run_threads(body: impl Fn(u64) + Sync) {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || body(thread))).collect();
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    });
}

fn expect_nothing_live(manager: &MemoryManager) {
    let statistics = manager.get_statistics();
    assert_eq!((statistics.blocks, statistics.allocated), (0, 0));
    manager.trim(0).expect("no failures");
    assert_eq!(manager.get_statistics().reserved, 0);
}

#[test]
fn threads_that_keep_to_themselves() {
    let manager = manager(MemoryOptions::default());
    run_threads(|thread| churn(&manager, &Gate::default(), thread));
    expect_nothing_live(&manager);
}

#[test]
fn threads_under_a_limit_that_take_from_each_other() {
    let limit = Limit::Bytes(64 << 20);
    for leak_tracking in [LeakTracking::Off, LeakTracking::Sampled(1 << 20)] {
        let manager = manager(MemoryOptions { limit, leak_tracking, zero_on_free: true, ..MemoryOptions::default() });
        run_threads(|thread| churn(&manager, &Gate::default(), thread));
        assert!(manager.get_statistics().recovery_steps[0].tried > 0, "the limit was never reached");
        expect_nothing_live(&manager);
    }
}

#[test]
fn blocks_that_other_threads_free() {
    let manager = manager(MemoryOptions { trace_events: 1000, ..MemoryOptions::default() });
    let gate = Gate::default();
    let boxes: Vec<_> = (0..THREADS).map(|_| AtomicPtr::<Block>::new(std::ptr::null_mut())).collect();
    let take = |from: &AtomicPtr<Block>| {
        let block = from.swap(std::ptr::null_mut(), Ordering::Acquire);
        // SAFETY: put there by `Box::into_raw` below, and taken once.
        (!block.is_null()).then(|| *unsafe { Box::from_raw(block) })
    };
    let free = |block: Block| manager.free(block.check(), RawHandle::NULL).expect("a live block");
    run_threads(|thread| {
        let (mine, next) = (&boxes[thread as usize], &boxes[((thread + 1) % THREADS) as usize]);
        let mut random = Random(thread + 1);
        for step in 0..STEPS {
            let block = allocate(&manager, &gate, &mut random, thread, step).expect("no limit");
            let block = Box::into_raw(Box::new(block));
            // What its reader has not fetched by now goes back to the thread that it came from.
            let before = next.swap(block, Ordering::AcqRel);
            if !before.is_null() {
                // SAFETY: as above.
                free(*unsafe { Box::from_raw(before) });
            }
            take(mine).into_iter().for_each(free);
        }
    });
    boxes.iter().filter_map(take).for_each(free);
    expect_nothing_live(&manager);
}

/// Places at the gate, after those of the threads that churn.
const POOLING: usize = 2;
const POOLING_TOO: usize = 3;
const SLEEPS: usize = 12;

#[test]
fn pools_come_and_go_while_others_drain_trim_sleep_and_count() {
    let manager = manager(MemoryOptions { limit: Limit::Bytes(256 << 20), ..MemoryOptions::default() });
    let (gate, done, executor) = (Gate::default(), AtomicBool::new(false), executor());
    std::thread::scope(|scope| {
        let (manager, gate, done, executor) = (&manager, &gate, &done, &executor);
        let churning: Vec<_> = (0..2).map(|thread| scope.spawn(move || churn(manager, gate, thread))).collect();
        let pooling = scope.spawn(move || {
            let mut random = Random(77);
            for round in 0..200 {
                let pool = Pool::new(manager, "short-lived").expect("a pool");
                let shared = &pool;
                let allocate = move |random: &mut Random, place: usize, word| {
                    let bytes = size(random);
                    let result = shared.allocate(bytes, RawHandle::NULL);
                    let _awake = gate.enter(place);
                    Some(Block::new(result.ok()?, bytes, word))
                };
                let check = |block: Block, place: usize| {
                    let _awake = gate.enter(place);
                    block.check()
                };
                let blocks: Vec<Block> = (0..20).filter_map(|i| allocate(&mut random, POOLING, i)).collect();
                std::thread::scope(|inner| {
                    // Another thread knows the pool's magazines as well, and ends before the pool does.
                    let thread = inner.spawn(move || {
                        let mut random = Random(round + 1);
                        let mine = (0..20).filter_map(|i| allocate(&mut random, POOLING_TOO, i));
                        let mine: Vec<Block> = mine.collect();
                        blocks.into_iter().chain(mine).for_each(|block| {
                            let pointer = check(block, POOLING_TOO);
                            shared.free(pointer, RawHandle::NULL).expect("a live block of the pool");
                        });
                    });
                    thread.join().expect("no panic");
                });
                // What is left goes with the pool.
                let left: Vec<Block> = (0..5).filter_map(|i| allocate(&mut random, POOLING, i)).collect();
                let count = left.len() as u64;
                left.into_iter().for_each(|block| assert!(!check(block, POOLING).is_null()));
                match round % 3 {
                    0 => assert_eq!(pool.clear().expect("no failures"), count),
                    1 => assert_eq!(pool.statistics().blocks, count),
                    _ => {}
                }
            }
        });
        let trimming = scope.spawn(move || {
            let mut round = 0;
            while !done.load(Ordering::Relaxed) {
                round += 1;
                manager.trim(if round % 2 == 0 { 0 } else { 32 << 20 }).expect("no failures");
                let statistics = manager.get_statistics();
                assert!(statistics.reserved <= 256 << 20);
                manager.reset_peaks();
                drop(manager.leak_report());
                std::thread::yield_now();
            }
        });
        let streaming = scope.spawn(move || {
            // Streams end while their magazines are in use; on the host they all mean the same.
            while !done.load(Ordering::Relaxed) {
                let stream = Stream::new(executor, 0).expect("a stream");
                let block = manager.allocate(5000, stream.raw());
                if let Ok(pointer) = block {
                    manager.free(pointer, stream.raw()).expect("a live block");
                }
            }
        });
        let sleeping = scope.spawn(move || {
            // What is kept is copied twice, while all others wait: a few times must do.
            for _ in 0..SLEEPS {
                let closed = gate.close();
                manager.sleep(true).expect("awake");
                for _ in 0..100 {
                    std::thread::yield_now();
                }
                manager.wake().expect("what was given back is there");
                drop(closed);
                // Others get a turn.
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let results: Vec<_> = churning.into_iter().chain([pooling]).map(|thread| thread.join()).collect();
        done.store(true, Ordering::Relaxed);
        let rest = [trimming.join(), streaming.join(), sleeping.join()];
        results.into_iter().chain(rest).for_each(|result| result.expect("no panic"));
    });
    expect_nothing_live(&manager);
}

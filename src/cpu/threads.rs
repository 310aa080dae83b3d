//! The executor's threads: fork, compute, join.
//!
//! Decoding one token is about a hundred short parallel regions, one after the other, so what counts is how fast a
//! region starts and ends. The workers therefore look for the next region for a moment before they sleep, and the
//! caller works too: a region is done when its tasks are, not when every worker has woken up.
//!
//! A region has numbered tasks that any thread may take in any order. Which thread computes a task must not change its
//! result; then neither does the number of threads.

use crate::thread::{spawn, Handle};
use std::alloc::{alloc_zeroed, Layout};
use std::any::Any;
use std::io::ErrorKind;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long an idle worker looks for work before it sleeps: longer than the serial stretches between the operations of
/// one decode step.
const SPIN: Duration = Duration::from_micros(100);

/// f32 values that each thread has for a task's intermediate results.
pub const SCRATCH_FLOATS: usize = 256 * 1024;

/// A thread's working memory, aligned to a cache line. Its content is whatever the last task left.
///
/// The system hands out zero pages as they are touched, so a thread that stays idle costs next to nothing.
pub struct Scratch(Vec<f32>);

const CACHE_LINE_FLOATS: usize = 16;

impl Scratch {
    fn new() -> std::io::Result<Scratch> {
        let length = SCRATCH_FLOATS + CACHE_LINE_FLOATS;
        let layout = Layout::array::<f32>(length).expect("a few megabytes");
        // SAFETY: the layout is not empty; zero bytes are valid floats, and a Vec frees with this very layout.
        unsafe {
            let floats = alloc_zeroed(layout).cast::<f32>();
            if floats.is_null() {
                return Err(ErrorKind::OutOfMemory.into());
            }
            Ok(Scratch(Vec::from_raw_parts(floats, length, length)))
        }
    }

    /// All of it.
    pub fn floats(&mut self) -> &mut [f32] {
        let skip = self.0.as_ptr().align_offset(CACHE_LINE_FLOATS * size_of::<f32>());
        &mut self.0[skip..skip + SCRATCH_FLOATS]
    }
}

type Body<'a> = dyn Fn(usize, &mut Scratch) + Sync + 'a;

/// The region being computed. Valid for a worker from a successful [`Shared::enter`] to its [`Shared::leave`].
#[derive(Clone, Copy)]
struct Region {
    body: *const Body<'static>,
    tasks: usize,
}

struct Shared {
    /// The open flag in the lowest bit, workers inside in the next [`INSIDE_BITS`], the region's number above.
    state: AtomicUsize,
    region: std::cell::UnsafeCell<Region>,
    /// The next task that nobody has taken.
    next: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    sleepers: Mutex<usize>,
    wake: Condvar,
    /// A copy of the number of sleepers that the caller can read without the lock.
    sleeping: AtomicUsize,
}

// SAFETY: `region` is written only by the caller that holds the pool's lock, while no worker is inside (`state` is
// closed and empty), and read only by workers inside. `Body` is Sync.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer in `region` is used only while the caller keeps the body alive.
unsafe impl Send for Shared {}

const OPEN: usize = 1;
const ONE_INSIDE: usize = 2;
const INSIDE_BITS: u32 = 15;
const INSIDE: usize = ((1 << INSIDE_BITS) - 1) * ONE_INSIDE;
const ONE_REGION: usize = 1 << (INSIDE_BITS + 1);

impl Shared {
    /// Joins the open region, if there is one that this worker has not been in.
    fn enter(&self, last: usize) -> Option<usize> {
        let mut state = self.state.load(Ordering::Acquire);
        while state & OPEN != 0 && state / ONE_REGION != last {
            match self.state.compare_exchange_weak(state, state + ONE_INSIDE, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(state / ONE_REGION),
                Err(now) => state = now,
            }
        }
        None
    }

    fn leave(&self) {
        self.state.fetch_sub(ONE_INSIDE, Ordering::AcqRel);
    }

    /// Takes tasks until none is left. A panic ends this thread's share and is kept for the caller.
    fn work(&self, region: Region, scratch: &mut Scratch) {
        // SAFETY: the caller of `run` keeps the body alive until the region is closed and empty.
        let body = unsafe { &*region.body };
        let result = catch_unwind(AssertUnwindSafe(|| loop {
            let task = self.next.fetch_add(1, Ordering::Relaxed);
            if task >= region.tasks {
                break;
            }
            body(task, scratch);
        }));
        if let Err(payload) = result {
            self.next.store(region.tasks, Ordering::Relaxed);
            lock(&self.panic).get_or_insert(payload);
        }
    }

    fn serve(&self, mut scratch: Scratch) {
        let mut last = 0;
        let mut idle_since = Instant::now();
        let mut looks = 0u32;
        while !self.stop.load(Ordering::Acquire) {
            if let Some(number) = self.enter(last) {
                // SAFETY: this worker is inside, so the region is the one that was opened and stays.
                let region = unsafe { *self.region.get() };
                self.work(region, &mut scratch);
                self.leave();
                last = number;
                idle_since = Instant::now();
            } else if idle_since.elapsed() < SPIN {
                look_again(looks);
                looks = looks.wrapping_add(1);
            } else {
                self.sleep(last);
                idle_since = Instant::now();
            }
        }
    }

    fn sleep(&self, last: usize) {
        let mut sleepers = lock(&self.sleepers);
        *sleepers += 1;
        self.sleeping.store(*sleepers, Ordering::SeqCst);
        // A region opened before the caller could see this sleeper is found here; one opened later wakes it.
        let nothing = || {
            let state = self.state.load(Ordering::SeqCst);
            (state & OPEN == 0 || state / ONE_REGION == last) && !self.stop.load(Ordering::Acquire)
        };
        while nothing() {
            sleepers = self.wake.wait(sleepers).unwrap_or_else(PoisonError::into_inner);
        }
        *sleepers -= 1;
        self.sleeping.store(*sleepers, Ordering::SeqCst);
    }

    fn wake_sleepers(&self) {
        if self.sleeping.load(Ordering::SeqCst) != 0 {
            drop(lock(&self.sleepers));
            self.wake.notify_all();
        }
    }
}

/// A pause between two looks at a shared variable, the `look`th since waiting began. Where threads outnumber cores, the
/// one that is waited for may need this very core, so it is offered now and then: rarely, because who gives a core up
/// to another process may not have it back for milliseconds.
fn look_again(look: u32) {
    for _ in 0..32 {
        std::hint::spin_loop();
    }
    if look % 16 == 15 {
        std::thread::yield_now();
    }
}

/// A poisoned lock is used as it is: what these locks guard is valid after every statement.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A fixed set of threads. Several callers may use one at once; their regions take turns.
pub struct Threads {
    shared: Arc<Shared>,
    /// The calling thread's scratch; whoever holds it has the pool.
    turn: Mutex<Scratch>,
    count: usize,
    /// Started with the first region that has something for them, so that creating a backend does not wait for them.
    workers: OnceLock<Vec<Handle>>,
}

impl Threads {
    /// `count` threads, the caller of [`Threads::run`] being one of them. 0 means one a core.
    pub fn new(count: usize) -> std::io::Result<Threads> {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let count = if count == 0 { cores() } else { count }.min(INSIDE / ONE_INSIDE);
        let nothing: &Body<'static> = &|_, _| ();
        let shared = Arc::new(Shared {
            state: AtomicUsize::new(0),
            region: Region { body: nothing, tasks: 0 }.into(),
            next: AtomicUsize::new(0),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            sleepers: Mutex::new(0),
            wake: Condvar::new(),
            sleeping: AtomicUsize::new(0),
        });
        Ok(Threads { shared, turn: Mutex::new(Scratch::new()?), count, workers: OnceLock::new() })
    }

    /// Starts as many of the workers as the system allows: results do not depend on their number.
    fn start(&self) -> Vec<Handle> {
        let start = |index| -> std::io::Result<Handle> {
            let shared = Arc::clone(&self.shared);
            let scratch = Scratch::new()?;
            spawn(&format!("nvbackend-cpu-{index}"), move || shared.serve(scratch))
        };
        let mut workers = Vec::with_capacity(self.count - 1);
        for index in 1..self.count {
            match start(index) {
                Ok(worker) => workers.push(worker),
                Err(error) => {
                    log::warn!(target: "nvbackend::cpu", "{index} of {} CPU threads started: {error}", self.count);
                    break;
                }
            }
        }
        workers
    }

    /// Threads that compute, the caller's own included.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Calls `body(task, scratch)` once for every task in `0..tasks`, spread over the threads, and returns when all are
    /// done. Tasks start in ascending order. A panic in a task is raised again here; tasks not yet started are dropped.
    ///
    /// Not to be called from within a task.
    pub fn run(&self, tasks: usize, body: impl Fn(usize, &mut Scratch) + Sync) {
        if tasks == 0 {
            return;
        }
        let mut scratch = lock(&self.turn);
        let shared = &*self.shared;
        if tasks == 1 || self.count == 1 || self.workers.get_or_init(|| self.start()).is_empty() {
            for task in 0..tasks {
                body(task, &mut scratch);
            }
            return;
        }
        let body: &Body<'_> = &body;
        // SAFETY: only the lifetime changes; no worker uses the body after the region is closed and empty, below.
        let body: *const Body<'static> = unsafe { std::mem::transmute::<*const Body<'_>, _>(body) };
        let region = Region { body, tasks };
        // SAFETY: this thread holds the turn and the last region is closed and empty, so nobody reads it.
        unsafe { *shared.region.get() = region };
        shared.next.store(0, Ordering::Relaxed);
        let number = (shared.state.load(Ordering::Relaxed) / ONE_REGION).wrapping_add(1);
        shared.state.store(number.wrapping_mul(ONE_REGION) | OPEN, Ordering::SeqCst);
        shared.wake_sleepers();

        shared.work(region, &mut scratch);

        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut looks = 0u32;
        while shared.state.load(Ordering::Acquire) & INSIDE != 0 {
            look_again(looks);
            looks = looks.wrapping_add(1);
        }
        if let Some(payload) = lock(&shared.panic).take() {
            drop(scratch);
            resume_unwind(payload);
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        drop(lock(&self.shared.sleepers));
        self.shared.wake.notify_all();
        for worker in self.workers.take().unwrap_or_default() {
            worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_from_several_callers() {
        let threads = Threads::new(4).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for tasks in [0, 1, 2, 3, 64, 1000] {
                        let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                        threads.run(tasks, |task, scratch| {
                            scratch.floats()[task] = task as f32;
                            counts[task].fetch_add(1, Ordering::Relaxed);
                        });
                        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
                    }
                });
            }
        });
    }

    #[test]
    fn workers_start_with_the_first_region_that_has_work_for_them() {
        let threads = Threads::new(3).unwrap();
        assert_eq!(threads.count(), 3);
        threads.run(1, |_, scratch| assert_eq!(scratch.floats().as_ptr() as usize % 64, 0));
        assert!(threads.workers.get().is_none());
        threads.run(2, |_, scratch| assert_eq!(scratch.floats().len(), SCRATCH_FLOATS));
        assert_eq!(threads.workers.get().unwrap().len(), 2);
    }

    #[test]
    fn many_short_regions_with_pauses() {
        let threads = Threads::new(3).unwrap();
        let sum = AtomicUsize::new(0);
        for round in 0..2000 {
            threads.run(5, |task, _| {
                sum.fetch_add(task, Ordering::Relaxed);
            });
            if round % 500 == 0 {
                std::thread::sleep(SPIN * 3);
            }
        }
        assert_eq!(sum.load(Ordering::Relaxed), 2000 * 10);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_threads_go_on() {
        let threads = Threads::new(3).unwrap();
        let result = catch_unwind(AssertUnwindSafe(|| threads.run(100, |task, _| assert_ne!(task, 57, "task 57"))));
        assert!(result.is_err());
        let done = AtomicUsize::new(0);
        threads.run(100, |_, _| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.load(Ordering::Relaxed), 100);
    }
}

//! The end of the process, and children of `fork`, in which CUDA's driver cannot be used once the parent has.
//!
//! The driver takes itself down in `exit`, and a thread that is inside it then, or comes after, ends in a segmentation
//! fault: with driver 580 and three busy threads in 8 of 18 runs, and in 0 of 18 with what follows (when threads noted
//! themselves with atomic additions; the stores of now have not been run so).
//!
//! A handler of `atexit` runs before those that were registered earlier: the driver's, the CUDA runtime's, which registers its
//! own with the first launch, and cuBLASLt's. It closes the way in, and waits until all threads are out. Calls that come later
//! get an error, and those that give something back leave it to the system.
//!
//! What is left is an exit in the middle of cuBLASLt's first search for an algorithm, some hundred milliseconds in a process:
//! what it registers then runs before any handler of ours.
//!
//! Every eager call comes by here several times, so a thread notes that it is inside with plain stores to a cache line of its
//! own; atomic additions cost rope and the norms 4 to 10 % of the host's time. Threads past the first thousand share a line.

use crate::error::{Error, Result, Status};
use crate::fork::{self, Heir};
use std::cell::Cell;
use std::sync::atomic::{compiler_fence, AtomicU8, AtomicUsize, Ordering};
use std::sync::Once;
use std::time::{Duration, Instant};

/// Waiting for a thread that waits for the GPU in its turn ends here.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often its thread, or threads, are inside.
#[repr(align(128))]
struct Line(AtomicUsize);

const OWN_LINES: usize = 1024;

/// The last one is shared.
static INSIDE: [Line; OWN_LINES + 1] = [const { Line(AtomicUsize::new(0)) }; OWN_LINES + 1];
/// `OPEN`, or why the driver must not be called.
static STATE: AtomicU8 = AtomicU8::new(OPEN);
const OPEN: u8 = 0;
const EXITING: u8 = 1;
const FORKED: u8 = 2;
static NEXT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The thread's line plus one, and how often it is inside: `exit` may be called from a callback.
    static LINE: Cell<usize> = const { Cell::new(0) };
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// What registers handlers of its own when it is first used, each of which must run after ours.
pub struct Starts(Once);

pub static DRIVER: Starts = Starts(Once::new());
pub static CONTEXT: Starts = Starts(Once::new());
pub static RUNTIME: Starts = Starts(Once::new());
pub static CUBLASLT: Starts = Starts(Once::new());

impl Starts {
    /// It has just been used. Registers the handler, once more for each of them: handlers run in the reverse order.
    #[inline]
    pub fn have_begun(&self) {
        if !self.0.is_completed() {
            self.watch();
        }
    }

    #[cold]
    fn watch(&self) {
        self.0.call_once(|| {
            static CHILDREN: Once = Once::new();
            CHILDREN.call_once(|| fork::add_heir(&Child));
            // SAFETY: a function of this library, which is never unloaded.
            unsafe { libc::atexit(close) };
        });
    }
}

/// After a call of cuBLASLt's: it makes tables when they are first wanted, which exit destroys. The handler must run before
/// that, so it is registered behind them, as often as a process with many shapes may need it.
pub fn cublaslt_was_called() {
    const MOST: usize = 512;
    static TIMES: AtomicUsize = AtomicUsize::new(0);
    if TIMES.load(Ordering::Relaxed) < MOST && TIMES.fetch_add(1, Ordering::Relaxed) < MOST {
        // SAFETY: a function of this library, which is never unloaded.
        unsafe { libc::atexit(close) };
    }
}

struct Child;

impl Heir for Child {
    /// The parent's other threads are not here, and would be waited for.
    fn inherit(&self) {
        STATE.store(FORKED, Ordering::SeqCst);
        INSIDE.iter().for_each(|line| line.0.store(0, Ordering::Relaxed));
    }
}

/// Whether the driver must not be called any more.
pub fn is_closed() -> bool {
    STATE.load(Ordering::SeqCst) != OPEN
}

/// This thread may call the driver for as long as the value lives.
#[inline]
pub fn enter() -> Result<Inside> {
    let mut line = LINE.get();
    if line == 0 {
        line = 1 + NEXT.fetch_add(1, Ordering::Relaxed).min(OWN_LINES);
        LINE.set(line);
    }
    let inside = Inside { line: line - 1 };
    add(inside.line, 1);
    // The store is in the line before anything is asked of the driver, or `close` waits until it is.
    compiler_fence(Ordering::SeqCst);
    match STATE.load(Ordering::Relaxed) {
        OPEN => Ok(inside),
        state => Err(closed(state)),
    }
}

#[cold]
fn closed(state: u8) -> Error {
    if state == EXITING {
        return Error::new(Status::CudaNotAvailable, "the process is exiting, and CUDA's driver with it");
    }
    Error::new(
        Status::CudaNotAvailable,
        "CUDA's driver cannot be used after a fork: the parent of this process had used it before",
    )
    .with_advice("use it in the parent alone, fork before it is used, or start a program of its own (exec)")
}

#[inline]
fn add(line: usize, by: isize) {
    DEPTH.set(DEPTH.get().wrapping_add_signed(by));
    if line < OWN_LINES {
        INSIDE[line].0.store(DEPTH.get(), Ordering::Release);
    } else {
        INSIDE[line].0.fetch_add(by as usize, Ordering::SeqCst);
    }
}

pub struct Inside {
    line: usize,
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        add(self.line, -1);
    }
}

extern "C" fn close() {
    if STATE.compare_exchange(OPEN, EXITING, Ordering::SeqCst, Ordering::SeqCst).is_err() {
        return;
    }
    let (own, began) = (DEPTH.get(), Instant::now());
    // A thread that has read `STATE` before it was set may have its store on the way still, for nanoseconds.
    std::thread::sleep(Duration::from_millis(1));
    while INSIDE.iter().map(|line| line.0.load(Ordering::Acquire)).sum::<usize>() > own {
        if began.elapsed() > PATIENCE {
            return;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

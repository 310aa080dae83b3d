//! The end of the process. The driver takes itself down in `exit`, and a thread that is inside it then, or comes after, ends
//! in a segmentation fault: with driver 580 and three busy threads in 8 of 18 runs, and in 0 of 18 with what follows.
//!
//! A handler of `atexit` runs before those that were registered earlier: the driver's, the CUDA runtime's, which registers its
//! own with the first launch, and cuBLASLt's. It closes the way in, and waits until all threads are out. Calls that come later
//! get an error, and those that give something back leave it to the system.
//!
//! What is left is an exit in the middle of cuBLASLt's first search for an algorithm, some hundred milliseconds in a process:
//! what it registers then runs before any handler of ours.
//!
//! Threads are counted in stripes, each a cache line of its own: two additions to a line that other cores hardly touch.

use crate::error::{Error, Result, Status};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Once;
use std::time::{Duration, Instant};

/// Waiting for a thread that waits for the GPU in its turn ends here.
const PATIENCE: Duration = Duration::from_secs(5);

#[repr(align(128))]
struct Stripe(AtomicUsize);

static INSIDE: [Stripe; 64] = [const { Stripe(AtomicUsize::new(0)) }; 64];
static CLOSED: AtomicBool = AtomicBool::new(false);
static NEXT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The thread's stripe plus one, and how often it is inside: `exit` may be called from a callback.
    static STRIPE: Cell<usize> = const { Cell::new(0) };
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
            // SAFETY: functions of this library; the C library drops them should it be unloaded.
            unsafe {
                libc::atexit(close);
                CHILDREN.call_once(|| {
                    libc::pthread_atfork(None, None, Some(forget_threads));
                });
            }
        });
    }
}

/// After a call of cuBLASLt's: it makes tables when they are first wanted, which exit destroys. The handler must run before
/// that, so it is registered behind them, as often as a process with many shapes may need it.
pub fn cublaslt_was_called() {
    const MOST: usize = 512;
    static TIMES: AtomicUsize = AtomicUsize::new(0);
    if TIMES.load(Ordering::Relaxed) < MOST && TIMES.fetch_add(1, Ordering::Relaxed) < MOST {
        // SAFETY: as above.
        unsafe { libc::atexit(close) };
    }
}

/// In a child of `fork`, where the parent's other threads are not, and would be waited for.
extern "C" fn forget_threads() {
    INSIDE.iter().for_each(|stripe| stripe.0.store(0, Ordering::Relaxed));
}

/// Whether the driver must not be called any more.
pub fn is_closed() -> bool {
    CLOSED.load(Ordering::SeqCst)
}

/// This thread may call the driver for as long as the value lives.
pub fn enter() -> Result<Inside> {
    let mut stripe = STRIPE.get();
    if stripe == 0 {
        stripe = 1 + NEXT.fetch_add(1, Ordering::Relaxed) % INSIDE.len();
        STRIPE.set(stripe);
    }
    let inside = Inside { stripe: stripe - 1 };
    // Sequentially consistent, as is `close`: either it sees this thread, or this thread sees that it has begun.
    INSIDE[inside.stripe].0.fetch_add(1, Ordering::SeqCst);
    DEPTH.set(DEPTH.get() + 1);
    if is_closed() {
        return Err(Error::new(Status::CudaNotAvailable, "the process is exiting, and CUDA's driver with it"));
    }
    Ok(inside)
}

pub struct Inside {
    stripe: usize,
}

impl Drop for Inside {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
        INSIDE[self.stripe].0.fetch_sub(1, Ordering::SeqCst);
    }
}

extern "C" fn close() {
    if CLOSED.swap(true, Ordering::SeqCst) {
        return;
    }
    let (own, began) = (DEPTH.get(), Instant::now());
    while INSIDE.iter().map(|stripe| stripe.0.load(Ordering::SeqCst)).sum::<usize>() > own {
        if began.elapsed() > PATIENCE {
            return;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

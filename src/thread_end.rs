//! What a thread gives back when it ends.
//!
//! Calls come from `atexit` handlers, static destructors and destructors of `pthread_key`s too, when the thread's own
//! destructors have run. A thread-local with a destructor is gone by then, or, first used then, never destroyed. So what a
//! thread keeps lies in thread-locals without one, and a `pthread_key` gives it back: the C library calls its destructor
//! once more for what a later one has set. The main thread's are not called when the process exits.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

pub struct ThreadEnd {
    /// One more than the key; 0: there is none yet.
    key: AtomicU64,
    run: unsafe extern "C" fn(*mut c_void),
}

impl ThreadEnd {
    /// `run` is called in threads that end and have asked for it. It does not look at its argument.
    pub const fn new(run: unsafe extern "C" fn(*mut c_void)) -> ThreadEnd {
        ThreadEnd { key: AtomicU64::new(0), run }
    }

    /// The calling thread has something to give back. In a process that has no key left, it keeps it.
    pub fn expect(&'static self) {
        let mut key = self.key.load(Ordering::Acquire);
        if key == 0 {
            key = self.create();
        }
        if key != 0 {
            // SAFETY: a key of ours, and a value other than NULL, for which the destructor is called.
            unsafe { libc::pthread_setspecific((key - 1) as libc::pthread_key_t, (self as *const ThreadEnd).cast()) };
        }
    }

    /// No `OnceLock`: a child of `fork` would wait for ever for a thread that was in the middle.
    #[cold]
    fn create(&self) -> u64 {
        let mut key: libc::pthread_key_t = 0;
        // SAFETY: a place for the key, and a function of this library, which is never unloaded.
        if unsafe { libc::pthread_key_create(&mut key, Some(self.run)) } != 0 {
            return 0;
        }
        match self.key.compare_exchange(0, u64::from(key) + 1, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => u64::from(key) + 1,
            Err(others) => {
                // SAFETY: created above, and nobody's.
                unsafe { libc::pthread_key_delete(key) };
                others
            }
        }
    }
}

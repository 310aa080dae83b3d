//! What a thread gives back when it ends.
//!
//! Calls come from `atexit` handlers, static destructors and destructors of `pthread_key`s too, when the thread's own
//! destructors have run. A thread-local with a destructor is gone by then, or, first used then, never destroyed. So what a
//! thread keeps lies in thread-locals without one, and a `pthread_key` gives it back: the C library calls its destructor
//! once more for what a later one has set. The main thread's are not called when the process exits.

use std::ffi::c_void;
use std::sync::OnceLock;

pub struct ThreadEnd {
    key: OnceLock<Option<libc::pthread_key_t>>,
    run: unsafe extern "C" fn(*mut c_void),
}

impl ThreadEnd {
    /// `run` is called in threads that end and have asked for it. It does not look at its argument.
    pub const fn new(run: unsafe extern "C" fn(*mut c_void)) -> ThreadEnd {
        ThreadEnd { key: OnceLock::new(), run }
    }

    /// The calling thread has something to give back. In a process that has no key left, it keeps it.
    pub fn expect(&'static self) {
        let key = *self.key.get_or_init(|| {
            let mut key = 0;
            // SAFETY: a place for the key, and a function of this library, which is never unloaded.
            (unsafe { libc::pthread_key_create(&mut key, Some(self.run)) } == 0).then_some(key)
        });
        if let Some(key) = key {
            // SAFETY: a key of ours, and a value other than NULL, for which the destructor is called.
            unsafe { libc::pthread_setspecific(key, (self as *const ThreadEnd).cast()) };
        }
    }
}

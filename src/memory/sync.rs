//! What threads meet over. Models of the lock-free parts put loom's types in the place of these, and builds under
//! ThreadSanitizer locks that it can see.

#[cfg(nvb_thread_sanitizer)]
pub use super::watched_locks::{Mutex, MutexGuard, RwLock};
#[cfg(not(nvb_thread_sanitizer))]
pub use std::sync::{Mutex, MutexGuard, RwLock};

pub use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// Bytes that processors pass between each other at once.
pub const LINE_BYTES: usize = 64;

pub fn relax(spins: u32) {
    if spins < 64 {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

/// `std::cell::UnsafeCell` with the access that loom can watch.
pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub const fn new(value: T) -> UnsafeCell<T> {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    #[inline]
    pub fn with_mut<R>(&self, body: impl FnOnce(*mut T) -> R) -> R {
        body(self.0.get())
    }
}

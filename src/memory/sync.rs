//! What threads meet over. Models of the lock-free parts put loom's types in the place of these, and builds under
//! ThreadSanitizer locks that it can see.

#[cfg(nvb_thread_sanitizer)]
pub use super::watched_locks::{Mutex, MutexGuard, RwLock};
#[cfg(not(nvb_thread_sanitizer))]
pub use std::sync::{Mutex, MutexGuard, RwLock};

pub use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// Bytes that processors pass between each other at once.
pub const LINE_BYTES: usize = 64;

/// Many zeros. The system gives them page by page, as they are used.
pub fn zero_words(count: usize) -> Box<[AtomicU32]> {
    let words = Box::into_raw(vec![0u32; count].into_boxed_slice());
    // SAFETY: an atomic has the size, alignment and values of its integer.
    unsafe { Box::from_raw(words as *mut [AtomicU32]) }
}

/// Asks for the line to be fetched for writing, and does not wait. A hint: any address will do.
#[inline(always)]
pub fn prefetch_for_write<T>(address: *const T) {
    // SAFETY: a prefetch has no effect but on caches, and faults on no address.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags));
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("prfm pstl1keep, [{}]", in(reg) address, options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}

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

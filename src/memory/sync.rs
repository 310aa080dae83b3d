//! What threads meet over. Models of the lock-free parts put loom's types in the place of these, and builds under
//! ThreadSanitizer locks that it can see.

#[cfg(nvb_thread_sanitizer)]
pub use super::watched_locks::{Mutex, MutexGuard, RwLock};
#[cfg(not(nvb_thread_sanitizer))]
pub use std::sync::{Mutex, MutexGuard, RwLock};

pub use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// Bytes that processors pass between each other at once.
pub const LINE_BYTES: usize = 64;

/// `count` > 0 zeros, if there is memory for them. The system gives it page by page, as they are used.
pub fn zero_words(count: usize) -> Option<Box<[AtomicU32]>> {
    let layout = std::alloc::Layout::array::<AtomicU32>(count).ok()?;
    // SAFETY: the layout is not empty.
    let words = unsafe { std::alloc::alloc_zeroed(layout) }.cast::<AtomicU32>();
    if words.is_null() {
        return None;
    }
    // SAFETY: of this layout, which a box frees with, and zero is a value of an atomic.
    Some(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(words, count)) })
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

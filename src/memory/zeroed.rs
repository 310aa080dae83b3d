//! Large tables that begin as zero. The system's zero pages cost nothing until they are written, while an allocator that
//! recycles memory must overwrite it: making a manager took half a millisecond more each time that one had gone before.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// # Safety
/// Zero bytes are a value of the type, and its values need no drop.
pub unsafe trait Zeroable {}

// SAFETY: plain numbers.
unsafe impl Zeroable for u8 {}
// SAFETY: as above.
unsafe impl Zeroable for u32 {}
// SAFETY: as above.
unsafe impl Zeroable for u64 {}
// SAFETY: NULL.
unsafe impl<T> Zeroable for std::sync::atomic::AtomicPtr<T> {}

pub struct Zeroed<T: Zeroable> {
    start: NonNull<T>,
    count: usize,
}

// SAFETY: owns its elements like a box.
unsafe impl<T: Zeroable + Send> Send for Zeroed<T> {}
// SAFETY: as above.
unsafe impl<T: Zeroable + Sync> Sync for Zeroed<T> {}

impl<T: Zeroable> Zeroed<T> {
    pub fn new(count: usize) -> Zeroed<T> {
        let bytes = std::mem::size_of::<T>() * count;
        if bytes == 0 {
            return Zeroed { start: NonNull::dangling(), count };
        }
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        // SAFETY: a new mapping at an address of the system's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        let layout = std::alloc::Layout::array::<T>(count).expect("a range has fewer units than bytes");
        match NonNull::new(start.cast::<T>()) {
            Some(first) if start != libc::MAP_FAILED => Zeroed { start: first, count },
            _ => std::alloc::handle_alloc_error(layout),
        }
    }
}

impl<T: Zeroable> Drop for Zeroed<T> {
    fn drop(&mut self) {
        let bytes = std::mem::size_of::<T>() * self.count;
        if bytes > 0 {
            // SAFETY: the mapping of `new`, which nobody refers to any more.
            unsafe { libc::munmap(self.start.as_ptr().cast(), bytes) };
        }
    }
}

impl<T: Zeroable> Deref for Zeroed<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `count` elements of zero bytes or what was written since, owned by `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

impl<T: Zeroable> DerefMut for Zeroed<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.count) }
    }
}

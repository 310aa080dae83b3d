//! Large tables that begin as zero. The system's zero pages cost nothing until they are written, while an allocator that
//! recycles memory must overwrite it: making a manager took half a millisecond more each time that one had gone before.
//! The tables of a manager are cut from one mapping: with one each, nineteen in all, mapping and unmapping them was more
//! than half of making a manager.

use crate::allocation::no_memory;
use crate::error::Result;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

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

/// Zero pages that tables are cut from, one behind the other. They go with the last table.
#[derive(Clone)]
pub struct Zeros(Arc<Mapping>);

struct Mapping {
    /// Dangling without bytes.
    start: NonNull<u8>,
    bytes: usize,
    used: AtomicUsize,
}

// SAFETY: an address; what lies there belongs to the tables.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// Tables begin on lines of their own, as threads that read one must not meet those that write the next.
const ALIGNMENT: usize = 64;

impl Zeros {
    /// Room for tables of as many bytes in all. What is never written costs addresses alone.
    pub fn new(bytes: usize) -> Result<Zeros> {
        let used = AtomicUsize::new(0);
        if bytes == 0 {
            return Ok(Zeros::none());
        }
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        // SAFETY: a new mapping at an address of the system's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        match NonNull::new(start.cast::<u8>()) {
            Some(first) if start != libc::MAP_FAILED => {
                // With huge pages two megabytes would be zeroed for the first word that is written. A system without
                // them refuses, and need not know.
                // SAFETY: the mapping just made.
                unsafe { libc::madvise(start, bytes, libc::MADV_NOHUGEPAGE) };
                Ok(Zeros(Arc::new(Mapping { start: first, bytes, used })))
            }
            _ => Err(no_memory(bytes, "the tables of a memory manager")),
        }
    }

    /// Room for nothing, so that each table has a mapping of its own.
    pub fn none() -> Zeros {
        Zeros(Arc::new(Mapping { start: NonNull::dangling(), bytes: 0, used: AtomicUsize::new(0) }))
    }

    /// A table of `count` elements. One that does not fit, which is none of a manager's, has a mapping of its own.
    pub fn table<T: Zeroable>(&self, count: usize) -> Zeroed<T> {
        const { assert!(align_of::<T>() <= ALIGNMENT) };
        if count == 0 {
            return Zeroed { start: NonNull::dangling(), count, _zeros: self.clone() };
        }
        let bytes = std::alloc::Layout::array::<T>(count).expect("a range has fewer units than bytes").size();
        let at = self.0.used.fetch_add(bytes.next_multiple_of(ALIGNMENT), Ordering::Relaxed);
        if bytes > self.0.bytes.saturating_sub(at) {
            return Zeros::new(bytes).expect("only tests have tables of their own mapping").table(count);
        }
        // SAFETY: inside the mapping, which begins on a page; no other table has these bytes.
        let start = unsafe { self.0.start.add(at) }.cast();
        Zeroed { start, count, _zeros: self.clone() }
    }
}

#[cfg(test)]
impl Zeros {
    /// Whether all tables fitted.
    pub fn were_enough(&self) -> bool {
        self.0.used.load(Ordering::Relaxed) <= self.0.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: the mapping of `new`, which no table refers to any more.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
        }
    }
}

pub struct Zeroed<T: Zeroable> {
    start: NonNull<T>,
    count: usize,
    /// Keeps the pages.
    _zeros: Zeros,
}

// SAFETY: owns its elements like a box.
unsafe impl<T: Zeroable + Send> Send for Zeroed<T> {}
// SAFETY: as above.
unsafe impl<T: Zeroable + Sync> Sync for Zeroed<T> {}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_zero_lie_apart_and_outlive_their_maker() {
        let zeros = Zeros::new(4096).unwrap();
        let mut words: Vec<Zeroed<u64>> = (0..4).map(|_| zeros.table(9)).collect();
        let mut bytes: Zeroed<u8> = zeros.table(1);
        // More than is left, and more than there ever was.
        let mut more: Zeroed<u32> = zeros.table(4096);
        let after: Zeroed<u64> = zeros.table(9);
        let none: Zeroed<u64> = zeros.table(0);
        drop(zeros);
        assert!(more.iter().all(|&word| word == 0) && after.iter().all(|&word| word == 0) && none.is_empty());
        for (i, table) in words.iter_mut().enumerate() {
            assert!(table.iter().all(|&word| word == 0));
            assert!((table.as_ptr() as usize).is_multiple_of(ALIGNMENT));
            table.fill(i as u64 + 1);
        }
        bytes[0] = 255;
        more.fill(7);
        for (i, table) in words.iter().enumerate() {
            assert!(table.iter().all(|&word| word == i as u64 + 1));
        }
        assert!(after.iter().all(|&word| word == 0));
    }
}

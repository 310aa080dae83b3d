//! The library's allocator: the system's, with a reserve behind it for what is small.
//!
//! Most of Rust's own allocations cannot fail: where the system has nothing left, they end the process. So requests of up
//! to [`SMALL`] bytes that the system refuses are served from a few megabytes that the library brings along, which are
//! pages of zeros and cost nothing until then. Larger requests are refused; whoever makes them asks through
//! [`crate::allocation`].
//!
//! While the system gives, this costs a look at each allocation's result and one comparison of each address that is freed.

use crate::allocation::SMALL;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

struct Allocator;

// SAFETY: the system's allocator, or a granule of the reserve that nobody else has; the address tells which.
unsafe impl GlobalAlloc for Allocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract.
        let address = unsafe { System.alloc(layout) };
        if address.is_null() {
            return RESERVE.allocate(layout);
        }
        address
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract.
        let address = unsafe { System.alloc_zeroed(layout) };
        if address.is_null() {
            let address = RESERVE.allocate(layout);
            if !address.is_null() {
                // SAFETY: just allocated with this size.
                unsafe { address.write_bytes(0, layout.size()) };
            }
            return address;
        }
        address
    }

    #[inline]
    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        if RESERVE.has(address) {
            RESERVE.free(address, layout.size());
            return;
        }
        // SAFETY: the caller's contract; it is not the reserve's, so it is the system's.
        unsafe { System.dealloc(address, layout) }
    }

    #[inline]
    unsafe fn realloc(&self, address: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !RESERVE.has(address) {
            // SAFETY: the caller's contract.
            let moved = unsafe { System.realloc(address, layout, size) };
            if !moved.is_null() || size > SMALL {
                return moved;
            }
        }
        // SAFETY: the caller's contract: a size that makes a layout.
        let to = unsafe { self.alloc(Layout::from_size_align_unchecked(size, layout.align())) };
        if !to.is_null() {
            // SAFETY: both have the shorter length, and the new block lies apart from the old one.
            unsafe {
                to.copy_from_nonoverlapping(address, layout.size().min(size));
                self.dealloc(address, layout);
            }
        }
        to
    }
}

const BYTES: usize = 4 << 20;
/// What is handed out is a run of these. Vectors that grow and strings are mostly shorter than a few.
const GRANULE: usize = 64;
const GRANULES: usize = BYTES / GRANULE;
const WORDS: usize = GRANULES / 64;

#[repr(align(4096))]
struct Reserve {
    pages: UnsafeCell<[u8; BYTES]>,
    /// Bit g of word w: granule 64 w + g is in use.
    used: UnsafeCell<[u64; WORDS]>,
    /// The process whose thread is at work on `used`; 0: none.
    holder: AtomicU32,
    in_use: AtomicUsize,
}

// SAFETY: `used` belongs to the holder of the lock, and each granule to whom it was given.
unsafe impl Sync for Reserve {}

static RESERVE: Reserve = Reserve {
    pages: UnsafeCell::new([0; BYTES]),
    used: UnsafeCell::new([0; WORDS]),
    holder: AtomicU32::new(0),
    in_use: AtomicUsize::new(0),
};

impl Reserve {
    #[inline]
    fn has(&self, address: *mut u8) -> bool {
        (address as usize).wrapping_sub(self.pages.get() as usize) < BYTES
    }

    /// A lock of the standard library may allocate, and so may whoever waits for one.
    ///
    /// In a child of `fork` a thread of the parent's may have held the lock, which never comes back; it is taken from it. Of
    /// the run that it was marking, what is marked stays so, which at worst keeps the granules of one request from being used.
    fn with_used<R>(&self, body: impl FnOnce(&mut [u64; WORDS]) -> R) -> R {
        let this = std::process::id();
        let mut holder = 0;
        while let Err(now) = self.holder.compare_exchange(holder, this, Ordering::Acquire, Ordering::Relaxed) {
            holder = if now == this { 0 } else { now };
            if now == this {
                std::thread::yield_now();
            }
        }
        // SAFETY: the lock is held, and nothing in `body` comes back here.
        let result = body(unsafe { &mut *self.used.get() });
        self.holder.store(0, Ordering::Release);
        result
    }

    #[cold]
    fn allocate(&self, layout: Layout) -> *mut u8 {
        let count = layout.size().div_ceil(GRANULE);
        if layout.size() > SMALL || layout.align() > 4096 || count == 0 {
            return std::ptr::null_mut();
        }
        let step = layout.align().div_ceil(GRANULE);
        let first = self.with_used(|used| {
            let first = find(used, count, step)?;
            mark(used, first, count, true);
            Some(first)
        });
        match first {
            Some(first) => {
                self.in_use.fetch_add(count * GRANULE, Ordering::Relaxed);
                // SAFETY: inside the pages.
                unsafe { self.pages.get().cast::<u8>().add(first * GRANULE) }
            }
            None => std::ptr::null_mut(),
        }
    }

    #[cold]
    fn free(&self, address: *mut u8, bytes: usize) {
        let (first, count) = ((address as usize - self.pages.get() as usize) / GRANULE, bytes.div_ceil(GRANULE));
        self.with_used(|used| mark(used, first, count, false));
        self.in_use.fetch_sub(count * GRANULE, Ordering::Relaxed);
    }
}

/// Whether more than half of the reserve is in use: then calls that would make something new are better refused, so that
/// those that give something back have what they need.
#[inline]
pub fn is_low() -> bool {
    RESERVE.in_use.load(Ordering::Relaxed) > BYTES / 2
}

/// The first run of `count` free granules that begins at a multiple of `step`.
fn find(used: &[u64; WORDS], count: usize, step: usize) -> Option<usize> {
    let mut first = 0;
    while first + count <= GRANULES {
        if used[first / 64] == u64::MAX {
            first = (first / 64 + 1) * 64;
            continue;
        }
        match (first..first + count).rev().find(|&at| used[at / 64] >> (at % 64) & 1 != 0) {
            None => return Some(first),
            Some(taken) => first = (taken + 1).next_multiple_of(step),
        }
    }
    None
}

fn mark(used: &mut [u64; WORDS], first: usize, count: usize, taken: bool) {
    for at in first..first + count {
        let bit = 1 << (at % 64);
        if taken {
            used[at / 64] |= bit;
        } else {
            used[at / 64] &= !bit;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(size: usize, align: usize) -> Layout {
        Layout::from_size_align(size, align).unwrap()
    }

    /// One test, as there is one reserve.
    #[test]
    fn the_reserve_gives_apart_aligned_and_again() {
        let shapes = [(1, 1), (64, 64), (65, 8), (4096, 4096), (SMALL - 1, 16), (200, 256), (24, 8)];
        let mut blocks = Vec::new();
        for round in 0..3 {
            for (i, &(size, align)) in shapes.iter().enumerate() {
                let address = RESERVE.allocate(layout(size, align));
                assert!(RESERVE.has(address) && (address as usize).is_multiple_of(align), "{size} {align}");
                // SAFETY: of this size.
                unsafe { address.write_bytes((round * 16 + i) as u8, size) };
                blocks.push((address, size, (round * 16 + i) as u8));
            }
        }
        for &(address, size, byte) in &blocks {
            // SAFETY: written above.
            assert!(unsafe { std::slice::from_raw_parts(address, size) }.iter().all(|&at| at == byte));
        }
        assert!(RESERVE.allocate(layout(SMALL + 1, 1)).is_null());
        // What the reserve has may grow out of it, and be freed like anything else.
        let (address, size, byte) = blocks.pop().unwrap();
        // SAFETY: a block of the reserve of this size.
        unsafe {
            let moved = ALLOCATOR.realloc(address, layout(size, 8), 100_000);
            assert!(!RESERVE.has(moved) && *moved == byte && *moved.add(size - 1) == byte);
            ALLOCATOR.dealloc(moved, layout(100_000, 8));
        }
        blocks.into_iter().for_each(|(address, size, _)| RESERVE.free(address, size));
        let largest = || RESERVE.allocate(layout(SMALL, 1));
        let all: Vec<_> = std::iter::from_fn(|| Some(largest()).filter(|address| !address.is_null())).collect();
        assert_eq!((all.len(), is_low()), (BYTES / SMALL, true));
        all.into_iter().for_each(|address| RESERVE.free(address, SMALL));
        assert_eq!((RESERVE.in_use.load(Ordering::Relaxed), is_low()), (0, false));
    }

    #[test]
    fn a_child_of_fork_takes_the_lock_from_the_parent() {
        let child = RESERVE.with_used(|_| {
            // SAFETY: the child takes the lock and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                RESERVE.with_used(|_| ());
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(0) };
            }
            child
        });
        let mut status = -1;
        // SAFETY: the child of above and a place for its status.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
    }
}

//! Memory that traps: each piece lies against a page that cannot be touched, before it or behind it.

use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};

/// Bytes that one piece may have.
pub const LARGEST: usize = 64 << 10;
const PAGE: usize = 4096;
/// Pieces of one step: all tensors and arrays of the largest argument struct.
const PIECES: usize = 48;

/// A run of pages between two that trap. They are never unmapped, so what a weight borrows stays readable.
struct Arena {
    pieces: Vec<*mut u8>,
    used: usize,
}

impl Arena {
    fn new() -> Arena {
        let pitch = LARGEST + PAGE;
        let bytes = PIECES * pitch + PAGE;
        // SAFETY: fresh anonymous memory; the pieces are made accessible, the pages between stay closed.
        let base = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0)
        };
        assert_ne!(base, libc::MAP_FAILED, "{bytes} bytes of addresses");
        let piece = |at: usize| {
            // SAFETY: within the mapping.
            unsafe {
                let start = base.cast::<u8>().add(PAGE + at * pitch);
                assert_eq!(libc::mprotect(start.cast(), LARGEST, libc::PROT_READ | libc::PROT_WRITE), 0);
                start
            }
        };
        Arena { pieces: (0..PIECES).map(piece).collect(), used: 0 }
    }
}

/// Arenas of threads that have ended.
static IDLE: Mutex<Vec<Arena>> = Mutex::new(Vec::new());

// SAFETY: addresses of memory that one thread has at a time.
unsafe impl Send for Arena {}

struct Lent(Arena);

impl Drop for Lent {
    fn drop(&mut self) {
        let arena = Arena { pieces: std::mem::take(&mut self.0.pieces), used: 0 };
        IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(arena);
    }
}

thread_local! {
    static ARENA: RefCell<Lent> = {
        let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        RefCell::new(Lent(idle.unwrap_or_else(Arena::new)))
    };
}

/// Makes every piece of this thread free again.
pub fn restart() {
    ARENA.with_borrow_mut(|arena| arena.0.used = 0);
}

/// `bytes` of memory, at most `LARGEST`, that end where a closed page begins, or with `front` begin where one ends. Each byte
/// is `filling`. Past a step's pieces the last one is shared, as two tensors of one address may be.
pub fn piece(bytes: usize, front: bool, filling: u8) -> *mut u8 {
    assert!(bytes <= LARGEST);
    ARENA.with_borrow_mut(|Lent(arena)| {
        let base = arena.pieces[arena.used.min(PIECES - 1)];
        arena.used += 1;
        // SAFETY: the piece has LARGEST bytes.
        unsafe {
            let start = if front { base } else { base.add(LARGEST - bytes) };
            start.write_bytes(filling, bytes);
            start
        }
    })
}

/// A copy of `bytes` in a piece.
pub fn copy(bytes: &[u8]) -> *mut u8 {
    let to = piece(bytes.len(), false, 0);
    // SAFETY: as many bytes were just taken.
    unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    to
}

/// A copy that stays, before a page that cannot be touched.
pub fn kept(bytes: &[u8]) -> &'static [u8] {
    let pages = bytes.len().next_multiple_of(PAGE);
    // SAFETY: fresh memory of `pages` bytes and a page, which is never unmapped.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let base = libc::mmap(std::ptr::null_mut(), pages + PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        assert_ne!(base, libc::MAP_FAILED, "{pages} bytes of memory");
        assert_eq!(libc::mprotect(base.cast::<u8>().add(pages).cast(), PAGE, libc::PROT_NONE), 0);
        let start = base.cast::<u8>().add(pages - bytes.len());
        start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        std::slice::from_raw_parts(start, bytes.len())
    }
}

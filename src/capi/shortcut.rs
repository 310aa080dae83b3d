//! The short way of calls that allocate and free: what a thread found behind a pair of handles is kept for its next call
//! with the same pair, which then writes to nothing that other threads read.

use super::handle::Validity;
use crate::error::Result;
use crate::memory::Shortcut;
use crate::stream::RawHandle;
use std::cell::RefCell;
use std::ffi::c_void;

struct Entry {
    /// The manager's or pool's handle, and the stream's, which may be NULL.
    owner: usize,
    stream: usize,
    validity: [Validity; 2],
    /// The stream behind its handle.
    raw: RawHandle,
    shortcut: Shortcut,
}

/// Pairs of handles that a thread keeps; others take their place by and by.
const ENTRIES: usize = 8;

thread_local! {
    static SHORTCUTS: RefCell<[Option<Entry>; ENTRIES]> = const { RefCell::new([const { None }; ENTRIES]) };
}

/// Handles of one kind differ from bit 8 on.
fn place(owner: usize, stream: usize) -> usize {
    ((owner >> 8) + 3 * (stream >> 8)) % ENTRIES
}

#[inline]
fn with<R>(owner: usize, stream: usize, body: impl FnOnce(&Entry) -> Option<R>) -> Option<R> {
    let find = |entries: &RefCell<[Option<Entry>; ENTRIES]>| {
        let entries = entries.try_borrow().ok()?;
        let entry = entries[place(owner, stream)].as_ref()?;
        let found = entry.owner == owner && entry.stream == stream && entry.validity.iter().all(Validity::holds);
        found.then(|| body(entry)).flatten()
    };
    SHORTCUTS.try_with(find).ok().flatten()
}

#[inline]
pub fn allocate<O, S>(owner: *const O, stream: *const S, bytes: usize) -> Option<*mut c_void> {
    with(owner as usize, stream as usize, |entry| entry.shortcut.allocate(bytes))
}

#[inline]
pub fn free<O, S>(owner: *const O, stream: *const S, pointer: *mut c_void) -> bool {
    with(owner as usize, stream as usize, |entry| entry.shortcut.free(pointer).then_some(())).is_some()
}

/// The stream behind a pair that is known, for the ways that need no more than that.
#[inline]
pub fn stream<O, S>(owner: *const O, stream: *const S) -> Option<RawHandle> {
    with(owner as usize, stream as usize, |entry| Some(entry.raw))
}

/// Keeps what `find` makes of the objects behind the two handles, unless that is known. `validity`: the handles'.
pub fn keep<O, S>(
    owner: *const O,
    stream: *const S,
    validity: impl FnOnce() -> Result<[Validity; 2]>,
    raw: RawHandle,
    find: impl FnOnce() -> Option<Shortcut>,
) {
    let (owner, stream) = (owner as usize, stream as usize);
    if with(owner, stream, |_| Some(())).is_some() {
        return;
    }
    // A handle that was destroyed meanwhile leaves nothing to keep.
    let (Ok(validity), Some(shortcut)) = (validity(), find()) else { return };
    let entry = Entry { owner, stream, validity, raw, shortcut };
    // A thread that is ending needs none.
    let _ = SHORTCUTS.try_with(|entries| entries.borrow_mut()[place(owner, stream)] = Some(entry));
}

//! The short way of calls that allocate and free: what a thread found behind a pair of handles is kept for its next call
//! with the same pair, which then writes to nothing that other threads read.

use super::handle::{is_of_kind, Validity};
use super::memory::MEMORY_MANAGERS;
use super::pool::POOLS;
use super::prelude::*;
use super::stream::STREAMS;
use crate::device::{when_a_device_is_lost, RawHandle};
use crate::memory::{Blocks, Shortcut};
use crate::thread_end::ThreadEnd;
use std::cell::RefCell;
use std::mem::ManuallyDrop;

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

type Shortcuts = RefCell<ManuallyDrop<[Option<Entry>; ENTRIES]>>;

thread_local! {
    static SHORTCUTS: Shortcuts = const { RefCell::new(ManuallyDrop::new([const { None }; ENTRIES])) };
}
const _: () = assert!(!std::mem::needs_drop::<Shortcuts>(), "it must answer after the thread's destructors");

static END: ThreadEnd = ThreadEnd::new(forget_all);

extern "C" fn forget_all(_: *mut c_void) {
    SHORTCUTS.with(|entries| entries.borrow_mut().fill_with(|| None));
}

/// Handles of one kind differ from bit 8 on.
fn place(owner: usize, stream: usize) -> usize {
    ((owner >> 8) + 3 * (stream >> 8)) % ENTRIES
}

/// What the thread keeps of the pair of handles. A manager is not found by calls that take pools, nor a pool by those that take
/// managers, for both keep their pairs here.
#[inline]
fn with<O: Owner, R>(owner: usize, stream: usize, body: impl FnOnce(&Entry) -> Option<R>) -> Option<R> {
    if !is_of_kind(owner, O::KIND) {
        return None;
    }
    // The compiler leaves a closure that does all of this out of line, which costs a pair of calls 28 instructions.
    let entries = SHORTCUTS.with(std::ptr::from_ref);
    // SAFETY: the thread's own, which has no destructor and so lives as long as the thread.
    let entries = unsafe { &*entries }.try_borrow().ok()?;
    let entry = entries[place(owner, stream)].as_ref()?;
    let found = entry.owner == owner && entry.stream == stream && entry.validity.iter().all(Validity::holds);
    found.then(|| body(entry)).flatten()
}

/// Objects behind handles that blocks come from.
pub trait Owner: Send + Sync + Sized + 'static {
    /// The kind of the handles, which tells a pool's from a manager's.
    const KIND: usize;

    fn table() -> &'static Table<Self>;
    fn backend(&self) -> &Backend;
    fn blocks(&self) -> &dyn Blocks;
}

/// `nvb_memory_allocate`, and the same of pools, where the pair is known and a block at hand. `None`: nothing has changed.
///
/// # Safety
/// `block` is NULL or valid for a write.
#[inline]
pub unsafe fn allocate_by_shortcut<O: Owner, H>(
    owner: *mut H,
    stream: *mut nvb_stream,
    bytes: usize,
    block: *mut *mut c_void,
) -> Option<()> {
    if block.is_null() {
        return None;
    }
    let found = with::<O, _>(owner as usize, stream as usize, |entry| entry.shortcut.allocate(bytes))?;
    // SAFETY: not NULL, so valid by the caller's word.
    unsafe { block.write(found) };
    Some(())
}

/// `nvb_memory_free`, and the same of pools, where the pair is known and the magazine has room. `None`: nothing has changed.
#[inline]
pub fn free_by_shortcut<O: Owner, H>(owner: *mut H, stream: *mut nvb_stream, pointer: *mut c_void) -> Option<()> {
    with::<O, _>(owner as usize, stream as usize, |entry| entry.shortcut.free(pointer).then_some(()))
}

/// Blocks that are freed at one go, between which other threads may have the magazines.
const AT_ONE_GO: usize = 128;

/// `nvb_memory_free_many`, and the same of pools. On an error the blocks before the one it names have been freed.
pub fn free_many<O: Owner, H>(owner: *mut H, stream: *mut nvb_stream, pointers: &[*mut c_void]) -> Result<()> {
    if pointers.is_empty() {
        return validity::<O, H>(owner, stream).map(|_| ());
    }
    let mut at = 0;
    while at < pointers.len() {
        let go = &pointers[at..pointers.len().min(at + AT_ONE_GO)];
        let freed =
            with::<O, _>(owner as usize, stream as usize, |entry| Some(entry.shortcut.free_many(go))).unwrap_or(0);
        at += freed;
        if freed < go.len() {
            free::<O, H>(owner, stream, pointers[at]).map_err(|error| error.context(format_args!("pointers[{at}]")))?;
            at += 1;
        }
    }
    Ok(())
}

/// The stream behind a pair that is known, for the ways that need no more than that.
fn known_stream<O: Owner, H>(owner: *mut H, stream: *mut nvb_stream) -> Option<RawHandle> {
    with::<O, _>(owner as usize, stream as usize, |entry| Some(entry.raw))
}

/// Runs `body` while the owner's end waits. The stream's does not, because that would cost each call two more locked
/// instructions: what `Blocks` does at once is sound while a stream ends.
fn with_blocks<O: Owner, H, R>(owner: *mut H, body: impl FnOnce(&dyn Blocks) -> R) -> Result<R> {
    O::table().with(owner, |object| body(object.blocks()))
}

fn validity<O: Owner, H>(owner: *mut H, stream: *mut nvb_stream) -> Result<[Validity; 2]> {
    let owner = O::table().validity(owner)?;
    Ok([owner, if stream.is_null() { owner } else { STREAMS.validity(stream)? }])
}

/// `nvb_memory_allocate`, and the same of pools, after `allocate_by_shortcut`.
pub fn allocate<O: Owner, H>(owner: *mut H, stream: *mut nvb_stream, bytes: usize) -> Result<*mut c_void> {
    if let Some(raw) = known_stream::<O, _>(owner, stream) {
        if let Some(block) = with_blocks::<O, _, _>(owner, |blocks| blocks.allocate_at_once(bytes, raw))? {
            return Ok(block);
        }
    }
    let object = O::table().get(owner)?;
    let stream_object = stream_of(object.backend(), stream)?;
    let block = object.blocks().allocate(bytes, stream_object.raw())?;
    keep(&*object, owner, stream, stream_object.raw());
    Ok(block)
}

/// `nvb_memory_free`, and the same of pools, after `free_by_shortcut`.
pub fn free<O: Owner, H>(owner: *mut H, stream: *mut nvb_stream, pointer: *mut c_void) -> Result<()> {
    if pointer.is_null() {
        return validity::<O, H>(owner, stream).map(|_| ());
    }
    if let Some(raw) = known_stream::<O, _>(owner, stream) {
        if with_blocks::<O, _, _>(owner, |blocks| blocks.free_at_once(pointer, raw))? {
            return Ok(());
        }
    }
    let object = O::table().get(owner)?;
    let stream_object = stream_of(object.backend(), stream)?;
    object.blocks().free(pointer, stream_object.raw())?;
    keep(&*object, owner, stream, stream_object.raw());
    Ok(())
}

/// Sends all threads the long way, which refuses a lost device. Other devices take it as well from then on.
fn end_shortcuts() {
    MEMORY_MANAGERS.end_validity();
    POOLS.end_validity();
}

/// Keeps what was found behind the two handles, unless that is known.
fn keep<O: Owner, H>(object: &O, owner: *mut H, stream: *mut nvb_stream, raw: RawHandle) {
    if known_stream::<O, _>(owner, stream).is_some() {
        return;
    }
    // A device that is lost from now on ends the validity, and one that is lost already has no shortcut.
    when_a_device_is_lost(end_shortcuts);
    // A handle that was destroyed meanwhile leaves nothing to keep.
    let (Ok(validity), Some(shortcut)) = (validity::<O, H>(owner, stream), object.blocks().shortcut(raw)) else {
        return;
    };
    let (owner, stream) = (owner as usize, stream as usize);
    let entry = Entry { owner, stream, validity, raw, shortcut };
    END.expect();
    SHORTCUTS.with(|entries| entries.borrow_mut()[place(owner, stream)] = Some(entry));
}

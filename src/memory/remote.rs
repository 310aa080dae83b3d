//! Blocks that come home: whichever thread gives one back links it to its slab with one compare-and-swap, and whoever
//! next takes blocks from the class collects them all at once. Taking everything leaves no room for the ABA problem.

use super::sync::{AtomicPtr, AtomicU16, AtomicU32, Ordering};

const EMPTY: u32 = u32::MAX;

/// The indices given back to one slab. The links between them live in an array beside it, one entry a block.
pub struct RemoteList {
    head: AtomicU32,
}

impl RemoteList {
    pub fn new() -> RemoteList {
        RemoteList { head: AtomicU32::new(EMPTY) }
    }

    /// Returns whether the list was empty: then, and only then, the slab must be announced to its class.
    pub fn push(&self, links: &[AtomicU16], index: u16) -> bool {
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            links[index as usize].store(head as u16, Ordering::Relaxed);
            // Release: the link, and what the thread did with the block, are seen by who collects it.
            match self.head.compare_exchange_weak(head, index.into(), Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return head == EMPTY,
                Err(now) => head = now,
            }
        }
    }

    /// Takes all indices, calling `each` for every one.
    pub fn drain(&self, links: &[AtomicU16], mut each: impl FnMut(u16)) {
        let mut at = self.head.swap(EMPTY, Ordering::Acquire);
        while at != EMPTY {
            let index = at as u16;
            let next = links[index as usize].load(Ordering::Relaxed);
            each(index);
            // A block count stays below 2^16 − 1, so all ones can only be the end.
            at = if next == u16::MAX { EMPTY } else { next.into() };
        }
    }
}

/// Things with a link of their own, for [`PendingStack`].
pub trait Linked: Sized {
    fn link(&self) -> &AtomicPtr<Self>;
}

/// Slabs with something to collect. Each is in at most one stack, at most once.
pub struct PendingStack<T> {
    head: AtomicPtr<T>,
}

impl<T: Linked> PendingStack<T> {
    pub fn new() -> PendingStack<T> {
        PendingStack { head: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// # Safety
    /// `item` is in no stack and lives until it has been drained.
    pub unsafe fn push(&self, item: *const T) {
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            // SAFETY: alive by the caller's word, and its link belongs to this stack now.
            unsafe { &*item }.link().store(head, Ordering::Relaxed);
            match self.head.compare_exchange_weak(head, item.cast_mut(), Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Takes all items. `each` may cause an item to be pushed again.
    pub fn drain(&self, mut each: impl FnMut(*const T)) {
        let mut at = self.head.swap(std::ptr::null_mut(), Ordering::Acquire);
        while !at.is_null() {
            // SAFETY: items live until drained; the link is read before `each` lets the item go.
            let next = unsafe { &*at }.link().load(Ordering::Relaxed);
            each(at.cast_const());
            at = next;
        }
    }
}

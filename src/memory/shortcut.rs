//! The way of a thread that knows its magazines already: one exchange, and neither the manager nor the stream is looked
//! up. The C functions keep shortcuts by handle.

use super::cache::{Given, Taken};
use super::core::Core;
use super::pool::Pool;
use super::size_class::{class_of, LARGEST_SMALL};
use super::threads::{claim_of, Claim};
use super::MemoryManager;
use crate::stream::RawHandle;
use std::ffi::c_void;

/// For the thread that made it. It may outlive the manager, and finds nothing then.
pub struct Shortcut {
    claim: Claim,
    key: usize,
    free_key: usize,
}

impl Shortcut {
    fn new(core: &Core, arena: &super::arena::Arena, stream: RawHandle) -> Option<Shortcut> {
        core.pages.as_ref()?;
        Some(Shortcut { claim: claim_of(arena)?, key: core.key(stream), free_key: core.free_key(stream) })
    }

    /// `None`: take the long way.
    #[inline]
    pub fn allocate(&self, bytes: usize) -> Option<*mut c_void> {
        if bytes.wrapping_sub(1) >= LARGEST_SMALL {
            return None;
        }
        match self.claim.cache.take(self.claim.token, self.key, class_of(bytes), bytes) {
            Taken::Block(pointer) => Some(pointer),
            _ => None,
        }
    }

    /// `false`: nothing has changed; take the long way.
    #[inline]
    pub fn free(&self, pointer: *mut c_void) -> bool {
        matches!(self.claim.cache.give(self.claim.token, self.free_key, pointer as usize, false), Given::Done)
    }
}

impl MemoryManager {
    /// What takes microseconds at most: a block without the ladder. `None`: take the long way.
    pub fn allocate_at_once(&self, bytes: usize, stream: RawHandle) -> Option<*mut c_void> {
        self.core.allocate_at_once(&self.core.main, bytes, stream)
    }

    /// As `allocate_at_once`. `false`: nothing has changed.
    pub fn free_at_once(&self, pointer: *mut c_void, stream: RawHandle) -> bool {
        self.core.free_at_once(&self.core.main, pointer, stream)
    }

    /// `None`: the thread never allocated here, is ending, or blocks are not pooled.
    pub fn shortcut(&self, stream: RawHandle) -> Option<Shortcut> {
        Shortcut::new(&self.core, &self.core.main, stream)
    }
}

impl Pool {
    /// As `MemoryManager::allocate_at_once`.
    pub fn allocate_at_once(&self, bytes: usize, stream: RawHandle) -> Option<*mut c_void> {
        self.manager().core().allocate_at_once(self.arena(), bytes, stream)
    }

    /// As `MemoryManager::free_at_once`.
    pub fn free_at_once(&self, pointer: *mut c_void, stream: RawHandle) -> bool {
        self.manager().core().free_at_once(self.arena(), pointer, stream)
    }

    /// As `MemoryManager::shortcut`.
    pub fn shortcut(&self, stream: RawHandle) -> Option<Shortcut> {
        Shortcut::new(self.manager().core(), self.arena(), stream)
    }
}

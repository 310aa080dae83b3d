//! The way of a thread that knows its magazines already: one exchange, and neither the manager nor the stream is looked
//! up. The C functions keep shortcuts by handle.

use super::cache::{Given, Taken};
use super::core::Core;
use super::pool::Pool;
use super::size_class::{class_of, LARGEST_SMALL};
use super::threads::{claim_of, Claim};
use super::MemoryManager;
use crate::device::RawHandle;
use crate::error::Result;
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
        core.source.refuse_lost().ok()?;
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

    /// Frees blocks up to the first that must take the long way. Returns their number.
    pub fn free_many(&self, pointers: &[*mut c_void]) -> usize {
        self.claim.cache.give_many(self.claim.token, self.free_key, pointers)
    }
}

/// What blocks come from and go back to: a manager, or one of its pools.
pub trait Blocks {
    /// Allocates as `MemoryManager::allocate` does.
    fn allocate(&self, bytes: usize, stream: RawHandle) -> Result<*mut c_void>;

    /// Frees as `MemoryManager::free` does.
    fn free(&self, pointer: *mut c_void, stream: RawHandle) -> Result<()>;

    /// What takes microseconds at most: a block without the ladder. The stream may end meanwhile. `None`: take the long way.
    fn allocate_at_once(&self, bytes: usize, stream: RawHandle) -> Option<*mut c_void>;

    /// Does of a free what takes microseconds at most. `false`: nothing has changed.
    fn free_at_once(&self, pointer: *mut c_void, stream: RawHandle) -> bool;

    /// `None`: the thread never allocated here, is ending, blocks are not pooled, or the device is lost.
    fn shortcut(&self, stream: RawHandle) -> Option<Shortcut>;
}

impl Blocks for MemoryManager {
    fn allocate(&self, bytes: usize, stream: RawHandle) -> Result<*mut c_void> {
        MemoryManager::allocate(self, bytes, stream)
    }

    fn free(&self, pointer: *mut c_void, stream: RawHandle) -> Result<()> {
        MemoryManager::free(self, pointer, stream)
    }

    fn allocate_at_once(&self, bytes: usize, stream: RawHandle) -> Option<*mut c_void> {
        self.core.allocate_at_once(&self.core.main, bytes, stream)
    }

    fn free_at_once(&self, pointer: *mut c_void, stream: RawHandle) -> bool {
        self.core.free_at_once(&self.core.main, pointer, stream)
    }

    fn shortcut(&self, stream: RawHandle) -> Option<Shortcut> {
        Shortcut::new(&self.core, &self.core.main, stream)
    }
}

impl Blocks for Pool {
    fn allocate(&self, bytes: usize, stream: RawHandle) -> Result<*mut c_void> {
        Pool::allocate(self, bytes, stream)
    }

    fn free(&self, pointer: *mut c_void, stream: RawHandle) -> Result<()> {
        Pool::free(self, pointer, stream)
    }

    fn allocate_at_once(&self, bytes: usize, stream: RawHandle) -> Option<*mut c_void> {
        self.manager().core().allocate_at_once(self.arena(), bytes, stream)
    }

    fn free_at_once(&self, pointer: *mut c_void, stream: RawHandle) -> bool {
        self.manager().core().free_at_once(self.arena(), pointer, stream)
    }

    fn shortcut(&self, stream: RawHandle) -> Option<Shortcut> {
        Shortcut::new(self.manager().core(), self.arena(), stream)
    }
}

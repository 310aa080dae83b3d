//! Blocks that are allocations of their own: without pooling, beyond the range, unified, or spilled to the host.

use super::statistics::Usage;
use super::sync::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::PoisonError;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Memory of the source.
    Plain,
    /// Page-locked host memory.
    Pinned,
    Managed,
}

#[derive(Clone, Copy)]
pub struct DirectBlock {
    pub kind: Kind,
    /// The size that the caller asked for.
    pub bytes: usize,
    /// What the source gave, which alignment may have moved the block away from.
    pub origin: *mut c_void,
    pub origin_bytes: usize,
    /// The counters of the arena that the block belongs to.
    pub usage: *const Usage,
    pub tracked: bool,
    /// It is here because the device was full.
    pub spilled: bool,
}

// SAFETY: addresses; the counters live as long as the manager.
unsafe impl Send for DirectBlock {}
// SAFETY: as above.
unsafe impl Sync for DirectBlock {}

#[derive(Default)]
pub struct DirectBlocks {
    blocks: RwLock<BTreeMap<usize, DirectBlock>>,
    count: AtomicUsize,
    /// Freed blocks of the host's memory that nobody has waited for yet.
    leaving: Mutex<Vec<DirectBlock>>,
}

impl DirectBlocks {
    pub fn insert(&self, address: usize, block: DirectBlock) {
        let mut blocks = self.blocks.write().unwrap_or_else(PoisonError::into_inner);
        blocks.insert(address, block);
        self.count.store(blocks.len(), Ordering::Relaxed);
    }

    /// The block that starts at the address, if `wanted` says so of its counters.
    pub fn remove(&self, address: usize, wanted: impl Fn(&DirectBlock) -> bool) -> Option<DirectBlock> {
        let mut blocks = self.blocks.write().unwrap_or_else(PoisonError::into_inner);
        if !blocks.get(&address).is_some_and(wanted) {
            return None;
        }
        let block = blocks.remove(&address);
        self.count.store(blocks.len(), Ordering::Relaxed);
        block
    }

    /// All blocks of one arena, or of all, one after the other.
    pub fn remove_all(&self, usage: Option<*const Usage>) -> impl Iterator<Item = (usize, DirectBlock)> + '_ {
        let wanted = move |block: &DirectBlock| usage.is_none_or(|usage| usage == block.usage);
        let mut from = 0;
        std::iter::from_fn(move || {
            let mut blocks = self.blocks.write().unwrap_or_else(PoisonError::into_inner);
            let (&address, _) = blocks.range(from..).find(|(_, block)| wanted(block))?;
            from = address + 1;
            let block = blocks.remove(&address)?;
            self.count.store(blocks.len(), Ordering::Relaxed);
            Some((address, block))
        })
    }

    /// The block around the address, with its start.
    pub fn find(&self, address: usize) -> Option<(usize, DirectBlock)> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let blocks = self.blocks.read().unwrap_or_else(PoisonError::into_inner);
        let (start, block) = blocks.range(..=address).next_back()?;
        (address - start < block.bytes).then_some((*start, *block))
    }

    pub fn leave(&self, block: DirectBlock) {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner).push(block);
    }

    pub fn take_leaving(&self) -> Vec<DirectBlock> {
        std::mem::take(&mut *self.leaving.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn for_each(&self, mut each: impl FnMut(usize, &DirectBlock)) {
        for (address, block) in self.blocks.read().unwrap_or_else(PoisonError::into_inner).iter() {
            each(*address, block);
        }
    }
}

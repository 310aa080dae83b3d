//! Which slab an address belongs to: one entry a unit of the range, read without a lock.

use super::slab::Slab;
use super::sync::{AtomicPtr, Ordering};
use std::alloc::Layout;

/// The unit of physical memory and of large blocks.
pub const UNIT_BYTES: usize = crate::executor::PAGE_BYTES;
const UNIT_SHIFT: u32 = UNIT_BYTES.trailing_zeros();

pub struct PageTable {
    base: usize,
    entries: Box<[AtomicPtr<Slab>]>,
}

impl PageTable {
    pub fn new(base: usize, units: usize) -> PageTable {
        let layout = Layout::array::<AtomicPtr<Slab>>(units).expect("a range has fewer units than bytes");
        // SAFETY: the size is not 0. Memory zeroed like this costs nothing until a part of the range is used, which
        // writing NULL into every entry would.
        let zeroed = unsafe { std::alloc::alloc_zeroed(layout) }.cast::<AtomicPtr<Slab>>();
        if zeroed.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        // SAFETY: `units` entries of zero bytes, which are NULL pointers, in memory that a box may free.
        let entries = unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(zeroed, units)) };
        PageTable { base, entries }
    }

    #[inline]
    pub fn contains(&self, address: usize) -> bool {
        address.wrapping_sub(self.base) >> UNIT_SHIFT < self.entries.len()
    }

    /// The slab whose units hold the address. Slabs are recycled, never freed, while the table lives.
    #[inline]
    pub fn find(&self, address: usize) -> Option<&Slab> {
        let entry = self.entries.get(address.wrapping_sub(self.base) >> UNIT_SHIFT)?;
        // SAFETY: NULL, or a slab that lives as long as the pages that this table belongs to.
        unsafe { entry.load(Ordering::Acquire).as_ref() }
    }

    pub fn set(&self, unit: usize, units: usize, slab: *const Slab) {
        for entry in &self.entries[unit..unit + units] {
            entry.store(slab.cast_mut(), Ordering::Release);
        }
    }

    pub fn address(&self, unit: usize) -> usize {
        self.base + unit * UNIT_BYTES
    }
}

//! Which slab an address belongs to: one entry a unit of the range, read without a lock.

use super::slab::Slab;
use super::sync::{AtomicPtr, Ordering};
use super::zeroed::{Zeroed, Zeros};

/// The unit of physical memory and of large blocks.
pub const UNIT_BYTES: usize = crate::device::PAGE_BYTES;
const UNIT_SHIFT: u32 = UNIT_BYTES.trailing_zeros();

pub struct PageTable {
    base: usize,
    entries: Zeroed<AtomicPtr<Slab>>,
}

impl PageTable {
    pub fn new(zeros: &Zeros, base: usize, units: usize) -> PageTable {
        PageTable { base, entries: zeros.table(units) }
    }

    #[inline]
    pub fn contains(&self, address: usize) -> bool {
        address.wrapping_sub(self.base) >> UNIT_SHIFT < self.entries.len()
    }

    /// The slab whose units hold the address, or held it before they were given back: entries are overwritten by the
    /// next owner only, because clearing them cost as much as the rest of freeing a large block. A slab that has moved on
    /// does not locate the address. Slabs are recycled, never freed, while the table lives.
    #[inline]
    pub fn find(&self, address: usize) -> Option<&Slab> {
        let entry = self.entries.get(address.wrapping_sub(self.base) >> UNIT_SHIFT)?;
        // SAFETY: NULL, or a slab that lives as long as the pages that this table belongs to.
        unsafe { entry.load(Ordering::Acquire).as_ref() }
    }

    pub fn set(&self, unit: usize, units: usize, slab: &Slab) {
        for entry in &self.entries[unit..unit + units] {
            entry.store(std::ptr::from_ref(slab).cast_mut(), Ordering::Release);
        }
    }

    pub fn address(&self, unit: usize) -> usize {
        self.base + unit * UNIT_BYTES
    }
}

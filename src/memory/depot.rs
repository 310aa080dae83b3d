//! The depot: slots through which threads pass batches of freed blocks to each other. A slot is filled by one
//! compare-and-swap and emptied by one exchange, after which the batch has one owner again.

use super::sync::{AtomicPtr, AtomicU32, Ordering};

struct Slot<T> {
    /// The label of the item, to skip unsuitable ones without taking them. It may be out of date, so takers look again.
    label: AtomicU32,
    item: AtomicPtr<T>,
}

pub struct Depot<T> {
    slots: Box<[Slot<T>]>,
}

// SAFETY: items move from one thread to another and are never shared.
unsafe impl<T: Send> Send for Depot<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Depot<T> {}

impl<T> Depot<T> {
    pub fn new(slots: usize) -> Depot<T> {
        let slot = |_| Slot { label: AtomicU32::new(0), item: AtomicPtr::new(std::ptr::null_mut()) };
        Depot { slots: (0..slots).map(slot).collect() }
    }

    /// Starts at the slot that `shard` names, so that threads meet little. Gives the item back when all slots are full.
    pub fn put(&self, shard: usize, label: u32, item: Box<T>) -> Result<(), Box<T>> {
        let pointer = Box::into_raw(item);
        for slot in self.from(shard) {
            let empty = std::ptr::null_mut();
            if slot.item.load(Ordering::Relaxed).is_null()
                && slot.item.compare_exchange(empty, pointer, Ordering::Release, Ordering::Relaxed).is_ok()
            {
                slot.label.store(label, Ordering::Relaxed);
                return Ok(());
            }
        }
        // SAFETY: made by `into_raw` above and in no slot.
        Err(unsafe { Box::from_raw(pointer) })
    }

    /// The first item whose label `wanted` accepts.
    pub fn take(&self, shard: usize, wanted: impl Fn(u32) -> bool) -> Option<Box<T>> {
        self.from(shard).find_map(|slot| {
            if slot.item.load(Ordering::Relaxed).is_null() || !wanted(slot.label.load(Ordering::Relaxed)) {
                return None;
            }
            let pointer = slot.item.swap(std::ptr::null_mut(), Ordering::Acquire);
            // SAFETY: `put`'s, and the exchange made this thread its only owner.
            (!pointer.is_null()).then(|| unsafe { Box::from_raw(pointer) })
        })
    }

    fn from(&self, shard: usize) -> impl Iterator<Item = &Slot<T>> {
        let (before, after) = self.slots.split_at(shard % self.slots.len());
        after.iter().chain(before)
    }
}

impl<T> Drop for Depot<T> {
    fn drop(&mut self) {
        while self.take(0, |_| true).is_some() {}
    }
}

//! Handles: what C holds instead of pointers.
//!
//! A handle is a number dressed as a pointer: kind, index and generation of a slot in a table. Looking one up costs a
//! read lock and a clone of an `Arc`; in return a NULL, foreign, stale or twice-destroyed handle is an error with a
//! name, and a call that runs while another thread destroys the handle keeps the object alive until it is done.

use super::guard::note_subject;
use crate::error::{Error, Result, Status};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock};

struct Entry<T> {
    value: Arc<T>,
    poisoned: Arc<AtomicBool>,
}

struct Slot<T> {
    generation: u32,
    entry: Option<Entry<T>>,
}

pub struct Table<T> {
    name: &'static str,
    kind: usize,
    slots: RwLock<(Vec<Slot<T>>, Vec<usize>)>,
}

/// Live handles of one kind; more than an engine can mean.
const MAX_HANDLES: usize = 1 << 24;

impl<T> Table<T> {
    pub const fn new(name: &'static str, kind: usize) -> Table<T> {
        assert!(kind < 128, "the kind takes seven bits");
        Table { name, kind, slots: RwLock::new((Vec::new(), Vec::new())) }
    }

    /// Generation in the upper half, then 24 bits of index, 7 of kind and a 1, which no object's address has.
    fn encode(&self, index: usize, generation: u32) -> usize {
        (generation as usize) << 32 | index << 8 | self.kind << 1 | 1
    }

    pub fn insert<H>(&self, value: Arc<T>) -> Result<*mut H> {
        let mut guard = self.slots.write().unwrap_or_else(|poison| poison.into_inner());
        let (slots, free) = &mut *guard;
        let index = match free.pop() {
            Some(index) => index,
            None if slots.len() < MAX_HANDLES => {
                slots.push(Slot { generation: 0, entry: None });
                slots.len() - 1
            }
            None => return Err(Error::new(Status::Error, format!("{MAX_HANDLES} {} handles are alive", self.name))),
        };
        let slot = &mut slots[index];
        slot.generation = slot.generation.wrapping_add(1);
        slot.entry = Some(Entry { value, poisoned: Arc::new(AtomicBool::new(false)) });
        Ok(self.encode(index, slot.generation) as *mut H)
    }

    pub fn get<H>(&self, handle: *const H) -> Result<Arc<T>> {
        let guard = self.slots.read().unwrap_or_else(|poison| poison.into_inner());
        let entry = self
            .index(handle as usize)
            .and_then(|(index, generation)| guard.0.get(index).filter(|slot| slot.generation == generation))
            .and_then(|slot| slot.entry.as_ref())
            .ok_or_else(|| self.unknown(handle as usize))?;
        if entry.poisoned.load(Ordering::Acquire) {
            return Err(Error::new(
                Status::Internal,
                format!(
                    "this {} met an internal error in an earlier call and refuses all calls but destroy",
                    self.name
                ),
            ));
        }
        note_subject(&entry.poisoned);
        Ok(entry.value.clone())
    }

    /// As `get`; NULL gives `None`.
    pub fn get_optional<H>(&self, handle: *const H) -> Result<Option<Arc<T>>> {
        if handle.is_null() {
            return Ok(None);
        }
        self.get(handle).map(Some)
    }

    /// NULL is fine. The object itself goes with the last child that holds it.
    pub fn remove<H>(&self, handle: *mut H) -> Result<()> {
        // Dropped here, outside the lock: the destructor may free device memory or wait for a stream.
        self.take(handle).map(drop)
    }

    /// As `remove`, handing the object over; `None` for NULL.
    pub fn take<H>(&self, handle: *mut H) -> Result<Option<Arc<T>>> {
        if handle.is_null() {
            return Ok(None);
        }
        let mut guard = self.slots.write().unwrap_or_else(|poison| poison.into_inner());
        let (slots, free) = &mut *guard;
        let (index, generation) = self.index(handle as usize).ok_or_else(|| self.unknown(handle as usize))?;
        let slot = slots.get_mut(index).filter(|slot| slot.generation == generation);
        let entry = slot.and_then(|slot| slot.entry.take()).ok_or_else(|| self.unknown(handle as usize))?;
        free.push(index);
        Ok(Some(entry.value))
    }

    fn index(&self, handle: usize) -> Option<(usize, u32)> {
        let low = handle & 0xff;
        (low == (self.kind << 1 | 1)).then_some(((handle >> 8) & 0xff_ffff, (handle >> 32) as u32))
    }

    fn unknown(&self, handle: usize) -> Error {
        let name = self.name;
        Error::invalid(match handle {
            0 => format!("the {name} handle is NULL"),
            _ if self.index(handle).is_some() => format!("the {name} handle {handle:#x} was destroyed"),
            _ => format!("{handle:#x} is not a {name} handle"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_foreign_and_null_handles_are_told_apart() {
        static THINGS: Table<u32> = Table::new("thing", 3);
        static OTHERS: Table<u32> = Table::new("other", 4);
        let handle: *mut u8 = THINGS.insert(Arc::new(7)).unwrap();
        assert_eq!(*THINGS.get(handle).unwrap(), 7);
        assert!(OTHERS.get(handle).unwrap_err().message.contains("is not a other handle"));
        assert!(THINGS.get(std::ptr::null::<u8>()).unwrap_err().message.contains("NULL"));
        THINGS.remove(handle).unwrap();
        assert!(THINGS.get(handle).unwrap_err().message.contains("destroyed"));
        assert!(THINGS.remove(handle).is_err());
        let again: *mut u8 = THINGS.insert(Arc::new(8)).unwrap();
        assert_ne!(handle, again, "the slot is reused with another generation");
        assert!(THINGS.get(handle).is_err());
        THINGS.remove(again).unwrap();
    }
}

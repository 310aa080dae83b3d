//! The page table in device memory, and the page-locked memory through which changes travel.

use super::pages::NONE;
use crate::device::{CopyKind, RawHandle};
use crate::error::Result;
use crate::memory::{Allocation, MemoryManager};
use crate::operation::memory_copy::MemoryCopy;
use crate::stream::Stream;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Entries of each half of the staging memory, unless a row is longer.
const HALF: usize = 4096;

pub(super) struct DeviceTable {
    allocation: Allocation,
    columns: usize,
    staging: Mutex<Staging>,
}

/// Changes are staged one behind the other, so that no queued copy reads what a later change wrote. When a half is full, an
/// event marks the copies out of it, and is waited for before the half is written again.
struct Staging {
    memory: Arc<MemoryManager>,
    entries: *mut i32,
    /// Of each half.
    length: usize,
    events: [RawHandle; 2],
    half: usize,
    used: usize,
}

// SAFETY: page-locked memory and events of this object alone, used under its lock.
unsafe impl Send for Staging {}

impl DeviceTable {
    /// Every entry is −1, no page.
    pub fn new(memory: &Arc<MemoryManager>, sequences: usize, columns: usize, stream: &Stream) -> Result<DeviceTable> {
        let bytes = sequences * columns * size_of::<i32>();
        let name = |error: crate::error::Error| error.context("the page table of a KV cache");
        let allocation = memory.allocate_owned(bytes, stream.raw()).map_err(name)?;
        let staging = Mutex::new(Staging::new(memory, columns.max(HALF)).map_err(name)?);
        // SAFETY: the block was just allocated with this size.
        unsafe { memory.device().fill(allocation.pointer(), 0xff, bytes, stream.raw())? };
        Ok(DeviceTable { allocation, columns, staging })
    }

    pub fn pointer(&self) -> *const i32 {
        self.allocation.pointer().cast_const().cast()
    }

    pub fn bytes(&self) -> usize {
        self.allocation.bytes()
    }

    /// Queues the copy of a sequence's `entries` to `columns` of its row; `None`: they name no page any more.
    pub fn update(
        &self,
        sequence: usize,
        columns: Range<usize>,
        entries: Option<&[i32]>,
        stream: &Stream,
        queue: &mut dyn FnMut(MemoryCopy) -> Result<()>,
    ) -> Result<()> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let from = staging.stage(columns.len(), entries, stream)?;
        let to = self.allocation.pointer().cast::<i32>().wrapping_add(sequence * self.columns + columns.start);
        let bytes = columns.len() * size_of::<i32>();
        // SAFETY: the columns lie in the table; the staged entries stay until an event behind the copy was waited for.
        queue(unsafe { MemoryCopy::new(to.cast(), from.cast(), bytes, CopyKind::HostToDevice) })
    }
}

impl Staging {
    fn new(memory: &Arc<MemoryManager>, length: usize) -> Result<Staging> {
        let device = memory.device();
        let first = device.event_create()?;
        let second = device.event_create().inspect_err(|_| device.event_destroy(first))?;
        let entries = device.host_allocate(2 * length * size_of::<i32>()).inspect_err(|_| {
            device.event_destroy(first);
            device.event_destroy(second);
        })?;
        Ok(Staging {
            memory: memory.clone(),
            entries: entries.cast(),
            length,
            events: [first, second],
            half: 0,
            used: 0,
        })
    }

    fn stage(&mut self, count: usize, entries: Option<&[i32]>, stream: &Stream) -> Result<*const i32> {
        if self.used + count > self.length {
            let device = self.memory.device();
            device.event_record(self.events[self.half], stream.raw())?;
            // An event that was never recorded has nothing to be waited for.
            device.event_synchronize(self.events[1 - self.half])?;
            (self.half, self.used) = (1 - self.half, 0);
        }
        let to = self.entries.wrapping_add(self.half * self.length + self.used);
        self.used += count;
        // SAFETY: as many entries of the half are free, and no copy out of them is under way.
        let staged = unsafe { std::slice::from_raw_parts_mut(to, count) };
        match entries {
            Some(entries) => staged.copy_from_slice(entries),
            None => staged.fill(NONE),
        }
        Ok(to)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let device = self.memory.device();
        for event in self.events {
            device.event_destroy(event);
        }
        // SAFETY: allocated with this size; whoever destroys a cache waits for its stream, and the driver for the copies.
        unsafe { device.host_free(self.entries.cast(), 2 * self.length * size_of::<i32>()) };
    }
}

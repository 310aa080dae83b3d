//! `memory_copy`: bytes from one place to another.

use super::access::{Region, Visit};
use super::Cost;
use crate::device::{CopyKind, Device, RawHandle};
use crate::error::Result;
use std::ffi::c_void;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryCopy {
    pub destination: *mut c_void,
    /// Apart from the destination, or the same address.
    pub source: *const c_void,
    pub bytes: usize,
    /// Which of the two lie in the device's memory.
    pub kind: CopyKind,
}

// SAFETY: addresses and a size, dereferenced only by executors.
unsafe impl Send for MemoryCopy {}
// SAFETY: as for `Send`.
unsafe impl Sync for MemoryCopy {}

impl MemoryCopy {
    /// # Safety
    /// Both ranges are valid for `bytes` in the memory that `kind` says, until the work has run.
    pub unsafe fn new(destination: *mut c_void, source: *const c_void, bytes: usize, kind: CopyKind) -> MemoryCopy {
        MemoryCopy { destination, source, bytes, kind }
    }

    pub fn run(&self, device: &dyn Device, stream: RawHandle) -> Result<()> {
        // SAFETY: the ranges are valid by the contract of `new`.
        unsafe { device.copy(self.destination, self.source, self.bytes, self.kind, stream) }
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read_before("source", Some(&Region::bytes(self.source, self.bytes)), &["destination"]);
        visit.write("destination", Some(&Region::bytes(self.destination, self.bytes)));
    }

    pub fn cost(&self) -> Cost {
        Cost { operations: 0.0, bytes: 2.0 * self.bytes as f64 }
    }
}

//! `memory_fill`: every byte of a range becomes the same.

use super::access::{Region, Visit};
use super::Cost;
use crate::device::{Device, RawHandle};
use crate::error::Result;
use std::ffi::c_void;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryFill {
    pub destination: *mut c_void,
    pub byte: u8,
    pub bytes: usize,
}

// SAFETY: an address and a size, dereferenced only by executors.
unsafe impl Send for MemoryFill {}
// SAFETY: as for `Send`.
unsafe impl Sync for MemoryFill {}

impl MemoryFill {
    /// # Safety
    /// The range is valid for `bytes` in the device's memory until the work has run.
    pub unsafe fn new(destination: *mut c_void, byte: u8, bytes: usize) -> MemoryFill {
        MemoryFill { destination, byte, bytes }
    }

    pub fn run(&self, device: &dyn Device, stream: RawHandle) -> Result<()> {
        // SAFETY: the range is valid by the contract of `new`.
        unsafe { device.fill(self.destination, self.byte, self.bytes, stream) }
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.write("destination", Some(&Region::bytes(self.destination, self.bytes)));
    }

    pub fn cost(&self) -> Cost {
        Cost { operations: 0.0, bytes: self.bytes as f64 }
    }
}

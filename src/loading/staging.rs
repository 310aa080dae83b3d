//! Page-locked host memory through which a weight travels panel by panel.

use crate::device::{CopyKind, Device};
use crate::error::Result;
use crate::stream::Stream;
use std::ffi::c_void;

/// What a panel should be about, so that one large copy replaces many and a model is never in memory twice.
pub const STAGING_BYTES: usize = 32 << 20;

pub struct Staging<'a> {
    device: &'a dyn Device,
    pointer: *mut u8,
    bytes: usize,
}

impl<'a> Staging<'a> {
    /// Zeroed. `bytes` > 0.
    pub fn new(device: &'a dyn Device, bytes: usize) -> Result<Staging<'a>> {
        let pointer = device.host_allocate(bytes)?.cast::<u8>();
        // SAFETY: just allocated with this size.
        unsafe { std::ptr::write_bytes(pointer, 0, bytes) };
        Ok(Staging { device, pointer, bytes })
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this size and initialised; `&mut self` makes it the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }

    /// Queues a copy of `bytes` from offset `from` on; they stay as they are until the stream has passed it.
    ///
    /// # Safety
    /// `to` is valid for `bytes` in the device's memory.
    pub unsafe fn upload(&mut self, from: usize, bytes: usize, to: *mut u8, stream: &Stream) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let from = self.bytes()[from..from + bytes].as_ptr();
        self.device.copy(to.cast(), from.cast(), bytes, CopyKind::HostToDevice, stream.raw())
    }

    /// Queues a copy to offset `to`.
    ///
    /// # Safety
    /// `from` is valid for `bytes` in the device's memory, and nobody reads the range before the stream has passed it.
    pub unsafe fn download(&mut self, from: *const u8, bytes: usize, to: usize, stream: &Stream) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let to: *mut c_void = self.bytes()[to..to + bytes].as_mut_ptr().cast();
        self.device.copy(to, from.cast(), bytes, CopyKind::DeviceToHost, stream.raw())
    }
}

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated with this size; every copy was waited for, or failed.
        unsafe { self.device.host_free(self.pointer.cast(), self.bytes) };
    }
}

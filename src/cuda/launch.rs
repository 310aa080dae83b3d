//! What crosses from Rust to every launcher.

use crate::device::RawHandle;
use std::ffi::c_void;

/// `nvb_launch` of csrc/common/launch.h.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Launch {
    pub stream: *mut c_void,
    pub capability: i32,
    pub multiprocessors: i32,
    pub shared_bytes_per_block: i32,
    pub l2_bytes: i32,
}

impl Launch {
    pub fn on(mut self, stream: RawHandle) -> Launch {
        self.stream = stream.0;
        self
    }
}

// SAFETY: a description of the device; the stream handle may be used from any thread.
unsafe impl Send for Launch {}
// SAFETY: as above.
unsafe impl Sync for Launch {}

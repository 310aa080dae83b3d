//! The name of a stream or an event.

use std::ffi::c_void;

/// A `CUstream` or `CUevent` on CUDA; the CPU executor gives its own meaning to the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawHandle(pub *mut c_void);

// SAFETY: a token that only its device interprets; CUDA's handles may be used from any thread.
unsafe impl Send for RawHandle {}
// SAFETY: as above.
unsafe impl Sync for RawHandle {}

impl RawHandle {
    pub const NULL: RawHandle = RawHandle(std::ptr::null_mut());
}

//! An engine's own allocator in the place of the device's: what the manager hands out comes from the engine, and is
//! counted, limited, tracked and reclaimed as ever.

use super::size_class::GRANULE;
use crate::error::{Error, Result, Status};
use std::ffi::c_void;

/// Bytes (not 0), alignment (a power of two), stream (a `cudaStream_t`) and user data; NULL: there are none.
pub type Allocate = unsafe extern "C" fn(usize, usize, *mut c_void, *mut c_void) -> *mut c_void;
/// Pointer, bytes as they were asked for, stream and user data.
pub type Free = unsafe extern "C" fn(*mut c_void, usize, *mut c_void, *mut c_void);

/// Functions of the engine. They may be called from any thread, do not throw, and outlive the manager.
#[derive(Debug, Clone, Copy)]
pub struct EngineAllocator {
    pub allocate: Allocate,
    pub free: Free,
    pub user_data: *mut c_void,
}

// SAFETY: handed back to the engine's functions only, which may be called from any thread.
unsafe impl Send for EngineAllocator {}
// SAFETY: as above.
unsafe impl Sync for EngineAllocator {}

impl PartialEq for EngineAllocator {
    fn eq(&self, other: &EngineAllocator) -> bool {
        let parts = |it: &EngineAllocator| (it.allocate as usize, it.free as usize, it.user_data);
        parts(self) == parts(other)
    }
}

impl EngineAllocator {
    /// `stream`: what the engine knows it by.
    pub(super) fn allocate(&self, bytes: usize, stream: *mut c_void) -> Result<*mut c_void> {
        // SAFETY: the engine's function, with the arguments that it was promised.
        let pointer = unsafe { (self.allocate)(bytes, GRANULE, stream, self.user_data) };
        if pointer.is_null() {
            let text = format!("the engine's allocator has no {bytes} bytes");
            return Err(Error::new(Status::OutOfMemory, text).with_limit(bytes as u64, 0));
        }
        if !(pointer as usize).is_multiple_of(GRANULE) {
            // SAFETY: allocated just now.
            unsafe { self.free(pointer, bytes, stream) };
            let text = format!("the engine's allocator returned {pointer:p}, which is no multiple of {GRANULE}");
            return Err(Error::new(Status::MemoryAllocation, text));
        }
        Ok(pointer)
    }

    /// # Safety
    /// `pointer` came from `allocate` with the same `bytes` and has not been freed.
    pub(super) unsafe fn free(&self, pointer: *mut c_void, bytes: usize, stream: *mut c_void) {
        // SAFETY: the engine's function, with what it returned.
        unsafe { (self.free)(pointer, bytes, stream, self.user_data) }
    }
}

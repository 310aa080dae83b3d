//! Unified memory: where the driver should keep it, and moving it before it is needed. Other blocks stay where they are,
//! so that callers need not know which of theirs have spilled.

use super::core::Core;
use super::direct::Kind;
use crate::device::{ManagedAdvice, RawHandle};
use crate::error::{Error, Result};
use std::ffi::c_void;

impl Core {
    pub fn advise(&self, pointer: *mut c_void, bytes: usize, advice: ManagedAdvice) -> Result<()> {
        if self.is_managed(pointer, bytes)? {
            // SAFETY: the range lies inside a block of unified memory.
            unsafe { self.source.managed_advise(pointer, bytes, advice)? };
        }
        Ok(())
    }

    pub fn prefetch(&self, pointer: *mut c_void, bytes: usize, to_host: bool, stream: RawHandle) -> Result<()> {
        if self.is_managed(pointer, bytes)? {
            // SAFETY: as above.
            unsafe { self.source.managed_prefetch(pointer, bytes, to_host, stream)? };
        }
        Ok(())
    }

    /// The range must lie inside a live block.
    fn is_managed(&self, pointer: *mut c_void, bytes: usize) -> Result<bool> {
        if bytes == 0 || !self.owns(pointer as usize, bytes) {
            return Err(Error::invalid(format!("{bytes} bytes from {pointer:p} do not lie inside a live block")));
        }
        let block = self.direct.find(pointer as usize);
        Ok(block.is_some_and(|(_, block)| block.kind == Kind::Managed))
    }
}

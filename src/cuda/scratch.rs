//! Workspace that kernels need between their blocks: one growing block a stream, because work on one stream is ordered
//! and work on two may overlap.

use crate::error::Result;
use crate::stream::RawHandle;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Mutex;

#[derive(Debug, Clone, Copy)]
struct Block {
    pointer: *mut c_void,
    bytes: usize,
}

// SAFETY: the address of device memory that only ordered work uses.
unsafe impl Send for Block {}

/// What the workspace is for; each purpose has its own block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Any content, used within one operation.
    Workspace,
    /// A vendor product's result on its way to the epilogue, alive together with `Workspace`.
    Product,
    /// Zero before each launch; every launch leaves it zero.
    Counters,
}

#[derive(Default)]
pub struct Scratch {
    blocks: Mutex<HashMap<(RawHandle, Purpose), Block>>,
}

/// Growing in steps keeps a slowly growing need from allocating at each call.
const STEP: usize = 1 << 20;

impl Scratch {
    /// At least `bytes` of the stream's block. `allocate` and `free` are ordered on the stream, so earlier work keeps the
    /// old block until it is done.
    pub fn get(
        &self,
        stream: RawHandle,
        purpose: Purpose,
        bytes: usize,
        allocate: impl FnOnce(usize) -> Result<*mut c_void>,
        free: impl FnOnce(*mut c_void, usize),
    ) -> Result<*mut c_void> {
        if bytes == 0 {
            return Ok(std::ptr::null_mut());
        }
        let mut blocks = self.blocks.lock().unwrap_or_else(|poison| poison.into_inner());
        let old = blocks.get(&(stream, purpose)).copied();
        if let Some(block) = old.filter(|block| block.bytes >= bytes) {
            return Ok(block.pointer);
        }
        let bytes = bytes.next_multiple_of(STEP);
        let pointer = allocate(bytes)?;
        blocks.insert((stream, purpose), Block { pointer, bytes });
        if let Some(old) = old {
            free(old.pointer, old.bytes);
        }
        Ok(pointer)
    }

    /// Gives back the blocks of one stream, or of all streams for `None`.
    pub fn release(&self, stream: Option<RawHandle>, mut free: impl FnMut(RawHandle, *mut c_void, usize)) {
        let mut blocks = self.blocks.lock().unwrap_or_else(|poison| poison.into_inner());
        blocks.retain(|(owner, _), block| {
            let gone = stream.is_none_or(|stream| stream == *owner);
            if gone {
                free(*owner, block.pointer, block.bytes);
            }
            !gone
        });
    }
}

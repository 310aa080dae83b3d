//! Workspace that kernels need between their blocks: growing blocks for each stream, because work on one stream is
//! ordered and work on two may overlap.

use crate::error::Result;
use crate::executor::Executor;
use crate::stream::RawHandle;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard};

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
    /// A slice of a weight as floats, alive together with `Workspace` and `Product`.
    Weight,
    /// A product's input in another order or in 8 bits, alive together with all of these.
    Input,
    /// Zero before each launch; every launch leaves it zero.
    Counters,
}

/// The blocks of one stream. Whoever launches with them holds the lock until the launch is queued: another thread that
/// grows a block in between would free it before the launch.
#[derive(Clone, Default)]
pub struct StreamScratch {
    blocks: Blocks,
    inputs: Blocks,
    outputs: Blocks,
}

type Blocks = Arc<Mutex<HashMap<Purpose, Block>>>;

pub struct ScratchGuard<'a> {
    blocks: MutexGuard<'a, HashMap<Purpose, Block>>,
    executor: &'a dyn Executor,
    stream: RawHandle,
}

/// Growing in steps keeps a slowly growing need from allocating at each call.
const STEP: usize = 1 << 20;

impl StreamScratch {
    pub fn lock<'a>(&'a self, executor: &'a dyn Executor, stream: RawHandle) -> ScratchGuard<'a> {
        guard(&self.blocks, executor, stream)
    }

    /// Blocks apart from those, for what an operation hands to another one that has workspace of its own. Taken before
    /// `lock`.
    pub fn lock_inputs<'a>(&'a self, executor: &'a dyn Executor, stream: RawHandle) -> ScratchGuard<'a> {
        guard(&self.inputs, executor, stream)
    }

    /// The same for what an operation makes of another one's result. Taken before both.
    pub fn lock_outputs<'a>(&'a self, executor: &'a dyn Executor, stream: RawHandle) -> ScratchGuard<'a> {
        guard(&self.outputs, executor, stream)
    }
}

fn guard<'a>(blocks: &'a Blocks, executor: &'a dyn Executor, stream: RawHandle) -> ScratchGuard<'a> {
    ScratchGuard { blocks: blocks.lock().unwrap_or_else(|poison| poison.into_inner()), executor, stream }
}

impl ScratchGuard<'_> {
    /// At least `bytes` for the purpose; NULL for 0. Growing is ordered on the stream, so earlier work keeps the old block
    /// until it is done.
    pub fn get(&mut self, purpose: Purpose, bytes: usize) -> Result<*mut c_void> {
        if bytes == 0 {
            return Ok(std::ptr::null_mut());
        }
        let old = self.blocks.get(&purpose).copied();
        if let Some(block) = old.filter(|block| block.bytes >= bytes) {
            return Ok(block.pointer);
        }
        let bytes = bytes.next_multiple_of(STEP);
        let pointer = self.executor.allocate(bytes, self.stream)?;
        // SAFETY: allocated just now with this size; the old block is freed once.
        unsafe {
            if purpose == Purpose::Counters {
                if let Err(error) = self.executor.fill(pointer, 0, bytes, self.stream) {
                    self.executor.free(pointer, bytes, self.stream);
                    return Err(error);
                }
            }
            if let Some(old) = self.blocks.insert(purpose, Block { pointer, bytes }) {
                self.executor.free(old.pointer, old.bytes, self.stream);
            }
        }
        Ok(pointer)
    }
}

#[derive(Default)]
pub struct Scratch {
    streams: Mutex<HashMap<RawHandle, StreamScratch>>,
}

impl Scratch {
    pub fn of(&self, stream: RawHandle) -> StreamScratch {
        self.streams().entry(stream).or_default().clone()
    }

    /// Gives back the blocks of one stream, in its order.
    pub fn release(&self, stream: RawHandle, executor: &dyn Executor) {
        let scratch = self.streams().remove(&stream);
        if let Some(scratch) = scratch {
            free(scratch, executor, stream);
        }
    }

    /// Gives back everything, in no stream's order: a stream that the caller owned may be gone by now.
    pub fn release_all(&self, executor: &dyn Executor) {
        let all: Vec<_> = self.streams().drain().collect();
        for (_, scratch) in all {
            free(scratch, executor, RawHandle::NULL);
        }
    }

    fn streams(&self) -> MutexGuard<'_, HashMap<RawHandle, StreamScratch>> {
        self.streams.lock().unwrap_or_else(|poison| poison.into_inner())
    }
}

fn free(scratch: StreamScratch, executor: &dyn Executor, stream: RawHandle) {
    let outputs = scratch.lock_outputs(executor, stream);
    for mut guard in [outputs, scratch.lock_inputs(executor, stream), scratch.lock(executor, stream)] {
        for (_, block) in guard.blocks.drain() {
            // SAFETY: drained, so freed once.
            unsafe { executor.free(block.pointer, block.bytes, stream) };
        }
    }
}

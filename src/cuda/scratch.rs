//! Workspace that kernels need between their blocks, for each stream its own, because work on one stream is ordered and
//! work on two may overlap: growing blocks of the library's, or a block that the caller has set. The first serve threads
//! that share a stream; with the second one thread at a time queues work, as the executor's contract says.

use super::workspace::{Workspace, COUNTER_BYTES};
use crate::device::{Device, RawHandle};
use crate::error::{Error, Result, Status};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

#[derive(Debug, Clone, Copy)]
pub struct Block {
    pointer: *mut c_void,
    bytes: usize,
}

// SAFETY: the address of device memory that only ordered work uses.
unsafe impl Send for Block {}

/// What workspace is used for; each use has its own block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkspaceUse {
    /// Any content that a kernel uses within one operation.
    Kernel,
    /// A vendor product's result on its way to the epilogue, alive together with `Kernel`.
    Product,
    /// A slice of a weight as floats, alive together with `Kernel` and `Product`.
    Weight,
    /// A product's input in another order, in aligned rows or in 8 bits, alive together with all of these.
    Input,
    /// Zero before each launch; every launch leaves it zero.
    Counters,
}

impl WorkspaceUse {
    pub const ALL: [WorkspaceUse; 5] = [
        WorkspaceUse::Kernel,
        WorkspaceUse::Product,
        WorkspaceUse::Weight,
        WorkspaceUse::Input,
        WorkspaceUse::Counters,
    ];
}

/// The blocks of one stream. Whoever launches with them holds the lock until the launch is queued: another thread that
/// grows a block in between would free it before the launch.
#[derive(Default)]
pub struct StreamScratch {
    blocks: Blocks,
    inputs: Blocks,
    outputs: Blocks,
    /// Bytes at the end of the caller's block that guards of the operation under way have.
    taken: AtomicUsize,
}

type Blocks = Mutex<Held>;

#[derive(Default)]
struct Held {
    /// By `WorkspaceUse`.
    own: [Option<Block>; WorkspaceUse::ALL.len()],
    /// The caller's, which then is all that operations take: counters first, what `lock` gives behind them, what
    /// `lock_inputs` and `lock_outputs` give at the end.
    caller: Option<Block>,
}

pub struct ScratchGuard<'a> {
    held: MutexGuard<'a, Held>,
    carved: Option<Carved>,
    /// What is given back with the guard, of `StreamScratch::taken`.
    taken: Option<(&'a AtomicUsize, usize)>,
    executor: &'a dyn Device,
    stream: RawHandle,
}

/// A part of the caller's block, in which each purpose has the room that was announced.
struct Carved {
    counters: *mut c_void,
    first: *mut c_void,
    workspace: Workspace,
}

/// Growing in steps keeps a slowly growing need from allocating at each call.
const STEP: usize = 1 << 20;

impl StreamScratch {
    /// `workspace`: the most that will be asked of the guard. It is asked for, and held against what the caller has set, where
    /// there is such a block.
    pub fn lock<'a>(
        &'a self,
        executor: &'a dyn Device,
        stream: RawHandle,
        workspace: impl FnOnce() -> Workspace,
    ) -> Result<ScratchGuard<'a>> {
        let held = held(&self.blocks);
        let carve = |block: Block| {
            let workspace = workspace();
            expect_room(workspace.total().saturating_add(self.taken.load(Ordering::Relaxed)), block.bytes)?;
            Ok(Carved { counters: block.pointer, first: block.pointer.wrapping_byte_add(COUNTER_BYTES), workspace })
        };
        let carved = held.caller.map(carve).transpose()?;
        Ok(ScratchGuard { held, carved, taken: None, executor, stream })
    }

    /// Blocks apart from those, for what an operation hands to another one that has workspace of its own. Taken before
    /// `lock`. They hold no counters.
    pub fn lock_inputs<'a>(
        &'a self,
        executor: &'a dyn Device,
        stream: RawHandle,
        workspace: impl FnOnce() -> Workspace,
    ) -> Result<ScratchGuard<'a>> {
        self.lock_end(&self.inputs, executor, stream, workspace)
    }

    /// Blocks apart from both, for what an operation makes of another one's result. This lock is taken before theirs.
    pub fn lock_outputs<'a>(
        &'a self,
        executor: &'a dyn Device,
        stream: RawHandle,
        workspace: impl FnOnce() -> Workspace,
    ) -> Result<ScratchGuard<'a>> {
        self.lock_end(&self.outputs, executor, stream, workspace)
    }

    fn lock_end<'a>(
        &'a self,
        blocks: &'a Blocks,
        executor: &'a dyn Device,
        stream: RawHandle,
        workspace: impl FnOnce() -> Workspace,
    ) -> Result<ScratchGuard<'a>> {
        let held = held(blocks);
        let mut taken = None;
        let carve = |block: Block| {
            let (workspace, before) = (workspace(), self.taken.load(Ordering::Relaxed));
            expect_room(workspace.total().saturating_add(before), block.bytes)?;
            // From one boundary to the next, whatever the block's length.
            let end = (block.bytes - before) / ALIGNMENT * ALIGNMENT;
            let first = end.saturating_sub(workspace.carved());
            self.taken.store(block.bytes - first, Ordering::Relaxed);
            taken = Some((&self.taken, block.bytes - first - before));
            Ok(Carved { counters: block.pointer, first: block.pointer.wrapping_byte_add(first), workspace })
        };
        let carved = held.caller.map(carve).transpose()?;
        Ok(ScratchGuard { held, carved, taken, executor, stream })
    }

    /// The library's own blocks, whatever the caller has set: for calls that allocate anyway.
    pub fn lock_own<'a>(&'a self, executor: &'a dyn Device, stream: RawHandle) -> ScratchGuard<'a> {
        ScratchGuard { held: held(&self.blocks), carved: None, taken: None, executor, stream }
    }
}

/// The alignment of every block, and of every part of the caller's workspace.
pub const ALIGNMENT: usize = 256;

fn held(blocks: &Blocks) -> MutexGuard<'_, Held> {
    blocks.lock().unwrap_or_else(|poison| poison.into_inner())
}

/// Refuses a caller's workspace that is smaller than the call needs.
pub fn expect_room(needed: usize, given: usize) -> Result<()> {
    if needed <= given {
        return Ok(());
    }
    Err(Error::invalid(format!("the call needs {needed} bytes of workspace; the stream was given {given}"))
        .with_limit(needed as u64, given as u64)
        .with_advice("ask the operation's nvb_..._get_workspace_size, and set as much with nvb_stream_set_workspace"))
}

impl Drop for ScratchGuard<'_> {
    fn drop(&mut self) {
        if let Some((taken, bytes)) = self.taken {
            taken.fetch_sub(bytes, Ordering::Relaxed);
        }
    }
}

impl ScratchGuard<'_> {
    /// At least `bytes` for the purpose; NULL for 0. Growing is ordered on the stream, so earlier work keeps the old block
    /// until it is done.
    pub fn get(&mut self, usage: WorkspaceUse, bytes: usize) -> Result<*mut c_void> {
        if bytes == 0 {
            return Ok(std::ptr::null_mut());
        }
        if let Some(carved) = &self.carved {
            return carved.get(usage, bytes, self.executor, self.stream);
        }
        let old = self.held.own[usage as usize];
        if let Some(block) = old.filter(|block| block.bytes >= bytes) {
            return Ok(block.pointer);
        }
        let bytes = bytes.next_multiple_of(STEP);
        let pointer = self.executor.allocate(bytes, self.stream)?;
        // SAFETY: allocated just now with this size; the old block is freed once.
        unsafe {
            if usage == WorkspaceUse::Counters {
                if let Err(error) = self.executor.fill(pointer, 0, bytes, self.stream) {
                    self.executor.free(pointer, bytes, self.stream);
                    return Err(error);
                }
            }
            if let Some(old) = self.held.own[usage as usize].replace(Block { pointer, bytes }) {
                self.executor.free(old.pointer, old.bytes, self.stream);
            }
        }
        Ok(pointer)
    }
}

impl Carved {
    fn get(&self, usage: WorkspaceUse, bytes: usize, executor: &dyn Device, stream: RawHandle) -> Result<*mut c_void> {
        let announced = self.workspace.of(usage);
        if bytes > announced {
            let text = format!("{bytes} bytes of workspace for {usage:?}; {announced} were announced");
            return Err(Error::new(Status::Internal, text));
        }
        if usage == WorkspaceUse::Counters && announced <= COUNTER_BYTES {
            return Ok(self.counters);
        }
        let pointer = self.first.wrapping_byte_add(self.workspace.offset(usage));
        if usage == WorkspaceUse::Counters {
            // Other operations have used this place.
            // SAFETY: the caller's block has this room, as was checked when it was carved.
            unsafe { executor.fill(pointer, 0, bytes, stream)? };
        }
        Ok(pointer)
    }
}

#[derive(Default)]
pub struct Scratch {
    streams: Mutex<HashMap<RawHandle, Arc<StreamScratch>>>,
    /// Streams with a block of the caller's: without one nobody looks for it.
    callers: AtomicUsize,
}

impl Scratch {
    pub fn of(&self, stream: RawHandle) -> Arc<StreamScratch> {
        self.streams().entry(stream).or_default().clone()
    }

    /// Bytes of the block that the caller has set for the stream.
    pub fn callers_bytes(&self, stream: RawHandle) -> Option<usize> {
        if self.callers.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let scratch = self.streams().get(&stream).cloned();
        scratch.and_then(|scratch| held(&scratch.blocks).caller).map(|block| block.bytes)
    }

    /// From now on operations on the stream take their workspace from this block; NULL: from the library's own again. The
    /// block's counters are zero once the stream has come to this point.
    pub fn set_callers(&self, stream: RawHandle, data: *mut c_void, bytes: usize, executor: &dyn Device) -> Result<()> {
        let scratch = self.of(stream);
        // In the order in which operations take them.
        let mut outputs = held(&scratch.outputs);
        let (mut inputs, mut blocks) = (held(&scratch.inputs), held(&scratch.blocks));
        let caller = (!data.is_null()).then_some(Block { pointer: data, bytes });
        if caller.is_some() {
            // SAFETY: memory of the caller's that the device reaches and the stream's work alone uses.
            unsafe { executor.fill(data, 0, bytes.min(COUNTER_BYTES), stream)? };
        }
        self.replace_callers([&mut outputs, &mut inputs, &mut blocks], caller);
        Ok(())
    }

    fn replace_callers(&self, held: [&mut Held; 3], caller: Option<Block>) {
        match (held[0].caller.is_some(), caller.is_some()) {
            (false, true) => self.callers.fetch_add(1, Ordering::Relaxed),
            (true, false) => self.callers.fetch_sub(1, Ordering::Relaxed),
            _ => 0,
        };
        held.into_iter().for_each(|held| held.caller = caller);
    }

    /// The block that the caller has set for the stream.
    pub fn callers(&self, stream: RawHandle) -> Option<Block> {
        held(&self.of(stream).blocks).caller
    }

    /// A block that `callers` gave is the stream's again, with the counters that it had.
    pub fn put_back_callers(&self, stream: RawHandle, block: Option<Block>) {
        let scratch = self.of(stream);
        let mut outputs = held(&scratch.outputs);
        let (mut inputs, mut blocks) = (held(&scratch.inputs), held(&scratch.blocks));
        self.replace_callers([&mut outputs, &mut inputs, &mut blocks], block);
    }

    /// Gives back the blocks of one stream, in its order.
    pub fn release(&self, stream: RawHandle, executor: &dyn Device) {
        let scratch = self.streams().remove(&stream);
        if let Some(scratch) = scratch {
            if held(&scratch.blocks).caller.is_some() {
                self.callers.fetch_sub(1, Ordering::Relaxed);
            }
            free(&scratch, executor, stream);
        }
    }

    /// Gives back everything, in no stream's order: a stream that the caller owned may be gone by now.
    pub fn release_all(&self, executor: &dyn Device) {
        let all: Vec<_> = self.streams().drain().collect();
        for (_, scratch) in all {
            free(&scratch, executor, RawHandle::NULL);
        }
    }

    fn streams(&self) -> MutexGuard<'_, HashMap<RawHandle, Arc<StreamScratch>>> {
        self.streams.lock().unwrap_or_else(|poison| poison.into_inner())
    }
}

fn free(scratch: &StreamScratch, executor: &dyn Device, stream: RawHandle) {
    for mut held in [held(&scratch.outputs), held(&scratch.inputs), held(&scratch.blocks)] {
        for block in held.own.iter_mut().filter_map(Option::take) {
            // SAFETY: taken, so freed once.
            unsafe { executor.free(block.pointer, block.bytes, stream) };
        }
    }
}

//! The workspace of graphs: one block of the backend's memory that the launches of a graph use, or those of several graphs.
//!
//! Launches with one workspace take turns: each waits on the device for the one before, by an event that is recorded behind
//! it, whatever the streams. A replay holds the block's address, so after the block has grown each graph is prepared again
//! before its next launch; the block before is freed at once, when the launches that used it have finished.

use crate::allocation::push;
use crate::device::RawHandle;
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::memory::{expect_awake, Allocation, MemoryManager};
use crate::stream::{Event, Stream};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub struct Workspace {
    executor: Arc<dyn Executor>,
    memory: Arc<MemoryManager>,
    /// That launch with it.
    graphs: AtomicU32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    block: Option<Block>,
    /// The most that a list of these graphs is known to need.
    wanted: usize,
    /// Behind the last launch.
    last: Option<Event>,
    /// Blocks before this one that CUDA graphs of the caller's name.
    kept: Vec<Block>,
}

struct Block {
    memory: Allocation,
    number: u64,
    /// A CUDA graph of the caller's names it, so it stays as long as the workspace.
    is_kept: bool,
}

impl Block {
    fn bytes(&self) -> (*mut c_void, usize) {
        (self.memory.pointer(), self.memory.bytes())
    }
}

impl Workspace {
    pub fn new(executor: &Arc<dyn Executor>, memory: &Arc<MemoryManager>) -> Workspace {
        Workspace {
            executor: executor.clone(),
            memory: memory.clone(),
            graphs: AtomicU32::new(0),
            state: Mutex::default(),
        }
    }

    pub fn executor(&self) -> &Arc<dyn Executor> {
        &self.executor
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of the block that there is now.
    pub fn bytes(&self) -> usize {
        self.lock().block.as_ref().map_or(0, |block| block.memory.bytes())
    }

    /// How many graphs launch with it.
    pub fn graphs(&self) -> u32 {
        self.graphs.load(Ordering::Relaxed)
    }

    /// The next block has at least as many bytes.
    pub fn want(&self, bytes: usize) {
        let mut state = self.lock();
        state.wanted = state.wanted.max(bytes);
    }

    /// The turn of a launch; it ends with the answer.
    pub fn begin(&self) -> Turn<'_> {
        Turn { workspace: self, state: self.lock() }
    }

    /// Waits until the last launch has finished.
    pub fn synchronize(&self) -> Result<()> {
        self.begin().synchronize()
    }
}

/// A graph's share in a workspace.
pub struct Share(Arc<Workspace>);

impl Share {
    pub fn of(workspace: Arc<Workspace>) -> Share {
        workspace.graphs.fetch_add(1, Ordering::Relaxed);
        Share(workspace)
    }

    pub fn workspace(&self) -> &Arc<Workspace> {
        &self.0
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.0.graphs.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Of one launch: nobody else launches with the workspace meanwhile.
pub struct Turn<'a> {
    workspace: &'a Workspace,
    state: MutexGuard<'a, State>,
}

impl Turn<'_> {
    /// Which block there is; 0: none.
    pub fn block_number(&self) -> u64 {
        self.state.block.as_ref().map_or(0, |block| block.number)
    }

    /// Refuses a launch while the block sleeps.
    pub fn expect_awake(&self) -> Result<()> {
        let Some(block) = &self.state.block else { return Ok(()) };
        expect_awake(block.memory.pointer()).map_err(|error| error.context("the graph's workspace"))
    }

    /// The host waits until the last launch has finished.
    pub fn synchronize(&self) -> Result<()> {
        self.state.last.as_ref().map_or(Ok(()), Event::synchronize)
    }

    /// A block of at least `bytes`, which no work uses; NULL for 0. Waits for the last launch and for `stream`.
    pub fn block(&mut self, bytes: usize, stream: RawHandle) -> Result<(*mut c_void, usize)> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        self.synchronize()?;
        if bytes == 0 {
            return Ok((std::ptr::null_mut(), 0));
        }
        let wanted = self.state.wanted.max(bytes);
        let has_room = |block: &Block| block.memory.bytes() >= bytes;
        if !self.state.block.as_ref().is_some_and(has_room) {
            // First the old one goes, which the new one may then be made of.
            if let Some(block) = self.state.block.take().filter(|block| block.is_kept) {
                push(&mut self.state.kept, block, "blocks of workspace")?;
            }
            let named = |error: Error| error.context("the graph's workspace");
            let allocate = |bytes| self.workspace.memory.allocate_owned(bytes, stream);
            // Where there is none for the most demanding list, this one may run all the same.
            let memory = allocate(wanted).or_else(|error| if bytes < wanted { allocate(bytes) } else { Err(error) });
            let memory = memory.map_err(named)?;
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            self.state.block = Some(Block { memory, number, is_kept: false });
        }
        // Memory that was freed on the stream is given out before the stream's work with it has finished, and a CUDA graph of the
        // caller's that names the block is ordered by the stream alone.
        self.workspace.executor.stream_synchronize(stream)?;
        Ok(self.state.block.as_ref().map_or((std::ptr::null_mut(), 0), Block::bytes))
    }

    /// The block that there is, for a CUDA graph of the caller's.
    pub fn keep_block(&mut self) -> (*mut c_void, usize) {
        self.state.block.as_mut().map_or((std::ptr::null_mut(), 0), |block| {
            block.is_kept = true;
            block.bytes()
        })
    }

    /// Queues what `launch` does behind the last launch, on the device.
    pub fn queue(&mut self, stream: &Stream, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        let executor = &self.workspace.executor;
        if self.state.last.is_none() {
            self.state.last = Some(Event::new(executor)?);
        } else if let Some(last) = &self.state.last {
            executor.stream_wait_event(stream.raw(), last.raw())?;
        }
        let launched = launch();
        if let Some(last) = &self.state.last {
            // Also behind a part that was queued before an error.
            if let Err(error) = executor.event_record(last.raw(), stream.raw()) {
                log::warn!(target: "nvbackend::graph", "a launch is waited for, since {error}");
                launched.and(executor.stream_synchronize(stream.raw()))?;
                return Ok(());
            }
        }
        launched
    }
}

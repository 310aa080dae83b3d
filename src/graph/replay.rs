//! How a recorded list runs: as one replay that the executor made of it, or an operation after the other.

use super::workspace::{Turn, Workspace};
use super::Node;
use crate::allocation::{push, with_room};
use crate::error::{Error, Result};
use crate::executor::CapturedList;
use crate::memory::{all_awake, expect_awake, sleeps};
use crate::operation::Operation;
use crate::stream::Stream;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a launch needs beside the nodes.
pub struct Replay {
    /// One address of each region, which may sleep, with the argument and the node that name it.
    addresses: Vec<(usize, &'static str, u32)>,
    prepared: Mutex<Option<Prepared>>,
}

struct Prepared {
    /// `None`: the executor runs the operations one by one.
    captured: Option<Box<dyn CapturedList>>,
    /// How often memory had been put to sleep: a replay that was made before may hold what was mapped then.
    sleeps: usize,
    /// The block of workspace that the replay holds; `None`: it holds none.
    block: Option<u64>,
}

impl Prepared {
    fn is_current(&self, turn: &Turn) -> bool {
        self.sleeps == sleeps() && self.block.is_none_or(|block| block == turn.block_number())
    }
}

impl Replay {
    pub fn of(nodes: &[Node]) -> Result<Replay> {
        let mut addresses = Vec::new();
        for (index, node) in nodes.iter().enumerate() {
            for access in node.accesses.iter().filter(|access| !access.region.is_empty()) {
                push(&mut addresses, (access.region.start, access.name, index as u32), "a graph's addresses")?;
            }
        }
        addresses.sort_unstable();
        addresses.dedup_by_key(|(address, ..)| *address);
        Ok(Replay { addresses, prepared: Mutex::new(None) })
    }

    /// Refuses a launch while memory that the list names sleeps.
    pub fn expect_awake(&self) -> Result<()> {
        // Some thousand addresses of a model would take microseconds of each launch.
        if all_awake() {
            return Ok(());
        }
        self.addresses.iter().try_for_each(|&(address, name, node)| {
            expect_awake(address as *const c_void).map_err(|error| error.context(format_args!("node {node}, `{name}`")))
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Prepared>> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it holds a block of workspace.
    pub fn has_workspace(&self) -> bool {
        self.lock().as_ref().is_some_and(|prepared| prepared.block.is_some())
    }

    /// Queues the list behind the last launch with the workspace. The first launch, and the first after memory slept or the
    /// workspace grew, prepares it. Whether the caller captures the stream, and its CUDA graph names the workspace now.
    pub fn launch(&self, nodes: &[Node], workspace: &Workspace, stream: &Stream) -> Result<bool> {
        let is_captured = workspace.executor().stream_is_capturing(stream.raw())?;
        if nodes.is_empty() {
            return Ok(is_captured);
        }
        // One launch at a time: a captured list may not be launched by two threads at once.
        let mut prepared = self.lock();
        let mut turn = workspace.begin();
        if !prepared.as_ref().is_some_and(|prepared| prepared.is_current(&turn)) {
            if is_captured {
                return Err(Error::invalid(
                    "the stream is being captured by CUDA, and the graph was not launched before",
                )
                .with_advice("launch it once on a stream that is not captured"));
            }
            *prepared = None;
            *prepared = Some(prepare(nodes, workspace, &mut turn, stream)?);
        }
        turn.expect_awake()?;
        let captured = prepared.as_ref().and_then(|prepared| prepared.captured.as_deref());
        match captured {
            // CUDA ends a capture in which another graph is launched. The order of what runs then is the caller's.
            Some(_) if is_captured => {
                let block = turn.keep_block();
                workspace.executor().capture_onto(&operations(nodes)?, block, stream.raw())?;
            }
            None if is_captured => run(nodes, workspace, stream)?,
            Some(captured) => turn.queue(stream, || captured.launch(stream.raw()))?,
            None => turn.queue(stream, || run(nodes, workspace, stream))?,
        }
        Ok(is_captured)
    }
}

/// Queues the operations one by one, with the workspace of the stream.
fn run(nodes: &[Node], workspace: &Workspace, stream: &Stream) -> Result<()> {
    if nodes.iter().any(|node| node.op.computes()) {
        stream.expect_awake()?;
    }
    nodes.iter().enumerate().try_for_each(|(index, Node { op, .. })| {
        let named = |error: Error| error.context(format_args!("node {index}, {}", op.kind().name()));
        workspace.executor().run(op, stream.raw()).map_err(named)
    })
}

pub fn operations(nodes: &[Node]) -> Result<Vec<&Operation>> {
    let mut operations: Vec<&Operation> = with_room(nodes.len(), "a graph's operations")?;
    operations.extend(nodes.iter().map(|node| &node.op));
    Ok(operations)
}

fn prepare(nodes: &[Node], workspace: &Workspace, turn: &mut Turn, stream: &Stream) -> Result<Prepared> {
    let sleeps = sleeps();
    let operations = operations(nodes)?;
    let executor = workspace.executor();
    let bytes = executor.capture_workspace(&operations)?;
    let block = turn.block(bytes, stream.raw())?;
    turn.expect_awake()?;
    let captured = executor.clone().capture(&operations, block)?;
    let block = (captured.is_some() && bytes > 0).then(|| turn.block_number());
    Ok(Prepared { captured, sleeps, block })
}

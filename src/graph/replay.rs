//! How a recorded list runs: as one replay that the executor made of it, or an operation after the other.

use super::Node;
use crate::allocation::{push, with_room};
use crate::device::RawHandle;
use crate::error::{Error, Result};
use crate::executor::{CapturedList, Executor};
use crate::memory::{expect_awake, sleeps};
use crate::operation::Operation;
use crate::stream::Stream;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
        self.addresses.iter().try_for_each(|&(address, name, node)| {
            expect_awake(address as *const c_void).map_err(|error| error.context(format_args!("node {node}, `{name}`")))
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Prepared>> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn workspace(&self) -> usize {
        let prepared = self.lock();
        let captured = prepared.as_ref().and_then(|prepared| prepared.captured.as_deref());
        captured.map_or(0, CapturedList::workspace)
    }

    /// Queues the list. The first launch, and the first after memory slept, prepares it.
    pub fn launch(&self, nodes: &[Node], executor: &Arc<dyn Executor>, stream: &Stream) -> Result<()> {
        if nodes.is_empty() {
            return Ok(());
        }
        // One launch at a time: a captured list may not be launched by two threads at once.
        let mut prepared = self.lock();
        if prepared.as_ref().is_none_or(|prepared| prepared.sleeps != sleeps()) {
            let sleeps = sleeps();
            let captured = prepare(nodes, executor, stream.raw())?;
            *prepared = Some(Prepared { captured, sleeps });
        }
        if let Some(captured) = prepared.as_ref().and_then(|prepared| prepared.captured.as_deref()) {
            return captured.launch(stream.raw());
        }
        if nodes.iter().any(|node| node.op.computes()) {
            stream.expect_awake()?;
        }
        nodes.iter().enumerate().try_for_each(|(index, Node { op, .. })| {
            let named = |error: Error| error.context(format_args!("node {index}, {}", op.kind().name()));
            executor.run(op, stream.raw()).map_err(named)
        })
    }
}

fn prepare(nodes: &[Node], executor: &Arc<dyn Executor>, stream: RawHandle) -> Result<Option<Box<dyn CapturedList>>> {
    if executor.stream_is_capturing(stream)? {
        return Err(Error::invalid("the stream is being captured by CUDA, and the graph was not launched before")
            .with_advice("launch it once on a stream that is not captured"));
    }
    let mut operations: Vec<&Operation> = with_room(nodes.len(), "a graph's operations")?;
    operations.extend(nodes.iter().map(|node| &node.op));
    executor.clone().capture(&operations)
}

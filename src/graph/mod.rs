//! Graphs: the operations of a stream, recorded as a list and replayed.
//!
//! A recording is a sink of its stream: checked operations arrive with the owners of their weights and caches, and nothing
//! runs. Its end makes nodes of them (`dependencies`), which `describe` puts into words. A launch hands the list to the device:
//! as one replay that the executor made of it (`replay`), or operation by operation.
//!
//! A conversion (`fp8`) makes products with FP8 weights of those with float weights. An optimisation (`optimize`) rewrites a
//! copy of the list by its `passes` and, where the caller allows it, measures both (`measure`); `report` tells of it. The
//! recorded list stays: every conversion begins with it, and every optimisation with the converted one.

pub mod decisions;
pub mod decisions_file;
mod dependencies;
pub mod describe;
pub mod finding;
mod fingerprint;
pub mod fp8;
mod list;
mod measure;
pub mod optimize;
pub mod passes;
pub mod profile;
mod rebind;
mod recorder;
pub mod region;
mod replay;
pub mod report;
#[cfg(test)]
mod tests;
mod validate;
mod workspace;

use crate::allocation::{push, with_room};
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::memory::MemoryManager;
use crate::operation::access::{Access, Each};
use crate::operation::{Cost, Operation};
use crate::stream::{Owner, Stream};
use finding::{Target, Validation};
use fp8::Conversion;
use measure::Measured;
use optimize::{Choice, Level, Optimized, Options};
use profile::Profile;
use recorder::Recorder;
use region::Ranges;
use replay::Replay;
use report::Report;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use workspace::{Share, Workspace};

/// An operation of a graph.
#[derive(Clone)]
pub struct Node {
    pub op: Operation,
    /// Keeps the operation's weight or cache.
    pub(super) owner: Option<Owner>,
    pub accesses: Vec<Access>,
    /// The earlier nodes that it runs after, in ascending order; those that these wait for may be left out.
    pub dependencies: Vec<u32>,
    /// The recorded nodes whose work it does, in ascending order.
    pub recorded: Vec<u32>,
}

impl Node {
    /// A node whose dependencies are not known yet.
    fn of(op: Operation, owner: Option<Owner>, recorded: Vec<u32>) -> Node {
        let mut accesses = Vec::new();
        op.accesses(&mut Each(|access| accesses.push(access)));
        Node { op, owner, accesses, dependencies: Vec::new(), recorded }
    }
}

/// The list of a recording that has ended.
pub struct Recorded {
    pub nodes: Vec<Node>,
    replay: Replay,
}

impl Recorded {
    fn new(operations: Vec<(Operation, Option<Owner>)>) -> Result<Recorded> {
        let mut nodes = with_room(operations.len(), "a graph's nodes")?;
        for (index, (op, owner)) in operations.into_iter().enumerate() {
            nodes.push(Node::of(op, owner, vec![index as u32]));
        }
        Recorded::of(nodes)
    }

    /// The list of these nodes, whose dependencies are not known yet.
    fn of(mut nodes: Vec<Node>) -> Result<Recorded> {
        dependencies::find(&mut nodes)?;
        Ok(Recorded { replay: Replay::of(&nodes)?, nodes })
    }

    /// What all operations must do at the least.
    pub fn cost(&self) -> Cost {
        cost_of(&self.nodes)
    }
}

fn cost_of(nodes: &[Node]) -> Cost {
    nodes.iter().map(|node| node.op.cost()).fold(Cost::default(), |sum, cost| Cost {
        operations: sum.operations + cost.operations,
        bytes: sum.bytes + cost.bytes,
    })
}

/// A list that was recorded, and the one that is launched.
#[derive(Clone)]
struct Lists {
    recorded: Arc<Recorded>,
    conversion: Option<Arc<Conversion>>,
    /// The list that `first` gives, as long as nothing was optimised.
    launched: Arc<Recorded>,
    optimization: Option<Optimization>,
}

impl Lists {
    fn of(recorded: Arc<Recorded>) -> Lists {
        Lists { launched: recorded.clone(), recorded, conversion: None, optimization: None }
    }

    /// Launches what came of an optimisation.
    fn optimized(self, level: Level, optimized: Optimized) -> Result<Lists> {
        let launched = match level {
            Level::O0 => self.first().clone(),
            _ => Arc::new(Recorded::of(optimized.nodes)?),
        };
        let (choice, report) = (optimized.choice, Arc::new(optimized.report));
        Ok(Lists { launched, optimization: Some(Optimization { level, choice, report }), ..self })
    }

    /// What an optimisation begins with: the converted list, or the recorded one.
    fn first(&self) -> &Arc<Recorded> {
        self.conversion.as_ref().map_or(&self.recorded, |conversion| &conversion.list)
    }
}

/// How the launched list came of the recorded one.
#[derive(Clone)]
struct Optimization {
    level: Level,
    choice: Choice,
    report: Arc<Report>,
}

#[derive(Clone)]
enum State {
    Empty,
    Recording { stream: Arc<Stream>, recorder: Arc<Recorder> },
    Recorded(Lists),
}

/// What a graph has as workspace.
#[derive(Debug, Clone, Copy, Default)]
pub struct WorkspaceInfo {
    /// 0 before the first launch, and where operations take the stream's.
    pub bytes: usize,
    /// Graphs that share it, this one among them.
    pub graphs: u32,
}

pub struct Graph {
    executor: Arc<dyn Executor>,
    memory: Arc<MemoryManager>,
    state: Mutex<State>,
    share: Mutex<Share>,
    /// Workspaces that CUDA graphs of the caller's name, into which this one was captured.
    kept: Mutex<Vec<Arc<Workspace>>>,
    /// Memory of which nobody reads, after a launch, what the launch left there.
    internal: Mutex<Ranges>,
    /// For the next conversion to FP8.
    marks: Mutex<fp8::Marks>,
}

impl Graph {
    /// `memory`, the executor's, is what workspace comes from.
    pub fn new(executor: &Arc<dyn Executor>, memory: &Arc<MemoryManager>) -> Graph {
        Graph {
            executor: executor.clone(),
            memory: memory.clone(),
            state: Mutex::new(State::Empty),
            share: Mutex::new(Share::of(Arc::new(Workspace::new(executor, memory)))),
            kept: Mutex::default(),
            internal: Mutex::default(),
            marks: Mutex::default(),
        }
    }

    pub fn executor(&self) -> &Arc<dyn Executor> {
        &self.executor
    }

    fn share(&self) -> MutexGuard<'_, Share> {
        self.share.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn workspace(&self) -> Arc<Workspace> {
        self.share().workspace().clone()
    }

    /// From now on the graph launches with the workspace of `other`, after which its launches run; `None`: with one of its own.
    /// Waits for the graph's last launch, so that the order of its launches stays.
    pub fn share_workspace(&self, other: Option<&Graph>) -> Result<()> {
        let workspace = match other {
            Some(other) => other.workspace(),
            None => Arc::new(Workspace::new(&self.executor, &self.memory)),
        };
        let before = self.workspace();
        if Arc::ptr_eq(&before, &workspace) || (other.is_none() && before.graphs() == 1) {
            return Ok(());
        }
        before.synchronize()?;
        if let Some(recorded) = self.recorded() {
            workspace.want(self.executor.capture_workspace(&replay::operations(&recorded.nodes)?)?);
        }
        let left = std::mem::replace(&mut *self.share(), Share::of(workspace));
        drop(left);
        Ok(())
    }

    pub fn workspace_info(&self) -> WorkspaceInfo {
        let workspace = self.workspace();
        let has_it = self.recorded().is_some_and(|recorded| recorded.replay.has_workspace());
        WorkspaceInfo { bytes: if has_it { workspace.bytes() } else { 0 }, graphs: workspace.graphs() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on the stream's operations, a stream of the graph's executor, are recorded.
    pub fn begin(&self, stream: &Arc<Stream>) -> Result<()> {
        let mut state = self.state();
        match *state {
            State::Empty => {}
            State::Recording { .. } => return Err(Error::invalid("the graph is being recorded already")),
            State::Recorded(_) => {
                return Err(Error::invalid("the graph has been recorded").with_advice("create another graph"))
            }
        }
        if self.executor.stream_is_capturing(stream.raw())? {
            return Err(Error::invalid("the stream is being captured by CUDA; record before or on another stream"));
        }
        let recorder = Arc::new(Recorder::new(self.executor.clone()));
        stream.begin_sink(recorder.clone())?;
        *state = State::Recording { stream: stream.clone(), recorder };
        Ok(())
    }

    /// Ends the recording on the stream, whose operations run again. The graph then holds what was recorded; should there be no
    /// memory for that, it holds nothing and may begin again.
    pub fn end(&self, stream: &Arc<Stream>) -> Result<()> {
        let mut state = self.state();
        let State::Recording { stream: recorded, recorder } = &*state else {
            return Err(Error::invalid("the graph is not being recorded"));
        };
        if !Arc::ptr_eq(recorded, stream) {
            return Err(Error::invalid("the graph is being recorded on another stream"));
        }
        let recorder = recorder.clone();
        end_sink(stream, &recorder)?;
        *state = State::Empty;
        let recorded = Arc::new(Recorded::new(recorder.finish())?);
        *state = State::Recorded(Lists::of(recorded));
        Ok(())
    }

    /// The list that is launched; `None` before one was recorded.
    pub fn recorded(&self) -> Option<Arc<Recorded>> {
        match &*self.state() {
            State::Recorded(lists) => Some(lists.launched.clone()),
            _ => None,
        }
    }

    fn expect_lists(&self) -> Result<Lists> {
        self.expect_recorded()?;
        match &*self.state() {
            State::Recorded(lists) => Ok(lists.clone()),
            _ => Err(Error::invalid("the graph holds nothing")),
        }
    }

    /// Launches what comes of an optimisation from now on.
    fn set(&self, lists: Lists) {
        // What was launched before may wait for the device when it goes, and must not hold the lock then.
        let _before = std::mem::replace(&mut *self.state(), State::Recorded(lists));
    }

    /// From the next optimisation on, what a launch leaves in this memory is nobody's concern after it.
    pub fn mark_internal(&self, range: std::ops::Range<usize>) {
        let mut internal = self.internal.lock().unwrap_or_else(PoisonError::into_inner);
        let ranges: Vec<_> = internal.iter().cloned().chain([range]).collect();
        *internal = Ranges::of(ranges);
    }

    pub fn internal(&self) -> Ranges {
        self.internal.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes the list that is launched from now on out of the recorded one. `stream` is measured on, where the options ask for
    /// that; after an error the graph is as before.
    pub fn optimize(&self, options: &Options, stream: &Stream) -> Result<()> {
        self.optimize_by(options, stream, passes::ALL)
    }

    fn optimize_by(&self, options: &Options, stream: &Stream, passes: &[passes::Pass]) -> Result<()> {
        let lists = self.expect_lists()?;
        let (internal, workspace) = (self.internal(), self.workspace());
        let subject = self.subject(&lists, &internal, passes, &workspace);
        let optimized = subject.optimize(options, stream)?;
        self.set(lists.optimized(options.level, optimized)?);
        Ok(())
    }

    fn subject<'a>(
        &'a self,
        lists: &'a Lists,
        internal: &'a Ranges,
        passes: &'a [passes::Pass],
        workspace: &'a Workspace,
    ) -> optimize::Subject<'a> {
        optimize::Subject { recorded: lists.first(), internal, workspace, passes }
    }

    /// Converts the recorded list's products to FP8 and runs the passes of the last optimisation again; after an error the graph is as
    /// before. `allowed`: whether the backend's options let products round their input to FP8.
    pub fn convert_fp8(&self, options: &fp8::Options, allowed: bool, stream: &Stream) -> Result<()> {
        let lists = self.expect_lists()?;
        let (internal, workspace) = (self.internal(), self.workspace());
        let (recorded, memory) = (&lists.recorded, &self.memory);
        let subject = fp8::Subject { recorded, internal: &internal, workspace: &workspace, memory, allowed };
        let conversion = Arc::new(subject.convert(&self.fp8_marks(), options, stream)?);
        let lists = Lists { launched: conversion.list.clone(), conversion: Some(conversion), ..lists };
        self.set(self.again(lists, &internal)?);
        Ok(())
    }

    /// Lists that are new but for the last optimisation, after it has run again without a measurement.
    fn again(&self, lists: Lists, internal: &Ranges) -> Result<Lists> {
        let Some(Optimization { level, choice, .. }) = &lists.optimization else { return Ok(lists) };
        let workspace = self.workspace();
        let optimized = self.subject(&lists, internal, passes::ALL, &workspace).by_choice(*level, choice.clone())?;
        let level = *level;
        lists.optimized(level, optimized)
    }

    /// What the last conversion did.
    pub fn conversion(&self) -> Result<Arc<Conversion>> {
        self.expect_lists()?.conversion.ok_or_else(|| {
            Error::invalid("the graph was not converted to FP8").with_advice("nvb_graph_convert_fp8 does it")
        })
    }

    fn fp8_marks(&self) -> fp8::Marks {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What the next conversion does with the recorded product at `node`.
    pub fn mark_fp8(&self, node: u32, mark: fp8::Mark) -> Result<()> {
        let lists = self.expect_lists()?;
        let op = lists.recorded.nodes.get(node as usize).map(|node| &node.op);
        match op {
            Some(Operation::Linear(_)) => {}
            Some(op) => return Err(Error::invalid(format!("node {node} is {}, not a product", op.kind().name()))),
            None => {
                let count = lists.recorded.nodes.len();
                return Err(Error::invalid(format!("node is {node}; the recorded list has {count} nodes")));
            }
        }
        self.marks.lock().unwrap_or_else(PoisonError::into_inner).insert(node, mark);
        Ok(())
    }

    /// What a device lacks for the list that is launched.
    pub fn validate(&self, target: &Target) -> Result<Validation> {
        self.expect_recorded()?.validate(target, &*self.executor)
    }

    /// Times of every node of the list that is launched, by replays on `stream`; what they write is as before afterwards.
    pub fn profile(&self, stream: &Stream, launches: usize) -> Result<Profile> {
        let lists = self.expect_lists()?;
        let workspace = self.workspace();
        let measured = Measured::begin(&lists.recorded, &self.internal(), &workspace, stream)?;
        profile::profile(&lists.launched, &measured, stream, launches)
    }

    /// What the last optimisation did.
    pub fn report(&self) -> Result<Arc<Report>> {
        let report = self.expect_lists()?.optimization.map(|optimization| optimization.report);
        report.ok_or_else(|| {
            Error::invalid("the graph was not optimised").with_advice("nvb_graph_optimize makes what is reported")
        })
    }

    pub fn is_recording(&self) -> bool {
        matches!(*self.state(), State::Recording { .. })
    }

    pub fn expect_recorded(&self) -> Result<Arc<Recorded>> {
        self.recorded().ok_or_else(|| {
            let (is, advice) = match self.is_recording() {
                true => ("is being recorded", "nvb_graph_end ends it"),
                false => ("holds nothing", "nvb_graph_begin and nvb_graph_end record one"),
            };
            Error::invalid(format!("the graph {is}")).with_advice(advice)
        })
    }

    /// Queues what was recorded on any stream of the executor. A stream whose operations are taken by a sink hands them to it.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        let recorded = self.expect_recorded()?;
        recorded.replay.expect_awake()?;
        if let Some(sink) = stream.sink() {
            return recorded.nodes.iter().try_for_each(|node| sink.take(node.op.clone(), node.owner.clone()));
        }
        let workspace = self.workspace();
        if recorded.replay.launch(&recorded.nodes, &workspace, stream)? {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            if !kept.iter().any(|other| Arc::ptr_eq(other, &workspace)) {
                push(&mut kept, workspace, "workspaces of a graph")?;
            }
        }
        Ok(())
    }
}

fn end_sink(stream: &Stream, recorder: &Arc<Recorder>) -> Result<()> {
    stream.end_sink(|sink| std::ptr::addr_eq(Arc::as_ptr(sink), Arc::as_ptr(recorder)))
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let State::Recording { stream, recorder } = &*self.state() {
            // The recorder has begun there and nobody else ends it, so this does not fail.
            let _ = end_sink(stream, recorder);
        }
    }
}

//! Graphs: operations recorded once and launched often.

use super::prelude::*;
use crate::graph::describe::Format;
use crate::graph::finding::Finding;
use crate::graph::profile::Profile;
use crate::graph::Graph;
use crate::operation::{Cost, Operation};
use crate::stream::Stream;
use std::sync::Mutex;

/// A list of operations that is recorded from a stream's calls and then launched as often as it is needed, such as one decode
/// step of a model.
///
/// `nvb_graph_begin(graph, stream)`, the ordinary calls of operations, copies and fills, `nvb_graph_end(graph, stream)`; from
/// then on `nvb_graph_launch(graph, stream)`. While a stream is recorded its operations are checked as ever and do not run. What
/// varies from launch to launch lies in device memory (tokens, positions, page tables), or in page-locked host memory that a
/// recorded copy reads at each launch; shapes, addresses and numbers in arguments are those of the recording.
///
/// A graph keeps the weights and KV caches that it names: their handles may be destroyed. The memory behind tensors and copies
/// is the caller's, who keeps it allocated until the last launch has finished.
///
/// Threads: one at a time. A stream is recorded by one thread; others use other streams meanwhile.
pub struct nvb_graph {
    _private: [u8; 0],
}

/// `state`: nothing was recorded yet.
pub const NVB_GRAPH_EMPTY: u32 = 0;
/// `state`: between `nvb_graph_begin` and `nvb_graph_end`.
pub const NVB_GRAPH_RECORDING: u32 = 1;
/// `state`: it may be launched.
pub const NVB_GRAPH_RECORDED: u32 = 2;

/// `format`, of `nvb_graph_describe`: lines for people.
pub const NVB_GRAPH_FORMAT_TEXT: u32 = 0;
/// `format`: JSON, {"nodes": [{"index", "operation", "operations", "bytes", "dependencies", "reads", "writes"}]}.
pub const NVB_GRAPH_FORMAT_JSON: u32 = 1;
/// `format`: DOT, from which Graphviz draws a picture.
pub const NVB_GRAPH_FORMAT_GRAPHVIZ: u32 = 2;

/// What a graph holds.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_graph_info {
    pub struct_size: usize,
    /// `NVB_GRAPH_EMPTY`, `_RECORDING` or `_RECORDED`; only of the last is there more to tell.
    pub state: u32,
    /// Recorded operations.
    pub nodes: u32,
    /// Bytes of the backend's memory that the graph launches with as workspace. 0 before the first launch, which takes them, and on
    /// the CPU.
    pub workspace_bytes: u64,
    /// What all nodes must do at the least: floating-point operations, and bytes with each input read and each output written
    /// once.
    pub operations: f64,
    pub bytes: f64,
    /// Graphs that share the workspace (`nvb_graph_share_workspace`), this one among them: 1 if it is the graph's own.
    pub workspace_graphs: u32,
    /// 0
    pub reserved: u32,
}
versioned!(nvb_graph_info);

pub(super) struct GraphObject {
    // Before the backend: it may be what the backend's memory waits for.
    pub(super) graph: Graph,
    pub(super) backend: Arc<Backend>,
    /// Of the last validation.
    pub(super) findings: Mutex<Vec<Finding>>,
    /// The last one.
    pub(super) profile: Mutex<Option<Arc<Profile>>>,
}

pub(super) static GRAPHS: Table<GraphObject> = Table::new("graph", 13);

fn graph_and_stream(graph: *mut nvb_graph, stream: *mut nvb_stream) -> Result<(Arc<GraphObject>, Arc<Stream>)> {
    let object = GRAPHS.get(graph)?;
    let stream = stream_of(&object.backend, stream)?;
    Ok((object, stream))
}

/// What a graph's launch runs, for tests that look at what functions of this interface queue.
#[doc(hidden)]
pub fn operations_of(graph: *mut nvb_graph) -> Result<Vec<Operation>> {
    Ok(GRAPHS.get(graph)?.graph.expect_recorded()?.nodes.iter().map(|node| node.op.clone()).collect())
}

/// Creates a graph that holds nothing.
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_create(backend: *const nvb_backend, graph: *mut *mut nvb_graph) -> nvb_status {
    guard!(nvb_graph_create, {
        let backend = BACKENDS.get(backend)?.backend.clone();
        expect_out("graph", graph)?;
        let graph_of = Graph::new(backend.executor(), backend.memory());
        let object = GraphObject { graph: graph_of, backend, findings: Mutex::default(), profile: Mutex::default() };
        let handle = GRAPHS.insert(Arc::new(object))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("graph", graph, handle) }
    })
}

/// Destroys the handle; NULL is fine. Ends the recording that it is in. Launches that are queued run to their end, and memory
/// that only the graph keeps is given back after the device's work.
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_destroy(graph: *mut nvb_graph) -> nvb_status {
    guard!(nvb_graph_destroy, { GRAPHS.remove(graph) })
}

/// From now on, until `nvb_graph_end`, the operations of `stream` (NULL: the backend's default stream) are recorded and do not
/// run. It holds for this handle: other handles of the same CUDA stream run their operations. A call that is refused is not
/// recorded, and the recording goes on.
///
/// Meanwhile the stream refuses what a graph cannot hold: waits of the host or for events, events, callbacks, prefetches,
/// another workspace, copies of pageable host memory on a GPU, weights and caches being made on it, and calls that change what a
/// KV cache holds. Memory is allocated and freed on it at once, as ever: do so before or after. Launching another graph on it
/// records that one's operations.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (the graph is recorded already or has been; the stream's operations are explained or
/// recorded; CUDA captures the stream; a stream of another backend).
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_begin(graph: *mut nvb_graph, stream: *mut nvb_stream) -> nvb_status {
    guard!(nvb_graph_begin, {
        let (object, stream) = graph_and_stream(graph, stream)?;
        object.graph.begin(&stream)
    })
}

/// Ends the recording; the stream's operations run again. An empty recording is a graph whose launch does nothing.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (the graph is not being recorded, or on another stream); `NVB_ERROR_OUT_OF_MEMORY` of
/// the host, after which the graph is empty.
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_end(graph: *mut nvb_graph, stream: *mut nvb_stream) -> nvb_status {
    guard!(nvb_graph_end, {
        let (object, stream) = graph_and_stream(graph, stream)?;
        object.graph.end(&stream)
    })
}

/// Queues the recorded operations on `stream` (NULL: the backend's default stream), which may be another one than was recorded.
/// They give what the calls would have given, in their order. Does not synchronise. The first launch prepares the graph, and so
/// does the first after an `nvb_memory_sleep` and after a shared workspace has grown: on a GPU it captures a CUDA graph, for which
/// it takes workspace out of the backend's memory, waits for `stream` and the last launch with it, and loads kernels; later ones
/// allocate nothing. Where CUDA's capture fails, the operations are queued one by one, with the workspace of `stream`. Launches of one graph, and of
/// graphs that share a workspace, run one after the other, whatever their streams: the device waits, not the host. Profiling
/// (`nvb_metrics_…`) does not count what a launch runs.
///
/// On a stream that the caller captures into a CUDA graph of its own, the recorded operations become nodes of that graph, with the
/// workspace of this one, which must have been launched before. The caller's graph may be launched as long as this handle lives, also
/// after another optimisation or recapture of this graph, until memory sleeps; the library does not see when, so the caller orders
/// its launches and those of this graph, and of graphs that share its workspace, one after the other. An error leaves the operations
/// before it in the caller's capture.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (the graph was not recorded; memory that it names sleeps; a stream of another backend; a
/// stream that is captured, and the graph was not launched before), `NVB_ERROR_OUT_OF_MEMORY`, and what the operations themselves report, with the node's number: the nodes before it were queued.
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_launch(graph: *mut nvb_graph, stream: *mut nvb_stream) -> nvb_status {
    guard!(nvb_graph_launch, {
        let (object, stream) = graph_and_stream(graph, stream)?;
        object.graph.launch(&stream)
    })
}

/// From now on `graph` launches with the workspace of `other`, a graph of the same backend; NULL: with one of its own, as a graph
/// begins. An engine that records a graph for each number of rows lets all of them share one workspace, which is then as large as
/// the most demanding of them needs instead of the sum. Sharing is transitive: the graph joins all those that share with `other`,
/// and the workspace lasts as long as one of them, whichever is destroyed first.
///
/// Launches of graphs that share run one after the other, whatever their streams and threads: each waits on the device for the one
/// before. So graphs that are to run side by side have workspaces of their own. The workspace grows when a graph is first launched
/// that needs more; until then it is as large as the most demanding recorded list that was known when it was made, so share first and
/// launch then. Growing waits for the last launch, and each of the graphs is prepared again at its next launch.
///
/// May be called at any time, also while `graph` is being recorded; waits for the last launch of `graph` if that had another
/// workspace. On the CPU there is no workspace, and only the order of launches is shared.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (a graph of another backend).
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_share_workspace(graph: *mut nvb_graph, other: *mut nvb_graph) -> nvb_status {
    guard!(nvb_graph_share_workspace, {
        let object = GRAPHS.get(graph)?;
        if other.is_null() {
            return object.graph.share_workspace(None);
        }
        let with = GRAPHS.get(other)?;
        if !Arc::ptr_eq(&object.backend, &with.backend) {
            return Err(Error::invalid("`other` is a graph of another backend"));
        }
        object.graph.share_workspace(Some(&with.graph))
    })
}

/// Fills in `info`; set its `struct_size` first.
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_get_info(graph: *const nvb_graph, info: *mut nvb_graph_info) -> nvb_status {
    guard!(nvb_graph_get_info, {
        let object = GRAPHS.get(graph)?;
        let recorded = object.graph.recorded();
        let workspace = object.graph.workspace_info();
        let cost = recorded.as_ref().map_or(Cost::default(), |recorded| recorded.cost());
        let value = nvb_graph_info {
            struct_size: 0,
            state: match &recorded {
                Some(_) => NVB_GRAPH_RECORDED,
                None if object.graph.is_recording() => NVB_GRAPH_RECORDING,
                None => NVB_GRAPH_EMPTY,
            },
            nodes: recorded.as_ref().map_or(0, |recorded| recorded.nodes.len() as u32),
            workspace_bytes: workspace.bytes as u64,
            operations: cost.operations,
            bytes: cost.bytes,
            workspace_graphs: workspace.graphs,
            reserved: 0,
        };
        // SAFETY: a struct with its size set, by the header's contract.
        unsafe { write(info, &value) }
    })
}

/// Writes what was recorded in `format` (`NVB_GRAPH_FORMAT_…`): each operation with what it must do at the least, what it reads
/// and writes (the argument, dtype and shape, address), and which earlier nodes it runs after. `text` receives up to `capacity`
/// bytes with a closing NUL and may be NULL; `*needed` what all of it takes and may be NULL.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (nothing was recorded yet, or a format that is none).
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_describe(
    graph: *const nvb_graph,
    format: u32,
    text: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> nvb_status {
    guard!(nvb_graph_describe, {
        let object = GRAPHS.get(graph)?;
        let format = match format {
            NVB_GRAPH_FORMAT_TEXT => Format::Text,
            NVB_GRAPH_FORMAT_JSON => Format::Json,
            NVB_GRAPH_FORMAT_GRAPHVIZ => Format::Graphviz,
            other => return Err(Error::invalid(format!("format is {other}; NVB_GRAPH_FORMAT_… (0 to 2) is needed"))),
        };
        let described = object.graph.expect_recorded()?.describe(format);
        // SAFETY: NULL, or valid for `capacity` bytes and for writing.
        unsafe { give_text(&described, text, capacity, needed) }
    })
}

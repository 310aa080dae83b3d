//! A list of operations as a CUDA graph: captured once on a stream of its own, with a workspace that the graph brings.
//!
//! The workspace is there before the capture, so nothing is allocated in it, and its counters are zero between launches as
//! those of a stream are. The capture is a relaxed one: a kernel that was never launched is loaded on the way, which the
//! stricter modes refuse.

use super::executor::CudaExecutor;
use super::grouped_linear;
use super::operation;
use super::prelude::*;
use super::workspace::{self, COUNTER_BYTES};
use crate::device::Device;
use crate::driver;
use crate::error::Error;
use crate::executor::{CapturedList, Executor};
use crate::operation::constant_reads::Written;
use crate::operation::Operation;
use cust::sys;
use std::ptr::null_mut;
use std::sync::Arc;

extern "C" {
    fn nvb_cuda_set_constant_reads(reads: u32);
}

/// What the kernels that this thread launches may load before those in front of them have finished. With it ends the
/// permission.
struct ConstantReads;

impl ConstantReads {
    fn set(&self, reads: u32) {
        // SAFETY: stores a number of this thread's.
        unsafe { nvb_cuda_set_constant_reads(reads) };
    }
}

impl Drop for ConstantReads {
    fn drop(&mut self) {
        self.set(0);
    }
}

struct CapturedGraph {
    executor: Arc<CudaExecutor>,
    launchable: sys::CUgraphExec,
}

// SAFETY: a handle that any thread may use, one at a time as the trait asks.
unsafe impl Send for CapturedGraph {}
// SAFETY: as above.
unsafe impl Sync for CapturedGraph {}

/// A wait of the caller's for the whole device ends a capture; as often it is begun again.
const TRIES: usize = 3;

/// Bytes of workspace for the most demanding operation; never 0 where there is a capture, so that an operation finds this
/// workspace rather than one that grows.
pub(super) fn workspace(executor: &CudaExecutor, operations: &[&Operation]) -> Result<usize> {
    if !driver::has_graph_functions() {
        return Ok(0);
    }
    let _guard = executor.enter()?;
    let needed = operations.iter().map(|op| workspace::bytes(executor, op)).max().unwrap_or(0);
    Ok(needed.max(COUNTER_BYTES))
}

/// `None` where CUDA cannot capture the list: it is launched operation by operation.
pub(super) fn capture(
    executor: Arc<CudaExecutor>,
    operations: &[&Operation],
    (workspace, bytes): (*mut c_void, usize),
) -> Result<Option<Box<dyn CapturedList>>> {
    if !driver::has_graph_functions() {
        return Ok(None);
    }
    let _guard = executor.enter()?;
    let _relaxed = executor.relax_capture()?;
    let stream = CaptureStream { raw: executor.stream_create(0)?, executor: &executor };
    // SAFETY: memory that no work uses now, and that outlives the stream.
    unsafe { executor.stream_set_workspace(stream.raw, workspace, bytes)? };
    // Launches come from any stream.
    executor.stream_synchronize(stream.raw)?;
    for _ in 0..TRIES {
        let captured = {
            let _no_wait = executor.hold_off_waits();
            stream.capture(operations)
        };
        match captured {
            Ok(launchable) => return Ok(Some(Box::new(CapturedGraph { executor: executor.clone(), launchable }))),
            Err(error) if is_of_capture(&error) => {
                log::info!(target: "nvbackend::graph", "{} operations are not captured: {error}", operations.len());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Queues the operations on a stream that is captured, two alike in one grid where a kernel does that. Their kernels may load
/// what no operation of the list writes before those in front of them have finished: nothing that is not a kernel stands between
/// them, and something does in front of the first.
fn run(executor: &CudaExecutor, operations: &[&Operation], stream: RawHandle) -> Result<()> {
    let written = Written::by(operations.iter().copied());
    let constant = ConstantReads;
    let mut index = 0;
    while let Some(op) = operations.get(index) {
        constant.set(written.constant_reads(op));
        let named = |error: Error| error.context(format_args!("node {index}, {}", op.kind().name()));
        if let (Operation::GroupedLinear(first), Some(Operation::GroupedLinear(second))) =
            (op, operations.get(index + 1).copied())
        {
            if grouped_linear::run_two(executor, first, second, stream).map_err(named)? {
                index += 2;
                continue;
            }
        }
        operation::run(executor, op, stream).map_err(named)?;
        index += 1;
    }
    Ok(())
}

/// Makes the operations a part of what the caller captures on the stream. They begin with a fill of the workspace's counters, before
/// which all earlier work of the caller's graph has finished.
pub(super) fn capture_onto(
    executor: &CudaExecutor,
    operations: &[&Operation],
    (workspace, bytes): (*mut c_void, usize),
    stream: RawHandle,
) -> Result<()> {
    let _guard = executor.enter()?;
    let _relaxed = executor.relax_capture()?;
    // The workspace of the caller's stream is not in use meanwhile: one thread queues work there.
    executor.with_workspace(stream, (workspace, bytes), || run(executor, operations, stream))
}

/// Whether the driver refuses the capture or what was called in it, and the operations may run without.
fn is_of_capture(error: &Error) -> bool {
    const NOT_SUPPORTED: i32 = 801;
    const OF_STREAM_CAPTURE: std::ops::RangeInclusive<i32> = 900..=908;
    OF_STREAM_CAPTURE.contains(&error.cuda_code) || error.cuda_code == NOT_SUPPORTED
}

/// Ends with the capture.
struct CaptureStream<'a> {
    executor: &'a CudaExecutor,
    raw: RawHandle,
}

impl CaptureStream<'_> {
    fn capture(&self, operations: &[&Operation]) -> Result<sys::CUgraphExec> {
        let stream = self.raw.0.cast();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: this capture's own stream.
        self.executor.check(unsafe { sys::cuStreamBeginCapture_v2(stream, mode) }, "beginning a capture")?;
        let recorded = run(self.executor, operations, self.raw);
        if let Err(lost) = self.executor.refuse_lost() {
            // No call more: not even the capture is ended.
            return Err(recorded.err().unwrap_or(lost));
        }
        let mut graph = null_mut();
        // SAFETY: the stream is captured, and the pointer valid.
        let ended = self.executor.check(unsafe { sys::cuStreamEndCapture(stream, &mut graph) }, "ending a capture");
        let made = recorded.and(ended).and_then(|()| {
            let mut launchable = null_mut();
            // SAFETY: a graph of the driver's, and a valid pointer.
            let result = unsafe { sys::cuGraphInstantiateWithFlags(&mut launchable, graph, 0) };
            self.executor.check(result, "instantiating a graph").map(|()| launchable)
        });
        if !graph.is_null() && self.executor.refuse_lost().is_ok() {
            // SAFETY: captured just now and destroyed once; what was instantiated does not need it.
            self.executor.log_failure(unsafe { sys::cuGraphDestroy(graph) }, "destroying a captured graph");
        }
        made
    }
}

impl Drop for CaptureStream<'_> {
    fn drop(&mut self) {
        self.executor.stream_destroy(self.raw);
    }
}

impl CapturedList for CapturedGraph {
    fn launch(&self, stream: RawHandle) -> Result<()> {
        let _guard = self.executor.enter()?;
        // SAFETY: instantiated, and a live stream of this context or NULL.
        self.executor.check(unsafe { sys::cuGraphLaunch(self.launchable, stream.0.cast()) }, "launching a graph")
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        let Some(_guard) = self.executor.enter_to_release() else { return };
        self.executor.wait_for_all_work();
        if self.executor.refuse_lost().is_ok() {
            // SAFETY: instantiated once, destroyed once, and none of its launches is under way.
            self.executor.log_failure(unsafe { sys::cuGraphExecDestroy(self.launchable) }, "destroying a graph");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_capture_is_no_error_of_the_operations() {
        let error = |code| Error::new(Status::Device, "refused").with_cuda_code(code);
        assert!([801, 900, 901, 908].iter().all(|&code| is_of_capture(&error(code))));
        assert!([0, 2, 700, 899, 909, 999].iter().all(|&code| !is_of_capture(&error(code))));
    }
}

//! Optimising graphs: levels, passes, what may be left out, and the report.

use super::environment::element;
use super::graph::{nvb_graph, GRAPHS};
use super::prelude::*;
use super::tensor::{device_tensor, nvb_tensor};
use crate::graph::describe::Format;
use crate::graph::optimize::{Level, Options};
use crate::graph::passes::ALL;
use crate::graph::report::Exactness;
use crate::operation::access::Extent;

/// `level`: the list as it was recorded.
pub const NVB_OPTIMIZE_O0: u32 = 0;
/// `level`: rewrites that change no bit of a result.
pub const NVB_OPTIMIZE_O1: u32 = 1;
/// `level`, the default one: also rewrites that leave out a rounding to a tensor's dtype, so that results differ within the bounds of
/// the operations.
pub const NVB_OPTIMIZE_O2: u32 = 2;
/// `level`: also approximate rewrites, within `maximum_error`; without a bound none of these is made.
pub const NVB_OPTIMIZE_O3: u32 = 3;

/// `exactness`, of a pass or a rewrite: no bit of a result changes.
pub const NVB_EXACTNESS_EXACT: u32 = 0;
/// `exactness`: a rounding is left out, or kernels add in another order.
pub const NVB_EXACTNESS_ROUNDING: u32 = 1;
/// `exactness`: factors are multiplied in another order, or precision is given up.
pub const NVB_EXACTNESS_APPROXIMATE: u32 = 2;

/// How a graph is optimised. All fields may be 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_graph_optimize_options {
    pub struct_size: usize,
    /// 1: a level that is none is refused. 0: it is `NVB_OPTIMIZE_O2`, with a warning in the log.
    pub unknown_level_is_error: u32,
    /// 1: both lists are launched in turns on `stream`, and the report has the medians of their times.
    pub measure_times: u32,
    /// 1: both lists run on `stream`, and the report has how far the outputs are apart.
    pub measure_errors: u32,
    /// Launches of each list that are timed; 0: 10.
    pub launches: u32,
    /// The largest error of an output, ‖optimised − recorded‖ / ‖recorded‖ on what lies in memory at the call. Passes with which it is
    /// larger are taken back, and the report names them. 0: no bound, and nothing is run for it. Token numbers have no error.
    pub maximum_error: f64,
    /// Names of passes with commas between them ("dead_work,linear_bias"): these alone run. NULL or "": all.
    pub enabled_passes: *const c_char,
    /// Names of passes that do not run.
    pub disabled_passes: *const c_char,
    /// What is measured on; NULL: the backend's default stream. Looked at only where something is measured.
    pub stream: *mut nvb_stream,
}
versioned!(nvb_graph_optimize_options { enabled_passes, disabled_passes });

/// A pass: one kind of rewrite.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_graph_pass_info {
    pub struct_size: usize,
    /// The best that its rewrites can be (`NVB_EXACTNESS_…`). Each rewrite says what it is: on a GPU two operations in one kernel may
    /// round differently, and everywhere an intermediate result in 16 bits is rounded once less.
    pub exactness: u32,
    /// Must be 0.
    pub reserved: u32,
    /// For `enabled_passes` and `disabled_passes`.
    pub name: [c_char; 32],
    /// A sentence.
    pub summary: [c_char; 256],
}
versioned!(nvb_graph_pass_info);

/// Writes how many passes there are.
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_pass_count(count: *mut u32) -> nvb_status {
    guard!(nvb_graph_pass_count, {
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("count", count, ALL.len() as u32) }
    })
}

/// Describes the pass at `index`, in the order in which passes run; set `info->struct_size` first.
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_pass_get(index: u32, info: *mut nvb_graph_pass_info) -> nvb_status {
    guard!(nvb_graph_pass_get, {
        let pass = element("pass", ALL, index)?;
        let value = nvb_graph_pass_info {
            struct_size: 0,
            exactness: match pass.exactness {
                Exactness::Exact => NVB_EXACTNESS_EXACT,
                Exactness::Rounding => NVB_EXACTNESS_ROUNDING,
                Exactness::Approximate => NVB_EXACTNESS_APPROXIMATE,
            },
            reserved: 0,
            name: fixed_text(pass.name),
            summary: fixed_text(pass.summary),
        };
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(info, &value) }
    })
}

/// Says that after a launch nobody reads what the launch left in the memory of `tensor`, which has no gaps: from the next
/// `nvb_graph_optimize` on, writes to it may be left out. Without such a word all that a graph writes may be an output, and only what
/// its own later operations write over before they read it is left out. May be called at any time and for any number of tensors.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (a tensor without memory or with gaps).
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_mark_internal(graph: *mut nvb_graph, tensor: *const nvb_tensor) -> nvb_status {
    guard!(nvb_graph_mark_internal, {
        let object = GRAPHS.get(graph)?;
        if tensor.is_null() {
            return Err(Error::invalid("tensor is NULL"));
        }
        // SAFETY: not NULL, and readable by the header's contract.
        let tensor = device_tensor(&object.backend, "tensor", unsafe { &*tensor })?;
        let region = tensor.region();
        if region.is_empty() || !region.exact {
            return Err(Error::invalid(format!("tensor {tensor} has no memory, or gaps; contiguous memory is needed")));
        }
        object.graph.mark_internal(region.start..region.end());
        Ok(())
    })
}

/// Optimises what was recorded for the launches that follow. Each call begins with the recorded list; `NVB_OPTIMIZE_O0` takes it as it
/// is. `level` is `NVB_OPTIMIZE_…`, `options` may be NULL. What nobody reads is left out, and with it the errors that it would have
/// reported. `nvb_graph_describe` and `nvb_graph_get_info` show the list that is launched, and the next launch prepares it as a first
/// one does.
///
/// Without a measurement nothing runs and no device is waited for, except for launches of the list that is replaced. With one, both
/// lists run for real on `stream`: the call waits for it, what the graph writes is copied to the host before and put back after, caches
/// too, and nobody else may use that memory meanwhile.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (nothing was recorded; an unknown level, if that is asked for; a pass that there is not; a
/// bound that is no number of at least 0; a stream that is recorded, explained or captured; memory that sleeps),
/// `NVB_ERROR_OUT_OF_MEMORY` of the host, and in a measurement what the operations report. The graph is then as before.
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_optimize(
    graph: *mut nvb_graph,
    level: u32,
    options: *const nvb_graph_optimize_options,
) -> nvb_status {
    guard!(nvb_graph_optimize, {
        let object = GRAPHS.get(graph)?;
        let given: nvb_graph_optimize_options = match options.is_null() {
            true => super::structs::init(),
            // SAFETY: a struct with its size set, by the header's contract.
            false => unsafe { read(options)? },
        };
        let maximum_error = given.maximum_error;
        if !(maximum_error.is_finite() && maximum_error >= 0.0) {
            return Err(Error::invalid(format!("maximum_error is {maximum_error}; a number of at least 0 is needed")));
        }
        let level = Level::of(level, flag("unknown_level_is_error", given.unknown_level_is_error)?)?;
        // SAFETY: NULL or NUL-terminated, by the header's contract.
        let names = |name, list| unsafe { text(name, list) }.map(|list| split(&list));
        let options = Options {
            level,
            enabled: names("enabled_passes", given.enabled_passes)?,
            disabled: names("disabled_passes", given.disabled_passes)?,
            measure_times: flag("measure_times", given.measure_times)?,
            measure_errors: flag("measure_errors", given.measure_errors)?,
            launches: if given.launches == 0 { 10 } else { given.launches as usize },
            maximum_error,
        };
        let stream = match options.measures() {
            true => stream_of(&object.backend, given.stream)?,
            false => object.backend.default_stream().clone(),
        };
        object.graph.optimize(&options, &stream)
    })
}

fn split(list: &str) -> Vec<String> {
    list.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_string).collect()
}

/// Writes what the last optimisation did, as `NVB_GRAPH_FORMAT_TEXT` or `NVB_GRAPH_FORMAT_JSON`: each rewrite with its pass, the nodes
/// of the recorded list before and the one after, and how exact it is; passes taken back with the error they had; what was left and
/// why; nodes and bytes before and after, which are counted; times and errors, where they were measured, and nowhere an estimate.
/// `text` receives up to `capacity` bytes with a closing NUL and may be NULL; `*needed` what all of it takes and may be NULL.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (nothing was optimised, or a format that is neither).
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_get_report(
    graph: *const nvb_graph,
    format: u32,
    text: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> nvb_status {
    guard!(nvb_graph_get_report, {
        let object = GRAPHS.get(graph)?;
        let format = match format {
            super::graph::NVB_GRAPH_FORMAT_TEXT => Format::Text,
            super::graph::NVB_GRAPH_FORMAT_JSON => Format::Json,
            other => {
                return Err(Error::invalid(format!(
                    "format is {other}; NVB_GRAPH_FORMAT_TEXT (0) or NVB_GRAPH_FORMAT_JSON (1) is needed"
                )))
            }
        };
        let report = object.graph.report()?.describe(format)?;
        // SAFETY: NULL, or valid for `capacity` bytes and for writing.
        unsafe { give_text(&report, text, capacity, needed) }
    })
}

/// From the next launch on, the graph uses the memory at `replacement` in the place of the `bytes` at `memory`, wherever recorded
/// tensors, copies and fills name it; tensors must lie in that range whole. Nothing is recorded again: passes of the last optimisation
/// run again without a measurement, and the next launch prepares the graph as a first one does. The two addresses are a multiple of 16
/// bytes apart. The memory of weights and KV caches cannot be replaced.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (nothing was recorded; no node names the range, or one does in part; a weight, a cache, or
/// keys and values of a prefill lie in it; the device cannot reach the replacement; outputs would overlap inputs). The graph is then as before.
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_rebind(
    graph: *mut nvb_graph,
    memory: *const c_void,
    bytes: usize,
    replacement: *mut c_void,
) -> nvb_status {
    guard!(nvb_graph_rebind, {
        let object = GRAPHS.get(graph)?;
        if memory.is_null() || replacement.is_null() {
            return Err(Error::invalid("memory or replacement is NULL"));
        }
        if !object.backend.executor().can_access(replacement)? {
            return Err(Error::invalid(format!(
                "replacement ({replacement:p}) is memory that the device cannot reach"
            )));
        }
        let start = memory as usize;
        let end = start.checked_add(bytes).filter(|_| (replacement as usize).checked_add(bytes).is_some());
        let end = end.ok_or_else(|| Error::invalid(format!("{bytes} bytes reach beyond the last address")))?;
        object.graph.rebind(start..end, replacement as usize)
    })
}

//! Times of a graph's nodes.

use super::graph::{nvb_graph, GRAPHS, NVB_GRAPH_FORMAT_JSON, NVB_GRAPH_FORMAT_TEXT};
use super::prelude::*;
use crate::graph::profile::Format;
use std::sync::{Arc, PoisonError};

/// `format`, of `nvb_graph_get_profile`: the trace event format, a JSON that chrome://tracing and Perfetto show.
pub const NVB_GRAPH_FORMAT_CHROME_TRACE: u32 = 3;

/// The most replays of a profile.
const MOST_LAUNCHES: u32 = 1 << 16;

/// How a graph is profiled. All fields may be 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_graph_profile_options {
    pub struct_size: usize,
    /// Instrumented replays, and as many whole launches, of which the medians are told; 0: 10. At most 65,536.
    pub launches: u32,
    /// Must be 0.
    pub reserved: u32,
    /// What runs on; NULL: the backend's default stream.
    pub stream: *mut nvb_stream,
}
versioned!(nvb_graph_profile_options);

/// Measures how long each node of the list that the graph launches takes: the operations run one by one with events between them (on
/// the CPU with a clock), and whole launches beside them, for the sum of the nodes is not the time of a launch: an event between two
/// kernels keeps the later one from beginning under the tail of the earlier. Waits for the stream. What the graph writes, caches too, is
/// copied to the host before and put back after, and nobody else may use that memory meanwhile. `options` may be NULL.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (nothing was recorded; a stream that is recorded, explained or captured; memory that sleeps;
/// too many launches), `NVB_ERROR_OUT_OF_MEMORY` of the host, and what the operations report, with the node's number. The profile of an
/// earlier call then stays.
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_profile(
    graph: *mut nvb_graph,
    options: *const nvb_graph_profile_options,
) -> nvb_status {
    guard!(nvb_graph_profile, {
        let object = GRAPHS.get(graph)?;
        let given: nvb_graph_profile_options = match options.is_null() {
            true => super::structs::init(),
            // SAFETY: a struct with its size set, by the header's contract.
            false => unsafe { read(options)? },
        };
        if given.reserved != 0 || given.launches > MOST_LAUNCHES {
            return Err(Error::invalid(format!(
                "launches is {}, reserved {}; at most {MOST_LAUNCHES} and 0 are needed",
                given.launches, given.reserved
            )));
        }
        let launches = if given.launches == 0 { 10 } else { given.launches as usize };
        let stream = stream_of(&object.backend, given.stream)?;
        let profile = Arc::new(object.graph.profile(&stream, launches)?);
        *object.profile.lock().unwrap_or_else(PoisonError::into_inner) = Some(profile);
        Ok(())
    })
}

/// Writes what the last `nvb_graph_profile` measured: `NVB_GRAPH_FORMAT_TEXT` is a table of nodes and of operations with µs, share of the
/// sum, GB/s and GFLOP/s; `NVB_GRAPH_FORMAT_JSON` {"launches", "launch_seconds", "sum_seconds", "note", "nodes": [{"index", "operation",
/// "start_seconds", "seconds", "operations", "bytes"}]}; `NVB_GRAPH_FORMAT_CHROME_TRACE` a timeline. `text` receives up to `capacity`
/// bytes with a closing NUL and may be NULL; `*needed` what all of it takes and may be NULL.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (nothing was profiled, or a format that is none of these).
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_get_profile(
    graph: *const nvb_graph,
    format: u32,
    text: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> nvb_status {
    guard!(nvb_graph_get_profile, {
        let object = GRAPHS.get(graph)?;
        let format = match format {
            NVB_GRAPH_FORMAT_TEXT => Format::Text,
            NVB_GRAPH_FORMAT_JSON => Format::Json,
            NVB_GRAPH_FORMAT_CHROME_TRACE => Format::ChromeTrace,
            other => {
                return Err(Error::invalid(format!(
                    "format is {other}; NVB_GRAPH_FORMAT_TEXT (0), _JSON (1) or _CHROME_TRACE (3) is needed"
                )))
            }
        };
        let profile = object.profile.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let profile = profile.ok_or_else(|| {
            Error::invalid("the graph was not profiled").with_advice("nvb_graph_profile measures what is told")
        })?;
        // SAFETY: NULL, or valid for `capacity` bytes and for writing.
        unsafe { give_text(&profile.describe(format), text, capacity, needed) }
    })
}

//! Keeping what optimisations and conversions of graphs decided.

use super::graph::{nvb_graph, GraphObject, GRAPHS};
use super::prelude::*;
use crate::configuration::Requirement;
use crate::graph::decisions_file::{self, Header, MOST_KEY_BYTES};
use std::path::Path;

/// What a file belongs to: the device, driver and build that a tuning file names too.
fn header(object: &GraphObject) -> Header {
    let backend = &object.backend;
    let header = crate::tuning::header::Header::of(backend.executor().info(), backend.configuration());
    header.fields.into_iter().filter(|(name, _)| *name != "format").collect()
}

/// # Safety
/// NULL or a NUL-terminated string, both.
unsafe fn path_and_key(path: *const c_char, key: *const c_char) -> Result<(String, String)> {
    // SAFETY: the caller's contract.
    let (path, key) = unsafe { (text("path", path)?, text("key", key)?) };
    if path.is_empty() {
        return Err(Error::invalid("`path` is NULL or empty"));
    }
    if key.len() > MOST_KEY_BYTES {
        return Err(Error::invalid(format!("`key` has {} bytes; at most {MOST_KEY_BYTES} are allowed", key.len())));
    }
    Ok((path, key))
}

/// Writes what the last `nvb_graph_optimize` and the last `nvb_graph_convert_fp8` decided to the file at `path`: which passes run and
/// how exact they must be, which products are in FP8 with their marks and errors, and the times and errors that were measured. A
/// program that records the same list again loads them instead of measuring. The list itself is not written, since recording it takes
/// less than reading it would: a few microseconds an operation; nor are tuned kernels, which a tuning file keeps.
///
/// `key` says what the errors were measured with, such as the name and date of the model's file: the values of weights are no part of
/// the file. At most 4,096 bytes; NULL is "". The file is new, or replaces one of this kind as a whole.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (the graph was neither optimised nor converted), `NVB_ERROR_IO` (with the path; a file of
/// something else or what is no regular file is left as it is).
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_write_decisions(
    graph: *const nvb_graph,
    path: *const c_char,
    key: *const c_char,
) -> nvb_status {
    guard!(nvb_graph_write_decisions, {
        let object = GRAPHS.get(graph)?;
        // SAFETY: NUL-terminated strings or NULL, by the header's contract.
        let (path, key) = unsafe { path_and_key(path, key)? };
        let decisions = object.graph.decisions(&key)?;
        decisions_file::write(Path::new(&path), &header(&object), &decisions)
    })
}

/// Optimises the recorded list, and converts it to FP8, as the decisions in the file at `path` say, for all launches that follow.
/// Nothing is measured: the report and the FP8 info have the times and errors of the file, and say so. Passes and conversion check what
/// they always check, so a rewrite that is not possible any more is left out; nothing in a file becomes an address or a shape.
///
/// The list must be the one that the decisions were made for: the same operations in the same order with the same shapes, dtypes and
/// numbers, the same memory in common, and the same marks of internal memory; addresses may differ. Device, driver, cuBLASLt and build
/// of the library must be those of the file, and `key` the one that was saved. Where it fails with `NVB_ERROR_IO` or
/// `NVB_ERROR_INVALID_ARGUMENT`, an engine optimises as if there were no file, and saves that.
///
/// Weights are converted on `stream` (NULL: the backend's default stream), which is waited for if there are any.
/// Errors: `NVB_ERROR_IO` (no such file, a damaged one, one of another device, driver or build, with the reason),
/// `NVB_ERROR_INVALID_ARGUMENT` (nothing was recorded; another list or key; a stream that is recorded, explained or captured),
/// `NVB_ERROR_OUT_OF_MEMORY`, and those of `nvb_graph_convert_fp8`. The graph is then as before.
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_read_decisions(
    graph: *mut nvb_graph,
    path: *const c_char,
    key: *const c_char,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_graph_read_decisions, {
        let object = GRAPHS.get(graph)?;
        // SAFETY: NUL-terminated strings or NULL, by the header's contract.
        let (path, key) = unsafe { path_and_key(path, key)? };
        object.graph.expect_recorded()?;
        let (backend, stream) = (&object.backend, stream_of(&object.backend, stream)?);
        let decisions = decisions_file::read(Path::new(&path), &header(&object))?;
        let allowed = backend.configuration().fp8 != Requirement::Off && !backend.configuration().batch_invariant;
        object.graph.decide(&decisions, &key, allowed, &stream)
    })
}

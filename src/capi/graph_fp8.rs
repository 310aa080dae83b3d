//! Converting graphs to FP8.

use super::environment::element;
use super::graph::{nvb_graph, GRAPHS};
use super::prelude::*;
use crate::configuration::Requirement;
use crate::graph::fp8::{Mark, Options};

/// `mark`: the bound of the error decides.
pub const NVB_FP8_MARK_AUTO: u32 = 0;
/// `mark`: the product stays as it was recorded.
pub const NVB_FP8_MARK_KEEP: u32 = 1;
/// `mark`: the product is converted whatever the error.
pub const NVB_FP8_MARK_CONVERT: u32 = 2;

/// The most launches of a measurement.
const MOST_LAUNCHES: u32 = 1 << 16;

/// How a graph is converted to FP8. All fields may be 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_graph_fp8_options {
    pub struct_size: usize,
    /// The largest error of an output, ‖converted − recorded‖ / ‖recorded‖ on what lies in memory at the call, so let memory hold what
    /// the model meets. Each product is measured alone; those with the smallest errors are converted, as many as stay within the bound
    /// together. 0: no bound, and all are converted.
    pub maximum_error: f64,
    /// 1: weights alone become FP8. 0: large products may round their input to FP8 E4M3 too, with a scale for each row that is found
    /// when they run.
    pub weights_alone: u32,
    /// 1: weights are kept in FP8 for their bytes alone, on devices without FP8 arithmetic too. 0: such a device is refused.
    pub storage_only: u32,
    /// 1: both lists run on `stream`, and the info has the error of the outputs.
    pub measure_errors: u32,
    /// 1: both lists are launched in turns on `stream`, and the info has the medians of their times.
    pub measure_times: u32,
    /// Launches of each list that are timed; 0: 10. At most 65,536.
    pub launches: u32,
    /// Must be 0.
    pub reserved: u32,
    /// What converts weights and is measured on; NULL: the backend's default stream.
    pub stream: *mut nvb_stream,
}
versioned!(nvb_graph_fp8_options);

/// What a conversion came to.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_graph_fp8_info {
    pub struct_size: usize,
    /// Products of the recorded list.
    pub products: u32,
    /// Those that are in FP8 now.
    pub converted: u32,
    /// Floating-point operations of all products, and of those in FP8.
    pub operations: f64,
    pub converted_operations: f64,
    /// Bytes of weights that the products of one launch read, before and after. Copies in FP8 come to the recorded weights, which the
    /// graph keeps; graphs that convert the same weight share its copy.
    pub weight_bytes_before: u64,
    pub weight_bytes_after: u64,
    /// The worst output's error; −1: not measured.
    pub error: f64,
    /// Medians of a launch; 0: not measured.
    pub seconds_before: f64,
    pub seconds_after: f64,
}
versioned!(nvb_graph_fp8_info);

/// A product of the recorded list.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_graph_fp8_product {
    pub struct_size: usize,
    /// Its place in the recorded list.
    pub node: u32,
    /// What it was marked with, `NVB_FP8_MARK_…`
    pub mark: u32,
    /// 1 if it is in FP8.
    pub converted: u32,
    /// 0
    pub reserved: u32,
    /// Rows of the input.
    pub input_rows: u64,
    /// Of the weight.
    pub rows: u64,
    pub columns: u64,
    /// ‖FP8 weight − weight‖ / ‖weight‖; 0 if none was made.
    pub weight_error: f64,
    /// The worst output's error with this product and those marked `NVB_FP8_MARK_CONVERT` in FP8; −1: not measured.
    pub error: f64,
    /// Why it is as it is.
    pub reason: [c_char; 128],
}
versioned!(nvb_graph_fp8_product);

/// Converts the products of the recorded list with F32, F16 or BF16 weights to FP8 for the launches that follow: each reads a copy of
/// its weight in FP8 E4M3 with a scale for each row, which is made now and lies in the backend's memory. Large products may round
/// their input as well, if the backend's option `fp8` is not "off" and `batch_invariant` is not set. Other operations, and the KV cache,
/// stay as they are. `options` may be NULL.
///
/// Each call begins with the recorded list, and the passes of the last `nvb_graph_optimize` run again; later optimisations begin with
/// the converted list and compare with it. Node numbers here are those of the recorded list, as `nvb_graph_describe` has them before
/// the first optimisation.
///
/// Waits for `stream`. In a measurement both lists run for real: what the graph writes is copied to the host before and put back
/// after, caches too, and nobody else may use that memory meanwhile.
/// Errors: `NVB_ERROR_FP8` (a device without FP8 arithmetic, or `fp8` is "off", without `storage_only`), `NVB_ERROR_INVALID_ARGUMENT`
/// (nothing was recorded; a bound that is no number of at least 0; a weight with a value that is not finite; a stream that is recorded,
/// explained or captured; memory that sleeps), `NVB_ERROR_CONFIGURATION` (a flag that is neither 0 nor 1), `NVB_ERROR_OUT_OF_MEMORY`,
/// and in a measurement what the operations report. The graph is then as before.
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_convert_fp8(
    graph: *mut nvb_graph,
    options: *const nvb_graph_fp8_options,
) -> nvb_status {
    guard!(nvb_graph_convert_fp8, {
        let object = GRAPHS.get(graph)?;
        let given: nvb_graph_fp8_options = match options.is_null() {
            true => super::structs::init(),
            // SAFETY: a struct with its size set, by the header's contract.
            false => unsafe { read(options)? },
        };
        let maximum_error = given.maximum_error;
        if !(maximum_error.is_finite() && maximum_error >= 0.0) {
            return Err(Error::invalid(format!("maximum_error is {maximum_error}; a number of at least 0 is needed")));
        }
        if given.reserved != 0 || given.launches > MOST_LAUNCHES {
            return Err(Error::invalid(format!(
                "launches is {}, reserved {}; at most {MOST_LAUNCHES} and 0 are needed",
                given.launches, given.reserved
            )));
        }
        let options = Options {
            maximum_error,
            weights_alone: flag("weights_alone", given.weights_alone)?,
            storage_only: flag("storage_only", given.storage_only)?,
            measure_errors: flag("measure_errors", given.measure_errors)?,
            measure_times: flag("measure_times", given.measure_times)?,
            launches: if given.launches == 0 { 10 } else { given.launches as usize },
        };
        let backend = &object.backend;
        let stream = stream_of(backend, given.stream)?;
        let allowed = backend.configuration().fp8 != Requirement::Off && !backend.configuration().batch_invariant;
        object.graph.convert_fp8(&options, allowed, &stream)
    })
}

/// Says what the next `nvb_graph_convert_fp8` does with the product at `node` of the recorded list: `mark` is `NVB_FP8_MARK_…`.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (nothing was recorded, a node that there is not or that is no `linear`, an unknown mark).
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_set_fp8_mark(graph: *mut nvb_graph, node: u32, mark: u32) -> nvb_status {
    guard!(nvb_graph_set_fp8_mark, {
        let object = GRAPHS.get(graph)?;
        let mark = Mark::from_code(mark)
            .ok_or_else(|| Error::invalid(format!("mark is {mark}; NVB_FP8_MARK_… (0 to 2) is needed")))?;
        object.graph.mark_fp8(node, mark)
    })
}

/// Writes what the last conversion came to; set `info->struct_size` first.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (nothing was converted).
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_get_fp8_info(graph: *const nvb_graph, info: *mut nvb_graph_fp8_info) -> nvb_status {
    guard!(nvb_graph_get_fp8_info, {
        let conversion = GRAPHS.get(graph)?.graph.conversion()?;
        let products = &conversion.products;
        let bytes = |at: usize| products.iter().map(|product| product.weight_bytes[at] as u64).sum();
        let converted = || products.iter().filter(|product| product.converted);
        let value = nvb_graph_fp8_info {
            struct_size: 0,
            products: products.len() as u32,
            converted: converted().count() as u32,
            operations: products.iter().map(|product| product.operations).sum(),
            converted_operations: converted().map(|product| product.operations).sum(),
            weight_bytes_before: bytes(0),
            weight_bytes_after: bytes(1),
            error: conversion.errors.as_ref().map_or(-1.0, |errors| errors.relative),
            seconds_before: conversion.times.map_or(0.0, |times| times.before),
            seconds_after: conversion.times.map_or(0.0, |times| times.after),
        };
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(info, &value) }
    })
}

/// Describes the product at `index` of those that `nvb_graph_fp8_info.products` counts; set `product->struct_size` first.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (nothing was converted, or an index beyond the last).
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_get_fp8_product(
    graph: *const nvb_graph,
    index: u32,
    product: *mut nvb_graph_fp8_product,
) -> nvb_status {
    guard!(nvb_graph_get_fp8_product, {
        let conversion = GRAPHS.get(graph)?.graph.conversion()?;
        let of = element("product", &conversion.products, index)?;
        let value = nvb_graph_fp8_product {
            struct_size: 0,
            node: of.node,
            mark: of.mark as u32,
            converted: of.converted.into(),
            reserved: 0,
            input_rows: of.rows as u64,
            rows: of.weight.rows as u64,
            columns: of.weight.columns as u64,
            weight_error: of.weight_error,
            error: of.error.unwrap_or(-1.0),
            reason: fixed_text(&of.reason),
        };
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(product, &value) }
    })
}

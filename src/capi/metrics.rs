//! Profiling on demand.

use super::prelude::*;
use crate::operation::OperationKind;

/// What one operation did since profiling was switched on or reset.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_operation_metrics {
    pub struct_size: usize,
    /// Calls that were queued without an error.
    pub calls: u64,
    /// Calls that have finished and are in the figures below. A call that is queued while 4096 measured calls of the
    /// backend have not finished is never timed, nor is one for which the driver refuses the events.
    pub timed_calls: u64,
    /// Seconds between the start and the end of the calls on their streams, summed; on a GPU with the gap before each
    /// kernel, which is what counts for calls of a few microseconds.
    pub seconds: f64,
    /// The shortest and the longest call.
    pub shortest_seconds: f64,
    pub longest_seconds: f64,
    /// Arithmetic operations that the formula asks for; attention counts the pairs that the mask keeps.
    pub operations: f64,
    /// Bytes that must be read and written at least; of keys and values those that the mask keeps, once for each sequence
    /// of the call. Which these are in a decode step its positions in device memory decide.
    pub bytes: f64,
    /// bytes / seconds; 0 without a timed call. Beside `nvb_device_info.peak_bandwidth` it is the share achieved.
    pub bytes_per_second: f64,
    /// operations / seconds; 0 likewise.
    pub operations_per_second: f64,
    /// Such as "linear".
    pub name: [c_char; 32],
}
versioned!(nvb_operation_metrics);

/// Switches profiling on (1) or off (0, as a backend starts). While it is on, each operation costs two event records, a decode
/// step also a copy of its positions to the host, which is not in its time, and streams under capture are left alone: their
/// calls are not counted.
/// Ranges of NVTX are independent of it: they are there whenever a profiler is attached.
#[no_mangle]
pub unsafe extern "C" fn nvb_backend_set_profiling(backend: *const nvb_backend, enabled: u32) -> nvb_status {
    guard!(nvb_backend_set_profiling, {
        let object = BACKENDS.get(backend)?;
        if enabled > 1 {
            return Err(Error::invalid(format!("enabled is {enabled}; 0 or 1 is needed")));
        }
        object.backend.metrics().set_enabled(enabled == 1);
        Ok(())
    })
}

/// Writes the figures of `operation` (`NVB_OPERATION_…`); set `metrics->struct_size` first. Does not wait: work that has
/// not finished is in `calls` and not yet in `timed_calls`.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (an operation that this library does not know).
#[no_mangle]
pub unsafe extern "C" fn nvb_backend_get_metrics(
    backend: *const nvb_backend,
    operation: u32,
    metrics: *mut nvb_operation_metrics,
) -> nvb_status {
    guard!(nvb_backend_get_metrics, {
        let object = BACKENDS.get(backend)?;
        let kind = OperationKind::from_code(operation).ok_or_else(|| {
            let last = OperationKind::ALL.len() - 1;
            Error::invalid(format!("operation is {operation}; NVB_OPERATION_… (0 to {last}) is needed"))
        })?;
        let found = object.backend.metrics().get(kind);
        let value = copied!(nvb_operation_metrics from found {
            calls, seconds, operations, bytes;
            timed_calls: found.timed,
            shortest_seconds: found.shortest,
            longest_seconds: found.longest,
            bytes_per_second: found.bandwidth(),
            operations_per_second: found.throughput(),
            name: fixed_text(kind.name()),
        });
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(metrics, &value) }
    })
}

/// Sets all figures to 0; work that is still running will not be counted.
#[no_mangle]
pub unsafe extern "C" fn nvb_backend_reset_metrics(backend: *const nvb_backend) -> nvb_status {
    guard!(nvb_backend_reset_metrics, {
        BACKENDS.get(backend)?.backend.metrics().reset();
        Ok(())
    })
}

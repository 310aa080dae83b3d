//! The auto-tuner of attention.

use super::attention::*;
use super::attention_plan::operation_of;
use super::prelude::*;
use super::tensor::Reading;
use super::tuning::{convert_options, convert_report, listener, nvb_tune_callback, nvb_tune_options, nvb_tune_report};

/// Measures the kernels that can do `nvb_attention_prefill` with `prefill`, or `nvb_attention_decode` with `decode`, the other
/// being NULL, on these tensors and this cache, and lets calls like it run the fastest from then on: of the same heads, dtypes,
/// page size, masks and terms of heads, and as many sequences, rows of the longest, keys of the longest (of a decode
/// `max_kv_length`) and window, each up to the same next power of two. A kernel whose output is more than 6 % (of the norm of up to 32
/// rows) from that of the plainest is never chosen, and the one that runs anyway stays unless another is 2 % faster. The choice is
/// added to the backend's tuning file, if it has one; `nvb_kernel_override` comes before it, and captured graphs keep what they have.
/// `options` may be NULL for the defaults, as may `callback` and `report`; set `report->struct_size` first. `callback` hears of one
/// case, and what it returns is as for `nvb_tune_linear`; a call that it ends chooses nothing.
///
/// The calls write the output and the lse as ever, and read caches as they lie: a caller who wants to know about memory that is not
/// in the device's caches gives tensors larger than those. Waits for the stream, and allocates on a GPU 128 MiB for the time of the
/// call, and workspace. On the CPU there is one kernel and nothing to choose: the report is all 0.
/// Errors: those of the call; a stream under capture, explained or recorded, and an unknown `clock` (`NVB_ERROR_INVALID_ARGUMENT`);
/// `NVB_ERROR_CONFIGURATION` with `batch_invariant`, under which there is nothing to choose.
#[no_mangle]
pub unsafe extern "C" fn nvb_tune_attention(
    attention: *const nvb_attention,
    prefill: *const nvb_attention_prefill_args,
    decode: *const nvb_attention_decode_args,
    options: *const nvb_tune_options,
    callback: nvb_tune_callback,
    user_data: *mut c_void,
    report: *mut nvb_tune_report,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_tune_attention, {
        let object = ATTENTIONS.get(attention)?;
        let backend = &object.backend;
        let stream = stream_of(backend, stream)?;
        // SAFETY: structs with their sizes set, or NULL, by the header's contract.
        let options = unsafe { convert_options(options)? };
        if !report.is_null() {
            // SAFETY: the header asks for a struct with its size set; a wrong one is found before the work.
            unsafe { read(report.cast_const())? };
        }
        stream.expect_no_sink("kernels are measured")?;
        stream.expect_awake()?;
        // SAFETY: structs with their sizes set and the arrays that they name, by the header's contract.
        let (op, _owner) = unsafe { operation_of(Reading::Memory(backend), &object, prefill, decode)? };
        op.expect_apart()?;
        // SAFETY: the engine's function and data, by the header's contract.
        let mut progress = unsafe { listener(callback, user_data) };
        let (found, unkept) =
            backend.tuning().tune_attention(backend.memory(), &op, &stream, options, &mut progress)?;
        if report.is_null() {
            return Ok(());
        }
        let value = convert_report(&found, unkept.as_ref(), backend.tuning().path().is_some());
        // SAFETY: checked above.
        unsafe { write(report, &value) }
    })
}

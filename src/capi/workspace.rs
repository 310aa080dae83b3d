//! Workspace that the caller owns: how much an operation needs, and a stream's block of it.

use super::attention::{
    decode_of, nvb_attention, nvb_attention_decode_args, nvb_attention_prefill_args, prefill_of, ATTENTIONS,
};
use super::kv_cache::layer_of;
use super::operations::{linear_of, nvb_linear_args};
use super::prelude::*;
use super::products::{grouped_linear_of, matmul_of, nvb_grouped_linear_args, nvb_matmul_args};
use super::rows::{nvb_sort_rows_args, sort_rows_of};
use super::sampling::{argmax_of, nvb_argmax_args, nvb_sample_args, sample_of};
use super::stream::STREAMS;
use super::structs::Versioned;
use super::tensor::Reading;
use super::weight::weight_of;

/// Gives the stream `bytes` at `data` as the workspace of all its operations, which from now on allocate none; NULL and 0
/// end that. As large as the largest of the stream's operations needs: see the functions `nvb_…_get_workspace_size`; an
/// operation that needs more fails with `NVB_ERROR_INVALID_ARGUMENT`, which names both numbers, and queues nothing.
///
/// `data` is memory of the stream's device at a multiple of 256 bytes and stays the caller's. Until the workspace is
/// replaced or a handle of the stream destroyed, and as long as graphs that were captured with it are launched, nobody else may
/// use it; before it is freed, the work queued until then must have run, or be ordered before its freeing. A stream of its
/// own each: what two streams do overlaps. Its first bytes are zeroed in the stream's order.
///
/// Creating weights and caches allocates as ever. On the CPU no operation needs workspace, and it is not used.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (memory that the device cannot reach, that is no live block or shorter than
/// `bytes`, that is not aligned; a stream under capture, or of a stream manager, which may have other users).
#[no_mangle]
pub unsafe extern "C" fn nvb_stream_set_workspace(
    stream: *mut nvb_stream,
    data: *mut c_void,
    bytes: usize,
) -> nvb_status {
    guard!(nvb_stream_set_workspace, {
        // SAFETY: memory that nobody else uses while it is set, by the header's contract.
        unsafe { STREAMS.get(stream)?.set_workspace(data, bytes) }
    })
}

/// Writes what `workspace_bytes` says of a call's arguments.
fn write_bytes<A: Versioned>(
    backend: *const nvb_backend,
    args: *const A,
    bytes: *mut usize,
    workspace_bytes: impl FnOnce(&Backend, &A) -> Result<usize>,
) -> Result<()> {
    let backend = BACKENDS.get(backend)?.backend.clone();
    expect_out("bytes", bytes)?;
    // SAFETY: a struct with its size set, and an output that was checked for NULL, by the header's contract.
    unsafe { write_out("bytes", bytes, workspace_bytes(&backend, &read(args)?)?) }
}

/// Writes the bytes of workspace that `nvb_linear` needs with these arguments, 0 for none: an upper bound over the kernels
/// that it may come to, cuBLASLt's 32 MiB among them where that may run. A stream whose workspace has as many runs it.
///
/// Nothing is queued and no memory touched: `data` of a tensor counts by its alignment, and may be NULL for an aligned one.
/// The answer holds for these shapes and for the kernels as they are chosen now: ask again after an override or a tuning.
/// With fewer rows the need may be larger. The other functions of this name are alike.
#[no_mangle]
pub unsafe extern "C" fn nvb_linear_get_workspace_size(
    backend: *const nvb_backend,
    args: *const nvb_linear_args,
    bytes: *mut usize,
) -> nvb_status {
    guard!(nvb_linear_get_workspace_size, {
        write_bytes(backend, args, bytes, |backend, args| {
            let (_weight, weight) = weight_of(backend, args.weight)?;
            Ok(backend.executor().plan(&linear_of(Reading::Shape, args, weight)?.into())?.workspace)
        })
    })
}

/// Writes the bytes of workspace that `nvb_grouped_linear` needs with these arguments; see
/// `nvb_linear_get_workspace_size`.
#[no_mangle]
pub unsafe extern "C" fn nvb_grouped_linear_get_workspace_size(
    backend: *const nvb_backend,
    args: *const nvb_grouped_linear_args,
    bytes: *mut usize,
) -> nvb_status {
    guard!(nvb_grouped_linear_get_workspace_size, {
        write_bytes(backend, args, bytes, |backend, args| {
            let (_weight, weight) = weight_of(backend, args.weight)?;
            Ok(backend.executor().plan(&grouped_linear_of(Reading::Shape, args, weight)?.into())?.workspace)
        })
    })
}

/// Writes the bytes of workspace that `nvb_matmul` needs with these arguments; see `nvb_linear_get_workspace_size`.
#[no_mangle]
pub unsafe extern "C" fn nvb_matmul_get_workspace_size(
    backend: *const nvb_backend,
    args: *const nvb_matmul_args,
    bytes: *mut usize,
) -> nvb_status {
    guard!(nvb_matmul_get_workspace_size, {
        write_bytes(backend, args, bytes, |backend, args| {
            Ok(backend.executor().plan(&matmul_of(Reading::Shape, args)?.into())?.workspace)
        })
    })
}

/// Writes the bytes of workspace that `nvb_attention_prefill` takes with these arguments; see `nvb_linear_get_workspace_size`. Few
/// tiles of query rows over many keys take some, for partial results, and so does a mask of bits, for the tiles of keys that it leaves
/// out; on a stream whose workspace is smaller the call runs all the same, without dividing the keys and leaving tiles out.
#[no_mangle]
pub unsafe extern "C" fn nvb_attention_prefill_get_workspace_size(
    attention: *const nvb_attention,
    args: *const nvb_attention_prefill_args,
    bytes: *mut usize,
) -> nvb_status {
    guard!(nvb_attention_prefill_get_workspace_size, {
        let object = ATTENTIONS.get(attention)?;
        expect_out("bytes", bytes)?;
        // SAFETY: a struct with its size set and host arrays of these lengths, by the header's contract.
        let (op, _cache) = unsafe { prefill_of(Reading::Shape, &object, &read(args)?)? };
        let needed = object.backend.executor().plan(&op.into())?.workspace;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("bytes", bytes, needed) }
    })
}

/// Writes the bytes of workspace that `nvb_attention_decode` needs with these arguments; see
/// `nvb_linear_get_workspace_size`.
#[no_mangle]
pub unsafe extern "C" fn nvb_attention_decode_get_workspace_size(
    attention: *const nvb_attention,
    args: *const nvb_attention_decode_args,
    bytes: *mut usize,
) -> nvb_status {
    guard!(nvb_attention_decode_get_workspace_size, {
        let object = ATTENTIONS.get(attention)?;
        expect_out("bytes", bytes)?;
        // SAFETY: a struct with its size set, by the header's contract.
        let args = unsafe { read(args)? };
        let cache = (args.cache, args.layer);
        let (_cache, layer) = layer_of(Reading::Shape, &object.backend, cache, &args.page_table)?;
        let op = decode_of(Reading::Shape, &object, &args, layer)?;
        let needed = object.backend.executor().plan(&op.into())?.workspace;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("bytes", bytes, needed) }
    })
}

/// Writes the bytes of workspace that `nvb_argmax` needs with these arguments; see `nvb_linear_get_workspace_size`.
#[no_mangle]
pub unsafe extern "C" fn nvb_argmax_get_workspace_size(
    backend: *const nvb_backend,
    args: *const nvb_argmax_args,
    bytes: *mut usize,
) -> nvb_status {
    guard!(nvb_argmax_get_workspace_size, {
        write_bytes(backend, args, bytes, |backend, args| {
            Ok(backend.executor().plan(&argmax_of(Reading::Shape, args)?.into())?.workspace)
        })
    })
}

/// Writes the bytes of workspace that `nvb_sample` needs with these arguments; see `nvb_linear_get_workspace_size`.
#[no_mangle]
pub unsafe extern "C" fn nvb_sample_get_workspace_size(
    backend: *const nvb_backend,
    args: *const nvb_sample_args,
    bytes: *mut usize,
) -> nvb_status {
    guard!(nvb_sample_get_workspace_size, {
        write_bytes(backend, args, bytes, |backend, args| {
            Ok(backend.executor().plan(&sample_of(Reading::Shape, args)?.into())?.workspace)
        })
    })
}

/// Writes the bytes of workspace that `nvb_sort_rows` needs with these arguments; see `nvb_linear_get_workspace_size`.
#[no_mangle]
pub unsafe extern "C" fn nvb_sort_rows_get_workspace_size(
    backend: *const nvb_backend,
    args: *const nvb_sort_rows_args,
    bytes: *mut usize,
) -> nvb_status {
    guard!(nvb_sort_rows_get_workspace_size, {
        write_bytes(backend, args, bytes, |backend, args| {
            Ok(backend.executor().plan(&sort_rows_of(Reading::Shape, args)?.into())?.workspace)
        })
    })
}

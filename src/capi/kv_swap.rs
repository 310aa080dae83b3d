//! Sequences of a KV cache in page-locked host memory and in files.

use super::kv_cache::{nvb_kv_cache, KvCacheObject, KV_CACHES};
use super::prelude::*;
use crate::kv_cache::Swap;
use crate::stream::Stream;
use std::path::Path;

/// Page-locked host memory for one sequence of a KV cache, and a stream of its own on which the sequence is copied there and
/// back while other streams work. The cache stays alive with it.
///
/// What waits for what: `nvb_kv_swap_out` and `nvb_kv_swap_in` return at once. Their copies wait for the work that is queued on
/// the `stream` that they are given, and for the swap's own copies before; no stream waits for them until `nvb_kv_swap_wait` says
/// so, and the host not until `nvb_kv_swap_synchronize`. So between an out and its wait nothing may append to the sequence,
/// truncate or release it, and between an in and its wait no work may read it. The order of calls is
/// - out: `nvb_kv_swap_out(swap, sequence, stream)`, other work, `nvb_kv_swap_wait(swap, stream)`, then
///   `nvb_kv_cache_release(cache, sequence, stream)`;
/// - in: `nvb_kv_swap_in(swap, other, stream)`, other work, `nvb_kv_swap_wait(swap, stream)`, then the next step of `other`.
///
/// The image stays in the swap until the next out, and may come in more than once, to any sequence of the cache. Of FP8 it is what
/// is stored, without the scales, which are the engine's.
///
/// Threads: one at a time uses a swap.
pub struct nvb_kv_swap {
    _private: [u8; 0],
}

struct SwapObject {
    // First: it waits for its copies before the cache goes.
    swap: Swap,
    cache: Arc<KvCacheObject>,
}

static KV_SWAPS: Table<SwapObject> = Table::new("KV swap", 14);

/// Creates a swap with room for any `tokens` tokens of a sequence of `cache`. Allocates page-locked memory, which takes its time:
/// keep swaps, and use them again.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (more tokens than a sequence of the cache can have), `NVB_ERROR_OUT_OF_MEMORY`,
/// `NVB_ERROR_UNSUPPORTED` for the engine's memory.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_swap_create(
    cache: *const nvb_kv_cache,
    tokens: u32,
    swap: *mut *mut nvb_kv_swap,
) -> nvb_status {
    guard!(nvb_kv_swap_create, {
        let cache = KV_CACHES.get(cache)?;
        expect_out("swap", swap)?;
        let stream = stream_of(&cache.backend, std::ptr::null_mut())?;
        let created = Swap::new(&cache.cache, tokens as usize, &stream)?;
        let handle = KV_SWAPS.insert(Arc::new(SwapObject { swap: created, cache }))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("swap", swap, handle) }
    })
}

/// Destroys the handle; NULL is fine. Waits for its copies.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_swap_destroy(swap: *mut nvb_kv_swap) -> nvb_status {
    guard!(nvb_kv_swap_destroy, { KV_SWAPS.remove(swap) })
}

/// Queues the copy of all tokens of `sequence` to the swap, behind the work on `stream`. The sequence keeps them.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (no tokens, more than there is room for, a capture, memory that sleeps, a stream that is
/// explained or recorded).
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_swap_out(swap: *mut nvb_kv_swap, sequence: u32, stream: *mut nvb_stream) -> nvb_status {
    guard!(nvb_kv_swap_out, {
        let object = KV_SWAPS.get(swap)?;
        let stream = working(&object.cache, stream)?;
        object.cache.cache.swap_out(&object.swap, sequence as usize, &stream)
    })
}

/// Gives `sequence`, which must hold nothing, the tokens of the swap: takes its pages as `nvb_kv_cache_reserve` does, on `stream`,
/// and queues the copy behind the work there.
/// Errors: those of `nvb_kv_swap_out`, `NVB_ERROR_INVALID_ARGUMENT` if the sequence holds tokens or the swap none, and
/// `NVB_ERROR_OUT_OF_MEMORY` if too few pages are free; nothing has changed then.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_swap_in(swap: *mut nvb_kv_swap, sequence: u32, stream: *mut nvb_stream) -> nvb_status {
    guard!(nvb_kv_swap_in, {
        let object = KV_SWAPS.get(swap)?;
        let KvCacheObject { cache, backend } = &*object.cache;
        let stream = working(&object.cache, stream)?;
        cache.swap_in(&object.swap, sequence as usize, &stream, &mut |copy| backend.queue(copy, &stream))
    })
}

/// Work queued on `stream` from now on waits for the swap's last copies. Does not block the host.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_swap_wait(swap: *mut nvb_kv_swap, stream: *mut nvb_stream) -> nvb_status {
    guard!(nvb_kv_swap_wait, {
        let object = KV_SWAPS.get(swap)?;
        let stream = stream_of(&object.cache.backend, stream)?;
        object.swap.wait(&stream)
    })
}

/// Waits until the swap's copies have finished, and returns the first error that any of them met.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_swap_synchronize(swap: *mut nvb_kv_swap) -> nvb_status {
    guard!(nvb_kv_swap_synchronize, { KV_SWAPS.get(swap)?.swap.synchronize() })
}

/// Writes the tokens that the swap holds, 0 before the first out, and its bytes of page-locked memory.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_swap_get_size(
    swap: *const nvb_kv_swap,
    tokens: *mut u32,
    bytes: *mut u64,
) -> nvb_status {
    guard!(nvb_kv_swap_get_size, {
        let object = KV_SWAPS.get(swap)?;
        expect_out("bytes", bytes)?;
        // SAFETY: NULL is checked; otherwise valid by the header's contract.
        unsafe {
            write_out("tokens", tokens, object.swap.tokens() as u32)?;
            write_out("bytes", bytes, object.swap.bytes() as u64)
        }
    })
}

/// Writes all tokens of `sequence` to the file at `path`, which is made, or replaced as a whole; only a regular file is. Waits for
/// the work on `stream`. The file says what it is (a mark and a version, the cache's geometry and dtypes, the tokens), and has sums
/// over that and over the content. Of FP8 it has no scales. What lies behind the last token in a page is written as zeros.
/// Errors: `NVB_ERROR_IO`; `NVB_ERROR_INVALID_ARGUMENT` (a sequence without tokens, and those of `nvb_kv_swap_out`);
/// `NVB_ERROR_UNSUPPORTED` for the engine's memory.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_cache_save(
    cache: *const nvb_kv_cache,
    sequence: u32,
    path: *const c_char,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_kv_cache_save, {
        let object = KV_CACHES.get(cache)?;
        // SAFETY: a NUL-terminated text, by the header's contract.
        let path = unsafe { text("path", path)? };
        let stream = working(&object, stream)?;
        object.cache.save(sequence as usize, Path::new(&path), &stream)
    })
}

/// Gives `sequence`, which must hold nothing, the tokens that `nvb_kv_cache_save` has written, of this cache or of one with the
/// same layers, heads, dims, dtypes, page_tokens and ring. Waits for the copies. The file is refused before memory is taken for
/// its content where mark, version, geometry or length do not fit, and before anything is copied where a sum does not.
/// Errors: `NVB_ERROR_IO` (no regular file, no such file, one that was shortened or changed), `NVB_ERROR_INVALID_ARGUMENT` (a cache
/// of another geometry, with both numbers; a sequence that holds tokens), `NVB_ERROR_OUT_OF_MEMORY` if too few pages are free.
/// Nothing has changed then.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_cache_restore(
    cache: *mut nvb_kv_cache,
    sequence: u32,
    path: *const c_char,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_kv_cache_restore, {
        let object = KV_CACHES.get(cache)?;
        // SAFETY: a NUL-terminated text, by the header's contract.
        let path = unsafe { text("path", path)? };
        let stream = working(&object, stream)?;
        let queue: crate::kv_cache::Queue<'_> = &mut |copy| object.backend.queue(copy, &stream);
        object.cache.restore(sequence as usize, Path::new(&path), &stream, queue)
    })
}

/// The stream of a call whose copies read or write the cache.
fn working(object: &KvCacheObject, stream: *mut nvb_stream) -> Result<Arc<Stream>> {
    let stream = stream_of(&object.backend, stream)?;
    object.cache.expect_awake()?;
    stream.expect_no_sink("a sequence can be copied to the host")?;
    Ok(stream)
}

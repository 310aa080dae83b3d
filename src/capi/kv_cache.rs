//! KV caches.

use super::backend::{expect_same_backend, nvb_backend, stream_of, BACKENDS};
use super::guard::guard;
use super::handle::Table;
use super::status::nvb_status;
use super::structs::{expect_out, read, versioned, write_out};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::kv_cache::{KvCache, KvCacheOptions};
use crate::memory::expect_awake;
use crate::tensor::{CacheLayer, DType};
use std::sync::Arc;

/// Keys and values of every layer, in `slots` sequences of up to `capacity` tokens each.
///
/// The cache stores no lengths: calls name positions and lengths. A sequence is rewound by naming a smaller one, and a
/// slot is reused by starting at position 0 again.
///
/// Threads: calls that write different slots or layers may run at once.
pub struct nvb_kv_cache {
    _private: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_kv_cache_options {
    pub struct_size: usize,
    pub layers: u32,
    /// Sequences that the cache can hold at a time.
    pub slots: u32,
    pub kv_heads: u32,
    /// 1 to 512.
    pub head_dim: u32,
    /// Tokens that a slot can hold.
    pub capacity: u32,
    /// `NVB_DTYPE_F32`, `_F16` or `_BF16`; 0: BF16 on CUDA, F32 on the CPU.
    pub dtype: u32,
}
versioned!(nvb_kv_cache_options);

pub struct KvCacheObject {
    pub cache: KvCache,
    pub backend: Arc<Backend>,
}

static KV_CACHES: Table<KvCacheObject> = Table::new("KV cache", 6);

pub(super) fn layer_of(
    backend: &Backend,
    cache: *const nvb_kv_cache,
    layer: u32,
) -> Result<(Arc<KvCacheObject>, CacheLayer)> {
    let object = KV_CACHES.get(cache)?;
    expect_same_backend(backend, object.backend.executor(), "KV cache")?;
    let layer = object.cache.layer(layer as usize)?;
    Ok((object, layer))
}

/// Finds a layer as `layer_of` does, for a call that reads or writes the cache.
pub(super) fn layer_to_use(
    backend: &Backend,
    cache: *const nvb_kv_cache,
    layer: u32,
) -> Result<(Arc<KvCacheObject>, CacheLayer)> {
    let found = layer_of(backend, cache, layer)?;
    expect_awake(found.1.key).map_err(|error| error.context("the KV cache"))?;
    Ok(found)
}

/// Creates a cache of 2 · layers · slots · kv_heads · capacity · head_dim elements, contents undefined.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (which field), `NVB_ERROR_OUT_OF_MEMORY`.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_cache_create(
    backend: *const nvb_backend,
    options: *const nvb_kv_cache_options,
    cache: *mut *mut nvb_kv_cache,
) -> nvb_status {
    guard!(nvb_kv_cache_create, {
        let backend = BACKENDS.get(backend)?.backend.clone();
        expect_out("cache", cache)?;
        // SAFETY: a struct with its size set, by the header's contract.
        let options = unsafe { read(options)? };
        let dtype = match options.dtype {
            0 => backend.default_dtype(),
            code => DType::from_code(code)
                .ok_or_else(|| Error::invalid(format!("dtype is {code}; NVB_DTYPE_F32, _F16 or _BF16 is needed")))?,
        };
        let options = KvCacheOptions {
            layers: options.layers as usize,
            slots: options.slots as usize,
            kv_heads: options.kv_heads as usize,
            head_dim: options.head_dim as usize,
            capacity: options.capacity as usize,
            dtype,
        };
        let stream = stream_of(&backend, std::ptr::null_mut())?;
        let created = KvCache::new(backend.memory(), options, &stream)?;
        // Other streams may use the memory at once.
        stream.synchronize()?;
        let handle = KV_CACHES.insert(Arc::new(KvCacheObject { cache: created, backend }))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { cache.write(handle) };
        Ok(())
    })
}

/// Destroys the handle; NULL is fine. Waits for the device before the memory is given back.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_cache_destroy(cache: *mut nvb_kv_cache) -> nvb_status {
    guard!(nvb_kv_cache_destroy, { KV_CACHES.remove(cache) })
}

/// Writes the device bytes that the cache holds.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_cache_get_bytes(cache: *const nvb_kv_cache, bytes: *mut u64) -> nvb_status {
    guard!(nvb_kv_cache_get_bytes, {
        let object = KV_CACHES.get(cache)?;
        // SAFETY: NULL is checked; otherwise valid by the header's contract.
        unsafe { write_out("bytes", bytes, object.cache.bytes() as u64) }
    })
}

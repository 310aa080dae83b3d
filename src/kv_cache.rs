//! The KV cache: for each layer keys and values as [slots, kv_heads, capacity, head_dim], contiguous.
//!
//! A slot holds one sequence. The cache stores no lengths: each call names positions or lengths, so that a recorded
//! step reads them from device memory and an engine may rewind a sequence by saying a smaller number.

use crate::error::{Error, Result};
use crate::memory::{Allocation, MemoryManager};
use crate::stream::Stream;
use crate::tensor::{CacheLayer, DType, MAX_HEAD_DIM};
use std::sync::Arc;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KvCacheOptions {
    pub layers: usize,
    pub slots: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Tokens a slot can hold.
    pub capacity: usize,
    pub dtype: DType,
}

pub struct KvCache {
    options: KvCacheOptions,
    allocation: Allocation,
}

impl KvCacheOptions {
    fn layer_bytes(&self) -> Option<usize> {
        // Each layer's keys start on a 256-byte boundary, which every vector width and TMA accept.
        let elements = self.slots.checked_mul(self.kv_heads)?.checked_mul(self.capacity)?.checked_mul(self.head_dim)?;
        elements.checked_mul(self.dtype.size())?.checked_next_multiple_of(256)
    }

    pub fn bytes(&self) -> Result<usize> {
        for (name, value) in [
            ("layers", self.layers),
            ("slots", self.slots),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("capacity", self.capacity),
        ] {
            if value == 0 || value > i32::MAX as usize {
                return Err(Error::invalid(format!("{name} is {value}; 1 to {} is supported", i32::MAX)));
            }
        }
        if self.head_dim > MAX_HEAD_DIM {
            return Err(Error::invalid(format!("head_dim is {}; at most {MAX_HEAD_DIM} is supported", self.head_dim)));
        }
        if !self.dtype.is_float() {
            return Err(Error::invalid(format!("a KV cache of dtype {}; f32, f16 or bf16 is needed", self.dtype)));
        }
        self.layer_bytes()
            .and_then(|bytes| bytes.checked_mul(2)?.checked_mul(self.layers))
            .filter(|&bytes| bytes <= isize::MAX as usize)
            .ok_or_else(|| Error::invalid(format!("the size of a KV cache of {self:?} overflows")))
    }
}

impl KvCache {
    /// Allocates all layers at once; the contents are undefined until tokens are appended.
    pub fn new(memory: &Arc<MemoryManager>, options: KvCacheOptions, stream: &Stream) -> Result<KvCache> {
        let bytes = options.bytes()?;
        let allocation = memory.allocate_owned(bytes, stream.raw()).map_err(|error| {
            error.context(format_args!(
                "KV cache of {} layers, {} slots of {} tokens",
                options.layers, options.slots, options.capacity
            ))
        })?;
        Ok(KvCache { options, allocation })
    }

    pub fn options(&self) -> &KvCacheOptions {
        &self.options
    }

    pub fn bytes(&self) -> usize {
        self.allocation.bytes()
    }

    pub fn layer(&self, layer: usize) -> Result<CacheLayer> {
        let options = &self.options;
        if layer >= options.layers {
            return Err(Error::invalid(format!("layer is {layer}; the KV cache has {} layers", options.layers))
                .with_limit(layer as u64, options.layers as u64));
        }
        let layer_bytes = options.layer_bytes().expect("checked at creation");
        let key = self.allocation.pointer().cast::<u8>().wrapping_add(2 * layer * layer_bytes);
        Ok(CacheLayer {
            key: key.cast(),
            value: key.wrapping_add(layer_bytes).cast(),
            dtype: options.dtype,
            slots: options.slots,
            heads: options.kv_heads,
            capacity: options.capacity,
            head_dim: options.head_dim,
            slot_stride: options.kv_heads * options.capacity * options.head_dim,
            head_stride: options.capacity * options.head_dim,
        })
    }
}

//! The KV cache: keys and values of each layer, for each sequence. One block a sequence (contiguous, or a ring that keeps
//! what a window sees), or pages that sequences share; of the library's memory or of the engine's.
//!
//! Work reads no lengths from the cache: each call names positions or lengths, so that a recorded step reads them from
//! device memory. What the host knows of a sequence (its tokens, its pages) is what the calls of `sequences.rs` said.

mod engine;
mod pages;
mod sequence_file;
mod sequences;
mod swap;
mod table;

use crate::allocation::filled;
use crate::error::{Error, Result};
use crate::memory::{expect_awake, Allocation, MemoryManager};
use crate::stream::Stream;
use crate::tensor::{CacheLayer, DType, PageTable, Placement, Tensor, ValueStrides, MAX_HEAD_DIM, MAX_VALUE_DIM};
use engine::EngineMemory;
use pages::Pages;
use sequences::Sequences;
pub use sequences::{Queue, Usage};
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::{Arc, PoisonError};
pub use swap::Swap;
use table::DeviceTable;

/// The largest page: kernels keep the place of a token in its page in eight bits.
pub const MAX_PAGE_TOKENS: usize = 256;
/// The largest pool: kernels keep a page and a token's place in it in 32 bits.
pub const MAX_PAGES: usize = 1 << 23;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KvCacheOptions {
    pub layers: usize,
    /// How many the cache holds; of an engine's pages the rows of its table count instead.
    pub sequences: usize,
    pub kv_heads: usize,
    /// Of keys.
    pub head_dim: usize,
    /// Of values; 0: head_dim.
    pub value_dim: usize,
    /// Values are the first elements of their keys, and not stored.
    pub values_in_keys: bool,
    /// No position of a sequence reaches this.
    pub capacity: usize,
    /// Of the keys.
    pub dtype: DType,
    /// `None`: that of the keys.
    pub value_dtype: Option<DType>,
    /// 0: no pages.
    pub page_tokens: usize,
    /// Of the pool; 0: enough for every sequence at its capacity.
    pub pages: usize,
    /// 0: every token is kept. Otherwise a ring keeps the last `window + max_append − 1`.
    pub window: usize,
    /// The most tokens of one sequence that a call appends; 0: 1.
    pub max_append: usize,
    /// f32 [layers, kv_heads], contiguous, of a dtype of 8 bits; absent: 1.
    pub key_scales: Option<Tensor>,
    pub value_scales: Option<Tensor>,
}

impl Default for KvCacheOptions {
    fn default() -> KvCacheOptions {
        KvCacheOptions {
            layers: 1,
            sequences: 1,
            kv_heads: 1,
            head_dim: 1,
            value_dim: 0,
            values_in_keys: false,
            capacity: 1,
            dtype: DType::F32,
            value_dtype: None,
            page_tokens: 0,
            pages: 0,
            window: 0,
            max_append: 0,
            key_scales: None,
            value_scales: None,
        }
    }
}

enum Memory {
    Library { allocation: Allocation, pages: Option<DeviceTable>, layout: Layout },
    Engine(EngineMemory),
}

pub struct KvCache {
    options: KvCacheOptions,
    memory: Memory,
    /// Taken by calls that change what sequences hold, never by work.
    sequences: Mutex<Sequences>,
}

/// How the options lay keys and values out.
#[derive(Debug, Clone, Copy)]
struct Layout {
    /// Sequences, or pages.
    blocks: usize,
    /// Tokens of a block.
    tokens: usize,
    /// Bytes of a block's keys in one layer, and of its values.
    key_bytes: usize,
    value_bytes: usize,
    bytes: usize,
}

impl Layout {
    /// Of a block in one layer; without pages of all blocks.
    fn layer_bytes(&self) -> usize {
        self.key_bytes + self.value_bytes
    }
}

impl KvCacheOptions {
    /// Elements of a value.
    pub fn value_dim(&self) -> usize {
        match self.value_dim {
            0 => self.head_dim,
            dim => dim,
        }
    }

    pub fn value_dtype(&self) -> DType {
        self.value_dtype.unwrap_or(self.dtype)
    }

    /// Bytes of a head's key, and of its value where that has memory of its own.
    fn row_bytes(&self) -> (usize, usize) {
        let value = if self.values_in_keys { 0 } else { self.value_dtype().row_bytes(self.value_dim()) };
        (self.dtype.row_bytes(self.head_dim), value)
    }

    /// Entries of a sequence's row of the page table.
    pub fn columns(&self) -> usize {
        match self.page_tokens {
            0 => 0,
            tokens => self.capacity.div_ceil(tokens),
        }
    }

    /// Tokens that a ring keeps; `None`: every token is kept.
    pub fn ring_tokens(&self) -> Option<usize> {
        let tokens = self.window.saturating_add(self.max_append.max(1) - 1);
        (self.window > 0 && tokens < self.capacity).then_some(tokens)
    }

    /// Refuses what no cache can be; `engine`: pages or blocks are the engine's.
    fn check(&self, engine: bool) -> Result<()> {
        for (name, value, least) in [
            ("layers", self.layers, 1),
            ("sequences", self.sequences, usize::from(!engine)),
            ("kv_heads", self.kv_heads, 1),
            ("head_dim", self.head_dim, 1),
            ("capacity", self.capacity, 1),
            ("window", self.window, 0),
            ("max_append", self.max_append, 0),
        ] {
            if value < least || value > i32::MAX as usize {
                return Err(Error::invalid(format!("{name} is {value}; {least} to {} is supported", i32::MAX)));
            }
        }
        for (name, value, most) in [
            ("head_dim", self.head_dim, MAX_HEAD_DIM),
            ("value_dim", self.value_dim(), MAX_VALUE_DIM),
            ("page_tokens", self.page_tokens, MAX_PAGE_TOKENS),
            ("pages", self.pages, MAX_PAGES),
        ] {
            if value > most {
                return Err(Error::invalid(format!("{name} is {value}; at most {most} is supported"))
                    .with_limit(value as u64, most as u64));
            }
        }
        let contradiction = |text: &str| Err(Error::invalid(text));
        if self.values_in_keys && self.value_dim() > self.head_dim {
            return contradiction("values_in_keys is given, and value_dim is larger than head_dim");
        }
        if self.page_tokens == 0 && self.pages > 0 {
            return contradiction("pages are given without page_tokens");
        }
        if self.window == 0 && self.max_append > 0 {
            return contradiction("max_append is given without a window, which makes the cache a ring");
        }
        if self.window > 0 && self.page_tokens > 0 {
            return contradiction("window and page_tokens are given: a cache is a ring or has pages");
        }
        expect_kv(self.dtype)?;
        expect_kv(self.value_dtype())?;
        if self.values_in_keys && (self.dtype.is_kv_row() || self.value_dtype() != self.dtype) {
            return Err(Error::invalid(format!(
                "values_in_keys is given, and the dtypes are {} and {}: a value is a part of its key where both are one float type or FP8",
                self.dtype,
                self.value_dtype()
            )));
        }
        self.check_scales()?;
        Ok(())
    }

    fn check_scales(&self) -> Result<()> {
        for (name, scales, dtype) in
            [("key_scales", self.key_scales, self.dtype), ("value_scales", self.value_scales, self.value_dtype())]
        {
            let Some(scales) = scales else { continue };
            if !dtype.is_fp8() {
                return Err(Error::invalid(format!("`{name}` are given for a KV cache of dtype {dtype}"))
                    .with_advice("keys and values in FP8 have scales of the engine's"));
            }
            scales.expect_dtype(name, DType::F32)?;
            scales.expect_shape(name, &[self.layers, self.kv_heads])?;
            scales.expect_readable(name)?;
            if !scales.is_contiguous() {
                return Err(Error::invalid(format!("tensor `{name}` is strided; a contiguous one is needed")));
            }
        }
        if self.values_in_keys && self.value_scales.is_some() {
            return Err(Error::invalid("`value_scales` are given, and values_in_keys: values have the keys' scales"));
        }
        Ok(())
    }

    /// The layer with its heads' scales.
    fn with_scales(&self, layer: usize, of: CacheLayer) -> CacheLayer {
        let scales = |scales: Option<Tensor>| {
            let first = |scales: Tensor| scales.data.cast::<f32>().cast_const().wrapping_add(layer * self.kv_heads);
            scales.map_or(std::ptr::null(), first)
        };
        let values = if self.values_in_keys { self.key_scales } else { self.value_scales };
        CacheLayer { key_scales: scales(self.key_scales), value_scales: scales(values), ..of }
    }

    fn layout(&self) -> Result<Layout> {
        self.check(false)?;
        let (blocks, tokens) = match (self.page_tokens, self.ring_tokens()) {
            (0, ring) => (self.sequences, ring.unwrap_or(self.capacity)),
            (tokens, _) if self.pages == 0 => (self.sequences.saturating_mul(self.columns()), tokens),
            (tokens, _) => (self.pages, tokens),
        };
        if self.page_tokens > 0 && blocks > MAX_PAGES {
            return Err(Error::invalid(format!("{blocks} pages; at most {MAX_PAGES} are supported"))
                .with_limit(blocks as u64, MAX_PAGES as u64));
        }
        let bytes = |blocks: usize, row_bytes: usize| {
            self.kv_heads.checked_mul(tokens)?.checked_mul(row_bytes)?.checked_mul(blocks)
        };
        let (key_row, value_row) = self.row_bytes();
        let overflow = || Error::invalid(format!("the size of a KV cache of {self:?} overflows"));
        let fits = |bytes: Option<usize>| bytes.filter(|&bytes| bytes <= isize::MAX as usize).ok_or_else(overflow);
        // Every vector width, and the strides of TMA, are multiples of 16 bytes; where layers of whole blocks begin, of 256.
        let (of_part, alignment, parts) = match self.page_tokens {
            0 => (blocks, 256, 1),
            _ => (1, 16, blocks),
        };
        let part = |row: usize| fits(bytes(of_part, row).and_then(|bytes| bytes.checked_next_multiple_of(alignment)));
        let (key_bytes, value_bytes) = (part(key_row)?, part(value_row)?);
        let layer = key_bytes.checked_add(value_bytes);
        let all = layer.and_then(|bytes| bytes.checked_mul(parts)?.checked_mul(self.layers));
        Ok(Layout { blocks, tokens, key_bytes, value_bytes, bytes: fits(all)? })
    }

    /// Bytes of all keys and values.
    pub fn bytes(&self) -> Result<usize> {
        Ok(self.layout()?.bytes)
    }

    /// What a cache of the library's memory holds on the device: [`KvCache::bytes`] of one that is created so.
    pub fn device_bytes(&self) -> Result<usize> {
        let table =
            self.sequences.checked_mul(self.columns()).and_then(|entries| entries.checked_mul(size_of::<i32>()));
        table.and_then(|table| self.bytes().ok()?.checked_add(table)).ok_or_else(|| {
            self.bytes()
                .err()
                .unwrap_or_else(|| Error::invalid(format!("the size of a KV cache of {self:?} overflows")))
        })
    }

    /// A layer of a cache of the library's memory, which begins at `data` and has its page table at `entries`. Neither is
    /// touched.
    pub fn layer_at(&self, data: *mut c_void, entries: *const i32, layer: usize) -> Result<CacheLayer> {
        Ok(self.layer_in(&self.layout()?, data, entries, layer))
    }

    /// The same with the options' layout, which a cache has at hand.
    fn layer_in(&self, layout: &Layout, data: *mut c_void, entries: *const i32, layer: usize) -> CacheLayer {
        let key = data.cast::<u8>().wrapping_add(layer * layout.layer_bytes());
        let value = if self.values_in_keys { key } else { key.wrapping_add(layout.key_bytes) };
        let addresses: (*mut c_void, *mut c_void) = (key.cast(), value.cast());
        let extents = [self.sequences, self.kv_heads, layout.tokens];
        let dtypes = (self.dtype, self.value_dtype());
        let blocks = CacheLayer::of_dims(addresses, dtypes, extents, (self.head_dim, self.value_dim()));
        let mut blocks = self.with_scales(layer, blocks);
        if self.values_in_keys {
            let (block, head, token) = (blocks.sequence_stride, blocks.head_stride, blocks.token_stride);
            blocks.value_strides = ValueStrides { block, head, token };
        }
        match (self.page_tokens, self.ring_tokens()) {
            (0, Some(tokens)) => {
                CacheLayer { capacity: self.capacity, placement: Placement::Ring { tokens }, ..blocks }
            }
            (0, None) => blocks,
            (page_tokens, _) => {
                let page_bytes = self.layers * layout.layer_bytes();
                let page_stride = page_bytes / self.dtype.size();
                let table = PageTable {
                    entries,
                    sequences: self.sequences,
                    columns: self.columns(),
                    row_stride: self.columns(),
                    page_tokens,
                    page_stride,
                    pages: layout.blocks,
                };
                CacheLayer {
                    capacity: self.capacity,
                    sequence_stride: table.row_stride,
                    placement: Placement::Paged(table),
                    value_strides: ValueStrides {
                        block: page_bytes / self.value_dtype().size(),
                        ..blocks.value_strides
                    },
                    ..blocks
                }
            }
        }
    }
}

impl KvCache {
    /// Allocates all layers at once; the contents are undefined until tokens are appended.
    pub fn new(memory: &Arc<MemoryManager>, options: KvCacheOptions, stream: &Stream) -> Result<KvCache> {
        let layout = options.layout()?;
        let allocation = memory.allocate_owned(layout.bytes, stream.raw()).map_err(|error| {
            error.context(match options.page_tokens {
                0 => format!(
                    "KV cache of {} layers, {} sequences of {} tokens",
                    options.layers, options.sequences, layout.tokens
                ),
                tokens => {
                    format!("KV cache of {} layers, {} pages of {tokens} tokens", options.layers, layout.blocks)
                }
            })
        })?;
        let (pages, table) = match options.page_tokens {
            0 => (None, None),
            tokens => {
                let columns = options.columns();
                let pages = Pages::new(tokens, options.sequences, columns, layout.blocks)?;
                (Some(pages), Some(DeviceTable::new(memory, options.sequences, columns, stream)?))
            }
        };
        let sequences = Mutex::new(Sequences::new(options.sequences, pages)?);
        Ok(KvCache { options, memory: Memory::Library { allocation, pages: table, layout }, sequences })
    }

    /// A cache over the engine's memory: keys, then values of each layer, [blocks, kv_heads, tokens, head_dim or value_dim, or a
    /// row's bytes] with any strides that all keys share, and all values. A block is a page, or without pages a sequence.
    pub fn over(options: KvCacheOptions, tensors: &[Tensor]) -> Result<KvCache> {
        let dtype = tensors.first().map_or(options.dtype, |tensor| tensor.dtype);
        let value_dtype = Some(tensors.get(1).map_or(options.value_dtype(), |tensor| tensor.dtype));
        let options = KvCacheOptions { dtype, value_dtype, ..options };
        options.check(true)?;
        let engine = EngineMemory::new(&options, tensors)?;
        let options = KvCacheOptions {
            sequences: if options.page_tokens == 0 { engine.blocks } else { options.sequences },
            ..options
        };
        let sequences = Mutex::new(Sequences::new(0, None)?);
        Ok(KvCache { options, memory: Memory::Engine(engine), sequences })
    }

    pub fn options(&self) -> &KvCacheOptions {
        &self.options
    }

    /// Device bytes that the cache itself holds.
    pub fn bytes(&self) -> usize {
        match &self.memory {
            Memory::Library { allocation, pages, .. } => {
                allocation.bytes() + pages.as_ref().map_or(0, DeviceTable::bytes)
            }
            Memory::Engine(_) => 0,
        }
    }

    /// Refuses to change what sequences hold while the memory of the cache and its page table sleeps.
    pub fn expect_awake(&self) -> Result<()> {
        match &self.memory {
            Memory::Library { allocation, .. } => {
                expect_awake(allocation.pointer()).map_err(|error| error.context("the KV cache"))
            }
            Memory::Engine(_) => Ok(()),
        }
    }

    /// A layer of a cache whose memory is the library's, or whose blocks are whole sequences.
    pub fn layer(&self, layer: usize) -> Result<CacheLayer> {
        self.layer_with(layer, None)
    }

    /// A layer as a call sees it; `table`, the engine's page table, belongs to its pages alone.
    pub fn layer_with(&self, layer: usize, table: Option<Tensor>) -> Result<CacheLayer> {
        let options = &self.options;
        if layer >= options.layers {
            return Err(Error::invalid(format!("layer is {layer}; the KV cache has {} layers", options.layers))
                .with_limit(layer as u64, options.layers as u64));
        }
        let (allocation, pages, layout) = match &self.memory {
            Memory::Engine(engine) => {
                return engine.layer(options, layer, table).map(|of| options.with_scales(layer, of));
            }
            Memory::Library { allocation, pages, layout } => (allocation, pages, layout),
        };
        if table.is_some() {
            return Err(Error::invalid("`page_table` is given, and the cache has its own or none"));
        }
        let entries = pages.as_ref().map_or(std::ptr::null(), DeviceTable::pointer);
        Ok(options.layer_in(layout, allocation.pointer(), entries, layer))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Sequences> {
        self.sequences.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Refuses what keys and values cannot be kept in.
fn expect_kv(dtype: DType) -> Result<()> {
    if dtype.is_float() || dtype.is_fp8() || dtype.is_kv_row() {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "a KV cache of dtype {dtype}; f32, f16, bf16, fp8 e4m3, fp8 e5m2, or rows of int8, q8_0 or q4_0 are needed"
    )))
}

/// A list of `count` zeros for what a cache's sequences or pages have.
fn zeros(count: usize, what: &str) -> Result<Vec<u32>> {
    filled(0, count, what)
}

//! Keys and values in memory of the engine's, which hands out its pages itself.

use super::{expect_kv, KvCacheOptions, MAX_PAGES};
use crate::allocation::with_room;
use crate::error::{Error, Result};
use crate::tensor::kv_row::ROW_ALIGNMENT;
use crate::tensor::{CacheLayer, DType, PageTable, Placement, Tensor, ValueStrides};
use std::ffi::c_void;

pub(super) struct EngineMemory {
    /// Keys and values of each layer.
    layers: Vec<(*mut c_void, *mut c_void)>,
    dtypes: (DType, DType),
    /// Pages, or without pages sequences.
    pub blocks: usize,
    /// Of the keys in elements, of blocks, heads and tokens.
    strides: [usize; 3],
    value_strides: ValueStrides,
}

// SAFETY: addresses of device memory, dereferenced only by executors.
unsafe impl Send for EngineMemory {}
// SAFETY: as above.
unsafe impl Sync for EngineMemory {}

impl EngineMemory {
    pub fn new(options: &KvCacheOptions, tensors: &[Tensor]) -> Result<EngineMemory> {
        let wanted = 2 * options.layers;
        if tensors.len() != wanted {
            return Err(Error::invalid(format!(
                "{} tensors of memory for {} layers; {wanted} are needed, keys and values of each",
                tensors.len(),
                options.layers
            )));
        }
        let block_tokens = match options.page_tokens {
            0 => options.ring_tokens().unwrap_or(options.capacity),
            tokens => tokens,
        };
        let firsts = [tensors[0], tensors[1]];
        let first = firsts[0];
        let mut layers = with_room(options.layers, "the layers of a KV cache")?;
        for (at, tensor) in tensors.iter().enumerate() {
            let of = |error: Error| error.context(format_args!("memory[{at}]"));
            expect_kv(tensor.dtype).map_err(of)?;
            tensor.expect_rank("memory", 4).map_err(of)?;
            let dim = if at % 2 == 0 { options.head_dim } else { options.value_dim() };
            let row = tensor.dtype.row_units(dim);
            tensor.expect_shape("memory", &[first.shape[0], options.kv_heads, block_tokens, row]).map_err(of)?;
            tensor.expect_places_apart("memory").map_err(of)?;
            let unaligned = |&stride: &usize| !stride.is_multiple_of(ROW_ALIGNMENT);
            let address = tensor.data as usize;
            if tensor.dtype.is_kv_row() && (unaligned(&address) || tensor.strides[..3].iter().any(unaligned)) {
                return Err(Error::invalid(format!(
                    "memory[{at}] holds {} that do not lie on multiples of {ROW_ALIGNMENT} bytes",
                    tensor.dtype
                )));
            }
            let like = at % 2;
            if tensor.strides != firsts[like].strides || tensor.dtype != firsts[like].dtype {
                return Err(Error::invalid(format!(
                    "memory[{at}] has another dtype or other strides than memory[{like}]"
                )));
            }
            if options.values_in_keys && at % 2 == 1 && tensor.data != tensors[at - 1].data {
                return Err(Error::invalid(format!("memory[{at}] is no part of memory[{}]", at - 1))
                    .with_advice("with values_in_keys the values are the first elements of the keys"));
            }
        }
        if first.shape[0] == 0 || first.shape[0] > MAX_PAGES {
            return Err(Error::invalid(format!(
                "memory has {} blocks; 1 to {MAX_PAGES} are supported",
                first.shape[0]
            ))
            .with_limit(first.shape[0] as u64, MAX_PAGES as u64));
        }
        let given = if options.page_tokens == 0 { options.sequences } else { options.pages };
        if given > first.shape[0] {
            return Err(Error::invalid(format!("memory has {} blocks; {given} are said to be there", first.shape[0])));
        }
        layers.extend(tensors.chunks(2).map(|pair| (pair[0].data, pair[1].data)));
        let blocks = if given == 0 { first.shape[0] } else { given };
        let [block, head, token, _] = first.strides;
        let [value_block, value_head, value_token, _] = firsts[1].strides;
        let value_strides = ValueStrides { block: value_block, head: value_head, token: value_token };
        let dtypes = (first.dtype, firsts[1].dtype);
        Ok(EngineMemory { layers, dtypes, blocks, strides: [block, head, token], value_strides })
    }

    pub fn layer(&self, options: &KvCacheOptions, layer: usize, table: Option<Tensor>) -> Result<CacheLayer> {
        let (key, value) = self.layers[layer];
        let [block_stride, head_stride, token_stride] = self.strides;
        let whole = CacheLayer {
            key,
            value,
            dtype: self.dtypes.0,
            value_dtype: self.dtypes.1,
            key_scales: std::ptr::null(),
            value_scales: std::ptr::null(),
            sequences: self.blocks,
            heads: options.kv_heads,
            capacity: options.capacity,
            head_dim: options.head_dim,
            value_dim: options.value_dim(),
            sequence_stride: block_stride,
            head_stride,
            token_stride,
            placement: options.ring_tokens().map_or(Placement::Contiguous, |tokens| Placement::Ring { tokens }),
            value_strides: self.value_strides,
        };
        let Some(table) = table else {
            if options.page_tokens == 0 {
                return Ok(whole);
            }
            return Err(Error::invalid("`page_table` is missing: the engine owns this cache's pages"));
        };
        if options.page_tokens == 0 {
            return Err(Error::invalid("`page_table` is given, and the cache has no pages"));
        }
        table.expect_dtype("page_table", DType::I32)?;
        table.expect_rank("page_table", 2)?;
        table.expect_readable("page_table")?;
        let [sequences, columns, ..] = table.shape;
        if table.is_empty() || sequences > i32::MAX as usize || columns > i32::MAX as usize {
            return Err(Error::invalid(format!("tensor `page_table` {table} has no entry, or too many")));
        }
        let row_stride = if sequences == 1 { columns } else { table.strides[0] };
        let table = PageTable {
            entries: table.data.cast_const().cast(),
            sequences,
            columns,
            row_stride,
            page_tokens: options.page_tokens,
            page_stride: block_stride,
            pages: self.blocks,
        };
        Ok(CacheLayer {
            sequences,
            capacity: options.capacity.min(columns.saturating_mul(options.page_tokens)),
            sequence_stride: row_stride,
            placement: Placement::Paged(table),
            ..whole
        })
    }
}

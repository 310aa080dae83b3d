//! Attention of one query row a sequence, over a KV cache.

use super::{check_lse, output_heads, AttentionConfig};
use crate::error::{Error, Result, Status};
use crate::operation::access::{Effect, Visit};
use crate::operation::{Cost, CostOf};
use crate::tensor::{CacheLayer, DType, Heads, PageTable, Tensor};

/// One query row a sequence; the lengths are read from device memory, so that a captured call serves every step.
#[derive(Debug, Clone, Copy)]
pub struct AttentionDecode {
    pub config: AttentionConfig,
    /// [B, query_heads, head_dim]
    pub query: Heads,
    pub cache: CacheLayer,
    pub output: Heads,
    pub lse: Option<Tensor>,
    /// i32 [B]: row b sees keys 0 ..= positions[b]
    pub positions: Tensor,
    /// i32 [B]: the cache's sequence of each row; absent: the row number
    pub sequences: Option<Tensor>,
    /// No position reaches this; it sizes the split of the work.
    pub max_kv_length: usize,
}

impl AttentionDecode {
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        config: AttentionConfig,
        query: Tensor,
        cache: CacheLayer,
        output: Tensor,
        lse: Option<Tensor>,
        positions: Tensor,
        sequences: Option<Tensor>,
        max_kv_length: usize,
    ) -> Result<AttentionDecode> {
        let config = config.with_value_dim();
        if !config.causal {
            return Err(Error::new(
                Status::Attention,
                "a bidirectional attention has no decode: its last row sees all keys",
            ));
        }
        query.expect_rank("query", 3)?;
        let rows = query.shape[0];
        let query = config.query_heads_of("query", query, rows, config.head_dim)?;
        let output = output_heads(&config, output, rows)?;
        check_lse(lse, rows, config.query_heads)?;
        config.check_cache(&cache)?;
        if query.dtype != cache.dtype && query.dtype != DType::F32 {
            return Err(Error::invalid(format!(
                "`query` has dtype {}; f32 or the cache's {} is needed",
                query.dtype, cache.dtype
            )));
        }
        for (name, tensor) in [("positions", Some(positions)), ("sequences", sequences)] {
            let Some(tensor) = tensor else { continue };
            tensor.expect_dtype(name, DType::I32)?;
            tensor.expect_shape(name, &[rows])?;
            tensor.expect_readable(name)?;
        }
        let table = cache.page_table().map(PageTable::tensor);
        for (name, tensor) in [("positions", Some(positions)), ("sequences", sequences), ("page_table", table)] {
            let Some(tensor) = tensor else { continue };
            tensor.expect_apart(name, "output", &output.tensor())?;
            if let Some(lse) = &lse {
                tensor.expect_apart(name, "lse", lse)?;
            }
        }
        if sequences.is_none() && rows > cache.sequences {
            return Err(Error::invalid(format!(
                "{rows} rows without `sequences`; the cache has {} sequences",
                cache.sequences
            )));
        }
        let max_kv_length = if max_kv_length == 0 { cache.capacity } else { max_kv_length };
        if max_kv_length > cache.capacity {
            return Err(Error::invalid(format!(
                "max_kv_length is {max_kv_length}; the cache holds up to {} tokens a sequence",
                cache.capacity
            ))
            .with_limit(max_kv_length as u64, cache.capacity as u64));
        }
        cache.check_window(rows.min(1), max_kv_length, config.window)?;
        Ok(AttentionDecode { config, query, cache, output, lse, positions, sequences, max_kv_length })
    }

    /// An upper bound: every row is taken to be max_kv_length long.
    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("query", Some(&self.query));
        visit.cache(&self.cache, Effect::Read);
        visit.read("positions", Some(&self.positions));
        visit.read("sequences", self.sequences.as_ref());
        visit.write("output", Some(&self.output));
        visit.write("lse", self.lse.as_ref());
    }

    pub fn cost(&self) -> Cost {
        let rows = self.query.tokens;
        let (begin, end) = self.config.visible(self.max_kv_length - 1, self.max_kv_length);
        self.cost_of_keys((end - begin) * rows)
    }

    /// The positions, and the cost with the keys and values that the mask keeps at these.
    pub fn cost_by_content(&self) -> (Tensor, CostOf) {
        let op = *self;
        let cost = move |positions: &[i32]| {
            let inside = positions.iter().filter_map(|&position| op.cache.check_position(position).ok());
            let keys = inside.map(|position| {
                let (begin, end) = op.config.visible(position, position + 1);
                end - begin
            });
            op.cost_of_keys(keys.sum())
        };
        (self.positions, Box::new(cost))
    }

    /// `keys` of all rows together.
    fn cost_of_keys(&self, keys: usize) -> Cost {
        let rows = self.query.tokens;
        let dtypes = [self.query.dtype, self.output.dtype];
        let Cost { operations, bytes } = self.config.cost(keys as f64, rows, keys, dtypes, self.cache.dtype, self.lse);
        let indices = 1 + usize::from(self.sequences.is_some());
        Cost { operations, bytes: bytes + (rows * indices * DType::I32.size()) as f64 }
    }
}

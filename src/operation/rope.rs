//! `rope`: q/k norm, rotary position embedding and the append to the KV cache, in one pass over a token's heads.
//!
//! Rotation (Su et al. 2021, half layout): with r = rotary_dim and i < r/2, the pair (x[i], x[i + r/2]) turns by
//! position · position_scale · base^(−2i/r); the elements from r on pass through. The norm before it is RMSNorm over
//! the head's elements. Inverse frequencies and angles are f32, as in HF transformers.

use super::{expect_extent, expect_finite_positive, expect_weight_offset, Cost};
use crate::error::{Error, Result};
use crate::operation::access::{Effect, Visit};
use crate::tensor::{CacheLayer, DType, Heads, PageTable, Placement, Tensor, MAX_HEAD_DIM};

#[derive(Debug, Clone, Copy)]
pub struct Rotation {
    pub base: f32,
    /// Multiplies every position: 1/8 where a model stretches its context eightfold.
    pub position_scale: f32,
    /// Even, at most head_dim.
    pub rotary_dim: usize,
}

#[derive(Debug, Clone, Copy)]
pub struct Rope {
    pub tokens: usize,
    /// Of queries and keys; values have the cache's.
    pub head_dim: usize,
    pub query: Option<Heads>,
    pub query_output: Option<Heads>,
    pub query_norm: Option<Tensor>,
    pub query_scale: f32,
    pub key: Option<Heads>,
    pub key_output: Option<Heads>,
    pub key_norm: Option<Tensor>,
    pub value: Option<Heads>,
    pub epsilon: f32,
    pub weight_offset: f32,
    /// i32 [tokens]
    pub positions: Tensor,
    /// `None` for a plain append.
    pub rotation: Option<Rotation>,
    pub append: Option<Append>,
}

/// Where normalised and rotated keys go, and raw values unless the cache has them in its keys.
#[derive(Debug, Clone, Copy)]
pub struct Append {
    pub cache: CacheLayer,
    /// i32 [tokens]: the cache's sequence of each token; absent: sequence 0
    pub sequences: Option<Tensor>,
}

/// The tensors and numbers of a call before validation.
#[derive(Debug, Clone, Copy)]
pub struct RopeArguments {
    pub query: Option<Tensor>,
    pub query_output: Option<Tensor>,
    pub query_norm: Option<Tensor>,
    pub query_scale: f32,
    pub key: Option<Tensor>,
    pub key_output: Option<Tensor>,
    pub key_norm: Option<Tensor>,
    pub value: Option<Tensor>,
    pub epsilon: f32,
    pub weight_offset: f32,
    pub positions: Tensor,
    pub rotation: Option<Rotation>,
    pub append: Option<Append>,
}

impl Rope {
    pub fn new(arguments: RopeArguments) -> Result<Rope> {
        let positions = arguments.positions;
        positions.expect_dtype("positions", DType::I32)?;
        positions.expect_rank("positions", 1)?;
        positions.expect_readable("positions")?;
        let tokens = positions.shape[0];
        expect_extent("the number of tokens", tokens)?;
        let Some(first) = arguments.query.or(arguments.key).or(arguments.value) else {
            return Err(Error::invalid("rope needs `query`, `key` or `value`"));
        };
        first.expect_rank("query, key or value", 3)?;
        let head_dim = first.shape[2];
        if head_dim == 0 || head_dim > MAX_HEAD_DIM {
            return Err(Error::invalid(format!("head_dim is {head_dim}; 1 to {MAX_HEAD_DIM} is supported"))
                .with_limit(head_dim as u64, MAX_HEAD_DIM as u64));
        }
        if let Some(Rotation { base, position_scale, rotary_dim }) = arguments.rotation {
            expect_finite_positive("base", base)?;
            expect_finite_positive("position_scale", position_scale)?;
            if rotary_dim % 2 != 0 || rotary_dim > head_dim {
                return Err(Error::invalid(format!(
                    "rotary_dim is {rotary_dim}; an even number up to head_dim = {head_dim} is needed"
                )));
            }
        }
        if !arguments.query_scale.is_finite() {
            return Err(Error::invalid(format!("query_scale is {}; a finite value is needed", arguments.query_scale)));
        }
        if arguments.query_norm.is_some() || arguments.key_norm.is_some() {
            expect_finite_positive("epsilon", arguments.epsilon)?;
            expect_weight_offset(arguments.weight_offset)?;
        }
        let heads = |name: &str, tensor: Option<Tensor>| -> Result<Option<Heads>> {
            tensor.map(|tensor| Heads::new(name, tensor, tokens, head_dim)).transpose()
        };
        let output = |name: &str, tensor: Option<Tensor>, of: Option<Heads>| -> Result<Option<Heads>> {
            let Some(tensor) = tensor else { return Ok(None) };
            let Some(of) = of else {
                return Err(Error::invalid(format!("`{name}` is given without its input")));
            };
            tensor.expect_writable(name)?;
            tensor.expect_shape(name, &[tokens, of.heads, head_dim])?;
            Ok(Some(Heads::new(name, tensor, tokens, head_dim)?))
        };
        let norm = |name: &str, tensor: Option<Tensor>| -> Result<Option<Tensor>> {
            if let Some(tensor) = tensor {
                tensor.expect_float(name)?;
                tensor.expect_shape(name, &[head_dim])?;
                tensor.expect_readable(name)?;
            }
            Ok(tensor)
        };
        let query = heads("query", arguments.query)?;
        let key = heads("key", arguments.key)?;
        let value_dim = arguments.append.map_or(head_dim, |append| append.cache.value_dim);
        let value = arguments.value.map(|tensor| Heads::new("value", tensor, tokens, value_dim)).transpose()?;
        let query_output = output("query_output", arguments.query_output, query)?;
        let key_output = output("key_output", arguments.key_output, key)?;
        let append = arguments.append.as_ref();
        let sequences = append.and_then(|append| append.sequences.as_ref());
        let table = append.and_then(|append| append.cache.page_table().map(PageTable::tensor));
        for (output_name, output) in [("query_output", &query_output), ("key_output", &key_output)] {
            let Some(output) = output else { continue };
            let output = output.tensor();
            positions.expect_apart("positions", output_name, &output)?;
            for (name, tensor) in [("sequences", sequences), ("page_table", table.as_ref())] {
                tensor.map_or(Ok(()), |tensor| tensor.expect_apart(name, output_name, &output))?;
            }
        }
        if let Some(append) = append {
            for (name, tensor) in
                [("positions", Some(&positions)), ("sequences", sequences), ("page_table", table.as_ref())]
            {
                tensor.map_or(Ok(()), |tensor| append.cache.expect_apart(name, tensor))?;
            }
        }
        if query.is_some() && query_output.is_none() {
            return Err(Error::invalid("`query` is given without `query_output` (it may be the same tensor)"));
        }
        if let Some(append) = append {
            append.check(key, value, tokens)?;
        } else if key.is_some() && key_output.is_none() {
            return Err(Error::invalid("`key` is given without `key_output` (it may be the same tensor) or a cache"));
        } else if value.is_some() {
            return Err(Error::invalid("`value` is given without a cache to store it in"));
        }
        Ok(Rope {
            tokens,
            head_dim,
            query,
            query_output,
            query_norm: norm("query_norm", arguments.query_norm)?,
            query_scale: arguments.query_scale,
            key,
            key_output,
            key_norm: norm("key_norm", arguments.key_norm)?,
            value,
            epsilon: arguments.epsilon,
            weight_offset: arguments.weight_offset,
            positions,
            // No element rotates, as in a head of one.
            rotation: arguments.rotation.filter(|rotation| rotation.rotary_dim != 0),
            append: arguments.append,
        })
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read_before("query", self.query.as_ref(), &["query_output"]);
        visit.read_before("key", self.key.as_ref(), &["key_output"]);
        visit.read("value", self.value.as_ref());
        visit.read("query_norm", self.query_norm.as_ref());
        visit.read("key_norm", self.key_norm.as_ref());
        visit.read("positions", Some(&self.positions));
        visit.write("query_output", self.query_output.as_ref());
        visit.write("key_output", self.key_output.as_ref());
        if let Some(append) = &self.append {
            visit.read("sequences", append.sequences.as_ref());
            visit.cache(&append.cache, Effect::Write);
        }
    }

    pub fn cost(&self) -> Cost {
        let rows = |heads: Option<Heads>| heads.map_or(0, |heads| heads.heads * heads.dtype.size()) as f64;
        // What an append writes of each head's key and value.
        let (cached_key, cached_value) = self.append.map_or((0, 0), |Append { cache, .. }| {
            (cache.dtype.row_bytes(cache.head_dim), cache.value_dtype.row_bytes(cache.value_dim))
        });
        let per_dim = rows(self.query) + rows(self.query_output) + rows(self.key) + rows(self.key_output);
        let elements = (self.tokens * self.head_dim) as f64;
        let of_value = |heads: Heads| heads.heads * (heads.head_dim * heads.dtype.size() + cached_value);
        let values = (self.tokens * self.value.map_or(0, of_value)) as f64;
        let keys = (self.tokens * self.key.map_or(0, |key| key.heads * cached_key)) as f64;
        Cost { operations: elements * 6.0, bytes: elements * per_dim + keys + values }
    }
}

impl Append {
    fn check(&self, key: Option<Heads>, value: Option<Heads>, tokens: usize) -> Result<()> {
        let shared = self.cache.has_values_in_keys();
        let (Some(key), true) = (key, value.is_some() != shared) else {
            return Err(Error::invalid(match shared {
                true => "the cache has values in its keys: `key` alone is needed",
                false => "a cache is given without `key` and `value`",
            }));
        };
        for (name, heads, dim) in [("key", Some(key), self.cache.head_dim), ("value", value, self.cache.value_dim)] {
            let Some(heads) = heads.filter(|heads| heads.heads != self.cache.heads || heads.head_dim != dim) else {
                continue;
            };
            return Err(Error::invalid(format!(
                "`{name}` has {} heads of {}; the cache holds {} of {dim}",
                heads.heads, heads.head_dim, self.cache.heads
            )));
        }
        if let Some(sequences) = self.sequences {
            sequences.expect_dtype("sequences", DType::I32)?;
            sequences.expect_shape("sequences", &[tokens])?;
            sequences.expect_readable("sequences")?;
            return Ok(());
        }
        match self.cache.placement {
            Placement::Ring { tokens: ring } if tokens > ring => Err(Error::invalid(format!(
                "{tokens} tokens of one sequence; the ring keeps {ring}, and each place takes one token a call"
            ))
            .with_limit(tokens as u64, ring as u64)),
            _ => Ok(()),
        }
    }
}

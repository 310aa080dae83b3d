//! What the tests of caches share. Tokens are appended in chunks, each chunk is prefilled over what the cache then holds, and in the
//! end every sequence is decoded. What no sequence holds is NaN.

use crate::attention_cases::{attend, expect_attention, value_dim, Keys};
use crate::kv_cache_rows::quantized_row;
use crate::run::{rounded, Failure, Outcome, Run, PLAIN};
use nvbackend::kv_cache::{KvCache, KvCacheOptions};
use nvbackend::operation::attention::{
    AttentionConfig, AttentionDecode, AttentionPrefill, DecodeRows, KeySource, EMPTY_ROW,
};
use nvbackend::operation::rope::{Append, Rope, RopeArguments};
use nvbackend::operation::Operation;
use nvbackend::tensor::{CacheLayer, DType, Tensor};

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Place {
    Contiguous,
    /// Appends of at most so many tokens.
    Ring(usize),
    /// Tokens of a page.
    Pages(usize),
    /// Tokens of a page, in random order; `true`: a page has tokens before heads, as vLLM lays them out.
    EnginePages(usize, bool),
    EngineBlocks,
}

#[derive(Debug, Clone)]
pub struct Case {
    pub place: Place,
    /// What each chunk appends to each sequence.
    pub chunks: Vec<Vec<usize>>,
    pub heads: (usize, usize),
    pub dim: usize,
    /// 0: `dim`
    pub value_dim: usize,
    pub values_in_keys: bool,
    pub window: usize,
    /// Of queries, then of keys and values.
    pub dtypes: (DType, DType),
    /// Of values, where it is not that of the keys.
    pub value_dtype: Option<DType>,
    /// Of a cache in FP8: of keys and of values, from head to head in turn.
    pub scales: Option<[[f64; 2]; 2]>,
    /// Query rows of a sequence in the decode; where they are several, the first is empty, and no chunk is prefilled.
    pub rows: usize,
}

impl Case {
    /// Whether an append rounds to rows with scales of their own, or keys and values to two dtypes.
    fn has_rows(&self) -> bool {
        self.dtypes.1.is_kv_row() || self.value_dtype.is_some()
    }
}

pub const LAYERS: usize = 2;
pub const LAYER: usize = 1;

struct Cache {
    cache: KvCache,
    /// Of an engine's pages.
    table: Option<Tensor>,
}

impl Cache {
    fn layer(&self) -> Result<CacheLayer, Failure> {
        Ok(self.cache.layer_with(LAYER, self.table)?)
    }
}

/// Scales of keys or of values of all layers; those of other layers are twice as large.
fn scales(run: &mut Run, case: &Case, part: usize) -> Result<Option<Tensor>, Failure> {
    let Some(scales) = case.scales else { return Ok(None) };
    let of = |layer: usize, head: usize| scales[part][head % 2] * if layer == LAYER { 1.0 } else { 2.0 };
    let heads = case.heads.1;
    let values: Vec<f64> = (0..LAYERS * heads).map(|at| of(at / heads, at % heads)).collect();
    Ok(Some(run.tensor(DType::F32, &[LAYERS, heads], PLAIN, &values)?))
}

/// What a cache in FP8 with scales, or in rows, holds of these keys and values.
fn stored(case: &Case, keys: &Keys) -> Keys {
    if case.has_rows() {
        let value_dim = if case.value_dim == 0 { case.dim } else { case.value_dim };
        let (key_dtype, value_dtype) = (case.dtypes.1, case.value_dtype.unwrap_or(case.dtypes.1));
        let of = |dtype, rows: &[f64], dim| rows.chunks(dim).flat_map(|row| quantized_row(dtype, row)).collect();
        let (key, value) = (of(key_dtype, &keys.key, case.dim), of(value_dtype, &keys.value, value_dim));
        return Keys { length: keys.length, key, value };
    }
    let Some(scales) = case.scales else { return keys.clone() };
    let stored = |rows: &[f64], part: usize, dim: usize| {
        let scale = |at: usize| f64::from(scales[part][at / dim % case.heads.1 % 2] as f32);
        let quotients: Vec<f64> =
            rows.iter().enumerate().map(|(at, &x)| f64::from(x as f32 / scale(at) as f32)).collect();
        let rounded = rounded(case.dtypes.1, &quotients);
        rounded.iter().enumerate().map(|(at, x)| x * scale(at)).collect()
    };
    let value_dim = if case.value_dim == 0 { case.dim } else { case.value_dim };
    let value_part = usize::from(!case.values_in_keys);
    Keys { length: keys.length, key: stored(&keys.key, 0, case.dim), value: stored(&keys.value, value_part, value_dim) }
}

/// A cache of poison for as many sequences, and one more that stays empty.
fn create(run: &mut Run, case: &Case, sequences: usize, capacity: usize) -> Result<Cache, Failure> {
    let (heads, dim, dtype) = (case.heads.1, case.dim, case.dtypes.1);
    let options = KvCacheOptions {
        layers: LAYERS,
        sequences,
        kv_heads: heads,
        head_dim: dim,
        value_dim: case.value_dim,
        values_in_keys: case.values_in_keys,
        capacity,
        dtype,
        value_dtype: case.value_dtype,
        key_scales: scales(run, case, 0)?,
        value_scales: if case.values_in_keys { None } else { scales(run, case, 1)? },
        ..Default::default()
    };
    let memory = run.device.backend.memory();
    let library = match case.place {
        Place::Contiguous => KvCache::new(memory, options, run.stream)?,
        Place::Ring(max_append) => {
            KvCache::new(memory, KvCacheOptions { window: case.window, max_append, ..options }, run.stream)?
        }
        Place::Pages(page_tokens) => KvCache::new(memory, KvCacheOptions { page_tokens, ..options }, run.stream)?,
        Place::EngineBlocks => {
            let tensors = blocks(run, &options, [sequences, heads, capacity], false)?;
            return Ok(Cache { cache: KvCache::over(options, &tensors)?, table: None });
        }
        Place::EnginePages(page_tokens, tokens_first) => {
            let columns = capacity.div_ceil(page_tokens);
            let pages = sequences * columns + 3;
            let tensors = blocks(run, &options, [pages, heads, page_tokens], tokens_first)?;
            let options = KvCacheOptions { page_tokens, sequences: 0, ..options };
            let cache = KvCache::over(options, &tensors)?;
            // The last sequence has no page.
            let mut entries: Vec<f64> = run.random.permutation(pages).iter().map(|&page| page as f64).collect();
            entries.truncate((sequences - 1) * columns);
            entries.resize(sequences * columns, -1.0);
            let layout = if columns % 2 == 0 { PLAIN } else { crate::run::PITCHED };
            let table = run.tensor(DType::I32, &[sequences, columns], layout, &entries)?;
            return Ok(Cache { cache, table: Some(table) });
        }
    };
    for layer in 0..LAYERS {
        let layer = library.layer(layer)?;
        for (data, bytes) in [(layer.key, layer.key_span_bytes()), (layer.value, layer.value_span_bytes())] {
            // SAFETY: the span lies in the cache's block.
            unsafe { run.executor().fill(data, 0xff, bytes, run.stream.raw())? };
        }
    }
    Ok(Cache { cache: library, table: None })
}

/// Keys and values of each layer, poisoned, of which the layer in use may be written.
pub fn blocks(
    run: &mut Run,
    options: &KvCacheOptions,
    [blocks, heads, tokens]: [usize; 3],
    tokens_first: bool,
) -> Result<Vec<Tensor>, Failure> {
    let mut tensors: Vec<Tensor> = Vec::new();
    for layer in 0..LAYERS {
        for (dtype, dim) in [(options.dtype, options.head_dim), (options.value_dtype(), options.value_dim())] {
            let dim = dtype.row_units(dim);
            if options.values_in_keys && tensors.len() % 2 == 1 {
                let mut value = tensors[tensors.len() - 1];
                value.shape[3] = dim;
                tensors.push(value);
                continue;
            }
            let strides = match tokens_first {
                true => [tokens * heads * dim, dim, heads * dim, 1],
                false => [tokens * heads * dim, tokens * dim, dim, 1],
            };
            let shape = [blocks, heads, tokens, dim];
            let tensor = run.strided(dtype, &shape, &strides, 0, blocks * heads * tokens * dim, None)?;
            if layer == LAYER {
                run.allow_write(&tensor);
            }
            tensors.push(tensor);
        }
    }
    Ok(tensors)
}

fn reserve(run: &Run, cache: &KvCache, sequence: usize, tokens: usize) -> nvbackend::error::Result<()> {
    cache
        .reserve(sequence, tokens, run.stream, &mut |copy| run.executor().run(&Operation::from(copy), run.stream.raw()))
}

/// The tokens [from, to) of each sequence, mixed: every sequence's first, then every sequence's second, and so on.
pub fn append(run: &mut Run, layer: CacheLayer, keys: &[Keys], from: &[usize], to: &[usize]) -> Outcome {
    let (width, value_width) = (layer.heads * layer.head_dim, layer.heads * layer.value_dim);
    let (mut positions, mut sequences) = (Vec::new(), Vec::new());
    let (mut key_rows, mut value_rows) = (Vec::new(), Vec::new());
    for step in 0..to.iter().zip(from).map(|(to, from)| to - from).max().unwrap_or(0) {
        for (sequence, keys) in keys.iter().enumerate().filter(|(at, _)| from[*at] + step < to[*at]) {
            let position = from[sequence] + step;
            positions.push(position as i32);
            sequences.push(sequence as i32);
            key_rows.extend(&keys.key[position * width..][..width]);
            value_rows.extend(&keys.value[position * value_width..][..value_width]);
        }
    }
    let shape = |dim: usize| [positions.len(), layer.heads, dim];
    let value = match layer.has_values_in_keys() {
        true => None,
        false => Some(run.tensor(DType::F32, &shape(layer.value_dim), PLAIN, &value_rows)?),
    };
    let op = Rope::new(RopeArguments {
        query: None,
        query_output: None,
        query_norm: None,
        query_scale: 1.0,
        key: Some(run.tensor(DType::F32, &shape(layer.head_dim), PLAIN, &key_rows)?),
        key_output: None,
        key_norm: None,
        value,
        epsilon: 1e-6,
        weight_offset: 0.0,
        positions: run.integers(&positions)?,
        rotation: None,
        append: Some(Append { cache: layer, sequences: Some(run.integers(&sequences)?) }),
    })?;
    run.executor().run(&Operation::from(op), run.stream.raw())?;
    Ok(())
}

fn prefix(keys: &Keys, length: usize) -> Keys {
    let part = |rows: &[f64]| rows[..rows.len() / keys.length.max(1) * length].to_vec();
    Keys { length, key: part(&keys.key), value: part(&keys.value) }
}

pub fn test(run: &mut Run, case: &Case) -> Outcome {
    let (query_dtype, kv) = case.dtypes;
    let config = AttentionConfig::new(AttentionConfig {
        query_heads: case.heads.0,
        kv_heads: case.heads.1,
        head_dim: case.dim,
        value_dim: case.value_dim,
        scale: 0.0,
        soft_cap: 0.0,
        window: case.window,
        causal: true,
        chunk: 0,
        sink_tokens: 0,
    })?;
    let (heads, dim, value_dim) = (case.heads.0, case.dim, value_dim(&config));
    // Kernels round F32 queries to keys of 16 bits.
    let narrowed = |queries: &[f64]| if kv.is_float() { rounded(kv, queries) } else { queries.to_vec() };
    let count = case.chunks[0].len();
    let lengths: Vec<usize> = (0..count).map(|at| case.chunks.iter().map(|chunk| chunk[at]).sum()).collect();
    let appended_dtype = if case.scales.is_some() || case.has_rows() { DType::F32 } else { kv };
    let keys = lengths.iter().map(|&length| match case.values_in_keys {
        true => Keys::new(run, &config, appended_dtype, length).with_values_in_keys(&config),
        false => Keys::new(run, &config, appended_dtype, length),
    });
    let appended: Vec<Keys> = keys.collect();
    let keys: Vec<Keys> = appended.iter().map(|keys| stored(case, keys)).collect();
    let longest = *lengths.iter().max().expect("there are sequences");
    let cache = create(run, case, count + 1, longest + 5)?;
    let mut held = vec![0; count];
    for chunk in &case.chunks {
        let after: Vec<usize> = held.iter().zip(chunk).map(|(held, chunk)| held + chunk).collect();
        if matches!(case.place, Place::Pages(_) | Place::Ring(_)) {
            // The last first, so that pages of sequences lie between each other.
            for (sequence, &tokens) in after.iter().enumerate().rev() {
                reserve(run, &cache.cache, sequence, tokens)?;
            }
        }
        append(run, cache.layer()?, &appended, &held, &after)?;
        if case.rows > 1 {
            held = after;
            continue;
        }
        let rows: usize = chunk.iter().sum();
        let queries = narrowed(&rounded(query_dtype, &run.random.normals(rows * heads * dim, 1.0)));
        let query = run.tensor(query_dtype, &[rows, heads, dim], PLAIN, &queries)?;
        let output = run.output(query_dtype, &[rows, heads, value_dim], PLAIN)?;
        let lse = run.output(DType::F32, &[rows, heads], PLAIN)?;
        let mut starts = vec![0];
        chunk.iter().for_each(|rows| starts.push(starts[starts.len() - 1] + *rows as i32));
        let sequences: Vec<i32> = (0..count as i32).collect();
        let kv_lengths: Vec<i32> = after.iter().map(|&length| length as i32).collect();
        let source = KeySource::Cache { layer: cache.layer()?, sequences: &sequences, kv_lengths: &kv_lengths };
        let op = AttentionPrefill::new(config, query, &starts, source, output, Some(lse))?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        let mut expected = Vec::new();
        for (sequence, keys) in keys.iter().enumerate() {
            let keys = prefix(keys, after[sequence]);
            for row in 0..chunk[sequence] {
                for head in 0..heads {
                    let at = ((starts[sequence] as usize + row) * heads + head) * dim;
                    let position = (held[sequence] + row) as i64;
                    expected.push(attend(&config, &queries[at..][..dim], head, &keys, position));
                }
            }
        }
        expect_attention(run, kv, &output, Some(&lse), &expected)?;
        held = after;
    }
    // Decode, the last sequence first, and the same rows by prefill. What the windows have left behind needs no page.
    let layer = match case.place {
        Place::EnginePages(page_tokens, _) if case.window > 0 => {
            let mut entries = run.read(&cache.table.expect("the engine's"))?;
            let columns = entries.len() / (count + 1);
            for (row, &length) in entries.chunks_mut(columns).zip(&lengths) {
                row[..(length.saturating_sub(case.window + case.rows - 1)) / page_tokens].fill(-1.0);
            }
            let table = run.tensor(DType::I32, &[count + 1, columns], PLAIN, &entries)?;
            cache.cache.layer_with(LAYER, Some(table))?
        }
        _ => cache.layer()?,
    };
    let order: Vec<usize> = (0..count).rev().collect();
    let numbers: Vec<i32> = order.iter().map(|&at| at as i32).collect();
    let position = |sequence: usize, row: usize| {
        let position = (lengths[sequence] + row) as i32 - case.rows as i32;
        if case.rows > 1 && row == 0 {
            EMPTY_ROW
        } else {
            position.max(EMPTY_ROW)
        }
    };
    let positions: Vec<i32> = order
        .iter()
        .flat_map(|&at| (0..case.rows).map(move |row| (at, row)))
        .map(|(at, row)| position(at, row))
        .collect();
    let total = count * case.rows;
    let queries = narrowed(&rounded(query_dtype, &run.random.normals(total * heads * dim, 1.0)));
    let query = run.tensor(query_dtype, &[total, heads, dim], PLAIN, &queries)?;
    let row = |at: usize| {
        let row = at / heads;
        attend(&config, &queries[at * dim..][..dim], at % heads, &keys[order[row / case.rows]], positions[row].into())
    };
    let expected: Vec<_> = (0..total * heads).map(row).collect();
    let output = run.output(query_dtype, &[total, heads, value_dim], PLAIN)?;
    let lse = run.output(DType::F32, &[total, heads], PLAIN)?;
    let rows = DecodeRows {
        per_sequence: case.rows,
        positions: run.integers(&positions)?,
        sequences: Some(run.integers(&numbers)?),
        max_kv_length: 0,
    };
    let op = AttentionDecode::new(config, query, layer, output, Some(lse), rows)?;
    run.executor().run(&Operation::from(op), run.stream.raw())?;
    expect_attention(run, kv, &output, Some(&lse), &expected)?;
    if case.rows > 1 {
        return Ok(());
    }
    let kv_lengths: Vec<i32> = positions.iter().map(|position| position + 1).collect();
    let output = run.output(query_dtype, &[count, heads, value_dim], PLAIN)?;
    let starts: Vec<i32> = (0..=count as i32).collect();
    let source = KeySource::Cache { layer, sequences: &numbers, kv_lengths: &kv_lengths };
    let op = AttentionPrefill::new(config, query, &starts, source, output, None)?;
    run.executor().run(&Operation::from(op), run.stream.raw())?;
    expect_attention(run, kv, &output, None, &expected)
}

pub fn case(place: Place) -> Case {
    Case {
        place,
        chunks: vec![vec![17, 1, 40], vec![1, 1, 1], vec![30, 2, 5]],
        heads: (4, 2),
        dim: 64,
        value_dim: 0,
        values_in_keys: false,
        window: 0,
        dtypes: (DType::F32, DType::F32),
        value_dtype: None,
        scales: None,
        rows: 1,
    }
}

pub fn variants(cases: &[Case]) -> Vec<Case> {
    let dtypes =
        [(DType::F32, DType::F32), (DType::Bf16, DType::Bf16), (DType::F32, DType::Bf16), (DType::F16, DType::F16)];
    cases.iter().flat_map(|case| dtypes.map(|dtypes| Case { dtypes, ..case.clone() })).collect()
}

//! `rope`: per head RMS norm, rotation by position · position_scale · base^(−2i/r), query scale, cache append.

use crate::compare::{bound, compare, FLOATS};
use crate::run::{
    check, expect_error, key_tensor, rounded, value_tensor, Failure, Layout, Outcome, Run, PITCHED, PLAIN, UNALIGNED,
};
use nvbackend::error::Status;
use nvbackend::kv_cache::{KvCache, KvCacheOptions};
use nvbackend::operation::attention::EMPTY_ROW;
use nvbackend::operation::rope::{Append, Rope, RopeArguments, Rotation};
use nvbackend::operation::Operation;
use nvbackend::tensor::{DType, Tensor};

#[derive(Debug, Clone, Copy)]
struct Case {
    tokens: usize,
    query_heads: usize,
    kv_heads: usize,
    dim: usize,
    /// `None`: a plain append.
    rotary: Option<usize>,
    base: f32,
    position_scale: f32,
    query_scale: f32,
    /// The dtype of the query and key norms, if there are any.
    norm: Option<DType>,
    offset: f32,
    dtype: DType,
    output: DType,
    in_place: bool,
    layout: Layout,
    /// Query, key and value are slices of one row a token.
    fused: bool,
    cache: Option<DType>,
    /// The largest position.
    top: usize,
}

const CASE: Case = Case {
    tokens: 7,
    query_heads: 4,
    kv_heads: 2,
    dim: 64,
    rotary: Some(64),
    base: 10_000.0,
    position_scale: 1.0,
    query_scale: 1.0,
    norm: None,
    offset: 0.0,
    dtype: DType::F32,
    output: DType::F32,
    in_place: false,
    layout: PLAIN,
    fused: false,
    cache: None,
    top: 40,
};

const SEQUENCES: usize = 3;

/// One head's norm and rotation. Frequencies and angles are F32, as in HF transformers; the rest is F64.
fn rotate(case: &Case, x: &[f64], norm: Option<&[f64]>, position: i32) -> Vec<f64> {
    let mut x = x.to_vec();
    if let Some(weight) = norm {
        let scale = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + 1e-6).sqrt();
        x.iter_mut().zip(weight).for_each(|(x, weight)| *x *= scale * (case.offset as f64 + weight));
    }
    let rotary = case.rotary.unwrap_or(0);
    for i in 0..rotary / 2 {
        let frequency = 1.0 / case.base.powf((2 * i) as f32 / rotary as f32);
        let (sin, cos) = ((position as f32 * frequency * case.position_scale) as f64).sin_cos();
        let (a, b) = (x[i], x[i + rotary / 2]);
        x[i] = a * cos - b * sin;
        x[i + rotary / 2] = b * cos + a * sin;
    }
    x
}

/// An F32 angle of a radians is uncertain by about a · 2⁻²², four units in its last place: powf may be off by that.
fn rotated_bound(case: &Case, dtype: DType) -> f64 {
    let angle = case.rotary.map_or(0.0, |_| case.top as f64 * case.position_scale as f64);
    bound(dtype) + angle * 2f64.powi(-22)
}

struct Heads {
    tensor: Tensor,
    values: Vec<f64>,
}

/// Query, key and value, apart or in one row.
fn inputs(run: &mut Run, case: &Case) -> Result<[Heads; 3], Failure> {
    let counts = [case.query_heads, case.kv_heads, case.kv_heads];
    let values = counts.map(|heads| rounded(case.dtype, &run.random.normals(case.tokens * heads * case.dim, 1.0)));
    if !case.fused {
        let mut tensors = Vec::new();
        for (heads, values) in counts.into_iter().zip(&values) {
            tensors.push(run.tensor(case.dtype, &[case.tokens, heads, case.dim], case.layout, values)?);
        }
        let mut tensors = tensors.into_iter();
        return Ok(values.map(|values| Heads { tensor: tensors.next().expect("three of them"), values }));
    }
    let row: usize = counts.iter().sum();
    let mut all = Vec::new();
    for token in 0..case.tokens {
        for (heads, values) in counts.into_iter().zip(&values) {
            all.extend(&values[token * heads * case.dim..][..heads * case.dim]);
        }
    }
    let all = run.tensor(case.dtype, &[case.tokens, row, case.dim], case.layout, &all)?;
    let mut first = 0;
    let mut part = 0;
    Ok(values.map(|values| {
        let data = all.data.cast::<u8>().wrapping_add(first * case.dim * case.dtype.size()).cast();
        let tensor = Tensor::new(data, case.dtype, &[case.tokens, counts[part], case.dim]);
        first += counts[part];
        part += 1;
        Heads { tensor: tensor.with_strides(&[all.strides[0], case.dim, 1]), values }
    }))
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let [query, key, value] = inputs(run, case)?;
    let plain = case.rotary.is_none();
    let output = |run: &mut Run, heads: &Heads| -> Result<Option<Tensor>, Failure> {
        if plain {
            return Ok(None);
        }
        let tensor =
            if case.in_place { heads.tensor } else { run.output(case.output, heads.tensor.shape(), case.layout)? };
        run.allow_write(&tensor);
        Ok(Some(tensor))
    };
    let query_output = output(run, &query)?;
    // With a cache the key may go there alone.
    let key_output = if case.cache.is_some() && !case.in_place { None } else { output(run, &key)? };
    let mut norms = Vec::new();
    for _ in 0..2 {
        norms.push(case.norm.filter(|_| !plain).map(|dtype| run.normal(dtype, &[case.dim], PLAIN, 1.0)).transpose()?);
    }
    let (query_norm, key_norm) = (&norms[0], &norms[1]);
    // No two tokens share a place in the cache.
    let places = run.random.permutation(SEQUENCES * (case.top + 1));
    let mut positions: Vec<i32> = (0..case.tokens).map(|t| (places[t] % (case.top + 1)) as i32).collect();
    let mut sequences: Vec<i32> = (0..case.tokens).map(|t| (places[t] / (case.top + 1)) as i32).collect();
    if case.tokens > 1 && !places[..case.tokens].contains(&case.top) {
        (positions[0], sequences[0]) = (case.top as i32, 0);
    }
    let position_tensor = run.integers(&positions)?;
    let sequence_tensor = run.integers(&sequences)?;
    let memory = run.device.backend.memory();
    let options = |dtype| KvCacheOptions {
        layers: 3,
        sequences: SEQUENCES,
        kv_heads: case.kv_heads,
        head_dim: case.dim,
        capacity: case.top + 1,
        dtype,
        ..KvCacheOptions::default()
    };
    let cache = case.cache.map(|dtype| KvCache::new(memory, options(dtype), run.stream)).transpose()?;
    let layer = cache.as_ref().map(|cache| cache.layer(1)).transpose()?;
    for layer in 0..cache.as_ref().map_or(0, |_| 3) {
        run.poison(&cache.as_ref().expect("it has layers").layer(layer)?)?;
    }
    let op = Rope::new(RopeArguments {
        query: query_output.map(|_| query.tensor),
        query_output,
        query_norm: query_norm.as_ref().map(|norm| norm.0),
        query_scale: case.query_scale,
        key: Some(key.tensor),
        key_output,
        key_norm: key_norm.as_ref().map(|norm| norm.0),
        value: layer.map(|_| value.tensor),
        epsilon: 1e-6,
        weight_offset: case.offset,
        positions: position_tensor,
        rotation: case.rotary.map(|rotary_dim| Rotation {
            base: case.base,
            position_scale: case.position_scale,
            rotary_dim,
        }),
        append: layer.map(|cache| Append { cache, sequences: Some(sequence_tensor) }),
    })?;
    run.executor().run(&Operation::from(op), run.stream.raw())?;

    let reference = |heads: usize, values: &[f64], norm: &Option<(Tensor, Vec<f64>)>, scale: f64| -> Vec<f64> {
        let norm = norm.as_ref().map(|norm| norm.1.as_slice());
        let heads = values.chunks(case.dim).enumerate().map(|(i, x)| rotate(case, x, norm, positions[i / heads]));
        heads.flatten().map(|x| x * scale).collect()
    };
    if let Some(output) = query_output {
        let expected = reference(case.query_heads, &query.values, query_norm, case.query_scale as f64);
        run.expect_within("query_output", &output, &expected, rotated_bound(case, output.dtype))?;
    }
    let keys = reference(case.kv_heads, &key.values, key_norm, 1.0);
    if let Some(output) = key_output {
        run.expect_within("key_output", &output, &keys, rotated_bound(case, output.dtype))?;
    }
    let Some((cache, layer)) = cache.as_ref().zip(layer) else { return Ok(()) };
    let cached = [("cached keys", &keys, key_tensor(&layer)), ("cached values", &value.values, value_tensor(&layer))];
    for (name, values, tensor) in cached {
        let mut expected = vec![f64::NAN; SEQUENCES * case.kv_heads * (case.top + 1) * case.dim];
        for (i, head) in values.chunks(case.dim).enumerate() {
            let (token, head_index) = (i / case.kv_heads, i % case.kv_heads);
            let row =
                (sequences[token] as usize * case.kv_heads + head_index) * (case.top + 1) + positions[token] as usize;
            expected[row * case.dim..][..case.dim].copy_from_slice(head);
        }
        run.expect_within(name, &tensor, &expected, rotated_bound(case, layer.dtype))?;
    }
    for other in [0, 2] {
        let layer = cache.layer(other)?;
        for tensor in [key_tensor(&layer), value_tensor(&layer)] {
            let values = run.read(&tensor)?;
            if values.iter().any(|value| !value.is_nan()) {
                return Err(format!("layer {other} changed").into());
            }
        }
    }
    Ok(())
}

#[test]
fn rotation() {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        for output in FLOATS {
            for norm in [None, Some(DType::F32), Some(DType::Bf16)] {
                cases.push(Case { dtype, output, norm, ..CASE });
            }
        }
        for (fused, layout) in [(false, PLAIN), (true, PLAIN), (true, UNALIGNED), (false, PITCHED)] {
            cases.push(Case {
                dtype,
                output: dtype,
                in_place: true,
                fused,
                layout,
                norm: Some(dtype),
                offset: 1.0,
                ..CASE
            });
        }
    }
    for (dim, rotary) in [
        (1, 0),
        (2, 2),
        (8, 8),
        (40, 40),
        (64, 16),
        (64, 2),
        (80, 20),
        (96, 96),
        (128, 64),
        (256, 256),
        (512, 512),
        (33, 32),
    ] {
        for norm in [None, Some(DType::F32)] {
            cases.push(Case { dim, rotary: Some(rotary), norm, ..CASE });
            cases.push(Case { dim, rotary: Some(rotary), norm, in_place: true, fused: true, ..CASE });
        }
    }
    for (query_heads, kv_heads) in [(1, 1), (8, 1), (8, 4), (32, 32), (3, 3)] {
        cases.push(Case { query_heads, kv_heads, ..CASE });
    }
    for (base, position_scale, query_scale) in [(1e6, 0.125, 1.0), (500.0, 2.0, 0.0625), (10_000.0, 1.0, -3.0)] {
        cases.push(Case { base, position_scale, query_scale, norm: Some(DType::Bf16), offset: 1.0, ..CASE });
    }
    for tokens in [0, 1, 2, 33, 100] {
        cases.push(Case { tokens, ..CASE });
    }
    for top in [2, 1000, 8191, 131_071] {
        for base in [10_000.0, 1e6] {
            cases.push(Case { top, base, ..CASE });
            cases.push(Case { top, base, position_scale: 0.125, norm: Some(DType::Bf16), ..CASE });
        }
    }
    check("rope", &cases, test);
}

#[test]
fn append() {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        for cache in FLOATS {
            let case = Case { dtype, output: dtype, cache: Some(cache), ..CASE };
            cases.push(Case { ..case });
            cases.push(Case { rotary: None, ..case });
            cases.push(Case { fused: true, in_place: true, norm: Some(DType::F32), offset: 1.0, ..case });
            cases.push(Case { fused: true, layout: UNALIGNED, dim: 40, rotary: Some(20), norm: Some(dtype), ..case });
            cases.push(Case { rotary: None, fused: true, dim: 33, layout: UNALIGNED, ..case });
        }
    }
    let case = Case { cache: Some(DType::Bf16), ..CASE };
    for (tokens, top) in [(0, 10), (1, 0), (1, 10), (3, 0), (60, 30)] {
        cases.push(Case { tokens, top, ..case });
        cases.push(Case { tokens, top, rotary: None, ..case });
    }
    for dim in [1, 8, 80, 96, 256, 512] {
        cases.push(Case { dim, rotary: Some(dim & !1), ..case });
    }
    check("rope with append", &cases, test);
}

/// Numbers of tokens around the one from which 132 multiprocessors run the kernel for many tokens: one less, that one,
/// and the next.
const MANY: [usize; 3] = [4223, 4224, 4225];

#[test]
fn many_tokens() {
    let mut cases = Vec::new();
    for dtype in [DType::Bf16, DType::F16] {
        let norm = Some(DType::Bf16);
        let many = Case { query_heads: 2, kv_heads: 1, dim: 16, rotary: Some(16), dtype, top: 1500, ..CASE };
        for tokens in MANY {
            let case = Case { tokens, ..many };
            cases.push(Case { output: dtype, in_place: true, fused: true, ..case });
            cases.push(Case { output: DType::F32, norm, offset: 1.0, query_scale: 0.25, layout: PITCHED, ..case });
            cases.push(Case { output: dtype, norm, offset: 1.0, fused: true, cache: Some(dtype), ..case });
            cases.push(Case { rotary: None, cache: Some(dtype), ..case });
        }
        // Heads of which some pass through, of which a cache keeps F32, without vectors, so many that each place for
        // tiles under way is filled again, and of four to a warp, the last of which are absent.
        let case = Case { tokens: 4224, output: dtype, norm: Some(DType::F32), ..many };
        cases.push(Case { dim: 24, in_place: true, ..case });
        cases.push(Case { cache: Some(DType::F32), in_place: true, ..case });
        cases.push(Case { layout: UNALIGNED, ..case });
        cases.push(Case { query_heads: 164, kv_heads: 3, cache: Some(dtype), ..case });
        cases.push(Case { dim: 80, rotary: Some(32), query_heads: 5, fused: true, cache: Some(dtype), ..case });
    }
    cases.push(Case { tokens: 4224, top: 1500, kv_heads: 1, query_heads: 1, ..CASE });
    // Heads of a whole warp, and angles that sine and cosine reduce in memory.
    let case = Case { tokens: 4224, query_heads: 1, kv_heads: 1, dtype: DType::Bf16, output: DType::Bf16, ..CASE };
    cases.push(Case {
        dim: 512,
        rotary: Some(512),
        norm: Some(DType::Bf16),
        cache: Some(DType::Bf16),
        top: 1500,
        ..case
    });
    cases.push(Case { dim: 16, rotary: Some(16), top: 131_071, ..case });
    check("rope of many tokens", &cases, test);
}

/// A token outside the cache: the CPU names it, a GPU leaves it out and stores the others. Both leave out what stands at −1.
#[test]
fn places_outside_the_cache() {
    let places = [(-1, 0), (8, 0), (i32::MAX, 0), (i32::MIN, 0), (3, -1), (3, 2), (3, i32::MAX)];
    let mut cases = places.map(|(position, sequence)| (2, DType::F32, 4, position, sequence)).to_vec();
    let places = [(-1, 0), (4230, 0), (3, -1), (3, 2)];
    cases.extend(places.map(|(position, sequence)| (MANY[1], DType::Bf16, 16, position, sequence)));
    check("rope outside the cache", &cases, |run, &(tokens, dtype, head_dim, position, sequence)| {
        let capacity = tokens + 6;
        let options = KvCacheOptions {
            layers: 1,
            sequences: 2,
            kv_heads: 1,
            head_dim,
            capacity,
            dtype,
            ..KvCacheOptions::default()
        };
        let cache = KvCache::new(run.device.backend.memory(), options, run.stream)?;
        let layer = cache.layer(0)?;
        run.poison(&layer)?;
        let (key, keys) = run.normal(dtype, &[tokens, 1, head_dim], PLAIN, 1.0)?;
        let (value, _) = run.normal(dtype, &[tokens, 1, head_dim], PLAIN, 1.0)?;
        // All but the first in sequence 1, from position 5 on.
        let rest = tokens - 1;
        let positions = run.integers(&[vec![position], (5..5 + rest as i32).collect()].concat())?;
        let sequences = run.integers(&[vec![sequence], vec![1; rest]].concat())?;
        let op = Rope::new(RopeArguments {
            query: None,
            query_output: None,
            query_norm: None,
            query_scale: 1.0,
            key: Some(key),
            key_output: None,
            key_norm: None,
            value: Some(value),
            epsilon: 1e-6,
            weight_offset: 0.0,
            positions,
            rotation: None,
            append: Some(Append { cache: layer, sequences: Some(sequences) }),
        })?;
        let result = run.executor().run(&Operation::from(op), run.stream.raw());
        if run.device.is_cpu() && position != EMPTY_ROW {
            let inside = (0..capacity as i32).contains(&position);
            let (outside, limit) = if inside { (sequence, 2) } else { (position, capacity) };
            return expect_error(result, Status::InvalidArgument, &[&outside.to_string(), &limit.to_string()]);
        }
        result?;
        let stored = run.read(&key_tensor(&layer))?;
        let mut expected = vec![f64::NAN; stored.len()];
        expected[(capacity + 5) * head_dim..][..rest * head_dim].copy_from_slice(&keys[head_dim..]);
        compare(dtype, &stored, &expected, bound(dtype), &[]).map_err(Failure::from)
    });
}

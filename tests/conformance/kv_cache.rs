//! Caches of every placement: contiguous, rings, the library's pages and the engine's.

use crate::attention_cases::{one_row, Keys};
use crate::kv_cache_cases::{append, blocks, case, test, variants, Case, Place, LAYER, LAYERS};
use crate::run::{check, expect_error, Failure, Run, PLAIN};
use nvbackend::error::Status;
use nvbackend::kv_cache::{KvCache, KvCacheOptions};
use nvbackend::operation::attention::{AttentionConfig, AttentionDecode, AttentionPrefill, KeySource};
use nvbackend::operation::rope::{Append, Rope, RopeArguments};
use nvbackend::operation::Operation;
use nvbackend::tensor::{DType, Tensor};

/// Keys and values in 8 bits: appended with saturation under scales of heads, and read by queries of every dtype.
#[test]
fn fp8() {
    let mut cases = Vec::new();
    for (query, kv) in [(DType::F32, DType::F8E4m3), (DType::Bf16, DType::F8E4m3), (DType::F16, DType::F8E5m2)] {
        for place in [
            Place::Contiguous,
            Place::Ring(40),
            Place::Pages(16),
            Place::Pages(1),
            Place::EnginePages(8, true),
            Place::EngineBlocks,
        ] {
            let window = if matches!(place, Place::Ring(_)) { 20 } else { 0 };
            let case = Case { dtypes: (query, kv), window, ..case(place) };
            // The second head's keys and the first one's values saturate often in E4M3.
            let scales = Some([[0.11, 0.002], [0.0013, 0.37]]);
            cases.push(Case { scales, ..case.clone() });
            cases.push(Case { scales, dim: 40, heads: (3, 3), ..case.clone() });
            cases.push(Case { dim: 80, value_dim: 24, heads: (8, 1), scales, ..case.clone() });
            // What tensor cores read: several tiles of keys, whole and not, of unequal sequences.
            let (window, chunks) = match place {
                Place::Ring(_) => (150, vec![vec![40, 2, 21]; 5]),
                _ => (0, vec![vec![130, 5, 64], vec![1, 1, 1], vec![3, 127, 2]]),
            };
            for dim in [128, 256] {
                for (heads, scales) in [((8, 2), scales), ((4, 2), None), ((12, 1), scales), ((12, 1), None)] {
                    cases.push(Case { dim, heads, scales, window, chunks: chunks.clone(), ..case.clone() });
                }
            }
            cases.push(case);
        }
        let values_in_keys =
            Case { values_in_keys: true, value_dim: 64, dim: 80, heads: (6, 1), ..case(Place::Pages(4)) };
        cases.push(Case { dtypes: (query, kv), scales: Some([[0.3, 0.3], [0.0, 0.0]]), ..values_in_keys });
    }
    check("a KV cache in FP8", &cases, test);
}

#[test]
fn scales_that_are_refused() {
    check("scales of a KV cache", &[()], |run, ()| {
        let invalid = Status::InvalidArgument;
        let scales = run.tensor(DType::F32, &[2, 3], PLAIN, &[1.0; 6])?;
        let options = KvCacheOptions {
            layers: 2,
            kv_heads: 3,
            head_dim: 8,
            capacity: 4,
            dtype: DType::F8E4m3,
            key_scales: Some(scales),
            ..Default::default()
        };
        let new = |options| KvCache::new(run.device.backend.memory(), options, run.stream);
        new(options)?;
        expect_error(new(KvCacheOptions { dtype: DType::Bf16, ..options }), invalid, &["key_scales", "bf16"])?;
        expect_error(new(KvCacheOptions { kv_heads: 2, ..options }), invalid, &["key_scales", "[2, 3]", "[2, 2]"])?;
        let halves = Tensor { dtype: DType::F16, ..scales };
        let halves = KvCacheOptions { key_scales: Some(halves), ..options };
        expect_error(new(halves), invalid, &["key_scales", "f16", "f32"])?;
        let strided = KvCacheOptions { value_scales: Some(scales.with_strides(&[4, 1])), ..options };
        expect_error(new(strided), invalid, &["value_scales", "strided"])?;
        let both = KvCacheOptions { values_in_keys: true, value_scales: Some(scales), ..options };
        expect_error(new(both), invalid, &["value_scales", "values_in_keys"])?;
        expect_error(
            new(KvCacheOptions { dtype: DType::I32, key_scales: None, ..options }),
            invalid,
            &["i32", "fp8 e4m3"],
        )
    });
}

#[test]
fn pages() {
    let mut cases = Vec::new();
    for tokens in [1, 2, 3, 7, 8, 16, 20, 32, 64, 100, 256] {
        cases.push(case(Place::Pages(tokens)));
        cases.push(case(Place::EnginePages(tokens, false)));
        cases.push(Case { window: 11, ..case(Place::EnginePages(tokens, true)) });
        cases.push(Case { window: 30, dim: 128, ..case(Place::EnginePages(tokens, false)) });
        cases.push(Case { heads: (3, 1), dim: 40, ..case(Place::Pages(tokens)) });
    }
    for tokens in [1, 3, 16, 256] {
        for dim in [1, 8, 33, 80, 128, 192, 256, 512] {
            // The error of a handful of averages near zero is chance, so single columns have more heads.
            let heads = (if dim == 1 { 16 } else { 2 }, 1);
            cases.push(Case { dim, heads, ..case(Place::EnginePages(tokens, dim % 16 == 0)) });
        }
        for (heads, dim) in [((8, 1), 128), ((16, 1), 64), ((32, 2), 128), ((8, 1), 256), ((9, 1), 512), ((20, 1), 8)] {
            cases.push(Case { heads, dim, chunks: vec![vec![20, 9]], ..case(Place::EnginePages(tokens, true)) });
        }
        // Enough keys to divide among blocks, and more than one pass of the kernel for few.
        cases.push(Case {
            chunks: vec![vec![600, 1], vec![1, 600]],
            dim: 32,
            ..case(Place::EnginePages(tokens, false))
        });
        cases.push(Case { chunks: vec![vec![1500]], heads: (2, 1), window: 300, ..case(Place::Pages(tokens)) });
        cases.push(Case { chunks: vec![vec![4100]], heads: (1, 1), dim: 8, ..case(Place::Pages(tokens)) });
    }
    check("pages of a KV cache", &variants(&cases), test);
}

/// Draft tokens beside their token: items of several chunks whose partial results lie side by side in the workspace.
#[test]
fn rows_of_a_sequence() {
    let mut cases = Vec::new();
    for place in [Place::Contiguous, Place::Pages(16), Place::EnginePages(16, false), Place::EnginePages(7, true)] {
        for (rows, heads) in [(16, (3, 1)), (4, (4, 1)), (5, (6, 2))] {
            let dims: &[usize] = if place == Place::Pages(16) { &[64, 128, 256] } else { &[64] };
            for &dim in dims {
                let chunks = vec![vec![500, 30, 100]];
                cases.push(Case { rows, heads, dim, chunks: chunks.clone(), ..case(place) });
                cases.push(Case { rows, heads, dim, chunks, window: 70, ..case(place) });
            }
        }
    }
    check("rows of a sequence over a KV cache", &variants(&cases), test);
}

#[test]
fn blocks_of_the_engine() {
    let cases = [case(Place::EngineBlocks), Case { dim: 40, heads: (6, 3), window: 9, ..case(Place::EngineBlocks) }];
    check("an engine's memory as a KV cache", &variants(&cases), test);
    check("a contiguous KV cache", &variants(&[case(Place::Contiguous)]), test);
}

/// Values narrower and wider than keys, and values that are a part of their keys.
#[test]
fn values_of_other_dims() {
    let places = [
        Place::Contiguous,
        Place::Ring(64),
        Place::Pages(16),
        Place::Pages(7),
        Place::EnginePages(16, true),
        Place::EnginePages(3, false),
        Place::EngineBlocks,
    ];
    let mut cases = Vec::new();
    for place in places {
        let window = if matches!(place, Place::Ring(_)) { 33 } else { 0 };
        let case = Case { window, ..case(place) };
        for (dim, value_dim) in [(192, 128), (40, 24), (17, 5), (16, 72)] {
            cases.push(Case { dim, value_dim, ..case.clone() });
        }
        for (dim, value_dim) in [(576, 512), (64, 64), (48, 1)] {
            cases.push(Case { dim, value_dim, values_in_keys: true, heads: (5, 1), ..case.clone() });
        }
    }
    check("a KV cache of other values", &variants(&cases), test);
}

#[test]
fn rings() {
    let mut cases = Vec::new();
    for (window, max_append) in [(1, 1), (2, 3), (16, 1), (16, 16), (33, 8), (64, 64), (100, 7)] {
        let steps = |step: usize, count: usize| vec![vec![step, step.min(2), 1]; count];
        for step in [1, max_append] {
            let count = (3 * (window + max_append) / step).min(90);
            cases.push(Case { chunks: steps(step, count), window, ..case(Place::Ring(max_append)) });
        }
        cases.push(Case {
            chunks: steps(max_append, 7),
            window,
            heads: (3, 1),
            dim: 40,
            ..case(Place::Ring(max_append))
        });
    }
    cases.push(Case { chunks: vec![vec![512, 100]; 4], window: 512, dim: 32, ..case(Place::Ring(512)) });
    cases.push(Case { chunks: vec![vec![40]; 40], window: 1000, heads: (2, 1), dim: 128, ..case(Place::Ring(40)) });
    // A sequence that never fills its ring is contiguous.
    cases.push(Case { chunks: vec![vec![3, 2]], window: 512, ..case(Place::Ring(512)) });
    check("a ring as KV cache", &variants(&cases), test);
}

#[test]
fn a_ring_refuses_what_it_has_lost() {
    check("a ring's errors", &[()], |run, _| {
        let base =
            KvCacheOptions { kv_heads: 1, head_dim: 8, capacity: 100, window: 8, max_append: 3, ..Default::default() };
        let cache = KvCache::new(run.device.backend.memory(), base, run.stream)?;
        let layer = cache.layer(0)?;
        let config = |window| AttentionConfig {
            query_heads: 1,
            kv_heads: 1,
            head_dim: 8,
            scale: 1.0,
            soft_cap: 0.0,
            window,
            causal: true,
            ..AttentionConfig::default()
        };
        let prefill = |run: &mut Run, window: usize, rows: usize, length: i32| -> Result<_, Failure> {
            let query = run.output(DType::F32, &[rows, 1, 8], PLAIN)?;
            let source = KeySource::Cache { layer, sequences: &[0], kv_lengths: &[length] };
            Ok(AttentionPrefill::new(config(window), query, &[0, rows as i32], source, query, None))
        };
        let decode = |run: &mut Run, window: usize, max_kv_length: usize| -> Result<_, Failure> {
            let query = run.output(DType::F32, &[1, 1, 8], PLAIN)?;
            let positions = run.integers(&[20])?;
            Ok(AttentionDecode::new(config(window), query, layer, query, None, one_row(positions, None, max_kv_length)))
        };
        let invalid = Status::InvalidArgument;
        prefill(run, 8, 3, 50)??;
        prefill(run, 0, 10, 10)??;
        expect_error(prefill(run, 8, 4, 50)?, invalid, &["4 query rows at length 50", "11 tokens back", "keeps 10"])?;
        expect_error(prefill(run, 0, 1, 50)?, invalid, &["a window of 0", "50 tokens back", "keeps 10"])?;
        expect_error(prefill(run, 8, 1, 101)?, invalid, &["101", "100"])?;
        decode(run, 8, 0)??;
        decode(run, 10, 0)??;
        decode(run, 0, 10)??;
        expect_error(decode(run, 11, 0)?, invalid, &["a window of 11", "keeps 10"])?;
        expect_error(decode(run, 0, 0)?, invalid, &["a window of 0", "keeps 10"])?;
        let key = run.output(DType::F32, &[11, 1, 8], PLAIN)?;
        let positions = run.integers(&(0..11).collect::<Vec<_>>())?;
        let append = Rope::new(RopeArguments {
            query: None,
            query_output: None,
            query_norm: None,
            query_scale: 1.0,
            key: Some(key),
            key_output: None,
            key_norm: None,
            value: Some(key),
            epsilon: 1e-6,
            weight_offset: 0.0,
            positions,
            rotation: None,
            append: Some(Append { cache: layer, sequences: None }),
        });
        expect_error(append, invalid, &["11 tokens of one sequence", "keeps 10"])
    });
}

/// An entry that is no page: the CPU names it; a GPU stores nothing for an append and reads nothing.
#[test]
fn entries_outside_the_pool() {
    let cases = [-1, 4, i32::MAX, i32::MIN];
    check("entries outside the pool", &cases, |run, &entry| {
        let options = KvCacheOptions {
            layers: LAYERS,
            kv_heads: 1,
            head_dim: 8,
            capacity: 6,
            page_tokens: 2,
            dtype: DType::Bf16,
            ..Default::default()
        };
        let memory = blocks(run, &options, [4, 1, 2], false)?;
        let cache = KvCache::over(KvCacheOptions { dtype: DType::Bf16, ..options }, &memory)?;
        let table = run.tensor(DType::I32, &[1, 3], PLAIN, &[2.0, entry.into(), 0.0])?;
        let layer = cache.layer_with(LAYER, Some(table))?;
        let key = Keys { length: 5, key: vec![1.0; 40], value: vec![2.0; 40] };
        let result = append(run, layer, &[key], &[0], &[5]);
        let (query, _) = run.normal(DType::F32, &[1, 1, 8], PLAIN, 1.0)?;
        let output = run.output(DType::F32, &[1, 1, 8], PLAIN)?;
        let config = AttentionConfig {
            query_heads: 1,
            kv_heads: 1,
            head_dim: 8,
            scale: 1.0,
            soft_cap: 0.0,
            window: 0,
            causal: true,
            ..AttentionConfig::default()
        };
        let positions = run.integers(&[4])?;
        let decode = AttentionDecode::new(config, query, layer, output, None, one_row(positions, None, 0))?;
        let decoded = run.executor().run(&Operation::from(decode), run.stream.raw());
        let source = KeySource::Cache { layer, sequences: &[0], kv_lengths: &[5] };
        let prefill = AttentionPrefill::new(config, query, &[0, 1], source, output, None)?;
        let prefilled = run.executor().run(&Operation::from(prefill), run.stream.raw());
        if run.device.is_cpu() {
            let name = entry.to_string();
            let words = ["page table", &name, "position 2", "4 pages"];
            for result in
                [result.map_err(|failure| nvbackend::error::Error::invalid(failure.text())), decoded, prefilled]
            {
                expect_error(result, Status::InvalidArgument, &words)?;
            }
            return Ok(());
        }
        result?;
        decoded?;
        prefilled?;
        run.stream.synchronize()?;
        // What was appended went to pages 2 and 0 alone.
        let keys = run.read(&memory[2 * LAYER])?;
        let kept = |page: usize| keys[page * 16..][..16].iter().filter(|value| !value.is_nan()).count();
        if [kept(0), kept(1), kept(2), kept(3)] != [8, 0, 16, 0] {
            return Err(format!("the pages have {:?} elements", [kept(0), kept(1), kept(2), kept(3)]).into());
        }
        Ok(())
    });
}

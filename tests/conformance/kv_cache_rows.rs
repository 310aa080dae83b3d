//! Caches whose rows have scales of their own: INT8, Q8_0 and Q4_0, and values of another dtype than keys, in every placement;
//! what an append leaves of a row, byte by byte; and the options that are refused.

use crate::attention_cases::Keys;
use crate::kv_cache_cases::{case, test, Case, Place};
use crate::run::{check, expect_error, rounded, Outcome, Run, PLAIN};
use nvbackend::error::Status;
use nvbackend::kv_cache::{KvCache, KvCacheOptions};
use nvbackend::operation::rope::{Append, Rope, RopeArguments};
use nvbackend::operation::Operation;
use nvbackend::tensor::{kv_row, DType, Tensor};

const ROWS: [DType; 3] = [DType::KvInt8, DType::KvQ8_0, DType::KvQ4_0];

/// What a row of the dtype says of these elements: the formula of the header, in f32 where an executor computes in it.
pub fn quantized_row(dtype: DType, row: &[f64]) -> Vec<f64> {
    if !dtype.is_kv_row() {
        return rounded(dtype, row);
    }
    let f16 = |x: f32| half::f16::from_f32(x).to_f32();
    let of_block = |block: &[f64]| -> Vec<f64> {
        let block: Vec<f32> = block.iter().map(|&x| x as f32).collect();
        let most = block.iter().fold(0f32, |most, x| most.max(x.abs()));
        let signed = if block.contains(&most) { most } else { -most };
        let scale = match dtype {
            DType::KvInt8 => most / 127.0,
            DType::KvQ8_0 => f16(most / 127.0),
            _ => f16(signed / -8.0),
        };
        let value = |&x: &f32| match dtype {
            _ if scale == 0.0 => 0.0,
            DType::KvQ4_0 => (x / scale + 8.5).floor().clamp(0.0, 15.0) - 8.0,
            _ => (x / scale).round_ties_even().clamp(-127.0, 127.0),
        };
        block.iter().map(|x| f64::from(value(x)) * f64::from(scale)).collect()
    };
    row.chunks(if dtype == DType::KvInt8 { row.len() } else { 32 }).flat_map(of_block).collect()
}

#[test]
fn rows() {
    let mut cases = Vec::new();
    for kv in ROWS {
        for place in [
            Place::Contiguous,
            Place::Ring(40),
            Place::Pages(16),
            Place::Pages(1),
            Place::EnginePages(8, true),
            Place::EngineBlocks,
        ] {
            let window = if matches!(place, Place::Ring(_)) { 20 } else { 0 };
            let query = if kv == DType::KvQ8_0 { DType::F16 } else { DType::Bf16 };
            let case = Case { dtypes: (DType::F32, kv), window, ..case(place) };
            cases.push(Case { dim: 40, heads: (3, 3), ..case.clone() });
            cases.push(Case { dim: 80, value_dim: 24, heads: (8, 1), ..case.clone() });
            cases.push(Case { dim: 1, value_dim: 33, heads: (2, 1), ..case.clone() });
            cases.push(Case { value_dtype: Some(DType::Bf16), ..case.clone() });
            cases.push(Case { value_dtype: Some(DType::F8E4m3), ..case.clone() });
            cases.push(Case { dtypes: (DType::Bf16, DType::Bf16), value_dtype: Some(kv), ..case.clone() });
            cases.push(Case { dtypes: (query, kv), value_dtype: Some(DType::KvQ4_0), dim: 128, ..case.clone() });
            // What tensor cores read: several tiles of keys, whole and not, of unequal sequences.
            let (window, chunks) = match place {
                Place::Ring(_) => (150, vec![vec![40, 2, 21]; 5]),
                _ => (0, vec![vec![130, 5, 64], vec![1, 1, 1], vec![3, 127, 2]]),
            };
            for (dim, heads) in [(128, (8, 2)), (128, (4, 2)), (128, (12, 1)), (256, (4, 2)), (64, (8, 1))] {
                let dtypes = (if heads == (4, 2) { query } else { DType::F32 }, kv);
                cases.push(Case { dtypes, dim, heads, window, chunks: chunks.clone(), ..case.clone() });
            }
            cases.push(case);
        }
        for (rows, heads) in [(16, (3, 1)), (4, (4, 1))] {
            let case = Case { dtypes: (DType::F32, kv), rows, heads, ..case(Place::Pages(16)) };
            cases.push(Case { dim: 128, ..case.clone() });
            cases.push(case);
        }
        cases.push(Case { dtypes: (DType::F32, kv), dim: 512, heads: (2, 1), ..case(Place::Contiguous) });
        cases.push(Case {
            dtypes: (DType::F32, kv),
            dim: 576,
            value_dim: 512,
            heads: (2, 1),
            ..case(Place::Contiguous)
        });
    }
    cases.push(Case { value_dtype: Some(DType::F32), dtypes: (DType::F16, DType::F16), ..case(Place::Pages(4)) });
    check("a KV cache in rows with scales", &cases, test);
}

/// Elements whose rounding is decided by little: ties, extremes of either sign, zeros, tiny, huge, and no number at all.
fn hostile_row(run: &mut Run, dim: usize, kind: usize) -> Vec<f64> {
    let mut row = run.random.normals(dim, 1.0);
    let places: Vec<usize> = (0..3).map(|i| (i * 31 + kind) % dim).collect();
    let specials = match kind {
        0 => return row,
        1 => return vec![0.0; dim],
        2 => [4.0, -4.0, 0.25],
        3 => [-4.0, 4.0, -0.25],
        4 => [127.0, 0.5, 1.5],
        5 => [-8.0, 8.0, 0.5],
        6 => [f64::NAN, 1.0, 1.0],
        7 => [f64::INFINITY, 1.0, 1.0],
        8 => [f64::NEG_INFINITY, f64::NAN, 1.0],
        9 => {
            row.iter_mut().for_each(|x| *x *= 1e-40);
            return row;
        }
        10 => [3e38, -3e38, 1e30],
        _ => {
            row.iter_mut().for_each(|x| *x *= 3e-6);
            return row;
        }
    };
    places.iter().zip(specials).for_each(|(&at, special)| row[at] = special);
    row
}

/// Every executor leaves the same bytes.
#[test]
fn appended_bytes() {
    let cases: Vec<(DType, usize)> =
        ROWS.iter().flat_map(|&dtype| [1, 8, 31, 33, 64, 80, 128, 256, 512].map(|dim| (dtype, dim))).collect();
    check("the bytes of rows", &cases, |run, &(dtype, dim)| {
        let kinds = 12;
        let rows: Vec<Vec<f64>> = (0..kinds).map(|kind| hostile_row(run, dim, kind)).collect();
        let elements: Vec<f64> = rows.concat();
        let options = KvCacheOptions { capacity: kinds, head_dim: dim, dtype, ..Default::default() };
        let cache = KvCache::new(run.device.backend.memory(), options, run.stream)?;
        let layer = cache.layer(0)?;
        let positions: Vec<i32> = (0..kinds as i32).collect();
        let input = run.tensor(DType::F32, &[kinds, 1, dim], PLAIN, &elements)?;
        let op = Rope::new(RopeArguments {
            query: None,
            query_output: None,
            query_norm: None,
            query_scale: 1.0,
            key: Some(input),
            key_output: None,
            key_norm: None,
            value: Some(input),
            epsilon: 1e-6,
            weight_offset: 0.0,
            positions: run.integers(&positions)?,
            rotation: None,
            append: Some(Append { cache: layer, sequences: None }),
        })?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        let bytes = dtype.row_bytes(dim);
        for (name, data) in [("key", layer.key), ("value", layer.value)] {
            let stored = run.read_byte_rows(data, (kinds, bytes), bytes)?;
            for (kind, (row, stored)) in rows.iter().zip(stored.chunks(bytes)).enumerate() {
                let row: Vec<f32> = row.iter().map(|&x| x as f32).collect();
                let mut expected = vec![0u32; bytes / 4];
                // SAFETY: a row's bytes, aligned to 4.
                unsafe { kv_row::pack(dtype, &row, expected.as_mut_ptr().cast()) };
                let expected: Vec<u8> = expected.iter().flat_map(|word| word.to_le_bytes()).collect();
                if stored != expected {
                    return Err(format!("{name} of kind {kind}: {stored:02x?}; {expected:02x?} is expected").into());
                }
            }
        }
        Ok(())
    });
}

/// A row that no query sees may hold anything: a scale of NaN does not reach the others.
#[test]
fn stale_rows_are_never_seen() {
    let cases: Vec<Case> =
        ROWS.iter().map(|&kv| Case { dtypes: (DType::F32, kv), window: 3, ..case(Place::Contiguous) }).collect();
    check("a window over rows", &cases, test);
}

fn options(run: &mut Run) -> KvCacheOptions {
    let _ = run;
    KvCacheOptions { layers: 2, kv_heads: 3, head_dim: 64, capacity: 4, dtype: DType::KvInt8, ..Default::default() }
}

#[test]
fn options_that_are_refused() {
    check("options of a KV cache in rows", &[()], |run, ()| -> Outcome {
        let invalid = Status::InvalidArgument;
        let options = options(run);
        let new = |options| KvCache::new(run.device.backend.memory(), options, run.stream);
        // 12 rows of 80 bytes, and of 48, from a multiple of 256 bytes to the next.
        assert_eq!(new(options)?.bytes(), 2 * (1024 + 1024), "INT8");
        let half = KvCacheOptions { value_dtype: Some(DType::KvQ4_0), ..options };
        assert_eq!(new(half)?.bytes(), 2 * (1024 + 768), "keys in INT8, values in Q4_0");
        expect_error(new(KvCacheOptions { values_in_keys: true, ..options }), invalid, &["values_in_keys", "int8"])?;
        let mixed =
            KvCacheOptions { values_in_keys: true, dtype: DType::F16, value_dtype: Some(DType::Bf16), ..options };
        expect_error(new(mixed), invalid, &["values_in_keys", "f16", "bf16"])?;
        expect_error(new(KvCacheOptions { value_dtype: Some(DType::I32), ..options }), invalid, &["i32", "q4_0"])?;
        let scales = run.tensor(DType::F32, &[2, 3], PLAIN, &[1.0; 6])?;
        let new = |options| KvCache::new(run.device.backend.memory(), options, run.stream);
        let scaled = KvCacheOptions { key_scales: Some(scales), ..options };
        expect_error(new(scaled), invalid, &["key_scales", "int8"])?;
        let of_values = KvCacheOptions { value_scales: Some(scales), value_dtype: Some(DType::F8E4m3), ..options };
        new(of_values)?;

        // The engine's memory: rows of bytes, on multiples of 16.
        let options = KvCacheOptions { layers: 1, kv_heads: 1, ..options };
        let memory = run.byte_rows((1, 4 * 96), 4 * 96, 0, None)?;
        let tensor = |bytes: usize, stride: usize, offset: usize| {
            let data = memory.cast::<u8>().wrapping_add(offset).cast();
            Tensor::new(data, DType::KvInt8, &[1, 1, 4, bytes]).with_strides(&[4 * stride, 4 * stride, stride, 1])
        };
        let over = |tensor: Tensor| KvCache::over(options, &[tensor, tensor]);
        over(tensor(80, 80, 0))?;
        over(tensor(80, 96, 0))?;
        expect_error(over(tensor(64, 80, 0)), invalid, &["[1, 1, 4, 64]", "[1, 1, 4, 80]"])?;
        expect_error(over(tensor(80, 88, 0)), invalid, &["multiples of 16 bytes"])?;
        expect_error(over(tensor(80, 80, 8)), invalid, &["multiples of 16 bytes"])
    });
}

/// A part of a key is no row, and tensors have no rows: `Keys` of such dtypes are for caches alone.
#[test]
fn a_formula_that_rounds_nothing_away_is_exact() {
    let row: Vec<f64> = (0..64).map(|i| f64::from(i % 16) - 8.0).collect();
    assert_eq!(quantized_row(DType::KvQ4_0, &row), row);
    let keys = Keys { length: 1, key: row.clone(), value: row };
    assert_eq!(quantized_row(DType::Bf16, &keys.key), keys.value);
}

//! What rows of a prefill see beside a causal mask: bits of a mask, trees of draft tokens, prefixes that are seen both ways, and several
//! documents in one row.

use crate::attention_batch::words;
use crate::attention_cases::{attend_masked, expect_attention, filled_cache, Keys};
use crate::run::{check, expect_error, rounded, Failure, Outcome, Run, PLAIN};
use nvbackend::error::{Result, Status};
use nvbackend::operation::attention::{AttentionConfig, AttentionPrefill, DeviceSource, KeySource};
use nvbackend::operation::Operation;
use nvbackend::tensor::{DType, Tensor};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    /// Bits of which most tiles have none set.
    Bits,
    Tree,
    Prefix,
}

#[derive(Debug, Clone)]
struct Case {
    kind: Kind,
    /// Query rows and keys of each sequence.
    sequences: Vec<(usize, usize)>,
    heads: (usize, usize),
    dim: usize,
    dtypes: (DType, DType, DType),
    window: usize,
    chunk: usize,
    soft_cap: f32,
    cache: bool,
    /// Lengths in device memory.
    on_device: bool,
}

fn case(kind: Kind) -> Case {
    Case {
        kind,
        sequences: vec![(19, 19), (33, 170), (1, 1), (0, 4), (64, 300)],
        heads: (4, 2),
        dim: 64,
        dtypes: (DType::F32, DType::F32, DType::F32),
        window: 0,
        chunk: 0,
        soft_cap: 0.0,
        cache: false,
        on_device: false,
    }
}

fn starts(counts: impl Iterator<Item = usize>) -> Vec<i32> {
    let mut starts = vec![0];
    counts.for_each(|count| starts.push(starts[starts.len() - 1] + count as i32));
    starts
}

/// A number that follows from two.
fn mixed(a: usize, b: usize) -> usize {
    let number =
        (a as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (b as u64 + 7).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (number >> 33) as usize
}

/// The parent of a row; some name no row before them, which are roots as those of −1 are.
fn parent(sequence: usize, row: usize) -> i32 {
    match mixed(sequence, row) % 8 {
        _ if row == 0 => -1,
        0 => -1,
        1 => row as i32,
        2 => 1000,
        _ => (mixed(row, sequence) % row) as i32,
    }
}

/// The rows that a row comes from, itself the first.
fn line(sequence: usize, row: usize) -> Vec<usize> {
    let mut rows = vec![row];
    loop {
        let last = rows[rows.len() - 1];
        match parent(sequence, last) {
            next if (0..last as i32).contains(&next) => rows.push(next as usize),
            _ => return rows,
        }
    }
}

fn prefix(sequence: usize, keys: usize) -> usize {
    [keys, keys / 2, 0, 1, keys.min(129)][sequence % 5]
}

/// Whether bits show a row the key: one block of 50 keys in ten, another for each 40 rows; the third row sees none.
fn has_bit(sequence: usize, row: usize, key: usize) -> bool {
    row != 2 && mixed(sequence + row / 40, key / 50).is_multiple_of(10) && !mixed(row, key).is_multiple_of(3)
}

/// Whether row `row` of n sees key `key` of L by the case's mask and window.
fn sees(case: &Case, sequence: usize, (rows, keys): (usize, usize), row: usize, key: usize) -> bool {
    let trunk = keys - rows;
    let (position, seen) = match case.kind {
        Kind::Bits => (trunk + row, key <= trunk + row && has_bit(sequence, row, key)),
        Kind::Prefix => (trunk + row, key <= trunk + row || key < prefix(sequence, keys)),
        Kind::Tree => {
            let line = line(sequence, row);
            (trunk + line.len() - 1, key < trunk || line.contains(&(key - trunk)))
        }
    };
    // Ancestors are nearer than any window that a tree may have.
    let near = case.window == 0 || position.abs_diff(key) < case.window || (case.kind == Kind::Tree && key >= trunk);
    seen && near && (case.chunk == 0 || position / case.chunk == key / case.chunk)
}

fn with_masks(run: &mut Run, case: &Case, op: AttentionPrefill, query_starts: &[i32]) -> Result<AttentionPrefill> {
    match case.kind {
        Kind::Bits => {
            let longest = case.sequences.iter().map(|pair| pair.1).max().unwrap_or(0);
            let mut elements = Vec::new();
            for (sequence, &(rows, _)) in case.sequences.iter().enumerate() {
                for row in 0..rows {
                    let bit = |key| if has_bit(sequence, row, key) { 0.0 } else { f64::NEG_INFINITY };
                    elements.extend(words(&(0..longest).map(bit).collect::<Vec<f64>>()));
                }
            }
            let shape = [query_starts[case.sequences.len()] as usize, longest.div_ceil(32)];
            op.with_mask(Some(run.tensor(DType::I32, &shape, PLAIN, &elements)?))
        }
        Kind::Tree => {
            let of = |(sequence, pair): (usize, &(usize, usize))| (0..pair.0).map(move |row| parent(sequence, row));
            let parents: Vec<i32> = case.sequences.iter().enumerate().flat_map(of).collect();
            op.with_tree(Some(run.integers(&parents)?))
        }
        Kind::Prefix => {
            let of = |(sequence, pair): (usize, &(usize, usize))| prefix(sequence, pair.1) as i32;
            let prefixes: Vec<i32> = case.sequences.iter().enumerate().map(of).collect();
            op.with_prefixes(&prefixes, query_starts)
        }
    }
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let (query_dtype, kv, output_dtype) = case.dtypes;
    let ((heads, kv_heads), dim) = (case.heads, case.dim);
    let config = AttentionConfig::new(AttentionConfig {
        query_heads: heads,
        kv_heads,
        head_dim: dim,
        soft_cap: case.soft_cap,
        window: case.window,
        chunk: case.chunk,
        ..AttentionConfig::default()
    })?;
    let keys: Vec<Keys> = case.sequences.iter().map(|pair| Keys::new(run, &config, kv, pair.1)).collect();
    let query_starts = starts(case.sequences.iter().map(|pair| pair.0));
    let key_starts = starts(case.sequences.iter().map(|pair| pair.1));
    let rows = query_starts[keys.len()] as usize;
    let queries = rounded(query_dtype, &run.random.normals(rows * heads * dim, 1.0));
    let query = run.tensor(query_dtype, &[rows, heads, dim], PLAIN, &queries)?;
    let output = run.output(output_dtype, &[rows, heads, dim], PLAIN)?;
    let lse = run.output(DType::F32, &[rows, heads], PLAIN)?;
    let capacity = case.sequences.iter().map(|pair| pair.1).max().unwrap_or(0) + 3;
    let placed: Vec<(usize, &Keys)> = keys.iter().enumerate().collect();
    let cache = match case.cache {
        true => Some(filled_cache(run, &config, kv, keys.len(), capacity, &placed)?),
        false => None,
    };
    let lengths: Vec<i32> = case.sequences.iter().map(|pair| pair.1 as i32).collect();
    let numbers: Vec<i32> = (0..keys.len() as i32).collect();
    let mut tensors = || -> Result<(Tensor, Tensor)> {
        let shape = [key_starts[keys.len()] as usize, kv_heads, dim];
        let all = |part: fn(&Keys) -> &Vec<f64>| keys.iter().flat_map(|keys| part(keys).clone()).collect::<Vec<f64>>();
        Ok((
            run.tensor(kv, &shape, PLAIN, &all(|keys| &keys.key))?,
            run.tensor(kv, &shape, PLAIN, &all(|keys| &keys.value))?,
        ))
    };
    let op = if case.on_device {
        let source = match &cache {
            Some(cache) => {
                DeviceSource::Cache { layer: cache.layer(1)?, sequences: None, kv_lengths: run.integers(&lengths)? }
            }
            None => {
                let (key, value) = tensors()?;
                DeviceSource::Tensors { key, value, key_starts: run.integers(&key_starts)? }
            }
        };
        let most = case.sequences.iter().map(|pair| pair.0).max().unwrap_or(0);
        let device_starts = run.integers(&query_starts)?;
        AttentionPrefill::with_device_lengths(config, query, device_starts, source, (output, Some(lse)), (most, 0))?
    } else {
        let source = match &cache {
            Some(cache) => KeySource::Cache { layer: cache.layer(1)?, sequences: &numbers, kv_lengths: &lengths },
            None => {
                let (key, value) = tensors()?;
                KeySource::Tensors { key, value, key_starts: &key_starts }
            }
        };
        AttentionPrefill::new(config, query, &query_starts, source, output, Some(lse))?
    };
    let op = with_masks(run, case, op, &query_starts)?;
    run.executor().run(&Operation::from(op), run.stream.raw())?;
    run.stream.synchronize()?;

    // The mask of the case is all of the reference's.
    let plain = AttentionConfig { causal: false, window: 0, chunk: 0, ..config };
    let mut reference = Vec::new();
    for (sequence, (&pair, keys)) in case.sequences.iter().zip(&keys).enumerate() {
        for (row, head) in (0..pair.0).flat_map(|row| (0..heads).map(move |head| (row, head))) {
            let at = ((query_starts[sequence] as usize + row) * heads + head) * dim;
            let bias = |key: usize| if sees(case, sequence, pair, row, key) { 0.0 } else { f64::NEG_INFINITY };
            reference.push(attend_masked(&plain, &queries[at..][..dim], head, keys, 0, &bias));
        }
    }
    expect_attention(run, kv, &output, Some(&lse), &reference)
}

fn variants(cases: &[Case]) -> Vec<Case> {
    let (f32, f16, bf16) = (DType::F32, DType::F16, DType::Bf16);
    let dtypes = [(f32, f32, f32), (bf16, bf16, bf16), (f16, f16, f32), (f32, bf16, f32), (bf16, DType::F8E4m3, f32)];
    let expand = |(at, case): (usize, &Case)| {
        let all = if at < 6 { &dtypes[..] } else { &dtypes[at % 4..at % 4 + 2] };
        let with = |&dtypes: &(DType, DType, DType)| Case { dtypes, ..case.clone() };
        all.iter().map(with).collect::<Vec<Case>>()
    };
    cases.iter().enumerate().flat_map(expand).collect()
}

/// Both sources, heads and dims, pairs with windows, chunks and soft caps, and lengths around tiles.
fn cases(kind: Kind) -> Vec<Case> {
    let mut cases = vec![case(kind), Case { cache: true, ..case(kind) }];
    for (window, soft_cap) in [(64, 0.0), (100, 20.0), (0, 5.0)] {
        cases.push(Case { window, soft_cap, ..case(kind) });
        cases.push(Case { window, soft_cap, cache: true, ..case(kind) });
    }
    for (dim, heads) in [(8, (1, 1)), (40, (3, 1)), (128, (8, 1)), (256, (6, 2)), (33, (5, 5)), (512, (2, 1))] {
        cases.push(Case { dim, heads, ..case(kind) });
    }
    for sequences in [vec![(64, 64)], vec![(63, 127), (2, 129), (64, 128)], vec![(1, 1), (2, 2), (33, 65), (64, 1000)]]
    {
        cases.push(Case { sequences: sequences.clone(), ..case(kind) });
        cases.push(Case { sequences, cache: true, window: 64, ..case(kind) });
    }
    cases
}

#[test]
fn bits() {
    let mut all = cases(Kind::Bits);
    for sequences in [vec![(130, 900)], vec![(300, 300), (129, 130)]] {
        for chunk in [0, 70] {
            all.push(Case {
                sequences: sequences.clone(),
                chunk,
                window: 30 * usize::from(chunk > 0),
                ..case(Kind::Bits)
            });
        }
    }
    all.push(Case { on_device: true, cache: true, ..case(Kind::Bits) });
    check("attention_prefill with bits", &variants(&all), test);
}

#[test]
fn trees() {
    let mut all = cases(Kind::Tree);
    for cache in [false, true] {
        all.push(Case { on_device: true, cache, ..case(Kind::Tree) });
        all.push(Case { on_device: true, cache, window: 80, soft_cap: 9.0, ..case(Kind::Tree) });
    }
    check("attention_prefill of trees", &variants(&all), test);
}

#[test]
fn prefixes() {
    let mut all = cases(Kind::Prefix);
    for sequences in [vec![(130, 130), (129, 300)], vec![(300, 300), (5, 700)]] {
        for (window, chunk) in [(0, 0), (1, 0), (90, 0), (0, 70), (30, 70)] {
            all.push(Case { sequences: sequences.clone(), window, chunk, ..case(Kind::Prefix) });
        }
    }
    check("attention_prefill with prefixes", &variants(&all), test);
}

/// Documents of one row of tokens are ragged sequences: no document sees another, with one call and no mask.
#[test]
fn documents() {
    let lengths = [vec![5, 1, 64, 200], vec![129, 0, 300]];
    check("attention_prefill of documents", &lengths, |run, lengths| {
        let config = AttentionConfig::new(AttentionConfig { head_dim: 64, ..AttentionConfig::default() })?;
        let bounds = starts(lengths.iter().copied());
        let tokens = bounds[lengths.len()] as usize;
        let keys = Keys::new(run, &config, DType::Bf16, tokens);
        let (query, queries) = run.normal(DType::Bf16, &[tokens, 1, 64], PLAIN, 1.0)?;
        let key = run.tensor(DType::Bf16, &[tokens, 1, 64], PLAIN, &keys.key)?;
        let value = run.tensor(DType::Bf16, &[tokens, 1, 64], PLAIN, &keys.value)?;
        let output = run.output(DType::Bf16, &[tokens, 1, 64], PLAIN)?;
        let source = KeySource::Tensors { key, value, key_starts: &bounds };
        let op = AttentionPrefill::new(config, query, &bounds, source, output, None)?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        run.stream.synchronize()?;
        // The same by a mask over the whole row: a key is seen where both tokens are of one document.
        let document = |token: usize| bounds.iter().filter(|&&bound| bound as usize <= token).count();
        let reference = (0..tokens).map(|token| {
            let bias = |key: usize| if document(key) == document(token) { 0.0 } else { f64::NEG_INFINITY };
            attend_masked(&config, &queries[token * 64..][..64], 0, &keys, token as i64, &bias)
        });
        expect_attention(run, DType::Bf16, &output, None, &reference.collect::<Vec<_>>())
    });
}

#[test]
fn what_is_refused() {
    check("attention_prefill with masks of rows", &[()], |run, ()| {
        let query = run.tensor(DType::F32, &[70, 1, 8], PLAIN, &[0.5; 560])?;
        let output = run.output(DType::F32, &[70, 1, 8], PLAIN)?;
        let parents = run.integers(&[-1; 70])?;
        let floats = run.tensor(DType::F32, &[70], PLAIN, &[0.0; 70])?;
        let words = run.tensor(DType::I32, &[70, 2], PLAIN, &[0.0; 140])?;
        let slopes = run.tensor(DType::F32, &[1], PLAIN, &[0.5])?;
        let prefill = |starts: [i32; 3], causal: bool, window: usize, chunk: usize| {
            let config = AttentionConfig { head_dim: 8, causal, window, chunk, ..AttentionConfig::default() };
            let source = KeySource::Tensors { key: query, value: query, key_starts: &starts };
            AttentionPrefill::new(AttentionConfig::new(config)?, query, &starts, source, output, None)
        };
        let (halves, uneven) = ([0, 35, 70], [0, 65, 70]);
        let tree = |op: Result<AttentionPrefill>| op?.with_tree(Some(parents));
        let attention = Status::Attention;
        expect_error(tree(prefill(uneven, true, 0, 0)), attention, &["65 query rows", "up to 64"])?;
        expect_error(tree(prefill(halves, false, 0, 0)), attention, &["tree_parents", "bidirectional"])?;
        expect_error(tree(prefill(halves, true, 63, 0)), attention, &["window is 63", "64"])?;
        expect_error(tree(prefill(halves, true, 0, 9)), attention, &["tree_parents", "chunks"])?;
        expect_error(tree(prefill(halves, true, 0, 0)?.with_head_terms(None, Some(slopes))), attention, &["slopes"])?;
        expect_error(
            tree(prefill(halves, true, 0, 0)?.with_prefixes(&[3, 0], &halves)),
            attention,
            &["prefix_lengths"],
        )?;
        let refused = prefill(halves, true, 0, 0)?.with_tree(Some(floats));
        expect_error(refused, Status::InvalidArgument, &["tree_parents", "f32", "i32"])?;
        let refused = prefill(halves, true, 0, 0)?.with_tree(Some(words));
        expect_error(refused, Status::InvalidArgument, &["tree_parents", "[70, 2]", "[70]"])?;
        let refused = prefill(halves, false, 0, 0)?.with_prefixes(&[1, 2], &halves);
        expect_error(refused, attention, &["prefix_lengths", "bidirectional"])?;
        for prefix in [-1, 36] {
            let refused = prefill(halves, true, 0, 0)?.with_prefixes(&[0, prefix], &halves);
            expect_error(refused, Status::InvalidArgument, &["prefix_lengths[1]", &prefix.to_string(), "35 keys"])?;
        }
        let refused = prefill([0, 0, 70], true, 0, 0)?.with_mask(Some(words));
        expect_error(refused, Status::InvalidArgument, &["mask", "[70, 2]", "at least 3 words of 32 keys"])?;
        prefill(halves, true, 0, 0)?.with_mask(Some(words)).map(|_| ()).map_err(Failure::from)
    });
}

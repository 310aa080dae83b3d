//! `rotary_embedding`: rotation of pairs from tensor to tensor, called as an engine calls it.

use crate::compare::FLOATS;
use crate::run::{c_tensor, check, expect_error, rounded, Outcome, Run, PLAIN};
use crate::strided::{places, Placement, ROW_MAJOR, SWAPPED};
use nvbackend::capi::strided::*;
use nvbackend::capi::structs::init;
use nvbackend::error::Status;
use nvbackend::tensor::DType;

#[derive(Debug, Clone, Copy)]
struct Case {
    /// Batch, tokens, heads, elements of a head.
    shape: [usize; 4],
    pairs: u32,
    /// As in the struct: 0 is a default.
    rotary_dim: usize,
    first: usize,
    base: f32,
    position_scale: f32,
    magnitude: f32,
    factors: bool,
    /// Extension and original positions.
    yarn: Option<(f32, u32)>,
    /// Pairs of each section, and the order.
    sections: Option<([u32; 4], u32)>,
    dtypes: [DType; 2],
    placement: Placement,
    in_place: bool,
    last_position: i32,
    /// The dtype of the norm's weights.
    norm: Option<DType>,
    /// Rows of the output, which the tokens go to from the last one downwards, every second of them.
    rows: Option<usize>,
}

const CASE: Case = Case {
    shape: [2, 5, 3, 32],
    pairs: NVB_ROTARY_HALF,
    rotary_dim: 0,
    first: 0,
    base: 0.0,
    position_scale: 0.0,
    magnitude: 0.0,
    factors: false,
    yarn: None,
    sections: None,
    dtypes: [DType::F32; 2],
    placement: ROW_MAJOR,
    in_place: false,
    last_position: 1000,
    norm: None,
    rows: None,
};

/// Angle per position and factor of the elements, as the formula has them.
fn frequency(case: &Case, rotary_dim: usize, pair: usize) -> (f64, f64) {
    let or = |value: f32, default: f64| if value == 0.0 { default } else { value.into() };
    let (base, scale, magnitude) = (or(case.base, 1e4), or(case.position_scale, 1.0), or(case.magnitude, 1.0));
    let (dim, i) = (rotary_dim as f64, pair as f64);
    // Independent sections begin anew, and fall twice as fast.
    let (place, dim) = match case.sections {
        Some((sections, NVB_SECTIONS_INDEPENDENT)) => {
            let place = pair % sections.iter().sum::<u32>() as usize;
            let before: u32 = sections[..axis(case, pair)].iter().sum();
            ((place - before as usize) as f64, dim / 2.0)
        }
        _ => (i, dim),
    };
    let inverse = base.powf(-2.0 * place / dim);
    let Some((extension, positions)) = case.yarn else { return (inverse * scale, magnitude) };
    // The pair that turns so many times in the original context.
    let turns = |count: f64| dim * (f64::from(positions) / (count * std::f64::consts::TAU)).ln() / (2.0 * base.ln());
    let (low, high) = (turns(32.0).floor().max(0.0), turns(1.0).ceil().min(dim - 1.0));
    let mix = f64::from(extension) * (1.0 - ((i - low) / (high - low).max(0.001)).clamp(0.0, 1.0));
    (inverse * (scale * (1.0 - mix) + mix), magnitude * (1.0 + 0.1 * (1.0 / scale).ln()))
}

/// Which of a token's four positions turns the pair: sections one behind the other, or taking turns.
fn axis(case: &Case, pair: usize) -> usize {
    let Some((sections, order)) = case.sections else { return 0 };
    let sections = sections.map(|pairs| pairs as usize);
    let place = pair % sections.iter().sum::<usize>();
    if order == NVB_SECTIONS_INTERLEAVED {
        let turn = place % 3;
        return if place / 3 < sections[turn] { turn } else { 3 };
    }
    let mut all = (0..4).flat_map(|axis| std::iter::repeat_n(axis, sections[axis]));
    all.nth(place).expect("a place within the sections")
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let [_, tokens, _, head_dim] = case.shape;
    let x = rounded(case.dtypes[0], &run.random.normals(case.shape.iter().product(), 1.0));
    let input = case.placement.tensor(run, case.dtypes[0], case.shape, &x)?;
    let axes = if case.sections.is_some() { 4 } else { 1 };
    let mut positions: Vec<i32> =
        (0..axes * tokens).map(|_| run.random.below(case.last_position as usize + 1) as i32).collect();
    if let Some(first) = positions.first_mut() {
        *first = case.last_position;
    }
    let rotary_dim = if case.rotary_dim == 0 { head_dim - case.first } else { case.rotary_dim };
    let factors: Vec<f64> = (0..rotary_dim / 2).map(|i| [1.0, 2.0, 8.0, 1.5][i % 4]).collect();

    let mut args: nvb_rotary_embedding_args = init();
    args.input = c_tensor(&input);
    args.positions = c_tensor(&run.integers(&positions)?);
    if let Some(([time, height, width, extra], order)) = case.sections {
        (args.positions.rank, args.positions.shape) = (2, [4, tokens as i64, 1, 1]);
        args.positions.strides = [0; 4];
        (args.time_pairs, args.height_pairs, args.width_pairs, args.extra_pairs) = (time, height, width, extra);
        args.section_order = order;
    }
    if case.factors {
        args.frequency_factors = c_tensor(&run.tensor(DType::F32, &[factors.len()], PLAIN, &factors)?);
    }
    let mut turned_from = x.clone();
    if let Some(dtype) = case.norm {
        let (weight, values) = run.normal(dtype, &[head_dim], PLAIN, 0.3)?;
        args.norm_weight = c_tensor(&weight);
        args.epsilon = 1e-3;
        for head in turned_from.chunks_mut(head_dim) {
            let mean = head.iter().map(|x| x * x).sum::<f64>() / head_dim as f64;
            let inverse = 1.0 / (mean + f64::from(1e-3f32)).sqrt();
            head.iter_mut().zip(&values).for_each(|(x, weight)| *x *= inverse * weight);
        }
    }
    let x = turned_from;
    // Places of the tokens in the output.
    let place = |token: usize| case.rows.map_or(token, |rows| rows - 1 - 2 * token);
    let mut places_of_tokens: Vec<i32> = (0..tokens).map(|token| place(token) as i32).collect();
    if case.rows.is_some() {
        // The low halves of 64-bit numbers.
        places_of_tokens = places_of_tokens.iter().flat_map(|&row| [row, -1]).collect();
        args.rows = c_tensor(&run.integers(&places_of_tokens)?);
        (args.rows.shape[0], args.rows.strides[0]) = (tokens as i64, 2);
    }
    let [batch, _, heads, _] = case.shape;
    let shape_of_output = [batch, case.rows.unwrap_or(tokens), heads, head_dim];
    let output = match case.in_place {
        true => input,
        false => ROW_MAJOR.output(run, case.dtypes[1], shape_of_output)?,
    };
    run.allow_write(&output);
    args.output = c_tensor(&output);
    (args.pairs, args.rotary_dim, args.first) = (case.pairs, case.rotary_dim as u32, case.first as u32);
    (args.base, args.position_scale, args.magnitude) = (case.base, case.position_scale, case.magnitude);
    if let Some((extension, positions)) = case.yarn {
        (args.extension, args.original_positions) = (extension, positions);
    }
    // SAFETY: a struct with its size set, and tensors of the case's device.
    run.call(|backend, stream| unsafe { nvb_rotary_embedding(backend, &args, stream) })?;

    // An angle is off by its share of two roundings to f32, of which a rotation makes as much of its pair.
    let (mut reference, mut slack) = (Vec::new(), Vec::new());
    let normed = if case.norm.is_some() { 16.0 } else { 0.0 };
    for (number, [_, token, _, element]) in places(case.shape).into_iter().enumerate() {
        let Some(place) = element.checked_sub(case.first).filter(|&place| place < rotary_dim) else {
            reference.push(x[number]);
            slack.push(normed * x[number].abs());
            continue;
        };
        let (pair, is_second, partner) = match case.pairs {
            NVB_ROTARY_HALF => (place % (rotary_dim / 2), place >= rotary_dim / 2, rotary_dim / 2),
            _ => (place / 2, place % 2 == 1, 1),
        };
        let (angle, magnitude) = frequency(case, rotary_dim, pair);
        let factor = if case.factors { factors[pair] } else { 1.0 };
        let angle = f64::from(positions[axis(case, pair) * tokens + token]) * angle / factor;
        let turned = match is_second {
            false => x[number] * angle.cos() - x[number + partner] * angle.sin(),
            true => x[number - partner] * angle.sin() + x[number] * angle.cos(),
        };
        reference.push(turned * magnitude);
        slack.push((angle.abs() * 4.0 + 8.0 + normed) * 4.0 * magnitude);
    }
    let Some(rows) = case.rows else { return run.expect_summed("output", &output, &reference, &slack) };
    // Token by token, because rows that are not named stay as they were.
    let width = heads * head_dim;
    for token in 0..tokens {
        let mut row = output;
        (row.rank, row.shape, row.strides) = (2, [1, width, 1, 1], [width, 1, 1, 1]);
        row.data = row.data.wrapping_byte_add(place(token) * width * output.dtype.size());
        let of = token * width..(token + 1) * width;
        run.expect_summed(&format!("row {} of {rows}", place(token)), &row, &reference[of.clone()], &slack[of])?;
    }
    Ok(())
}

#[test]
fn norms_and_rows() {
    let mut cases = Vec::new();
    for pairs in [NVB_ROTARY_HALF, NVB_ROTARY_INTERLEAVED] {
        for norm in FLOATS.map(Some).into_iter().chain([None]) {
            for (shape, rows) in [([1, 5, 3, 32], 9), ([1, 1, 8, 256], 300), ([1, 3, 1, 80], 5), ([1, 0, 2, 64], 4)] {
                for output in FLOATS {
                    let case = Case { pairs, norm, shape, dtypes: [DType::F32, output], ..CASE };
                    cases.push(Case { rows: Some(rows), ..case });
                    cases.push(case);
                }
            }
            cases.push(Case { pairs, norm, in_place: true, ..CASE });
            cases.push(Case { pairs, norm, shape: [2, 4, 11, 96], rotary_dim: 48, first: 16, magnitude: 0.25, ..CASE });
            cases.push(Case { pairs, norm, placement: SWAPPED, in_place: true, factors: true, ..CASE });
        }
    }
    check("rotary_embedding", &cases, test);
}

#[test]
fn rows_outside_the_output() {
    check("rotary_embedding", &[-1, 4], |run, &row| {
        let input = run.tensor(DType::F32, &[2, 1, 16], PLAIN, &[1.0; 32])?;
        let output = run.tensor(DType::F32, &[4, 1, 16], PLAIN, &[7.0; 64])?;
        run.allow_write(&output);
        let mut args: nvb_rotary_embedding_args = init();
        (args.input, args.output) = (c_tensor(&input), c_tensor(&output));
        args.positions = c_tensor(&run.integers(&[0, 0])?);
        args.rows = c_tensor(&run.integers(&[row, 2])?);
        // SAFETY: as in `test`.
        let result = run.call(|backend, stream| unsafe { nvb_rotary_embedding(backend, &args, stream) });
        let on_cpu = run.device.is_cpu();
        if on_cpu {
            expect_error(result, Status::InvalidArgument, &[&format!("token 0 goes to row {row}"), "4 rows"])?;
        } else {
            result?;
        }
        let left = |place: usize| if place / 16 == 2 && !on_cpu { 1.0 } else { 7.0 };
        let reference: Vec<f64> = (0..64).map(left).collect();
        run.expect("output", &output, &reference)
    });
}

#[derive(Debug, Clone, Copy)]
struct Together {
    /// Tokens, and the heads of queries and of keys.
    tokens: usize,
    heads: [usize; 2],
    head_dim: usize,
    rotary_dim: usize,
    pairs: u32,
    norm: bool,
    /// Keys and values go to rows of this many.
    rows: Option<usize>,
    dtypes: [DType; 2],
    keys: bool,
    values: bool,
}

/// Queries, keys and values in one call are what they are in calls of their own, bit for bit.
#[test]
fn keys_and_values_together() {
    let base = Together {
        tokens: 3,
        heads: [4, 2],
        head_dim: 64,
        rotary_dim: 0,
        pairs: NVB_ROTARY_HALF,
        norm: true,
        rows: Some(7),
        dtypes: [DType::F32, DType::F16],
        keys: true,
        values: true,
    };
    let mut cases = Vec::new();
    for head_dim in [64, 80, 128, 192, 256, 320] {
        for pairs in [NVB_ROTARY_HALF, NVB_ROTARY_INTERLEAVED] {
            for norm in [false, true] {
                cases.push(Together { head_dim, pairs, norm, ..base });
                cases.push(Together { head_dim, pairs, norm, rows: None, tokens: 1, heads: [9, 1], ..base });
            }
        }
        cases.push(Together { head_dim, rotary_dim: 32, ..base });
        cases.push(Together { head_dim, dtypes: [DType::Bf16, DType::F32], heads: [16, 8], ..base });
        cases.push(Together { head_dim, keys: false, ..base });
        cases.push(Together { head_dim, values: false, ..base });
        cases.push(Together { head_dim, tokens: 0, ..base });
    }
    check("rotary_embedding, together", &cases, |run, case| {
        let &Together { tokens, heads, head_dim, dtypes, .. } = case;
        let (wide, narrow) = ([tokens, heads[0], head_dim], [tokens, heads[1], head_dim]);
        let (query, _) = run.normal(dtypes[0], &wide, PLAIN, 1.0)?;
        let (key, _) = run.normal(dtypes[0], &narrow, PLAIN, 1.0)?;
        // Copied elements stay what they are, whatever stands beside them.
        let mut of_values = rounded(dtypes[0], &run.random.normals(narrow.iter().product(), 1.0));
        if let Some(first) = of_values.first_mut() {
            *first = f64::INFINITY;
        }
        let value = run.tensor(dtypes[0], &narrow, PLAIN, &of_values)?;
        let positions: Vec<i32> = (0..tokens).map(|token| 900 - token as i32).collect();
        let (query_weight, _) = run.normal(DType::F32, &[head_dim], PLAIN, 0.3)?;
        let (key_weight, _) = run.normal(DType::F32, &[head_dim], PLAIN, 0.3)?;
        let numbers: Vec<i32> = (0..tokens).map(|token| 2 * token as i32 + 1).collect();
        let rows = case.rows.map(|_| run.integers(&numbers)).transpose()?.map(|rows| c_tensor(&rows));
        let cache = [case.rows.unwrap_or(tokens), heads[1], head_dim];
        let mut common: nvb_rotary_embedding_args = init();
        common.positions = c_tensor(&run.integers(&positions)?);
        (common.pairs, common.rotary_dim, common.base) = (case.pairs, case.rotary_dim as u32, 1e6);
        common.epsilon = 1e-5;

        let zeros = vec![0.0; cache.iter().product()];
        let outputs = |run: &mut Run| -> nvbackend::error::Result<_> {
            let query = run.output(DType::F32, &wide, PLAIN)?;
            let mut caches = Vec::new();
            for _ in 0..2 {
                let cache = run.tensor(dtypes[1], &cache, PLAIN, &zeros)?;
                run.allow_write(&cache);
                caches.push(cache);
            }
            Ok((query, caches[0], caches[1]))
        };
        let (one_query, one_key, one_value) = outputs(run)?;
        let mut args = common;
        (args.input, args.output, args.magnitude) = (c_tensor(&query), c_tensor(&one_query), 0.088_388_35);
        if case.norm {
            args.norm_weight = c_tensor(&query_weight);
        }
        let mut key_args = common;
        (key_args.input, key_args.output, key_args.magnitude) = (c_tensor(&key), c_tensor(&one_key), 1.5);
        if case.norm {
            key_args.norm_weight = c_tensor(&key_weight);
        }
        if let Some(rows) = rows {
            key_args.rows = rows;
        }
        // SAFETY: structs with their sizes set, and tensors of the case's device.
        run.call(|backend, stream| unsafe { nvb_rotary_embedding(backend, &args, stream) })?;
        if case.keys {
            // SAFETY: as above.
            run.call(|backend, stream| unsafe { nvb_rotary_embedding(backend, &key_args, stream) })?;
        }

        let (query_output, key_output, value_output) = outputs(run)?;
        args.output = c_tensor(&query_output);
        if case.keys {
            (args.key_input, args.key_output) = (c_tensor(&key), c_tensor(&key_output));
            (args.key_magnitude, args.key_norm_weight) = (1.5, key_args.norm_weight);
            args.key_rows = key_args.rows;
        }
        if case.values {
            (args.value_input, args.value_output) = (c_tensor(&value), c_tensor(&value_output));
            args.value_rows = key_args.rows;
        }
        // SAFETY: as above.
        run.call(|backend, stream| unsafe { nvb_rotary_embedding(backend, &args, stream) })?;
        run.expect_within("queries", &query_output, &run.read(&one_query)?, 0.0)?;
        run.expect_within("keys", &key_output, &run.read(&one_key)?, 0.0)?;
        let mut copied = run.read(&one_value)?;
        if case.values {
            let width = heads[1] * head_dim;
            for (token, row) in rounded(dtypes[1], &of_values).chunks(width).enumerate() {
                let place = if case.rows.is_some() { numbers[token] as usize } else { token };
                copied[place * width..][..width].copy_from_slice(row);
            }
        }
        run.expect_within("values", &value_output, &copied, 0.0)
    });
}

#[test]
fn pairs_dtypes_and_shapes() {
    let mut cases = Vec::new();
    for pairs in [NVB_ROTARY_HALF, NVB_ROTARY_INTERLEAVED] {
        let case = Case { pairs, ..CASE };
        for input in FLOATS {
            for output in FLOATS {
                cases.push(Case { dtypes: [input, output], ..case });
            }
            cases.push(Case { dtypes: [input; 2], in_place: true, ..case });
        }
        for placement in [ROW_MAJOR, SWAPPED] {
            for in_place in [false, true] {
                cases.push(Case { placement, in_place, rotary_dim: 16, first: 8, ..case });
            }
        }
        for shape in [[1, 1, 1, 2], [1, 0, 3, 32], [1, 1, 8, 512], [3, 7, 1, 80], [1, 300, 2, 64]] {
            cases.push(Case { shape, ..case });
        }
        for (rotary_dim, first) in [(2, 0), (2, 30), (20, 12), (0, 4)] {
            cases.push(Case { rotary_dim, first, ..case });
        }
        for last_position in [0, 1, 131_071] {
            cases.push(Case { last_position, base: 500_000.0, ..case });
        }
    }
    check("rotary_embedding", &cases, test);
}

#[test]
fn factors_and_yarn() {
    let mut cases = Vec::new();
    for pairs in [NVB_ROTARY_HALF, NVB_ROTARY_INTERLEAVED] {
        for factors in [false, true] {
            for (position_scale, magnitude) in [(0.0, 0.0), (0.125, 1.2), (0.25, 0.5)] {
                let case = Case { pairs, factors, position_scale, magnitude, ..CASE };
                cases.push(case);
                for yarn in [(1.0, 128), (0.7, 8192), (1.0, 1), (0.5, 0)] {
                    cases.push(Case { yarn: Some(yarn), shape: [1, 5, 2, 128], ..case });
                }
            }
        }
    }
    check("rotary_embedding", &cases, test);
}

#[test]
fn sections() {
    let mut cases = Vec::new();
    for pairs in [NVB_ROTARY_HALF, NVB_ROTARY_INTERLEAVED] {
        for order in [NVB_SECTIONS_CONSECUTIVE, NVB_SECTIONS_INTERLEAVED, NVB_SECTIONS_INDEPENDENT] {
            for sections in [[4, 6, 6, 0], [2, 3, 1, 1], [1, 0, 0, 0], [0, 0, 0, 16], [8, 8, 0, 0], [40, 30, 20, 10]] {
                for yarn in [None, Some((1.0, 128))] {
                    let scale = if yarn.is_some() { 0.25 } else { 1.0 };
                    let case = Case { pairs, sections: Some((sections, order)), yarn, position_scale: scale, ..CASE };
                    cases.push(case);
                    cases.push(Case { rotary_dim: 16, first: 8, factors: true, ..case });
                }
            }
        }
    }
    check("rotary_embedding", &cases, test);
}

#[test]
fn what_is_refused() {
    check("rotary_embedding", &[()], |run, ()| {
        let input = run.tensor(DType::F32, &[3, 2, 16], PLAIN, &[1.0; 96])?;
        let output = run.output(DType::F32, &[3, 2, 16], PLAIN)?;
        let positions = run.integers(&[0, 1, 2])?;
        let factors = run.tensor(DType::F32, &[8], PLAIN, &[1.0; 8])?;
        let run_weight = run.tensor(DType::F32, &[16], PLAIN, &[1.0; 16])?;
        let four = run.tensor(DType::I32, &[4, 3], PLAIN, &[0.0; 12])?;
        let two = run.integers(&[0, 1])?;
        let batches = run.output(DType::F32, &[2, 3, 2, 16], PLAIN)?;
        let more = run.tensor(DType::F32, &[2, 3, 2, 16], PLAIN, &[1.0; 192])?;
        let mut good: nvb_rotary_embedding_args = init();
        (good.input, good.output, good.positions) = (c_tensor(&input), c_tensor(&output), c_tensor(&positions));
        good.frequency_factors = c_tensor(&factors);
        let refused = |change: &dyn Fn(&mut nvb_rotary_embedding_args), words: &[&str]| {
            let mut args = good;
            change(&mut args);
            // SAFETY: as in `test`.
            let result = run.call(|backend, stream| unsafe { nvb_rotary_embedding(backend, &args, stream) });
            expect_error(result, Status::InvalidArgument, words)
        };
        refused(&|args| args.pairs = 2, &["pairs is 2"])?;
        refused(&|args| args.section_order = 3, &["section_order is 3"])?;
        refused(&|args| args.time_pairs = 4, &["positions", "[4, 3]"])?;
        refused(
            &|args| {
                args.time_pairs = u32::MAX;
                args.positions = c_tensor(&four);
            },
            &["the sections have 4294967295 pairs"],
        )?;
        refused(&|args| args.rotary_dim = 7, &["rotary_dim is 7"])?;
        refused(&|args| args.rotary_dim = 18, &["rotary_dim is 18"])?;
        refused(&|args| (args.rotary_dim, args.first) = (8, 10), &["rotary_dim is 8", "10"])?;
        refused(&|args| args.base = -1.0, &["base is -1"])?;
        refused(&|args| args.position_scale = f32::INFINITY, &["position_scale is inf"])?;
        refused(&|args| args.magnitude = f32::NAN, &["magnitude is NaN"])?;
        refused(&|args| args.extension = -1.0, &["extension is -1"])?;
        refused(&|args| (args.extension, args.base) = (1.0, 1.0), &["base is 1"])?;
        refused(&|args| args.positions.shape[0] = 2, &["positions", "[3]"])?;
        refused(&|args| args.positions.dtype = DType::F32 as u32, &["positions", "i32"])?;
        refused(&|args| args.frequency_factors.shape[0] = 7, &["frequency_factors", "[8]"])?;
        refused(&|args| args.frequency_factors.dtype = DType::F16 as u32, &["frequency_factors", "f32"])?;
        refused(&|args| args.output.shape[0] = 2, &["output", "shape"])?;
        refused(&|args| args.norm_weight = c_tensor(&factors), &["norm_weight", "[16]"])?;
        refused(&|args| args.rows = c_tensor(&factors), &["rows", "i32"])?;
        refused(&|args| args.rows = c_tensor(&two), &["rows", "[3]"])?;
        refused(
            &|args| {
                args.rows = c_tensor(&positions);
                args.output = args.input;
            },
            &["output", "input"],
        )?;
        refused(
            &|args| {
                args.norm_weight = c_tensor(&run_weight);
                args.epsilon = -1.0;
            },
            &["epsilon is -1"],
        )?;
        refused(
            &|args| {
                (args.input, args.output) = (c_tensor(&more), c_tensor(&batches));
                args.rows = c_tensor(&positions);
            },
            &["output"],
        )?;
        refused(&|args| args.key_rows = c_tensor(&positions), &["`key_rows`", "without `key_input`"])?;
        refused(&|args| args.key_norm_weight = c_tensor(&run_weight), &["`key_norm_weight`", "`key_input`"])?;
        refused(&|args| args.value_output = args.output, &["`value_output`", "without `value_input`"])?;
        refused(&|args| args.key_input = args.input, &["key_output"])?;
        refused(&|args| (args.key_input, args.key_output) = (args.input, args.output), &["output"])?;
        refused(&|args| (args.value_input, args.value_output) = (args.input, args.output), &["output"])?;
        refused(
            &|args| {
                (args.key_input, args.key_output) = (c_tensor(&more), c_tensor(&batches));
                args.key_input.shape[1] = 2;
                args.key_output.shape[1] = 2;
            },
            &["keys", "positions"],
        )?;
        refused(
            &|args| {
                (args.value_input, args.value_output) = (c_tensor(&more), c_tensor(&batches));
                args.key_magnitude = f32::NAN;
                (args.key_input, args.key_output) = (args.value_input, args.value_output);
            },
            &["keys", "magnitude is NaN"],
        )?;
        refused(&|args| args.output.strides = [0, 16, 1, 0], &["output", "overlap"])?;
        refused(&|args| args.positions.data = output.data, &["positions", "output"])?;
        refused(&|args| args.output.data = input.data.wrapping_byte_add(4), &["output", "input"])
    });
}

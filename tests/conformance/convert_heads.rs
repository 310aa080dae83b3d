//! `convert_heads`: heads rotated and rounded to FP8, called as an engine calls it.

use crate::compare::FLOATS;
use crate::run::{c_tensor, check, expect_error, rounded, Failure, Outcome, Run, PLAIN};
use crate::strided::{Placement, PLACEMENTS, ROW_MAJOR};
use nvbackend::capi::convert_heads::*;
use nvbackend::capi::structs::init;
use nvbackend::error::Status;
use nvbackend::tensor::fp8::{E4M3_MAX, E5M2_MAX};
use nvbackend::tensor::DType;

const E4M3: DType = DType::F8E4m3;
const E5M2: DType = DType::F8E5m2;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Scales {
    None,
    /// So many, read.
    Read(usize),
    Written(usize),
}

#[derive(Debug, Clone, Copy)]
struct Case {
    /// [.., tokens, heads, head_dim]
    shape: [usize; 4],
    /// Of input and output.
    dtypes: [DType; 2],
    placements: [Placement; 2],
    in_place: bool,
    scales: Scales,
    seed: Option<u64>,
    magnitude: f64,
    /// Put into one place.
    special: Option<f64>,
}

const CASE: Case = Case {
    shape: [2, 5, 4, 64],
    dtypes: [DType::F32; 2],
    placements: [ROW_MAJOR; 2],
    in_place: false,
    scales: Scales::None,
    seed: Some(17),
    magnitude: 1.0,
    special: None,
};

/// The n-th number of SplitMix64.
fn split_mix(seed: u64, n: u64) -> u64 {
    let mut z = seed.wrapping_add((n + 1).wrapping_mul(0x9e3779b97f4a7c15));
    z = (z ^ z >> 30).wrapping_mul(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d049bb133111eb);
    z ^ z >> 31
}

/// By the definition of the Hadamard matrix: the sign of entry (i, j) is the parity of i & j.
fn rotated(head: &[f64], seed: u64) -> Vec<f64> {
    let block = 1 << head.len().trailing_zeros();
    let sign = |i: usize| if split_mix(seed, i as u64 / 64) >> (i % 64) & 1 == 1 { -1.0 } else { 1.0 };
    let entry = |i: usize, j: usize| if (i & j).count_ones() % 2 == 1 { -1.0 } else { 1.0 };
    let of_block = |first: usize, i: usize| -> f64 {
        (0..block).map(|j| entry(i, j) * sign(first + j) * head[first + j]).sum::<f64>() / (block as f64).sqrt()
    };
    (0..head.len()).map(|at| of_block(at / block * block, at % block)).collect()
}

/// Rounds to FP8 of a scale, and widens again. The quotient is f32, as the header says: of BF16 elements many lie halfway.
fn through_fp8(dtype: DType, value: f64, scale: f64) -> f64 {
    let quotient = if scale == 0.0 { 0.0 } else { value as f32 / scale as f32 };
    rounded(dtype, &[f64::from(quotient)])[0] * scale
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let [.., heads, dim] = case.shape;
    let mut x = run.random.normals(case.shape.iter().product(), case.magnitude);
    if let Some(special) = case.special {
        let place = x.len() / 2;
        x[place] = special;
    }
    let x = rounded(case.dtypes[0], &x);
    let input = case.placements[0].tensor(run, case.dtypes[0], case.shape, &x)?;
    let output = match case.in_place {
        true => input,
        false => case.placements[1].output(run, case.dtypes[1], case.shape)?,
    };
    run.allow_write(&output);
    let mut args: nvb_convert_heads_args = init();
    (args.input, args.output) = (c_tensor(&input), c_tensor(&output));
    (args.rotate, args.seed) = (case.seed.is_some().into(), case.seed.unwrap_or(0));
    let given: Vec<f64> = [0.5, 2.0, 0.0078125, 1.0, 0.3].iter().map(|&scale| f64::from(scale as f32)).collect();
    let scales = match case.scales {
        Scales::None => None,
        Scales::Read(count) => Some(run.tensor(DType::F32, &[count], PLAIN, &given[..count])?),
        Scales::Written(count) => Some(run.output(DType::F32, &[count], PLAIN)?),
    };
    if let Some(scales) = &scales {
        args.scales = c_tensor(scales);
    }
    args.write_scales = matches!(case.scales, Scales::Written(_)).into();
    // SAFETY: a struct with its size set, and tensors of the case's device.
    run.call(|backend, stream| unsafe { nvb_convert_heads(backend, &args, stream) })?;

    let turned: Vec<f64> = match case.seed {
        Some(seed) => x.chunks(dim.max(1)).flat_map(|head| rotated(head, seed)).collect(),
        None => x,
    };
    if !case.dtypes[1].is_fp8() {
        return run.expect("output", &output, &turned);
    }
    let scales_now = scales.as_ref().map(|scales| run.read(scales)).transpose()?;
    if let Scales::Written(count) = case.scales {
        let largest = f64::from(if case.dtypes[1] == E4M3 { E4M3_MAX } else { E5M2_MAX });
        let mut expected = vec![0f64; count];
        for (row, head) in turned.chunks(dim.max(1)).enumerate() {
            let scale = &mut expected[row % heads / (heads / count)];
            for value in head {
                // Not `max`, which would lose a NaN.
                let of_value = value.abs() / largest;
                if of_value.is_nan() || of_value > *scale {
                    *scale = of_value;
                }
            }
        }
        run.expect("scales", &scales.expect("they are written"), &expected)?;
    }
    // What the device stored, by its scales, beside the rounded reference: sums in f32 may round to the neighbour, so each is within
    // a step of the unrounded quotient, and most are the same.
    let out = run.read(&output)?;
    let scale_of = |at: usize| {
        let scales = scales_now.as_ref();
        scales.map_or(1.0, |scales| scales[at / dim % heads / (heads / scales.len())])
    };
    let mut other = 0;
    for (at, (&out, &value)) in out.iter().zip(&turned).enumerate() {
        let scale = scale_of(at);
        let expected = through_fp8(case.dtypes[1], value, scale);
        let out = out * scale;
        if out == expected || out.is_nan() && expected.is_nan() {
            continue;
        }
        other += 1;
        let mantissa = if case.dtypes[1] == E4M3 { 3 } else { 2 };
        let step = expected.abs().max(out.abs()) * 2f64.powi(-mantissa) + scale * 2f64.powi(-9);
        if (out - expected).abs() > step || out.is_nan() != expected.is_nan() {
            return Err(Failure::from(format!("element {at} is {out:e}; {expected:e} is expected")));
        }
    }
    if other > 2 + out.len() / 1000 {
        return Err(Failure::from(format!("{other} of {} elements are rounded otherwise", out.len())));
    }
    Ok(())
}

#[test]
fn rotations() {
    let mut cases = Vec::new();
    for input in PLACEMENTS {
        for output in PLACEMENTS {
            cases.push(Case { placements: [input, output], ..CASE });
        }
        cases.push(Case { placements: [input; 2], in_place: true, ..CASE });
    }
    for input in FLOATS {
        for output in FLOATS {
            cases.push(Case { dtypes: [input, output], ..CASE });
            cases.push(Case { dtypes: [input, output], seed: None, ..CASE });
        }
        cases.push(Case { dtypes: [input; 2], in_place: true, ..CASE });
    }
    for dim in [8, 16, 24, 40, 80, 96, 128, 192, 256, 264, 320, 512, 576] {
        for dtype in [DType::F32, DType::Bf16] {
            cases.push(Case { shape: [1, 3, 2, dim], dtypes: [dtype; 2], seed: Some(dim as u64), ..CASE });
        }
        cases.push(Case { shape: [1, 3, 2, dim], dtypes: [DType::Bf16, E4M3], scales: Scales::Written(2), ..CASE });
    }
    for shape in [[0, 3, 4, 16], [2, 0, 4, 16], [2, 3, 0, 16], [1, 1, 1, 8], [1, 1, 3000, 8], [1, 3000, 1, 8]] {
        cases.push(Case { shape, ..CASE });
    }
    for seed in [0, 1, u64::MAX] {
        cases.push(Case { seed: Some(seed), ..CASE });
    }
    for special in [f64::NAN, f64::INFINITY] {
        cases.push(Case { special: Some(special), seed: None, ..CASE });
    }
    check("convert_heads to floats", &cases, test);
}

#[test]
fn fp8() {
    let mut cases = Vec::new();
    for dtype in [E4M3, E5M2] {
        for input in FLOATS {
            for scales in [Scales::None, Scales::Read(1), Scales::Read(4), Scales::Written(1), Scales::Written(2)] {
                for seed in [None, Some(3)] {
                    cases.push(Case { dtypes: [input, dtype], scales, seed, ..CASE });
                }
            }
        }
        for placement in PLACEMENTS {
            let placements = [placement, PLACEMENTS[2]];
            cases.push(Case { dtypes: [DType::F16, dtype], placements, scales: Scales::Written(4), ..CASE });
        }
        for magnitude in [0.0, 1e-30, 1e-3, 1e4, 1e30] {
            for scales in [Scales::None, Scales::Read(2), Scales::Written(4)] {
                cases.push(Case { dtypes: [DType::F32, dtype], magnitude, scales, ..CASE });
            }
        }
        for special in [f64::NAN, 0.0, 1e6] {
            cases.push(Case {
                dtypes: [DType::F32, dtype],
                special: Some(special),
                scales: Scales::Written(2),
                ..CASE
            });
        }
        for shape in [[0, 3, 4, 16], [1, 700, 4, 128], [1, 1, 1, 8]] {
            for count in [1, 4] {
                let scales = Scales::Written(count.min(shape[2]));
                cases.push(Case { shape, dtypes: [DType::Bf16, dtype], scales, ..CASE });
            }
        }
    }
    check("convert_heads to FP8", &cases, test);
}

#[test]
fn what_is_refused() {
    check("convert_heads", &[()], |run, ()| {
        let input = run.tensor(DType::F32, &[3, 2, 16], PLAIN, &[1.0; 96])?;
        let output = run.output(E4M3, &[3, 2, 16], PLAIN)?;
        let floats = run.output(DType::F32, &[3, 2, 16], PLAIN)?;
        let scales = run.output(DType::F32, &[3], PLAIN)?;
        let mut good: nvb_convert_heads_args = init();
        (good.input, good.output, good.scales) = (c_tensor(&input), c_tensor(&output), c_tensor(&scales));
        good.scales.shape[0] = 2;
        let refused = |change: &dyn Fn(&mut nvb_convert_heads_args), words: &[&str]| {
            let mut args = good;
            change(&mut args);
            // SAFETY: as in `test`.
            let result = run.call(|backend, stream| unsafe { nvb_convert_heads(backend, &args, stream) });
            expect_error(result, Status::InvalidArgument, words)
        };
        refused(&|args| args.rotate = 2, &["rotate is 2"])?;
        refused(&|args| args.write_scales = 2, &["write_scales is 2"])?;
        refused(
            &|args| (args.write_scales, args.scales) = (1, init::<nvb_convert_heads_args>().scales),
            &["`scales` is missing"],
        )?;
        refused(&|args| args.output = c_tensor(&floats), &["`scales`", "f32"])?;
        refused(&|args| args.scales.shape[0] = 3, &["3 entries", "2 heads"])?;
        refused(&|args| args.scales.shape[0] = 0, &["0 entries"])?;
        refused(&|args| args.scales.dtype = DType::I32 as u32, &["`scales`", "i32"])?;
        refused(&|args| args.input.dtype = DType::I32 as u32, &["`input`", "i32"])?;
        refused(&|args| args.input.dtype = E4M3 as u32, &["`input`", "fp8"])?;
        refused(&|args| args.output.dtype = DType::I32 as u32, &["`output`", "i32"])?;
        refused(&|args| args.output.shape[0] = 2, &["output", "shape"])?;
        refused(&|args| args.output.strides = [0, 16, 1, 0], &["output", "overlap"])?;
        refused(&|args| args.output.data = input.data, &["output", "input"])?;
        refused(&|args| args.output.data = scales.data, &["output", "scales"])?;
        refused(&|args| (args.input.shape[2], args.output.shape[2]) = (12, 12), &["head_dim is 12", "multiple of 8"])?;
        refused(&|args| (args.input.rank, args.output.rank) = (1, 1), &["rank 1"])
    })
}

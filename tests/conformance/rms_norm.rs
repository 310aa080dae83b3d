//! `rms_norm`: b = post_weight ? norm(input, post_weight) : input; s = residual ? residual + b : b;
//! residual_output = s; output = norm(s, weight); norm(x, w) = x · rsqrt(mean(x²) + ε) · (offset + w).

use crate::compare::{compare, round, FLOATS};
use crate::run::{check, rounded, Layout, Outcome, Run, LAYOUTS, PLAIN, UNALIGNED};
use nvbackend::operation::rms_norm::RmsNorm;
use nvbackend::operation::Operation;
use nvbackend::tensor::{DType, Tensor};

#[derive(Debug, Clone, Copy)]
struct Case {
    rows: usize,
    columns: usize,
    input: DType,
    residual: DType,
    weight: DType,
    output: DType,
    /// Which of the optional tensors are given.
    parts: Parts,
    in_place: bool,
    /// The sum takes the place of the input, and the output that of the residual.
    crossed: bool,
    layout: Layout,
    epsilon: f32,
    offset: f32,
    magnitude: f64,
    /// Put into the first row.
    special: Option<f64>,
}

#[derive(Debug, Clone, Copy)]
struct Parts {
    post_weight: bool,
    residual: bool,
    residual_output: bool,
    weight: bool,
    output: bool,
}

const PARTS: Parts = Parts { post_weight: false, residual: false, residual_output: false, weight: true, output: true };
/// Gemma 3: the branch is normalised, joins the residual stream, and the next norm follows.
const FUSED: Parts = Parts { post_weight: true, residual: true, residual_output: true, weight: true, output: true };

const CASE: Case = Case {
    rows: 3,
    columns: 640,
    input: DType::F32,
    residual: DType::F32,
    weight: DType::Bf16,
    output: DType::F32,
    parts: PARTS,
    in_place: false,
    crossed: false,
    layout: PLAIN,
    epsilon: 1e-6,
    offset: 1.0,
    magnitude: 1.0,
    special: None,
};

fn norm(x: &[f64], weight: Option<&[f64]>, case: &Case) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + case.epsilon as f64).sqrt();
    let factor = |i: usize| weight.map_or(1.0, |weight| case.offset as f64 + weight[i]);
    x.iter().enumerate().map(|(i, x)| x * scale * factor(i)).collect()
}

/// Roundings of which so much shows in norm(s), where s was summed up from terms of these magnitudes: a short row that
/// cancels is scaled up again with its errors, each element's own and that of the row's length.
fn terms_of_norm(s: &[f64], magnitudes: &[f64], weight: Option<&[f64]>, case: &Case) -> Vec<f64> {
    let square = s.iter().map(|s| s * s).sum::<f64>() + s.len() as f64 * case.epsilon as f64;
    let turned = s.iter().zip(magnitudes).map(|(s, magnitude)| (s * magnitude).abs()).sum::<f64>() / square;
    let moved: Vec<f64> = s.iter().zip(magnitudes).map(|(s, magnitude)| magnitude + s.abs() * turned).collect();
    let scaled = moved.iter().enumerate().map(|(i, moved)| {
        let factor = weight.map_or(1.0, |weight| case.offset as f64 + weight[i]);
        (moved * factor).abs() / (square / s.len() as f64).sqrt()
    });
    // The normalised branch comes with some roundings of its own. What is not a number is compared without slack.
    scaled.map(|term| if term.is_finite() { 8.0 * term } else { 0.0 }).collect()
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let (shape, vector, layout) = ([case.rows, case.columns], [case.columns], case.layout);
    let mut x = rounded(case.input, &run.random.normals(case.rows * case.columns, case.magnitude));
    if let Some(special) = case.special {
        x[case.columns / 2] = special;
    }
    let input = run.tensor(case.input, &shape, layout, &x)?;
    let given = |yes: bool, made: (Tensor, Vec<f64>)| if yes { (Some(made.0), Some(made.1)) } else { (None, None) };
    let parts = case.parts;
    let (post_weight, post_values) = given(parts.post_weight, run.normal(case.weight, &vector, layout, 0.3)?);
    let (weight, weight_values) = given(parts.weight, run.normal(case.weight, &vector, layout, 0.3)?);
    let (residual, residual_values) = given(parts.residual, run.normal(case.residual, &shape, layout, case.magnitude)?);
    let (sum_place, output_place) = match case.crossed {
        true => (Some(input), residual),
        false => {
            (residual.filter(|_| case.in_place), Some(input).filter(|_| case.in_place && case.input == case.output))
        }
    };
    let residual_output = match (parts.residual_output, sum_place) {
        (false, _) => None,
        (true, Some(place)) => {
            run.allow_write(&place);
            Some(place)
        }
        (true, None) => Some(run.output(case.residual, &shape, layout)?),
    };
    let output = match (parts.output, output_place) {
        (false, _) => None,
        (true, Some(place)) => {
            run.allow_write(&place);
            Some(place)
        }
        (true, None) => Some(run.output(case.output, &shape, layout)?),
    };
    let (mut sums, mut normed, mut terms) = (Vec::new(), Vec::new(), Vec::new());
    for (row, x) in x.chunks(case.columns.max(1)).take(case.rows).enumerate() {
        let mut s = post_values.as_ref().map_or(x.to_vec(), |post| norm(x, Some(post), case));
        if let Some(residual) = &residual_values {
            let residual = &residual[row * case.columns..][..case.columns];
            let magnitudes: Vec<f64> = s.iter().zip(residual).map(|(s, residual)| s.abs() + residual.abs()).collect();
            s.iter_mut().zip(residual).for_each(|(s, residual)| *s += residual);
            terms.extend(terms_of_norm(&s, &magnitudes, weight_values.as_deref(), case));
        }
        normed.extend(norm(&s, weight_values.as_deref(), case));
        sums.extend(s);
    }
    let (epsilon, weight_offset, quantized_output) = (case.epsilon, case.offset, None);
    let call = RmsNorm {
        input,
        post_weight,
        residual,
        residual_output,
        weight,
        output,
        quantized_output,
        epsilon,
        weight_offset,
    };
    run.executor().run(&Operation::from(call.validated()?), run.stream.raw())?;
    if let Some(output) = output {
        run.expect_summed("output", &output, &normed, &terms)?;
    }
    if let Some(residual_output) = residual_output {
        run.expect("residual_output", &residual_output, &sums)?;
    }
    Ok(())
}

#[test]
fn every_form() {
    let mut cases = Vec::new();
    for bits in 0..32 {
        let bit = |i: u32| bits >> i & 1 == 1;
        let parts =
            Parts { post_weight: bit(0), residual: bit(1), residual_output: bit(2), weight: bit(3), output: bit(4) };
        // Some output, and no weight without the output that it scales.
        if parts.output || parts.residual_output && !parts.weight {
            for (in_place, offset, layout) in [(false, 0.0, PLAIN), (true, 1.0, UNALIGNED), (false, 1.0, UNALIGNED)] {
                cases.push(Case { parts, in_place, offset, layout, columns: 65, ..CASE });
            }
        }
    }
    check("rms_norm", &cases, test);
}

#[test]
fn dtypes() {
    let mut cases = Vec::new();
    for input in FLOATS {
        for residual in FLOATS {
            for output in FLOATS {
                for weight in FLOATS {
                    cases.push(Case { input, residual, weight, output, parts: FUSED, columns: 96, ..CASE });
                }
                cases.push(Case { input, residual, output, parts: FUSED, in_place: true, columns: 257, ..CASE });
            }
        }
    }
    check("rms_norm", &cases, test);
}

#[test]
fn sizes() {
    let mut cases = Vec::new();
    for columns in [1, 2, 3, 7, 8, 31, 33, 127, 128, 256, 1000, 1152, 2560, 3001, 4096, 5376, 8192, 16384, 65535, 65536]
    {
        for (parts, layout) in LAYOUTS.iter().flat_map(|&layout| [(PARTS, layout), (FUSED, layout)]) {
            for dtype in [DType::F32, DType::Bf16] {
                cases.push(Case { columns, parts, layout, input: dtype, residual: dtype, output: dtype, ..CASE });
            }
        }
    }
    // A head's elements as rows: q/k norm.
    for (rows, columns) in [(0, 64), (1, 64), (2, 1), (5, 40), (257, 64), (1000, 128), (33, 256), (70_000, 4)] {
        cases.push(Case { rows, columns, ..CASE });
        cases.push(Case { rows, columns, parts: FUSED, in_place: true, ..CASE });
        cases.push(Case { rows, columns, parts: FUSED, crossed: true, ..CASE });
    }
    for columns in [1000, 8192, 16385, 65_536] {
        for dtype in FLOATS {
            for parts in [FUSED, Parts { post_weight: false, ..FUSED }] {
                cases.push(Case {
                    columns,
                    parts,
                    crossed: true,
                    input: dtype,
                    residual: dtype,
                    output: dtype,
                    ..CASE
                });
            }
        }
    }
    check("rms_norm", &cases, test);
}

/// Values that are hard to normalise: all of one magnitude, or one of them special.
pub struct Extreme {
    pub magnitude: f64,
    pub special: Option<f64>,
    pub epsilon: f32,
    pub dtype: DType,
    pub columns: usize,
}

pub fn extremes() -> Vec<Extreme> {
    let plain = |magnitude| Extreme { magnitude, special: None, epsilon: 1e-6, dtype: DType::F32, columns: 640 };
    let mut extremes = Vec::new();
    for magnitude in [0.0, 1e-30, 1e-12, 1e-3, 1e3, 1e15] {
        extremes.extend([1e-6, 1e-5, 1e-20].map(|epsilon| Extreme { epsilon, ..plain(magnitude) }));
    }
    extremes.extend([1e-7, 1e-4, 100.0, 1e4].map(|magnitude| Extreme { dtype: DType::F16, ..plain(magnitude) }));
    for special in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let of = |columns| Extreme { special: Some(special), columns, ..plain(1.0) };
        extremes.extend([5, 640, 9000, 20_001].map(of));
    }
    extremes
}

#[test]
fn magnitudes() {
    let mut cases = Vec::new();
    for Extreme { magnitude, special, epsilon, dtype, columns } in extremes() {
        for parts in [PARTS, FUSED] {
            let case = Case { magnitude, special, epsilon, columns, parts, ..CASE };
            cases.push(Case { input: dtype, residual: dtype, output: dtype, ..case });
        }
    }
    check("rms_norm", &cases, test);
}

/// A row of heads is normalised head by head through a view of the same memory.
#[test]
fn heads_of_a_fused_row() {
    let cases = FLOATS.map(|dtype| [24, 64].map(|dim| (dtype, dim))).concat();
    check("rms_norm of heads", &cases, |run, &(dtype, dim)| {
        let (tokens, heads) = (5, 3);
        let (x, values) = run.normal(dtype, &[tokens, heads, dim], PLAIN, 1.0)?;
        let (weight, weight_values) = run.normal(DType::F32, &[dim], PLAIN, 1.0)?;
        run.allow_write(&x);
        let call = RmsNorm {
            input: x,
            post_weight: None,
            residual: None,
            residual_output: None,
            weight: Some(weight),
            output: Some(x),
            quantized_output: None,
            epsilon: 1e-6,
            weight_offset: 0.0,
        };
        run.executor().run(&Operation::from(call.validated()?), run.stream.raw())?;
        let case = Case { offset: 0.0, ..CASE };
        let reference: Vec<f64> = values.chunks(dim).flat_map(|head| norm(head, Some(&weight_values), &case)).collect();
        run.expect("output", &x, &reference)
    });
}

/// s enters the second norm unrounded, though residual_output is rounded: a bound that one BF16 rounding would break.
#[test]
fn the_sum_is_not_rounded_between_the_norms() {
    let cases = [257, 640].map(|columns| Case { columns, residual: DType::Bf16, parts: FUSED, ..CASE });
    check("rms_norm", &cases, test);
    assert!(compare(DType::F32, &[round(DType::Bf16, 1.003)], &[1.003], 1e-5, &[]).is_err());
}

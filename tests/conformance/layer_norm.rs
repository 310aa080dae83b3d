//! `layer_norm`: s = residual + input; output = (s − mean) · rsqrt(variance + ε) · weight + bias.

use crate::compare::FLOATS;
use crate::random::Random;
use crate::rms_norm::{extremes, Extreme};
use crate::run::{check, Layout, Outcome, Run, LAYOUTS, PLAIN, UNALIGNED};
use nvbackend::operation::layer_norm::LayerNorm;
use nvbackend::operation::Operation;
use nvbackend::tensor::DType;

#[derive(Debug, Clone, Copy)]
struct Case {
    rows: usize,
    columns: usize,
    /// The dtypes of input, residual, weight and output.
    dtypes: [DType; 4],
    layout: Layout,
    residual: bool,
    residual_output: bool,
    weight: bool,
    bias: bool,
    output: bool,
    /// residual_output is residual, and output input where their dtypes agree.
    in_place: bool,
    epsilon: f32,
    /// The input's standard deviation, and that of the residual.
    magnitude: f64,
    /// What all elements of the input have in common.
    mean: f64,
    /// Put into the first row.
    special: Option<f64>,
}

/// Everything at once.
const CASE: Case = Case {
    rows: 3,
    columns: 640,
    dtypes: [DType::F32; 4],
    layout: PLAIN,
    residual: true,
    residual_output: true,
    weight: true,
    bias: true,
    output: true,
    in_place: false,
    epsilon: 1e-5,
    magnitude: 1.0,
    mean: 0.0,
    special: None,
};

fn test(run: &mut Run, case: &Case) -> Outcome {
    let &Case { rows, columns, dtypes: [input_dtype, residual_dtype, weight_dtype, output_dtype], layout, .. } = case;
    let shape = [rows, columns];
    let normals = run.random.normals(rows * columns, case.magnitude);
    let mut x = crate::run::rounded(input_dtype, &normals.iter().map(|x| x + case.mean).collect::<Vec<f64>>());
    if let Some(special) = case.special {
        x[columns / 2] = special;
    }
    let input = run.tensor(input_dtype, &shape, layout, &x)?;
    let residual = if case.residual { Some(run.normal(residual_dtype, &shape, layout, case.magnitude)?) } else { None };
    let weight = if case.weight { Some(run.normal(weight_dtype, &[columns], layout, 1.0)?) } else { None };
    let bias = if case.bias { Some(run.normal(weight_dtype, &[columns], layout, 1.0)?) } else { None };
    let residual_output = match (case.residual_output, residual.as_ref().filter(|_| case.in_place)) {
        (false, _) => None,
        (true, Some(&(residual, _))) => {
            run.allow_write(&residual);
            Some(residual)
        }
        (true, None) => Some(run.output(residual_dtype, &shape, layout)?),
    };
    let output = match (case.output, case.in_place && input_dtype == output_dtype) {
        (false, _) => None,
        (true, true) => {
            run.allow_write(&input);
            Some(input)
        }
        (true, false) => Some(run.output(output_dtype, &shape, layout)?),
    };

    let sums: Vec<f64> =
        x.iter().enumerate().map(|(i, x)| x + residual.as_ref().map_or(0.0, |(_, residual)| residual[i])).collect();
    let (mut reference, mut slack) = (Vec::new(), Vec::new());
    for row in sums.chunks(columns) {
        let mean = row.iter().sum::<f64>() / columns as f64;
        let variance = row.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / columns as f64;
        let inverse = 1.0 / (variance + f64::from(case.epsilon)).sqrt();
        for (i, s) in row.iter().enumerate() {
            let weight = weight.as_ref().map_or(1.0, |(_, weight)| weight[i]);
            let bias = bias.as_ref().map_or(0.0, |(_, bias)| bias[i]);
            reference.push((s - mean) * inverse * weight + bias);
            // s and its mean cancel, and so do the norm and the bias.
            let of_norm = 8.0 * (s.abs() + mean.abs()) * inverse * weight.abs();
            slack.push(if of_norm.is_finite() { of_norm + 2.0 * bias.abs() } else { 0.0 });
        }
    }
    let tensor = |pair: &Option<(nvbackend::tensor::Tensor, Vec<f64>)>| pair.as_ref().map(|(tensor, _)| *tensor);
    let call = LayerNorm {
        input,
        residual: tensor(&residual),
        residual_output,
        weight: tensor(&weight),
        bias: tensor(&bias),
        output,
        epsilon: case.epsilon,
    };
    run.executor().run(&Operation::from(call.validated()?), run.stream.raw())?;
    if let Some(residual_output) = residual_output {
        run.expect("residual_output", &residual_output, &sums)?;
    }
    match output {
        Some(output) => run.expect_summed("output", &output, &reference, &slack),
        None => Ok(()),
    }
}

#[test]
fn sizes() {
    let mut random = Random::new("layer norm cases");
    let mut cases = Vec::new();
    for columns in [1, 5, 31, 64, 100, 256, 257, 640, 1000, 1536, 4096, 8200, 16_384, 16_392, 20_001, 65_536] {
        for rows in [0, 1, 3, 140] {
            if rows * columns > 1 << 20 {
                continue;
            }
            let dtypes = [(); 4].map(|()| random.choose(&FLOATS));
            let output = random.choose(&[true, true, true, false]);
            cases.push(Case {
                rows,
                columns,
                dtypes,
                layout: random.choose(&LAYOUTS),
                residual: random.flip(),
                residual_output: !output || random.flip(),
                weight: random.flip(),
                bias: random.flip(),
                output,
                mean: random.choose(&[0.0, 0.0, 30.0]),
                ..CASE
            });
        }
    }
    check("layer norm", &cases, test);
}

#[test]
fn every_form() {
    let mut cases = Vec::new();
    for bits in 0..32 {
        let bit = |i: u32| bits >> i & 1 == 1;
        let [residual, residual_output, weight, bias, output] = [bit(0), bit(1), bit(2), bit(3), bit(4)];
        // Some output, and no weight without the output that it scales.
        if output || residual_output && !weight && !bias {
            for (in_place, layout) in [(false, PLAIN), (true, UNALIGNED), (false, UNALIGNED)] {
                let form = Case { residual, residual_output, weight, bias, output, ..CASE };
                cases.push(Case { in_place, layout, columns: 65, ..form });
            }
        }
    }
    check("layer norm", &cases, test);
}

#[test]
fn dtypes() {
    let mut cases = Vec::new();
    for input in FLOATS {
        for residual in FLOATS {
            for output in FLOATS {
                for weight in FLOATS {
                    cases.push(Case { dtypes: [input, residual, weight, output], columns: 96, ..CASE });
                }
                let dtypes = [input, residual, DType::Bf16, output];
                cases.push(Case { dtypes, in_place: true, columns: 257, ..CASE });
            }
        }
    }
    check("layer norm", &cases, test);
}

/// The widths at which kernels change, in every layout, and in place where a row is read more than once.
#[test]
fn layouts() {
    let mut cases = Vec::new();
    for columns in [1, 2, 7, 8, 33, 127, 256, 1152, 3001, 5376, 8192, 8193, 16_384, 65_535, 65_536] {
        for layout in LAYOUTS {
            for dtype in [DType::F32, DType::Bf16] {
                let case = Case { columns, layout, dtypes: [dtype; 4], ..CASE };
                cases.extend([case, Case { in_place: true, ..case }]);
            }
        }
    }
    for (rows, columns) in [(0, 64), (1, 64), (2, 1), (257, 64), (1000, 128), (70_000, 4)] {
        cases.push(Case { rows, columns, ..CASE });
        cases.push(Case { rows, columns, in_place: true, ..CASE });
    }
    check("layer norm", &cases, test);
}

#[test]
fn magnitudes() {
    let mut cases = Vec::new();
    for Extreme { magnitude, special, epsilon, dtype, columns } in extremes() {
        for residual in [false, true] {
            cases.push(Case { magnitude, special, epsilon, columns, residual, dtypes: [dtype; 4], ..CASE });
        }
    }
    check("layer norm", &cases, test);
}

/// s is normalised unrounded, though residual_output is rounded: a bound that one BF16 rounding would break.
#[test]
fn the_sum_is_not_rounded_before_the_norm() {
    let dtypes = [DType::F32, DType::Bf16, DType::F32, DType::F32];
    let cases = [257, 640, 20_001].map(|columns| Case { columns, dtypes, ..CASE });
    check("layer norm", &cases, test);
}

/// Terms that are alike are all rounded to one side, so that a sum in f32 over a long row would drift.
#[test]
fn long_rows_far_from_zero() {
    let cases = [16_384, 65_536].map(|columns| Case { rows: 12, columns, mean: 30.0, residual: false, ..CASE });
    check("layer norm", &cases, test);
}

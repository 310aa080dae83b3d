//! `layer_norm`: s = residual + input; output = (s − mean) · rsqrt(variance + ε) · weight + bias.

use crate::compare::FLOATS;
use crate::random::Random;
use crate::run::{check, Layout, Outcome, Run, LAYOUTS};
use nvbackend::ops::layer_norm::{LayerNorm, LayerNormTensors};
use nvbackend::tensor::DType;

const EPSILON: f32 = 1e-5;

#[derive(Debug, Clone, Copy)]
struct Case {
    rows: usize,
    columns: usize,
    /// Of input, residual, weight and output.
    dtypes: [DType; 4],
    layout: Layout,
    residual: bool,
    residual_output: bool,
    weight: bool,
    bias: bool,
    output: bool,
    /// What all elements of a row have in common, beside a variance of 1.
    mean: f64,
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let &Case { rows, columns, dtypes: [input_dtype, residual_dtype, weight_dtype, output_dtype], layout, .. } = case;
    let shape = [rows, columns];
    let values: Vec<f64> = run.random.normals(rows * columns, 1.0).iter().map(|x| x + case.mean).collect();
    let x = crate::run::rounded(input_dtype, &values);
    let input = run.tensor(input_dtype, &shape, layout, &x)?;
    let residual = if case.residual { Some(run.normal(residual_dtype, &shape, layout, 1.0)?) } else { None };
    let weight = if case.weight { Some(run.normal(weight_dtype, &[columns], layout, 1.0)?) } else { None };
    let bias = if case.bias { Some(run.normal(weight_dtype, &[columns], layout, 1.0)?) } else { None };
    let residual_output = if case.residual_output { Some(run.output(residual_dtype, &shape, layout)?) } else { None };
    let output = if case.output { Some(run.output(output_dtype, &shape, layout)?) } else { None };

    let sums: Vec<f64> =
        x.iter().enumerate().map(|(i, x)| x + residual.as_ref().map_or(0.0, |(_, residual)| residual[i])).collect();
    let (mut reference, mut slack) = (Vec::new(), Vec::new());
    for row in sums.chunks(columns) {
        let mean = row.iter().sum::<f64>() / columns as f64;
        let variance = row.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / columns as f64;
        let inverse = 1.0 / (variance + f64::from(EPSILON)).sqrt();
        for (i, s) in row.iter().enumerate() {
            let weight = weight.as_ref().map_or(1.0, |(_, weight)| weight[i]);
            let bias = bias.as_ref().map_or(0.0, |(_, bias)| bias[i]);
            reference.push((s - mean) * inverse * weight + bias);
            // s and its mean cancel, and so do the norm and the bias.
            slack.push(8.0 * (s.abs() + mean.abs()) * inverse * weight.abs() + 2.0 * bias.abs());
        }
    }
    let tensor = |pair: &Option<(nvbackend::tensor::Tensor, Vec<f64>)>| pair.as_ref().map(|(tensor, _)| *tensor);
    let op = LayerNorm::new(
        LayerNormTensors {
            input,
            residual: tensor(&residual),
            residual_output,
            weight: tensor(&weight),
            bias: tensor(&bias),
            output,
        },
        EPSILON,
    )?;
    run.executor().layer_norm(&op, run.stream.raw())?;
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
            });
        }
    }
    check("layer norm", &cases, test);
}

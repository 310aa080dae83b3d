//! `softmax`: exp(scale · x − max) / Σ over each row; a row of −∞ gives zeros.

use crate::compare::FLOATS;
use crate::run::{check, rounded, Layout, Outcome, Run, LAYOUTS, PLAIN, UNALIGNED};
use nvbackend::operation::softmax::Softmax;
use nvbackend::operation::Operation;
use nvbackend::tensor::DType;

#[derive(Debug, Clone, Copy)]
enum Content {
    Normal(f64),
    /// −∞ in most places, and everywhere in the second row.
    Masked,
    /// NaN in the first row.
    Nan,
    Equal,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    rows: usize,
    columns: usize,
    input: DType,
    output: DType,
    in_place: bool,
    layout: Layout,
    scale: f32,
    content: Content,
}

const CASE: Case = Case {
    rows: 4,
    columns: 100,
    input: DType::F32,
    output: DType::F32,
    in_place: false,
    layout: PLAIN,
    scale: 1.0,
    content: Content::Normal(3.0),
};

fn test(run: &mut Run, case: &Case) -> Outcome {
    let (shape, count) = ([case.rows, case.columns], case.rows * case.columns);
    let mut values = run.random.normals(count, if let Content::Normal(scale) = case.content { scale } else { 1.0 });
    match case.content {
        Content::Normal(_) => {}
        Content::Masked => values.iter_mut().enumerate().for_each(|(i, value)| {
            if i % 7 != 3 || i / case.columns == 1 {
                *value = f64::NEG_INFINITY;
            }
        }),
        Content::Nan => values[case.columns / 2] = f64::NAN,
        Content::Equal => values.fill(-7.25),
    }
    let values = rounded(case.input, &values);
    let input = run.tensor(case.input, &shape, case.layout, &values)?;
    let output = if case.in_place { input } else { run.output(case.output, &shape, case.layout)? };
    run.allow_write(&output);
    let mut reference = Vec::with_capacity(count);
    for row in values.chunks(case.columns.max(1)) {
        let scaled = || row.iter().map(|x| x * case.scale as f64);
        let max = scaled().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scaled().map(|x| (x - max).exp()).sum();
        let masked = row.iter().all(|&x| x == f64::NEG_INFINITY);
        reference.extend(scaled().map(|x| if masked { 0.0 } else { (x - max).exp() / sum }));
    }
    run.executor().run(&Operation::from(Softmax::new(input, output, case.scale)?), run.stream.raw())?;
    run.expect("output", &output, &reference)
}

#[test]
fn softmax() {
    let mut cases = Vec::new();
    for input in FLOATS {
        for output in FLOATS {
            for layout in LAYOUTS {
                cases.push(Case { input, output, layout, ..CASE });
            }
        }
        for content in [Content::Masked, Content::Nan, Content::Equal] {
            cases.push(Case { input, content, ..CASE });
            cases.push(Case { input, content, columns: 5000, output: input, layout: UNALIGNED, ..CASE });
        }
        cases.push(Case { input, output: input, in_place: true, ..CASE });
        cases.push(Case { input, output: input, in_place: true, layout: UNALIGNED, columns: 1001, ..CASE });
    }
    for columns in [0, 1, 2, 7, 31, 32, 33, 255, 256, 1023, 4097, 50_000] {
        cases.push(Case { columns, ..CASE });
        cases.push(Case { columns, input: DType::Bf16, layout: UNALIGNED, ..CASE });
    }
    cases.push(Case { rows: 1, columns: 262_144, ..CASE });
    cases.push(Case { rows: 1, columns: 262_145, input: DType::Bf16, ..CASE });
    for rows in [0, 1, 1000, 70_000] {
        cases.push(Case { rows, columns: 3, ..CASE });
    }
    for scale in [0.0, 0.125, -0.5, 40.0] {
        cases.push(Case { scale, ..CASE });
    }
    for magnitude in [1e-30, 60.0, 1e4, 1e30] {
        cases.push(Case { content: Content::Normal(magnitude), ..CASE });
    }
    check("softmax", &cases, test);
}

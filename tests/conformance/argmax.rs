//! `argmax`: the lowest index of the largest value; NaN never wins unless all are NaN (then 0).

use crate::compare::FLOATS;
use crate::run::{check, rounded, Layout, Outcome, Run, LAYOUTS, PLAIN, UNALIGNED};
use nvbackend::operation::argmax::Argmax;
use nvbackend::operation::Operation;
use nvbackend::tensor::DType;

#[derive(Debug, Clone, Copy)]
enum Content {
    Normal,
    /// Few distinct values.
    Ties,
    Equal(f64),
    /// NaN in most places.
    MostlyNan,
    /// −∞ everywhere but for some NaN.
    Masked,
    /// +∞ twice in each row.
    Infinite,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    rows: usize,
    columns: usize,
    dtype: DType,
    layout: Layout,
    content: Content,
}

const CASE: Case = Case { rows: 3, columns: 1000, dtype: DType::F32, layout: PLAIN, content: Content::Normal };

fn test(run: &mut Run, case: &Case) -> Outcome {
    let count = case.rows * case.columns;
    let random = &mut run.random;
    let mut values = random.normals(count, 1.0);
    match case.content {
        Content::Normal => {}
        Content::Ties => values.iter_mut().for_each(|value| *value = value.trunc()),
        Content::Equal(same) => values.fill(same),
        Content::MostlyNan => values.iter_mut().for_each(|value| {
            if random.below(10) > 0 {
                *value = f64::NAN;
            }
        }),
        Content::Masked => {
            values.iter_mut().for_each(|value| *value = if random.flip() { f64::NAN } else { f64::NEG_INFINITY })
        }
        Content::Infinite => {
            for row in values.chunks_mut(case.columns) {
                row[random.below(case.columns)] = f64::INFINITY;
                row[random.below(case.columns)] = f64::INFINITY;
            }
        }
    }
    let values = rounded(case.dtype, &values);
    let reference: Vec<i32> = values
        .chunks(case.columns)
        .map(|row| {
            let mut best: Option<usize> = None;
            for (i, value) in row.iter().enumerate() {
                if !value.is_nan() && best.is_none_or(|best| *value > row[best]) {
                    best = Some(i);
                }
            }
            best.unwrap_or(0) as i32
        })
        .collect();
    let logits = run.tensor(case.dtype, &[case.rows, case.columns], case.layout, &values)?;
    let tokens = run.output(DType::I32, &[case.rows], PLAIN)?;
    run.executor().run(&Operation::from(Argmax::new(logits, tokens)?), run.stream.raw())?;
    run.expect_integers("tokens", &tokens, &reference)
}

#[test]
fn argmax() {
    let mut cases = Vec::new();
    let contents = [
        Content::Normal,
        Content::Ties,
        Content::Equal(0.0),
        Content::Equal(f64::NAN),
        Content::Equal(f64::NEG_INFINITY),
        Content::MostlyNan,
        Content::Masked,
        Content::Infinite,
    ];
    for dtype in FLOATS {
        for content in contents {
            for layout in LAYOUTS {
                cases.push(Case { dtype, layout, content, ..CASE });
            }
        }
        for columns in [1, 2, 3, 31, 33, 127, 1025, 32_000, 262_144] {
            cases.push(Case { columns, dtype, content: Content::Ties, ..CASE });
            cases.push(Case { columns, dtype, layout: UNALIGNED, ..CASE });
        }
    }
    for rows in [0, 1, 2, 65, 1000] {
        cases.push(Case { rows, columns: 257, content: Content::Ties, ..CASE });
    }
    // −0 and +0 are equal, so the first of them wins; negative values sort by value and not by bits.
    for content in [Content::Equal(-0.0), Content::Equal(-1.5)] {
        cases.push(Case { content, ..CASE });
    }
    check("argmax", &cases, test);
}

#[test]
fn signed_zeros_tie() {
    check("argmax of zeros", &FLOATS, |run, &dtype| {
        let logits = run.tensor(dtype, &[2, 4], PLAIN, &[-0.0, 0.0, -0.0, -1.0, -1.0, 0.0, -0.0, 0.0])?;
        let tokens = run.output(DType::I32, &[2], PLAIN)?;
        run.executor().run(&Operation::from(Argmax::new(logits, tokens)?), run.stream.raw())?;
        run.expect_integers("tokens", &tokens, &[0, 1])
    });
}

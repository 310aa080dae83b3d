//! `matmul`: C = α · op(A) · op(B) over batches, transposed, strided and broadcast.

use crate::compare::FLOATS;
use crate::random::Random;
use crate::run::{check, offsets, rounded, Outcome, Run};
use nvbackend::error::Result;
use nvbackend::operation::matmul::Matmul;
use nvbackend::operation::Operation;
use nvbackend::tensor::{DType, Tensor};

#[derive(Debug, Clone, Copy)]
struct Case {
    batch: [usize; 2],
    m: usize,
    n: usize,
    k: usize,
    dtype: DType,
    output: DType,
    transposes: [bool; 2],
    /// Elements between rows, and in front of the first.
    padding: usize,
    /// One A (or B) for the first, for the second batch axis.
    broadcast_a: [bool; 2],
    broadcast_b: [bool; 2],
    alpha: f32,
}

/// A batch of matrices with these strides, of which broadcast axes have stride 0; its values as [batch.., rows, columns].
fn operand(
    run: &mut Run,
    case: &Case,
    rows: usize,
    columns: usize,
    broadcast: [bool; 2],
) -> Result<(Tensor, Vec<f64>)> {
    let stride = columns + case.padding;
    let own = [0, 1].map(|axis| if broadcast[axis] { 1 } else { case.batch[axis] });
    let inner = rows * stride;
    let strides = [own[1] * inner, inner, stride, 1];
    let shape = [own[0], own[1], rows, columns];
    let values = rounded(case.dtype, &run.random.normals(shape.iter().product(), 1.0));
    let tensor = run.strided(case.dtype, &shape, &strides, case.padding, own[0] * strides[0], Some(&values))?;
    let mut view = tensor;
    view.shape[..2].copy_from_slice(&case.batch);
    for (stride, _) in view.strides.iter_mut().zip(broadcast).filter(|(_, repeats)| *repeats) {
        *stride = 0;
    }
    // The values of the view, element by element.
    let places = offsets(&tensor);
    let of_place: std::collections::HashMap<usize, f64> = places.into_iter().zip(values).collect();
    let values = offsets(&view).into_iter().map(|place| of_place[&place]).collect();
    Ok((view, values))
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let &Case { batch, m, n, k, transposes, alpha, .. } = case;
    let lying =
        |rows: usize, columns: usize, transposed: bool| if transposed { (columns, rows) } else { (rows, columns) };
    let (a_rows, a_columns) = lying(m, k, transposes[0]);
    let (b_rows, b_columns) = lying(k, n, transposes[1]);
    let (a, x) = operand(run, case, a_rows, a_columns, case.broadcast_a)?;
    let (b, w) = operand(run, case, b_rows, b_columns, case.broadcast_b)?;
    let stride = n + case.padding;
    let strides = [batch[1] * m * stride, m * stride, stride, 1];
    let shape = [batch[0], batch[1], m, n];
    let output = run.strided(case.output, &shape, &strides, case.padding, batch[0] * strides[0], None)?;
    run.allow_write(&output);

    let (mut reference, mut terms) = (Vec::new(), Vec::new());
    for matrix in 0..batch[0] * batch[1] {
        let (x, w) = (&x[matrix * m * k..][..m * k], &w[matrix * k * n..][..k * n]);
        let at = |values: &[f64], transposed: bool, rows: usize, columns: usize, row: usize, column: usize| {
            values[if transposed { column * rows + row } else { row * columns + column }]
        };
        for row in 0..m {
            for column in 0..n {
                let products = (0..k)
                    .map(|i| at(x, transposes[0], m, k, row, i) * at(w, transposes[1], k, n, i, column))
                    .collect::<Vec<_>>();
                reference.push(f64::from(alpha) * products.iter().sum::<f64>());
                terms.push(f64::from(alpha).abs() * products.iter().map(|term| term.abs()).sum::<f64>());
            }
        }
    }
    let op = Matmul::new(a, b, transposes[0], transposes[1], alpha, output)?;
    run.executor().run(&Operation::from(op), run.stream.raw())?;
    run.expect_summed("output", &output, &reference, &terms)
}

#[test]
fn sizes() {
    let mut random = Random::new("matmul cases");
    let mut cases = Vec::new();
    let sizes =
        [(1, 1, 1), (7, 5, 3), (64, 64, 64), (65, 130, 72), (16, 200, 128), (100, 33, 257), (3, 300, 8), (50, 40, 0)];
    for (m, n, k) in sizes {
        for transposes in [[false, false], [false, true], [true, false], [true, true]] {
            for batch in [[1, 1], [1, 3], [2, 1], [2, 3], [0, 2]] {
                let (dtype, other) = (random.choose(&FLOATS), random.choose(&FLOATS));
                cases.push(Case {
                    batch,
                    m,
                    n,
                    k,
                    dtype,
                    output: random.choose(&[DType::F32, dtype, other]),
                    transposes,
                    padding: random.choose(&[0, 0, 8, 3]),
                    broadcast_a: [random.flip() && batch[0] > 0, false],
                    broadcast_b: [random.flip() && batch[0] > 0, random.flip()],
                    alpha: random.choose(&[1.0, 0.125, -3.0]),
                });
            }
        }
    }
    check("matmul", &cases, test);
}

//! Layer normalisation with the residual addition in front of it; the formulas are in `ops/layer_norm.rs`.

use super::norm::{norm, RowNorm};
use super::row::{vectors, Row};
use super::simd::Simd;
use super::threads::Threads;
use crate::ops::layer_norm::LayerNorm;
use crate::tensor::Matrix;

pub fn layer_norm(threads: &Threads, op: &LayerNorm) {
    norm(threads, op);
}

impl RowNorm for LayerNorm {
    fn input(&self) -> &Matrix {
        &self.input
    }

    #[inline(always)]
    unsafe fn row<S: Simd>(&self, row: usize, sum: Row) {
        let columns = self.input.columns;
        let input = Row::of(&self.input, row);
        let residual = self.residual.map(|residual| Row::of(&residual, row));
        let residual_output = self.residual_output.map(|output| Row::of(&output, row));
        // The residual sum, kept in f32 for the norm.
        let mut total = S::zero();
        for (at, lanes) in vectors::<S>(columns) {
            let mut value = input.load::<S>(at, lanes);
            if let Some(residual) = residual {
                value = S::add(residual.load::<S>(at, lanes), value);
            }
            if let Some(output) = residual_output {
                output.store::<S>(at, value, lanes);
            }
            sum.store::<S>(at, value, lanes);
            total = S::add(total, value);
        }
        let Some(output) = self.output else { return };
        let output = Row::of(&output, row);
        // The variance is that of the differences, without the cancellation of E[s²] − mean².
        let mean = S::splat(S::sum(total) / columns as f32);
        let mut squares = S::zero();
        for (at, lanes) in vectors::<S>(columns) {
            let difference = S::first(lanes, S::sub(sum.load::<S>(at, lanes), mean), S::zero());
            squares = S::fma(difference, difference, squares);
        }
        let inverse = S::splat(1.0 / (S::sum(squares) / columns as f32 + self.epsilon).sqrt());
        for (at, lanes) in vectors::<S>(columns) {
            let mut value = S::mul(S::sub(sum.load::<S>(at, lanes), mean), inverse);
            if let Some(weight) = self.weight {
                value = S::mul(value, Row::vector(&weight).load::<S>(at, lanes));
            }
            if let Some(bias) = self.bias {
                value = S::add(value, Row::vector(&bias).load::<S>(at, lanes));
            }
            output.store::<S>(at, value, lanes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, at_every_level, threads, Buffer};
    use super::*;
    use crate::ops::layer_norm::LayerNormTensors;
    use crate::tensor::{DType, Tensor};

    /// The formula in f64, for tensors in host memory.
    fn reference(op: &LayerNorm) {
        let columns = op.input.columns as f64;
        // SAFETY: a validated descriptor's tensors are readable and writable in their extents.
        unsafe {
            let of = |vector: Option<Tensor>, i: usize| vector.map(|vector| Row::vector(&vector).get(i));
            for row in 0..op.input.rows {
                let residual = |i: usize| op.residual.map_or(0.0, |residual| Row::of(&residual, row).get(i));
                let sums: Vec<f64> =
                    (0..op.input.columns).map(|i| Row::of(&op.input, row).get(i) + residual(i)).collect();
                let mean = sums.iter().sum::<f64>() / columns;
                let variance = sums.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / columns;
                for (i, s) in sums.into_iter().enumerate() {
                    if let Some(output) = op.residual_output {
                        Row::of(&output, row).set(i, s);
                    }
                    let norm = (s - mean) / (variance + f64::from(op.epsilon)).sqrt();
                    if let Some(output) = op.output {
                        Row::of(&output, row)
                            .set(i, norm * of(op.weight, i).unwrap_or(1.0) + of(op.bias, i).unwrap_or(0.0));
                    }
                }
            }
        }
    }

    #[test]
    fn all_forms_match_the_reference() {
        at_every_level(|level| {
            for (rows, columns) in [(0, 8), (1, 1), (3, 7), (5, 640), (130, 129), (2, 65_536)] {
                for form in 0..16 {
                    let [residual, weight, bias, second] = [form & 1 != 0, form & 2 != 0, form & 4 != 0, form & 8 != 0];
                    let mut input = Buffer::random(DType::Bf16, rows * columns, 1);
                    let mut stream = Buffer::random(DType::F32, rows * columns, 2);
                    let mut vectors = [Buffer::random(DType::F16, columns, 3), Buffer::random(DType::F16, columns, 4)];
                    let mut run = |sum: &mut Buffer, output: &mut Buffer, function: &dyn Fn(&LayerNorm)| {
                        let shape = [rows, columns];
                        let tensors = LayerNormTensors {
                            input: input.tensor(&shape),
                            residual: residual.then(|| stream.tensor(&shape)),
                            residual_output: Some(sum.tensor(&shape)),
                            weight: weight.then(|| vectors[0].tensor(&[columns])),
                            bias: bias.then(|| vectors[1].tensor(&[columns])),
                            output: second.then(|| output.tensor(&shape)),
                        };
                        function(&LayerNorm::new(tensors, 1e-5).unwrap());
                    };
                    let new = |dtype| Buffer::poisoned(dtype, rows * columns);
                    let (mut sum, mut output) = (new(DType::F32), new(DType::Bf16));
                    let (mut expected_sum, mut expected) = (new(DType::F32), new(DType::Bf16));
                    run(&mut sum, &mut output, &|op| layer_norm(threads(), op));
                    run(&mut expected_sum, &mut expected, &reference);
                    assert_close(&sum, &expected_sum, &format!("{level:?} sum [{rows}, {columns}] form {form}"));
                    assert_close(&output, &expected, &format!("{level:?} output [{rows}, {columns}] form {form}"));
                }
            }
        });
    }
}

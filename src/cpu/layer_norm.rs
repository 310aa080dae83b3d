//! Layer normalisation with the residual addition in front of it; the formulas are in `ops/layer_norm.rs`.

use super::norm::{norm, RowNorm};
use super::row::{vectors, Row};
use super::threads::Threads;
use crate::operation::layer_norm::LayerNorm;
use crate::simd::Simd;
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
    use super::super::norm::testing::{check_forms, Operands};
    use super::super::testing::threads;
    use super::*;
    use crate::tensor::Tensor;

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

    fn op([residual, weight, bias, output]: [bool; 4], operands: Operands) -> LayerNorm {
        let call = LayerNorm {
            input: operands.input,
            residual: residual.then_some(operands.residual),
            residual_output: Some(operands.residual_output),
            weight: weight.then_some(operands.vectors[0]),
            bias: bias.then_some(operands.vectors[1]),
            output: output.then_some(operands.output),
            epsilon: 1e-5,
        };
        call.validated().unwrap()
    }

    #[test]
    fn all_forms_match_the_reference() {
        check_forms(
            |form, operands| layer_norm(threads(), &op(form, operands)),
            |form, operands| reference(&op(form, operands)),
        );
    }
}

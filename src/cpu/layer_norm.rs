//! Layer normalisation with the residual addition in front of it; the formulas are in `ops/layer_norm.rs`.

use super::mean::{mean, mean_square, ADDITIONS};
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
        // A row that one sum may collect is not read again for its mean, which would show in its time.
        let short = columns <= ADDITIONS * S::LANES;
        let mean = if short { S::sum(total) / columns as f32 } else { mean::<S>(sum, columns) };
        // The variance is that of the differences, without the cancellation of E[s²] − mean².
        let variance = mean_square::<S>(sum, columns, mean);
        let (mean, inverse) = (S::splat(mean), S::splat(1.0 / (variance + self.epsilon).sqrt()));
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

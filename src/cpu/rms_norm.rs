//! RMS normalisation with the residual additions around it; the formulas are in `ops/rms_norm.rs`.

use super::mean::mean_square;
use super::norm::{norm, RowNorm};
use super::quantized_rows;
use super::row::{vectors, Row};
use super::threads::Threads;
use crate::operation::rms_norm::RmsNorm;
use crate::simd::Simd;
use crate::tensor::Matrix;

pub fn rms_norm(threads: &Threads, op: &RmsNorm) {
    norm(threads, op);
}

impl RowNorm for RmsNorm {
    fn input(&self) -> &Matrix {
        &self.input
    }

    #[inline(always)]
    unsafe fn row<S: Simd>(&self, row: usize, sum: Row) {
        let columns = self.input.columns;
        let input = Row::of(&self.input, row);
        let offset = S::splat(self.weight_offset);
        // The branch's own norm.
        let post = self.post_weight.map(|weight| (Row::vector(&weight), S::splat(inverse_rms::<S>(self, input))));
        // The residual sum, kept in f32 for the second norm.
        let residual = self.residual.map(|residual| Row::of(&residual, row));
        let residual_output = self.residual_output.map(|output| Row::of(&output, row));
        for (at, lanes) in vectors::<S>(columns) {
            let mut value = input.load::<S>(at, lanes);
            if let Some((weight, inverse)) = post {
                value = S::mul(S::mul(value, inverse), S::add(offset, weight.load::<S>(at, lanes)));
            }
            if let Some(residual) = residual {
                value = S::add(residual.load::<S>(at, lanes), value);
            }
            if let Some(output) = residual_output {
                output.store::<S>(at, value, lanes);
            }
            sum.store::<S>(at, value, lanes);
        }
        // The norm that follows.
        if !self.normalises_sum() {
            return;
        }
        let output = self.output.map(|output| Row::of(&output, row));
        let inverse = S::splat(inverse_rms::<S>(self, sum));
        for (at, lanes) in vectors::<S>(columns) {
            let mut value = S::mul(sum.load::<S>(at, lanes), inverse);
            if let Some(weight) = self.weight {
                value = S::mul(value, S::add(offset, Row::vector(&weight).load::<S>(at, lanes)));
            }
            if let Some(output) = output {
                output.store::<S>(at, value, lanes);
            }
            if self.quantized_output.is_some() {
                sum.store::<S>(at, value, lanes);
            }
        }
        if let Some(output) = self.quantized_output {
            quantized_rows::quantize_row(&output, row, sum.floats(columns));
        }
    }
}

#[inline(always)]
unsafe fn inverse_rms<S: Simd>(op: &RmsNorm, row: Row) -> f32 {
    1.0 / (mean_square::<S>(row, op.input.columns, 0.0) + op.epsilon).sqrt()
}

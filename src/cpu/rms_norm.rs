//! RMS normalisation with the residual additions around it; the formulas are in `ops/rms_norm.rs`.

use super::norm::{norm, RowNorm};
use super::quantized_rows;
use super::row::{vectors, Row};
use super::threads::Threads;
use crate::operation::rms_norm::RmsNorm;
use crate::simd::Simd;
use crate::tensor::{Matrix, Tensor};

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
    let squares = sum_of_squares::<S>(row, op.input.columns);
    1.0 / (squares / op.input.columns as f32 + op.epsilon).sqrt()
}

/// Σ x² in f32.
///
/// # Safety
/// The CPU has `S`; the row is readable.
#[inline(always)]
pub unsafe fn sum_of_squares<S: Simd>(row: Row, columns: usize) -> f32 {
    let mut sum = S::zero();
    for (at, lanes) in vectors::<S>(columns) {
        let value = row.load::<S>(at, lanes);
        sum = S::fma(value, value, sum);
    }
    S::sum(sum)
}

/// The formula in f64, for tensors in host memory.
pub fn reference(op: &RmsNorm) {
    let columns = op.input.columns;
    // SAFETY: a validated descriptor's tensors are readable and writable in their extents.
    unsafe {
        let norm = |x: &[f64], weight: Option<Tensor>| -> Vec<f64> {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / columns as f64;
            let factor = |i: usize| weight.map_or(1.0, |w| f64::from(op.weight_offset) + Row::vector(&w).get(i));
            x.iter().enumerate().map(|(i, x)| x / (mean + f64::from(op.epsilon)).sqrt() * factor(i)).collect()
        };
        for row in 0..op.input.rows {
            let mut sum: Vec<f64> = (0..columns).map(|i| Row::of(&op.input, row).get(i)).collect();
            if op.post_weight.is_some() {
                sum = norm(&sum, op.post_weight);
            }
            for (i, sum) in sum.iter_mut().enumerate() {
                *sum += op.residual.map_or(0.0, |residual| Row::of(&residual, row).get(i));
            }
            let outputs = [(op.residual_output, sum.clone()), (op.output, norm(&sum, op.weight))];
            for (output, values) in outputs.into_iter().filter_map(|(output, values)| Some((output?, values))) {
                values.into_iter().enumerate().for_each(|(i, value)| Row::of(&output, row).set(i, value));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::norm::testing::{check_forms, Operands};
    use super::super::testing::{threads, Buffer};
    use super::*;
    use crate::tensor::DType;

    fn op([post, residual, weight, output]: [bool; 4], operands: Operands) -> RmsNorm {
        let call = RmsNorm {
            input: operands.input,
            post_weight: post.then_some(operands.vectors[0]),
            residual: residual.then_some(operands.residual),
            residual_output: Some(operands.residual_output),
            weight: weight.then_some(operands.vectors[1]),
            output: output.then_some(operands.output),
            quantized_output: None,
            epsilon: 1e-6,
            weight_offset: f32::from(post),
        };
        call.validated().unwrap()
    }

    #[test]
    fn all_forms_match_the_reference() {
        check_forms(
            |form, operands| rms_norm(threads(), &op(form, operands)),
            |form, operands| reference(&op(form, operands)),
        );
    }

    #[test]
    fn outputs_may_be_inputs() {
        let (mut input, mut stream) = (Buffer::random(DType::F32, 30, 1), Buffer::random(DType::F32, 30, 2));
        let expected: Vec<f32> = input.values().iter().zip(stream.values()).map(|(a, b)| b + a).collect();
        let (x, s) = (input.tensor(&[3, 10]), stream.tensor(&[3, 10]));
        let call = RmsNorm {
            input: x,
            post_weight: None,
            residual: Some(s),
            residual_output: Some(s),
            weight: None,
            output: Some(x),
            quantized_output: None,
            epsilon: 1e-6,
            weight_offset: 0.0,
        };
        rms_norm(threads(), &call.validated().unwrap());
        assert_eq!(stream.values(), expected);
        let row = &input.values()[..10];
        assert!((row.iter().map(|x| x * x).sum::<f32>() / 10.0 - 1.0).abs() < 1e-4);
    }
}

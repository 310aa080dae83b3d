//! Sums over rows, in f64, in which no order of additions shows in an f32 result.

use super::row::{for_rows, Row};
use super::threads::Threads;
use crate::operation::sum_rows::SumRows;
use crate::tensor::Tensor;

pub fn sum_rows(threads: &Threads, op: &SumRows) {
    if op.output.is_empty() {
        return;
    }
    let [first, second, third, columns] = op.input.shape;
    for_rows(threads, first * second * third, columns, |rows, _| {
        for row in rows {
            let places = [row / third / second, row / third % second, row % third];
            let line = |tensor: &Tensor| {
                let offset = (0..3).map(|axis| places[axis] * tensor.strides[axis]).sum();
                Row::raw(tensor.data, tensor.dtype).skip(offset)
            };
            let input = line(&op.input);
            // SAFETY: the descriptor is validated, and tasks write different elements.
            unsafe {
                let sum: f64 = (0..columns).map(|column| input.get(column * op.input.strides[3])).sum();
                line(&op.output).set(0, sum * f64::from(op.scale));
            }
        }
    });
}

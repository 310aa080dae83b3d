//! Rows divided by their length. The squares are added in f64, where those of every f32 fit.

use super::row::{for_rows, Row};
use super::threads::Threads;
use crate::operation::l2_norm::L2Norm;
use crate::tensor::Tensor;

pub fn l2_norm(threads: &Threads, op: &L2Norm) {
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
            let (input, output) = (line(&op.input), line(&op.output));
            let (from, to) = (op.input.strides[3], op.output.strides[3]);
            // SAFETY: the descriptor is validated, and tasks write different rows.
            unsafe {
                let squares: f64 = (0..columns).map(|column| input.get(column * from).powi(2)).sum();
                let length = squares.sqrt();
                // Not `max`, which would lose a NaN.
                let inverse = 1.0 / if length < f64::from(op.epsilon) { f64::from(op.epsilon) } else { length };
                for column in 0..columns {
                    output.set(column * to, input.get(column * from) * inverse);
                }
            }
        }
    });
}

//! output = activation(gate) · up.

use super::activation::activate;
use super::quantized_rows;
use super::row::{for_rows, vectors, Row};
use super::threads::{Scratch, Threads};
use crate::operation::gated_activation::GatedActivation;
use crate::operation::quantized_rows::QuantizedRows;
use crate::simd::{dispatch, Kernel, Simd};
use crate::tensor::{Matrix, Tensor};
use std::ops::Range;

pub fn gated_activation(threads: &Threads, op: &GatedActivation) {
    for_rows(threads, op.gate.rows, op.gate.columns, |rows, scratch| {
        // SAFETY: the descriptor is validated, and tasks write different rows.
        unsafe { dispatch(Rows { op, rows, scratch }) }
    });
}

struct Rows<'a> {
    op: &'a GatedActivation,
    rows: Range<usize>,
    scratch: &'a mut Scratch,
}

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Rows { op, rows, scratch } = self;
        for row in rows {
            match (op.quantized_output, op.output) {
                (Some(quantized), output) => {
                    quantized_row::<S>(op, row, &quantized, output.as_ref(), scratch.floats());
                }
                (None, Some(output)) => values::<S>(op, row, 0..op.gate.columns, Row::of(&output, row)),
                (None, None) => {}
            }
        }
    }
}

/// The columns `range` of a row, to the start of `to`.
#[inline(always)]
unsafe fn values<S: Simd>(op: &GatedActivation, row: usize, range: Range<usize>, to: Row) {
    let (gate, up) = (Row::of(&op.gate, row).skip(range.start), Row::of(&op.up, row).skip(range.start));
    for (at, lanes) in vectors::<S>(range.len()) {
        let value = S::mul(activate::<S>(op.activation, gate.load::<S>(at, lanes)), up.load::<S>(at, lanes));
        to.store::<S>(at, value, lanes);
    }
}

/// A row in 8 bits: its values in pieces that `scratch` holds, once for the largest magnitude and, where there are several
/// pieces, again for the quantised values. The float output is written with the quantised values, because it may lie
/// over the inputs.
#[inline(always)]
unsafe fn quantized_row<S: Simd>(
    op: &GatedActivation,
    row: usize,
    quantized: &QuantizedRows,
    output: Option<&Matrix>,
    scratch: &mut [f32],
) {
    let columns = op.gate.columns;
    let piece = scratch.len().min(columns);
    let pieces = || (0..columns).step_by(piece.max(1)).map(|first| first..(first + piece).min(columns));
    let buffer = Row::vector(&Tensor::of(scratch, &[scratch.len()]));
    let mut most = 0;
    for range in pieces() {
        values::<S>(op, row, range.clone(), buffer);
        most = quantized_rows::largest(buffer.floats(range.len()), most);
    }
    if columns == 0 {
        return;
    }
    let inverse = quantized_rows::store_scale(quantized, row, most);
    for range in pieces() {
        if piece < columns {
            values::<S>(op, row, range.clone(), buffer);
        }
        quantized_rows::store_quantized(quantized, row, range.start, buffer.floats(range.len()), inverse);
        let Some(output) = output else { continue };
        let output = Row::of(output, row).skip(range.start);
        for (at, lanes) in vectors::<S>(range.len()) {
            output.store::<S>(at, buffer.load::<S>(at, lanes), lanes);
        }
    }
}

//! Rows of floats from and to rows of blocks, a slice at a time.

use super::row::{for_rows, vectors, Row};
use super::threads::{Scratch, Threads};
use crate::error::{Error, Result};
use crate::operation::block_rows::{BlockRows, Direction};
use crate::simd::{dispatch, Kernel, Simd, VectorElement};
use crate::weight::blocks::{self, with_block_format, MOST_ELEMENTS};
use std::ops::Range;

/// An error names the first row whose number is none; nothing is written then.
pub fn block_rows(threads: &Threads, op: &BlockRows) -> Result<()> {
    if op.is_empty() {
        return Ok(());
    }
    let [outer, inner, tokens, width] = op.floats.shape;
    let (count, places) = (outer * inner * tokens, op.blocks.shape[2]);
    for row in 0..if op.rows.is_some() { count } else { 0 } {
        // SAFETY: a validated descriptor's row numbers.
        let number = unsafe { number(op, split(op, row)) };
        if number < 0 || number as usize >= places {
            return Err(Error::invalid(format!(
                "row {row} has the number {number}; there are {places} rows of blocks"
            ))
            .with_limit(number.max(0) as u64, places as u64));
        }
    }
    for_rows(threads, count, width, |rows, scratch| {
        // SAFETY: the descriptor is validated, and so are the numbers. Tasks write different rows unless the caller names one row
        // twice, of which he then gets a mixture.
        unsafe { dispatch(Rows { op, rows, scratch }) }
    });
    Ok(())
}

/// Places on the three axes in front of the columns.
fn split(op: &BlockRows, row: usize) -> [usize; 3] {
    let [_, inner, tokens, _] = op.floats.shape;
    [row / tokens / inner, row / tokens % inner, row % tokens]
}

/// # Safety
/// The descriptor is validated, and the row is one of its floats'.
unsafe fn number(op: &BlockRows, [outer, inner, token]: [usize; 3]) -> i32 {
    let Some(rows) = &op.rows else { return token as i32 };
    let (shape, strides) = (rows.shape, rows.strides);
    let at = outer % shape[1] * strides[1] + inner % shape[2] * strides[2] + token * strides[3];
    rows.data.cast::<i32>().add(at).read()
}

struct Rows<'a> {
    op: &'a BlockRows,
    rows: Range<usize>,
    scratch: &'a mut Scratch,
}

/// Floats that are decoded or encoded at a time: whole blocks of any format.
const SLICE: usize = 4 * MOST_ELEMENTS;

impl Kernel for Rows<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Rows { op, rows, scratch } = self;
        let (format, width, step) = (op.blocks.format, op.floats.shape[3], op.floats.strides[3]);
        let values = &mut scratch.floats()[..SLICE];
        for row in rows {
            let place = split(op, row);
            let [outer, inner, token] = place;
            let [first, second, third, _] = op.floats.strides;
            let line = Row::raw(op.floats.data, op.floats.dtype).skip(outer * first + inner * second + token * third);
            let [first, second, third] = op.blocks.strides;
            let blocks = op.blocks.data.cast::<u8>();
            let blocks = blocks.add(outer * first + inner * second + number(op, place) as usize * third);
            for at in (0..width).step_by(SLICE) {
                let count = SLICE.min(width - at);
                let values = &mut values[..count];
                let (from, bytes) = (blocks.add(format.bytes(at)), format.bytes(count));
                match op.direction {
                    Direction::Decode => {
                        let blocks = std::slice::from_raw_parts(from.cast_const(), bytes);
                        with_block_format!(format, F => blocks::decode::<F>(blocks, values));
                        store::<S>(line.skip(at * step), step, values);
                    }
                    Direction::Encode => {
                        load::<S>(line.skip(at * step), step, values);
                        format.encode(values, std::slice::from_raw_parts_mut(from, bytes));
                    }
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn load<S: Simd>(line: Row, step: usize, values: &mut [f32]) {
    if step == 1 {
        for (at, lanes) in vectors::<S>(values.len()) {
            f32::store_lanes::<S>(values.as_mut_ptr().add(at), line.load::<S>(at, lanes), lanes);
        }
        return;
    }
    for (at, value) in values.iter_mut().enumerate() {
        *value = line.element(at * step);
    }
}

#[inline(always)]
unsafe fn store<S: Simd>(line: Row, step: usize, values: &[f32]) {
    if step == 1 {
        for (at, lanes) in vectors::<S>(values.len()) {
            line.store::<S>(at, f32::load_lanes::<S>(values.as_ptr().add(at), lanes), lanes);
        }
        return;
    }
    for (at, &value) in values.iter().enumerate() {
        line.set_element(at * step, value);
    }
}

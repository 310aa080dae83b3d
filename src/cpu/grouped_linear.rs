//! y = activation(x · W[expert]ᵀ + bias[expert]): a product for each expert that has tokens. Tokens that name their experts
//! are brought together for it, unless an expert has a single one.

use super::linear::linear;
use super::row::integers;
use super::threads::Threads;
use crate::allocation::filled;
use crate::error::{Error, Result};
use crate::operation::grouped_linear::{GroupedLinear, Routing};
use crate::operation::linear_product::LinearProduct;
use crate::tensor::{Matrix, Tensor};

pub fn grouped_linear(threads: &Threads, op: &GroupedLinear) -> Result<()> {
    match &op.routing {
        Routing::Offsets(offsets) => by_offsets(threads, op, offsets),
        Routing::Ids(ids) => by_ids(threads, op, ids),
    }
}

fn by_offsets(threads: &Threads, op: &GroupedLinear, offsets: &Tensor) -> Result<()> {
    // SAFETY: a validated rank-1 tensor of i32.
    let expert_offsets = unsafe { integers(offsets) };
    let (mut last, rows) = (0, op.input.rows);
    for (place, &offset) in expert_offsets.iter().enumerate() {
        if offset < last || offset as usize > rows || (place == 0 && offset != 0) {
            return Err(Error::invalid(format!(
                "expert_offsets[{place}] is {offset}; they ascend from 0 to at most the {rows} rows of `input`"
            ))
            .with_limit(offset.max(0) as u64, rows as u64));
        }
        last = offset;
    }
    for (expert, range) in expert_offsets.windows(2).enumerate() {
        let (first, end) = (range[0] as usize, range[1] as usize);
        let part = |matrix: Matrix| matrix.part(first, end - first);
        of_expert(threads, op, expert, part(op.input), part(op.output));
    }
    Ok(())
}

fn of_expert(threads: &Threads, op: &GroupedLinear, expert: usize, input: Matrix, output: Matrix) {
    let bias = op.bias.map(|bias| {
        let skipped = expert * op.expert_rows() * bias.dtype.size();
        Tensor::new(bias.data.wrapping_byte_add(skipped), bias.dtype, &[op.expert_rows()])
    });
    let (weight, activation) = (op.expert_weight(expert), op.activation);
    linear(threads, &LinearProduct { input, weight, bias, activation, residual: None, output, rounds_input: false });
}

/// What lists of rows hold.
const ROWS: &str = "the rows of experts";

fn by_ids(threads: &Threads, op: &GroupedLinear, ids: &Tensor) -> Result<()> {
    let [tokens, used, ..] = ids.shape;
    let id = |row: usize| {
        let at = row / used * ids.strides[0] + row % used * ids.strides[1];
        // SAFETY: a validated tensor of [tokens, used] i32, and the row is one of theirs.
        unsafe { ids.data.cast::<i32>().add(at).read() }
    };
    // Where the rows of each expert end in the order by expert.
    let mut ends = filled(0usize, op.experts, ROWS)?;
    for row in 0..tokens * used {
        let number = id(row);
        match usize::try_from(number).ok().and_then(|number| ends.get_mut(number)) {
            Some(count) => *count += 1,
            None => {
                return Err(Error::invalid(format!(
                    "expert_ids[{}, {}] is {number}; there are {} experts",
                    row / used,
                    row % used,
                    op.experts
                ))
                .with_limit(number.max(0) as u64, op.experts as u64))
            }
        }
    }
    let most = ends.iter().copied().max().unwrap_or(0);
    let mut first = 0;
    for end in &mut ends {
        first += std::mem::replace(end, first);
    }
    let mut order = filled(0usize, tokens * used, ROWS)?;
    for row in 0..tokens * used {
        let place = &mut ends[id(row) as usize];
        order[*place] = row;
        *place += 1;
    }
    let of_input = |row: usize| if op.input.rows == tokens { row / used } else { row };
    // In words, so that elements of every dtype are aligned.
    let words = |matrix: &Matrix| (most * matrix.columns * matrix.dtype.size()).div_ceil(size_of::<u64>());
    let room = |matrix: &Matrix| filled(0u64, if most > 1 { words(matrix) } else { 0 }, ROWS);
    let (mut inputs, mut outputs) = (room(&op.input)?, room(&op.output)?);
    let mut first = 0;
    for (expert, &end) in ends.iter().enumerate() {
        let rows = &order[first..end];
        first = end;
        match *rows {
            [] => {}
            [row] => of_expert(threads, op, expert, op.input.part(of_input(row), 1), op.output.part(row, 1)),
            _ => {
                let together = |matrix: &Matrix, room: &mut [u64]| Matrix {
                    data: room.as_mut_ptr().cast(),
                    rows: rows.len(),
                    row_stride: matrix.columns,
                    ..*matrix
                };
                let (input, output) = (together(&op.input, &mut inputs), together(&op.output, &mut outputs));
                for (at, &row) in rows.iter().enumerate() {
                    // SAFETY: rows of validated matrices and of room for the most rows that an expert has.
                    unsafe { copy_row(&op.input, of_input(row), &input, at) };
                }
                of_expert(threads, op, expert, input, output);
                for (at, &row) in rows.iter().enumerate() {
                    // SAFETY: as above.
                    unsafe { copy_row(&output, at, &op.output, row) };
                }
            }
        }
    }
    Ok(())
}

/// # Safety
/// Matrices of one dtype and width, in host memory, have these rows, which lie apart.
unsafe fn copy_row(from: &Matrix, row: usize, to: &Matrix, to_row: usize) {
    let size = from.dtype.size();
    let source = from.data.cast::<u8>().add(row * from.row_stride * size);
    let target = to.data.cast::<u8>().add(to_row * to.row_stride * size);
    std::ptr::copy_nonoverlapping(source, target, from.columns * size);
}

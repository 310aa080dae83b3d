//! Decode over a prefix that all sequences share: a prefill over the prefix, a decode over what follows, and their merge.

use super::{decode, prefill};
use crate::allocation::{collected, filled, gathered};
use crate::cpu::attention_merge::attention_merge;
use crate::cpu::row::integers;
use crate::cpu::threads::Threads;
use crate::error::{Error, Result};
use crate::operation::attention::{AttentionDecode, Partial, SharedPrefix, EMPTY_ROW};
use crate::operation::attention_merge::AttentionMerge;
use crate::tensor::{DType, Tensor};

/// What the lists hold.
const WHAT: &str = "the results over a shared prefix";

pub fn prefix_decode(
    threads: &Threads,
    op: &AttentionDecode,
    prefix: &SharedPrefix,
    workspace: &mut Vec<f32>,
) -> Result<()> {
    let (rows, heads, value_dim) = (op.query.tokens, op.config.query_heads, op.config.value_dim);
    if rows == 0 {
        return Ok(());
    }
    // SAFETY: a validated tensor of one integer a row.
    let positions = unsafe { integers(&op.rows.positions) };
    let own = positions.iter().enumerate().map(|(row, &position)| own_position(op, prefix, row, position));
    let mut own: Vec<i32> = gathered(own, WHAT)?;
    let keys = op.cache.key_view();
    // SAFETY: on the CPU a table is in host memory, and the prefix lies within the sequence's row of it.
    unsafe { keys.check_pages(keys.origin(prefix.sequence), 0..prefix.tokens)? };
    let empty: Vec<bool> = collected(positions.iter().map(|&position| position == EMPTY_ROW), WHAT)?;

    // Part 0 is the prefix.
    let mut outputs = filled(0f32, 2 * rows * heads * value_dim, WHAT)?;
    let mut lses = filled(0f32, 2 * rows * heads, WHAT)?;
    let (output, lse) = (outputs.as_mut_ptr(), lses.as_mut_ptr());
    prefill::prefill(threads, &prefix.prefill(op, (op.query, 0), prefix.tokens, Partial { output, lse })?)?;
    let behind = Partial { output: output.wrapping_add(rows * heads * value_dim), lse: lse.wrapping_add(rows * heads) };
    let own_positions = Tensor::new(own.as_mut_ptr().cast(), DType::I32, &[rows]);
    decode::decode(threads, &prefix.own(op, own_positions, behind), workspace)
        .map_err(|error| error.context(format_args!("behind the shared prefix of {} tokens", prefix.tokens)))?;
    for (_, lses) in empty.iter().zip(lses.chunks_exact_mut(heads)).filter(|(empty, _)| **empty) {
        lses.fill(f32::NEG_INFINITY);
    }
    let merge = AttentionMerge {
        outputs: Tensor::new(output.cast(), DType::F32, &[2, rows, heads, value_dim]),
        lses: Tensor::new(lses.as_mut_ptr().cast(), DType::F32, &[2, rows, heads]),
        output: op.output,
        lse: op.lse,
    };
    attention_merge(threads, &merge);
    Ok(())
}

/// A row's position behind the prefix: [`EMPTY_ROW`] also where the prefix is all that it sees.
fn own_position(op: &AttentionDecode, prefix: &SharedPrefix, row: usize, position: i32) -> Result<i32> {
    if position == EMPTY_ROW {
        return Ok(EMPTY_ROW);
    }
    let found = op.cache.check_position(position).map_err(|error| error.context(format_args!("row {row}")))?;
    if found + 1 < prefix.tokens {
        return Err(Error::invalid(format!(
            "row {row}: position {position} lies within the shared prefix of {} tokens, of which every row sees all",
            prefix.tokens
        ))
        .with_limit(found as u64, prefix.tokens as u64));
    }
    Ok((found as i64 - prefix.tokens as i64) as i32)
}

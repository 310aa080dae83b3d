//! The chunks of a decode: the keys that each row sees, cut at multiples of [`CHUNK`], and where they lie.

use super::addresses;
use super::softmax::Scores;
use crate::allocation::gathered;
use crate::cpu::row::integers;
use crate::error::{Error, Result};
use crate::operation::attention::{AttentionDecode, EMPTY_ROW};
use std::ops::Range;

/// Keys of a chunk.
pub const CHUNK: usize = 256;

/// One row of the call.
pub struct Sequence {
    pub row: usize,
    /// Its number in the cache.
    sequence: usize,
    /// The keys that it sees, of the window.
    keys: Range<usize>,
    /// The first keys that it sees beside the window, which are a chunk in front of the others.
    sinks: usize,
    /// The number of its first chunk among all chunks of the call, which run by sequence, then by key/value head.
    first_chunk: usize,
}

impl Sequence {
    fn chunks(&self) -> Range<usize> {
        self.keys.start / CHUNK..self.keys.end.div_ceil(CHUNK)
    }

    /// Of all that it sees.
    fn chunk_count(&self) -> usize {
        self.chunks().len() + usize::from(self.sinks > 0)
    }
}

/// An error names the first row whose sequence, position or page is out of range.
pub fn check(op: &AttentionDecode) -> Result<Vec<Sequence>> {
    // SAFETY: validated tensors of one integer a row.
    let (positions, places) =
        unsafe { (integers(&op.rows.positions), op.rows.sequences.as_ref().map(|all| integers(all))) };
    let max_kv_length = op.rows.max_kv_length;
    let mut first_chunk = 0;
    let sequences = (0..op.query.tokens).map(|row| {
        let context = |error: Error| error.context(format_args!("row {row}"));
        if positions[row] == EMPTY_ROW {
            return Ok(Sequence { row, sequence: 0, keys: 0..0, sinks: 0, first_chunk });
        }
        let position = op.cache.check_position(positions[row]).map_err(context)?;
        if position >= max_kv_length {
            return Err(Error::invalid(format!("row {row}: position {position}; max_kv_length is {max_kv_length}"))
                .with_limit(position as u64, max_kv_length as u64));
        }
        let sequence = row / op.rows.per_sequence;
        let sequence = places.map_or(sequence as i32, |places| places[sequence]);
        let sequence = op.cache.check_sequence(sequence).map_err(context)?;
        let (begin, end) = op.config.visible(position, position + 1);
        let sinks = op.config.sinks_before(begin);
        for keys in [0..sinks, begin..end] {
            // SAFETY: on the CPU a table is in host memory; sequence and positions are within it.
            unsafe { op.cache.key_view().check_pages(op.cache.origin(sequence), keys) }.map_err(context)?;
        }
        let sequence = Sequence { row, sequence, keys: begin..end, sinks, first_chunk };
        first_chunk += sequence.chunk_count() * op.config.kv_heads;
        Ok(sequence)
    });
    gathered(sequences, "the rows of a decode")
}

/// A call, whose chunks have numbers: by sequence, then by key/value head. A unit is a sequence and a key/value head.
pub struct Call<'a> {
    pub op: &'a AttentionDecode,
    pub sequences: &'a [Sequence],
    pub scores: Scores,
}

impl Call<'_> {
    pub fn chunks(&self) -> usize {
        let kv_heads = self.op.config.kv_heads;
        self.sequences.last().map_or(0, |last| last.first_chunk + last.chunk_count() * kv_heads)
    }

    /// Sequence and key/value head.
    pub fn unit(&self, unit: usize) -> (&Sequence, usize) {
        (&self.sequences[unit / self.op.config.kv_heads], unit % self.op.config.kv_heads)
    }

    pub fn chunks_of(&self, unit: usize) -> Range<usize> {
        let (sequence, kv_head) = self.unit(unit);
        let count = sequence.chunk_count();
        let first = sequence.first_chunk + kv_head * count;
        first..first + count
    }

    /// Whose chunk that is. Rows without a key have the number of the next row's first chunk, and come before it.
    pub fn unit_of(&self, chunk: usize) -> usize {
        let sequence = self.sequences.partition_point(|sequence| sequence.first_chunk <= chunk) - 1;
        let Sequence { first_chunk, .. } = self.sequences[sequence];
        sequence * self.op.config.kv_heads + (chunk - first_chunk) / self.sequences[sequence].chunk_count()
    }

    pub fn value_dim(&self) -> usize {
        self.op.config.value_dim
    }

    /// A chunk's result for one query head: the shift, the sum of weights (and padding), the weighted values.
    pub fn stride(&self) -> usize {
        16 + self.value_dim().next_multiple_of(16)
    }

    pub fn group_floats(&self) -> usize {
        self.op.config.group() * self.stride()
    }

    /// Where the tokens of a chunk are.
    pub fn tokens(&self, chunk: usize, unit: usize, to: &mut Tokens) {
        let (op, (sequence, kv_head)) = (self.op, self.unit(unit));
        let index = chunk - self.chunks_of(unit).start;
        let (begin, end) = match (index, sequence.sinks) {
            (0, sinks @ 1..) => (0, sinks),
            (index, sinks) => {
                let number = sequence.chunks().start + index - usize::from(sinks > 0);
                ((number * CHUNK).max(sequence.keys.start), sequence.keys.end.min((number + 1) * CHUNK))
            }
        };
        to.last = sequence.keys.end as isize - 1 - begin as isize;
        to.count = end - begin;
        // SAFETY: `check` saw the pages of all keys.
        unsafe {
            let (key, value) = (op.cache.key_view(), op.cache.value_view());
            addresses(&key, key.origin(sequence.sequence), begin, kv_head, &mut to.key[..to.count]);
            addresses(&value, value.origin(sequence.sequence), begin, kv_head, &mut to.value[..to.count]);
        }
    }
}

/// Where the keys and values of a chunk start.
pub struct Tokens {
    pub key: [*const u8; CHUNK],
    pub value: [*const u8; CHUNK],
    pub count: usize,
    /// The row's position, counted from the first of these.
    pub last: isize,
}

//! What is added to the scores of a prefill, or which keys its rows see.

use crate::error::{Error, Result};
use crate::tensor::{DType, Tensor};

/// Keys that a word of bits tells of.
pub const WORD_KEYS: usize = 32;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mask {
    /// [sequences, heads, rows, keys], a stride of 0 where an axis repeats; of I32, [.., words]: bit k mod 32 of word k / 32 is 1
    /// where key k is seen.
    pub tensor: Tensor,
    /// Elements from one start of a sequence to the next.
    pub start_stride: usize,
    pub head_stride: usize,
    pub row_stride: usize,
}

impl Mask {
    /// `extents`: sequences, heads, rows and the most keys. Where the rows of all sequences follow one another (not `dense`) they
    /// are those of one.
    pub fn new(mask: Tensor, extents: [usize; 4], dense: bool) -> Result<Mask> {
        let is_bits = mask.dtype == DType::I32;
        if !is_bits && !mask.dtype.is_float() {
            let text = format!("tensor `mask` has dtype {}; f32, f16, bf16 or, of bits, i32 is needed", mask.dtype);
            return Err(Error::invalid(text));
        }
        let needed = if is_bits { extents[3].div_ceil(WORD_KEYS) } else { extents[3] };
        mask.expect_readable("mask")?;
        let refuse = || {
            let [sequences, heads, rows, _] = extents;
            let what = if is_bits { " words of 32 keys" } else { "" };
            Err(Error::invalid(format!(
                "tensor `mask` has shape {:?}; [{sequences} or 1, {heads} or 1, {rows} or 1, at least {needed}{what}] is needed",
                mask.shape()
            )))
        };
        if mask.rank < 2 {
            return refuse();
        }
        let missing = 4 - mask.rank;
        let (mut shape, mut strides) = ([1; 4], [0; 4]);
        for axis in 0..mask.rank {
            (shape[missing + axis], strides[missing + axis]) = (mask.shape[axis], mask.strides[axis]);
        }
        for axis in 0..3 {
            if shape[axis] != 1 && shape[axis] != extents[axis] {
                return refuse();
            }
            if shape[axis] == 1 {
                strides[axis] = 0;
            }
        }
        if shape[3] < needed {
            return refuse();
        }
        // A last axis of 1 never steps.
        strides[3] = 1;
        let tensor = Tensor::new(mask.data, mask.dtype, &shape).with_strides(&strides);
        let [sequence, head_stride, row_stride, _] = strides;
        let start_stride = if dense { sequence } else { row_stride };
        Ok(Mask { tensor, start_stride, head_stride, row_stride })
    }

    pub fn is_bits(&self) -> bool {
        self.tensor.dtype == DType::I32
    }

    /// A word of bits, for an executor that computes on the host.
    ///
    /// # Safety
    /// The mask has bits, and the word is one of its own.
    #[inline(always)]
    pub unsafe fn word(&self, at: usize) -> u32 {
        self.tensor.data.cast::<u32>().add(at).read()
    }

    /// Elements from the first to the one of key 0.
    #[inline(always)]
    pub fn offset(&self, start: usize, row: usize, head: usize) -> usize {
        start * self.start_stride + row * self.row_stride + head * self.head_stride
    }
}

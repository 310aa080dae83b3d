//! What is added to the scores of a prefill.

use crate::error::{Error, Result};
use crate::tensor::Tensor;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mask {
    /// [sequences, heads, rows, keys], a stride of 0 where an axis repeats
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
        mask.expect_float("mask")?;
        mask.expect_readable("mask")?;
        let refuse = || {
            let [sequences, heads, rows, keys] = extents;
            Err(Error::invalid(format!(
                "tensor `mask` has shape {:?}; [{sequences} or 1, {heads} or 1, {rows} or 1, at least {keys}] is needed",
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
        if shape[3] < extents[3] {
            return refuse();
        }
        // A last axis of 1 never steps.
        strides[3] = 1;
        let tensor = Tensor::new(mask.data, mask.dtype, &shape).with_strides(&strides);
        let [sequence, head_stride, row_stride, _] = strides;
        let start_stride = if dense { sequence } else { row_stride };
        Ok(Mask { tensor, start_stride, head_stride, row_stride })
    }

    /// Elements from the first to the one of key 0.
    #[inline(always)]
    pub fn offset(&self, start: usize, row: usize, head: usize) -> usize {
        start * self.start_stride + row * self.row_stride + head * self.head_stride
    }
}

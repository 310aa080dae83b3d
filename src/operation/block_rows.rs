//! `block_rows`: rows of floats from and to rows of a file's blocks, one for one or by number.
//!
//! - decode: floats[i, j, t] = blocks[i, j, rows[i mod, j mod, t]]
//! - encode: blocks[i, j, rows[i mod, j mod, t]] = floats[i, j, t]
//!
//! Without numbers row t meets row t. What a block means, and how floats become one, is `crate::weight::blocks`.

use super::access::{Effect, Region};
use super::{expect_extent, Cost};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{DType, Tensor, MAX_RANK};
use crate::weight::blocks::can_encode;
use crate::weight::BlockFormat;
use std::ffi::c_void;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Decode,
    Encode,
}

/// Rows of blocks over four axes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockTensor {
    pub data: *mut c_void,
    pub format: BlockFormat,
    /// The last in elements.
    pub shape: [usize; MAX_RANK],
    /// In bytes, of the first three axes; blocks of a row follow one another.
    pub strides: [usize; 3],
}

// SAFETY: an address and its description, dereferenced only by executors.
unsafe impl Send for BlockTensor {}
// SAFETY: as above.
unsafe impl Sync for BlockTensor {}

impl BlockTensor {
    pub fn row_bytes(&self) -> usize {
        self.format.bytes(self.shape[3])
    }

    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Bytes from the first to behind the last.
    pub fn span_bytes(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        (0..3).map(|axis| (self.shape[axis] - 1) * self.strides[axis]).sum::<usize>() + self.row_bytes()
    }

    fn expect_rows_apart(&self) -> Result<()> {
        let mut axes = [0, 1, 2].map(|axis| (self.strides[axis], self.shape[axis]));
        axes.sort_unstable();
        let mut end = self.row_bytes();
        for (stride, extent) in axes {
            if extent > 1 && stride < end {
                return Err(Error::invalid(format!(
                    "`blocks` are written, but a stride of {stride} bytes makes rows overlap (at least {end} is needed)"
                )));
            }
            end = end.max((extent.max(1) - 1) * stride + end);
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockRows {
    pub direction: Direction,
    /// [i, j, t, width]
    pub floats: Tensor,
    /// [i, j, rows, width]
    pub blocks: BlockTensor,
    /// I32 [1, i or a divisor, j or a divisor, t]
    pub rows: Option<Tensor>,
}

impl BlockRows {
    pub fn new(direction: Direction, floats: Tensor, blocks: BlockTensor, rows: Option<Tensor>) -> Result<BlockRows> {
        floats.expect_float("floats")?;
        let floats = floats.with_four_axes();
        let [outer, inner, tokens, width] = floats.shape;
        let [block_outer, block_inner, places, block_width] = blocks.shape;
        if [outer, inner, width] != [block_outer, block_inner, block_width] || rows.is_none() && tokens != places {
            return Err(Error::invalid(format!(
                "`floats` have the shape {:?} and `blocks` {:?}; one shape is needed, apart from the number of rows where \
                 `rows` is given",
                floats.shape, blocks.shape
            )));
        }
        match direction {
            Direction::Decode => floats.expect_elements_apart("floats")?,
            Direction::Encode if !can_encode(blocks.format) => {
                return Err(Error::unsupported(format!(
                    "{} is read, but floats are not made into it; Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and IQ4_NL are",
                    blocks.format
                )))
            }
            Direction::Encode => blocks.expect_rows_apart()?,
        }
        let rows = match rows {
            None => None,
            Some(rows) => {
                rows.expect_dtype("rows", DType::I32)?;
                if rows.rank > 3 {
                    return Err(Error::invalid(format!("tensor `rows` has rank {}; at most 3 is needed", rows.rank)));
                }
                let rows = rows.with_four_axes();
                let fits = |extent: usize, of: usize| if extent == 0 { of == 0 } else { of.is_multiple_of(extent) };
                if rows.shape[3] != tokens || !fits(rows.shape[1], outer) || !fits(rows.shape[2], inner) {
                    return Err(Error::invalid(format!(
                        "tensor `rows` has shape {:?}; [{outer}, {inner}, {tokens}] or divisors of the first two are needed",
                        &rows.shape[1..]
                    )));
                }
                Some(rows)
            }
        };
        for (name, extent) in [
            ("the number of rows", outer.saturating_mul(inner).saturating_mul(tokens)),
            ("the number of rows of blocks", places),
            ("the number of columns", width),
        ] {
            expect_extent(name, extent)?;
        }
        Ok(BlockRows { direction, floats, blocks, rows })
    }

    pub fn is_empty(&self) -> bool {
        self.floats.is_empty()
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("rows", self.rows.as_ref());
        let exact = self.rows.is_none()
            && self.blocks.span_bytes() == self.floats.shape[..3].iter().product::<usize>() * self.blocks.row_bytes();
        let blocks = Region { exact, ..Region::bytes(self.blocks.data, self.blocks.span_bytes()) };
        match self.direction {
            Direction::Decode => {
                visit.add("blocks", &blocks, Effect::Read);
                visit.write("floats", Some(&self.floats));
            }
            Direction::Encode => {
                visit.read("floats", Some(&self.floats));
                visit.add("blocks", &blocks, Effect::Write);
            }
        }
    }

    pub fn cost(&self) -> Cost {
        let elements = self.floats.elements();
        let bytes = elements * self.floats.dtype.size() + self.blocks.format.bytes(elements);
        Cost { operations: elements as f64, bytes: bytes as f64 }
    }
}

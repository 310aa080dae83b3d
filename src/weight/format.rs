//! What a weight is turned into: an encoding and how far a scale reaches.

use super::encoding::{Encoding, BLOCK};
use super::BlockFormat;
use crate::error::{Error, Result};
use crate::tensor::DType;
use std::fmt;

/// Which elements share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granularity {
    /// All of one source tensor.
    Tensor,
    /// A row (an output channel).
    Rows,
    /// This many neighbouring elements of a row: 32, 64 or 128.
    Groups(usize),
    /// Blocks of 128 rows × 128 columns.
    Blocks,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format {
    pub encoding: Encoding,
    /// Without meaning for floats.
    pub granularity: Granularity,
    /// Int4 with a zero point beside each scale.
    pub zero_points: bool,
    /// Search for the range, up to the largest magnitude, that loses least.
    pub clipping: bool,
}

pub const GROUP_SIZES: [usize; 3] = [32, 64, 128];

/// How far a scale of Int4 reaches in memory when it stands for a whole row.
const WHOLE_ROW_GROUP: usize = 128;

impl Format {
    pub fn float(dtype: DType) -> Format {
        Format { encoding: Encoding::Float(dtype), granularity: Granularity::Rows, zero_points: false, clipping: false }
    }

    /// Blocks as a file has them.
    pub fn blocks(format: BlockFormat) -> Format {
        Format { encoding: Encoding::Blocks(format), ..Format::float(DType::F32) }
    }

    pub fn new(encoding: Encoding, granularity: Granularity, zero_points: bool, clipping: bool) -> Result<Format> {
        let refuse = |what: String| Err(Error::invalid(what));
        let integer = matches!(encoding, Encoding::Int8 | Encoding::Int4);
        match granularity {
            Granularity::Groups(size) if !GROUP_SIZES.contains(&size) => {
                return refuse(format!("group_size is {size}; 32, 64 or 128 is needed"))
            }
            Granularity::Groups(_) if !integer => return refuse(format!("{encoding} has no scales for groups")),
            Granularity::Blocks if !matches!(encoding, Encoding::Fp8E4m3 | Encoding::Fp8E5m2) => {
                return refuse(format!("{encoding} has no scales for blocks of 128 x 128; fp8 has"))
            }
            _ => {}
        }
        if zero_points && encoding != Encoding::Int4 {
            return refuse(format!("{encoding} has no zero points; int4 has"));
        }
        if clipping && !integer {
            return refuse(format!("a search for the clipping range is for int8 and int4, not for {encoding}"));
        }
        Ok(Format { encoding, granularity, zero_points, clipping })
    }

    /// Elements of a row that share a scale in memory; 0 where all do.
    pub fn stored_group(&self) -> usize {
        match (self.granularity, self.encoding) {
            (Granularity::Groups(size), _) => size,
            (Granularity::Blocks, _) => BLOCK,
            (_, Encoding::Int4) => WHOLE_ROW_GROUP,
            _ => 0,
        }
    }

    /// Scales of one row (of a row of blocks).
    pub fn scales_in_row(&self, columns: usize) -> usize {
        match self.stored_group() {
            _ if !self.encoding.has_scales() => 0,
            0 => 1,
            size => columns.div_ceil(size),
        }
    }

    /// Whether scales are stored as f16.
    pub fn has_f16_scales(&self) -> bool {
        self.encoding == Encoding::Int4 || matches!(self.granularity, Granularity::Groups(_))
    }

    /// Whether quantised values in format `other` can be kept as they are, their scales repeated where they reach
    /// further.
    pub fn holds(&self, other: &Format) -> bool {
        let reach = |size: usize| if size == 0 { usize::MAX } else { size };
        let (ours, theirs) = (reach(self.stored_group()), reach(other.stored_group()));
        let same = self.granularity == other.granularity
            || self.has_f16_scales() == other.has_f16_scales() && self.granularity != Granularity::Blocks;
        self.encoding.has_scales()
            && self.encoding == other.encoding
            && (self.zero_points || !other.zero_points)
            && same
            && (ours == theirs || theirs != usize::MAX && theirs % ours == 0)
    }

    /// The format that holds the quantised values of both.
    pub fn common(self, other: Format) -> Option<Format> {
        if self == other {
            return Some(self);
        }
        let zero_points = self.zero_points || other.zero_points;
        let wider = |format: Format| Format { zero_points, ..format };
        [wider(self), wider(other)].into_iter().find(|format| format.holds(&self) && format.holds(&other))
    }
}

impl fmt::Display for Format {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.encoding.fmt(formatter)?;
        match self.granularity {
            _ if !self.encoding.has_scales() => return Ok(()),
            Granularity::Tensor => formatter.write_str(" per tensor")?,
            Granularity::Rows => formatter.write_str(" per row")?,
            Granularity::Groups(size) => write!(formatter, " in groups of {size}")?,
            Granularity::Blocks => formatter.write_str(" in blocks of 128 x 128")?,
        }
        if self.zero_points {
            formatter.write_str(" with zero points")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn int4(size: usize, zero_points: bool) -> Format {
        Format::new(Encoding::Int4, Granularity::Groups(size), zero_points, false).unwrap()
    }

    #[test]
    fn smaller_groups_hold_the_codes_of_larger_ones() {
        assert!(int4(32, false).holds(&int4(128, false)) && !int4(128, false).holds(&int4(32, false)));
        assert!(int4(64, true).holds(&int4(64, false)) && !int4(64, false).holds(&int4(64, true)));
        assert_eq!(int4(32, false).common(int4(128, true)), Some(int4(32, true)));
        let rows = Format::new(Encoding::Int8, Granularity::Rows, false, false).unwrap();
        let groups = Format::new(Encoding::Int8, Granularity::Groups(32), false, false).unwrap();
        assert!(rows.holds(&rows) && !rows.holds(&groups) && !groups.holds(&rows));
        assert_eq!(groups.common(int4(32, false)), None);
        let whole = Format::new(Encoding::Int4, Granularity::Rows, false, false).unwrap();
        assert!(int4(32, false).holds(&whole) && int4(128, false).holds(&whole));
        assert_eq!(int4(32, false).common(Format::float(DType::F16)), None);
        let blocks = Format::new(Encoding::Fp8E4m3, Granularity::Blocks, false, false).unwrap();
        let channels = Format::new(Encoding::Fp8E4m3, Granularity::Rows, false, false).unwrap();
        assert!(blocks.holds(&blocks) && !blocks.holds(&channels) && !channels.holds(&blocks));
    }

    #[test]
    fn formats_that_no_product_reads_are_refused() {
        let refused = |encoding, granularity, zero_points, clipping| {
            Format::new(encoding, granularity, zero_points, clipping).unwrap_err().message
        };
        assert!(refused(Encoding::Int4, Granularity::Groups(48), false, false).contains("48"));
        assert!(refused(Encoding::Fp8E4m3, Granularity::Groups(32), false, false).contains("groups"));
        assert!(refused(Encoding::Int8, Granularity::Blocks, false, false).contains("blocks"));
        assert!(refused(Encoding::Int8, Granularity::Rows, true, false).contains("zero points"));
        assert!(refused(Encoding::Fp8E5m2, Granularity::Rows, false, true).contains("clipping"));
    }
}

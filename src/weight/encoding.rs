//! How a weight's elements are stored, and the scales that turn their quantised values into numbers.

use super::blocks::BlockFormat;
use crate::tensor::DType;
use half::f16;
use std::fmt;

/// What one element is. The value of element (n, k) stored as q:
///
/// - `Float`: the element itself
/// - `Fp8E4m3`, `Fp8E5m2`: scale · value(q); E4M3 is the variant without infinities (largest value 448)
/// - `Sfp`: scale · value(q); gemma.cpp's switching floating point, whose largest value is 1.875
/// - `Int8`: scale · q, q in −127 ..= 127 (imported quantised values may be −128)
/// - `Int4`: scale · (q − 8), with zero points scale · q + zero point; q in 0 ..= 15
/// - `Blocks`: what the block of the file says, whose scales lie within it
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Encoding {
    Float(DType),
    Fp8E4m3,
    Fp8E5m2,
    Int8,
    Int4,
    Sfp,
    Blocks(BlockFormat),
}

impl Encoding {
    pub const QUANTIZED: [Encoding; 5] =
        [Encoding::Fp8E4m3, Encoding::Fp8E5m2, Encoding::Int8, Encoding::Int4, Encoding::Sfp];

    pub fn is_float(self) -> bool {
        matches!(self, Encoding::Float(_))
    }

    /// Whether scales stand beside the elements.
    pub fn has_scales(self) -> bool {
        !matches!(self, Encoding::Float(_) | Encoding::Blocks(_))
    }

    /// Bytes of neighbouring elements, of blocks a whole number; scales that stand beside them not counted.
    pub fn bytes(self, elements: usize) -> usize {
        match self {
            Encoding::Float(dtype) => elements * dtype.size(),
            Encoding::Fp8E4m3 | Encoding::Fp8E5m2 | Encoding::Int8 | Encoding::Sfp => elements,
            Encoding::Int4 => elements.div_ceil(2),
            Encoding::Blocks(format) => format.bytes(elements),
        }
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Encoding::Float(dtype) => dtype.fmt(formatter),
            Encoding::Fp8E4m3 => formatter.write_str("fp8 e4m3"),
            Encoding::Fp8E5m2 => formatter.write_str("fp8 e5m2"),
            Encoding::Int8 => formatter.write_str("int8"),
            Encoding::Int4 => formatter.write_str("int4"),
            Encoding::Sfp => formatter.write_str("sfp"),
            Encoding::Blocks(format) => format.fmt(formatter),
        }
    }
}

/// Rows and columns of the blocks that share one of [`Scales::Blocks`].
pub const BLOCK: usize = 128;

/// The scales of a quantised weight, in device memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scales {
    /// A float weight has none.
    None,
    /// f32 [N]: one a row.
    Rows(*const f32),
    /// f16 [N][⌈K / size⌉] (Int4 in fragment tiles: paired as its layout says), for `size` neighbouring elements of a row:
    /// 32, 64 or 128.
    Groups { size: usize, data: *const f16 },
    /// f32 [⌈N / 128⌉][⌈K / 128⌉]: one for a block of 128 × 128.
    Blocks(*const f32),
}

impl Scales {
    /// Elements of a row that share a scale; 0: all of them, or no scale at all.
    pub fn group_size(self) -> usize {
        match self {
            Scales::None | Scales::Rows(_) => 0,
            Scales::Groups { size, .. } => size,
            Scales::Blocks(_) => BLOCK,
        }
    }
}

/// How an executor wants Int4 values; all other encodings are rows in every executor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightLayout {
    /// Row-major: 32 neighbouring elements of a row in 16 bytes, byte i = q[i] | q[i + 16] << 4. Columns padded to 32 with
    /// q = 8, so a row starts on a 16-byte boundary.
    Rows,
    /// Tiles of 16 rows × 64 columns in the order in which a tensor core's operand registers hold them (`pack.rs`).
    FragmentTiles,
}

//! The block formats of GGUF (ggml-common.h): each row is a sequence of blocks of 32 or 256 elements with their scales.
//!
//! One file holds what a block means for each group of formats: [`small`] those of 32 elements, [`large`] those of 256. A
//! block is decoded in the order of operations that ggml has, so its values are the same bits. Products, embeddings, copies,
//! weights made from blocks and the definition of an element all read blocks by [`Block::decode`], which is inlined into
//! kernels of any instruction set. It copies bytes before it writes values, since compilers make no vectors of loops whose operands
//! may overlap: with AVX2 Q8_0 takes 0.2 ns an element so and 1.4 otherwise, Q6_K 0.3 and 1.1.

mod encode;
mod large;
mod small;

pub use encode::can_encode;
pub use large::{scale_and_minimum, Iq4Xs, Q2K, Q3K, Q4K, Q5K, Q6K};
pub use small::{Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};

use std::fmt;

/// Most elements and bytes of a block of any format.
pub const MOST_ELEMENTS: usize = 256;
pub const MOST_BYTES: usize = 210;

/// How a block of one format becomes values.
pub trait Block {
    const ELEMENTS: usize;
    const BYTES: usize;

    /// Writes `ELEMENTS` values.
    fn decode(block: &[u8], values: &mut [f32]);
}

macro_rules! formats {
    ($($name:ident $text:literal $file_type:literal;)+) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum BlockFormat {
            $($name,)+
        }

        impl BlockFormat {
            pub const ALL: &'static [BlockFormat] = &[$(BlockFormat::$name,)+];

            /// Elements of a block.
            pub const fn elements(self) -> usize {
                match self {
                    $(BlockFormat::$name => $name::ELEMENTS,)+
                }
            }

            /// Bytes of a block.
            pub const fn block_bytes(self) -> usize {
                match self {
                    $(BlockFormat::$name => $name::BYTES,)+
                }
            }

            /// The name that llama.cpp gives it.
            pub const fn name(self) -> &'static str {
                match self {
                    $(BlockFormat::$name => $text,)+
                }
            }

            /// The number of the type in GGUF files.
            pub const fn file_type(self) -> u32 {
                match self {
                    $(BlockFormat::$name => $file_type,)+
                }
            }
        }

        /// Runs `$body` with `$type` standing for the [`Block`] of a format.
        macro_rules! with_block_format {
            ($format:expr, $type:ident => $body:expr) => {
                match $format {
                    $($crate::weight::blocks::BlockFormat::$name => {
                        type $type = $crate::weight::blocks::$name;
                        $body
                    })+
                }
            };
        }
        pub(crate) use with_block_format;
    };
}

formats! {
    Q4_0 "Q4_0" 2;
    Q4_1 "Q4_1" 3;
    Q5_0 "Q5_0" 6;
    Q5_1 "Q5_1" 7;
    Q8_0 "Q8_0" 8;
    Q2K "Q2_K" 10;
    Q3K "Q3_K" 11;
    Q4K "Q4_K" 12;
    Q5K "Q5_K" 13;
    Q6K "Q6_K" 14;
    Iq4Nl "IQ4_NL" 20;
    Iq4Xs "IQ4_XS" 23;
    Mxfp4 "MXFP4" 39;
}

impl BlockFormat {
    pub fn from_file_type(file_type: u32) -> Option<BlockFormat> {
        BlockFormat::ALL.iter().copied().find(|format| format.file_type() == file_type)
    }

    /// Bytes of so many elements of a row, a whole number of blocks.
    pub const fn bytes(self, elements: usize) -> usize {
        elements / self.elements() * self.block_bytes()
    }

    /// Decodes whole blocks one behind the other.
    #[inline(always)]
    pub fn decode(self, blocks: &[u8], values: &mut [f32]) {
        with_block_format!(self, F => decode::<F>(blocks, values));
    }
}

impl fmt::Display for BlockFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Decodes whole blocks of one format.
#[inline(always)]
pub fn decode<F: Block>(blocks: &[u8], values: &mut [f32]) {
    for (block, values) in blocks.chunks_exact(F::BYTES).zip(values.chunks_exact_mut(F::ELEMENTS)) {
        F::decode(block, values);
    }
}

#[cfg(test)]
mod tests;

//! `convert_heads`: heads of queries, keys or values as attention wants them: rotated if asked for, and rounded to FP8 by scales of
//! heads, or stored as floats.
//!
//! output = round(rotate(x) / scale). A rotation multiplies the head by random signs and then each of its blocks of b elements by the
//! Hadamard matrix of size b divided by √b, where b is the largest power of two that divides head_dim. It is orthogonal, so that
//! q · k stays what it is where both are rotated alike, and an outlier becomes b elements of 1/√b of its size before they are rounded
//! ("incoherent processing", FlashAttention 3, Shah et al., arXiv:2407.08608).

use super::{expect_extent, Cost};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::fp8::{E4M3_MAX, E5M2_MAX};
use crate::tensor::{DType, Tensor, MAX_HEAD_DIM};

/// What head_dim is a multiple of.
pub const HEAD_DIM_STEP: usize = 8;
/// Words with a bit for each element of the longest head.
pub const SIGN_WORDS: usize = 18;
const _: () = assert!(32 * SIGN_WORDS == MAX_HEAD_DIM);

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ConvertHeads {
    /// [.., tokens, heads, head_dim] with any strides, in four axes.
    pub input: Tensor,
    /// The input's shape, a float dtype or FP8, any strides.
    pub output: Tensor,
    pub scales: Option<HeadScales>,
    pub rotation: Option<HeadRotation>,
}

/// f32 scales of as many heads each as they divide the heads into.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadScales {
    /// Contiguous, of rank 1.
    pub tensor: Tensor,
    /// The call computes them: the largest magnitude of their heads over all tokens, divided by the largest number of the dtype.
    pub written: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadRotation {
    /// Elements that a Hadamard matrix mixes.
    pub block: usize,
    /// 1/√block
    pub factor: f32,
    /// Bit i mod 32 of word i / 32: element i changes its sign.
    pub signs: [u32; SIGN_WORDS],
}

/// The largest power of two that divides a head.
pub fn rotation_block(head_dim: usize) -> usize {
    1 << head_dim.trailing_zeros()
}

impl HeadRotation {
    pub fn new(head_dim: usize, seed: u64) -> HeadRotation {
        let block = rotation_block(head_dim);
        let mut signs = [0; SIGN_WORDS];
        let mut state = seed;
        for pair in signs.chunks_mut(2) {
            let number = split_mix(&mut state);
            for (word, bits) in pair.iter_mut().zip([number as u32, (number >> 32) as u32]) {
                *word = bits;
            }
        }
        HeadRotation { block, factor: (1.0 / (block as f64).sqrt()) as f32, signs }
    }

    pub fn is_negated(&self, element: usize) -> bool {
        self.signs[element / 32] >> (element % 32) & 1 == 1
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014).
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut number = *state;
    number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

impl ConvertHeads {
    pub fn new(
        input: Tensor,
        output: Tensor,
        scales: Option<HeadScales>,
        rotation_seed: Option<u64>,
    ) -> Result<ConvertHeads> {
        input.expect_float("input")?;
        if !output.dtype.is_float() && !output.dtype.is_fp8() {
            return Err(Error::invalid(format!(
                "tensor `output` has dtype {}; f32, f16, bf16, fp8 e4m3 or fp8 e5m2 is needed",
                output.dtype
            )));
        }
        if input.rank < 2 {
            return Err(Error::invalid(format!("tensor `input` has rank {}; 2 to 4 is needed", input.rank)));
        }
        output.expect_shape("output", input.shape())?;
        output.expect_elements_apart("output")?;
        let (input, output) = (input.with_four_axes(), output.with_four_axes());
        let [first, second, heads, head_dim] = input.shape;
        expect_extent("the number of tokens", first.saturating_mul(second))?;
        expect_extent("the number of heads", heads)?;
        if head_dim == 0 || head_dim > MAX_HEAD_DIM || head_dim % HEAD_DIM_STEP != 0 {
            return Err(Error::invalid(format!(
                "head_dim is {head_dim}; a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM} is needed"
            ))
            .with_limit(head_dim as u64, MAX_HEAD_DIM as u64));
        }
        expect_extent("the tokens' eights of elements of a head", input.elements() / heads.max(1) / HEAD_DIM_STEP)?;
        if let Some(scales) = &scales {
            scales.check(output.dtype, heads)?;
        }
        let rotation = rotation_seed.map(|seed| HeadRotation::new(head_dim, seed));
        Ok(ConvertHeads { input, output, scales, rotation })
    }

    /// Rows of a head each.
    pub fn rows(&self) -> usize {
        self.input.shape[..3].iter().product()
    }

    /// Heads that share a scale.
    pub fn heads_per_scale(&self) -> usize {
        let heads = self.input.shape[2];
        self.scales.map_or(heads, |scales| heads / scales.tensor.elements())
    }

    /// The largest number of the output's dtype where it is FP8.
    pub fn largest(&self) -> f32 {
        match self.output.dtype {
            DType::F8E5m2 => E5M2_MAX,
            _ => E4M3_MAX,
        }
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        match self.input.strides == self.output.strides && self.input.dtype == self.output.dtype {
            true => visit.read_before("input", Some(&self.input), &["output"]),
            false => visit.read("input", Some(&self.input)),
        }
        match &self.scales {
            Some(HeadScales { tensor, written: true }) => visit.write("scales", Some(tensor)),
            scales => visit.read("scales", scales.as_ref().map(|scales| &scales.tensor)),
        }
        visit.write("output", Some(&self.output));
    }

    pub fn cost(&self) -> Cost {
        let elements = self.input.elements() as f64;
        let stages = self.rotation.map_or(0.0, |rotation| f64::from(rotation.block.ilog2()) + 1.0);
        let width = self.input.dtype.size() + self.output.dtype.size();
        Cost { operations: elements * (stages + 1.0), bytes: elements * width as f64 }
    }
}

impl HeadScales {
    fn check(&self, output: DType, heads: usize) -> Result<()> {
        let tensor = &self.tensor;
        if !output.is_fp8() {
            return Err(Error::invalid(format!("`scales` is given, and `output` has dtype {output}, not FP8")));
        }
        tensor.expect_dtype("scales", DType::F32)?;
        tensor.expect_rank("scales", 1)?;
        let count = tensor.shape[0];
        if count == 0 || !heads.is_multiple_of(count) {
            return Err(Error::invalid(format!("`scales` has {count} entries; a divisor of {heads} heads is needed")));
        }
        if !tensor.is_contiguous() {
            return Err(Error::invalid(format!("tensor `scales` {tensor} is not contiguous")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_are_those_of_split_mix() {
        // The first outputs of SplitMix64 from 1234567, as its reference implementation prints them.
        let mut state = 1_234_567;
        assert_eq!(split_mix(&mut state), 6_457_827_717_110_365_317);
        assert_eq!(split_mix(&mut state), 3_203_168_211_198_807_973);
        let rotation = HeadRotation::new(192, 1_234_567);
        assert_eq!((rotation.block, rotation.factor), (64, 0.125));
        let second = 3_203_168_211_198_807_973u64;
        assert!((0..64).all(|i| rotation.is_negated(64 + i) == (second >> i & 1 == 1)));
    }

    #[test]
    fn blocks_are_the_largest_powers_of_two() {
        let blocks = [8, 24, 64, 80, 96, 128, 192, 256, 512, 576].map(rotation_block);
        assert_eq!(blocks, [8, 8, 64, 16, 32, 128, 64, 256, 512, 64]);
    }
}

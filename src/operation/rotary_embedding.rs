//! `rotary_embedding`: rotation of pairs of elements by angles that grow with the position, from tensor to tensor.
//!
//! Pair i turns by θ = position · base^(−2i/rotary_dim) / factors[i] · position_scale (Su et al. 2021). With YaRN (Peng et al.
//! 2023) position_scale counts for low frequencies alone: θ = position · base^(−2i/rotary_dim) / factors[i] · (scale · (1 − m) + m)
//! with m = extension · (1 − clamp((i − low) / max(0.001, high − low), 0, 1)), where low and high are the pairs that turn
//! `beta_fast` and `beta_slow` times within the original context, rounded outwards; and the rotated elements are multiplied by
//! 1 + 0.1 · ln(1 / position_scale) besides `magnitude`.
//!
//! With a norm the heads are x · rsqrt(mean(x²) + ε) · weight before they turn; with rows token t goes to row rows[t].

use super::{expect_extent, expect_finite_positive, Cost};
use crate::error::{numbered, Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{DType, Tensor, MAX_HEAD_DIM};

numbered! {
    /// `nvb_rotary_code` of csrc/rotary_embedding/rotary_embedding.h, which elements are a pair; the numbers are `NVB_ROTARY_*` of
    /// the C ABI too.
    pub enum Pairs: u32 {
        /// x[i] and x[i + rotary_dim / 2]
        Half = 0,
        /// x[2i] and x[2i + 1]
        Interleaved = 1,
    }
}

numbered! {
    /// Which pairs belong to a section; the numbers are `NVB_SECTIONS_*` of the C ABI.
    pub enum SectionOrder: u32 {
        /// Those of one section stand one behind the other.
        Consecutive = 0,
        /// Pairs of the first three alternate while each has some left (Qwen3-VL), and the fourth has the rest.
        Interleaved = 1,
        /// As consecutive, and each section has all frequencies from the first on (vision towers, as of Qwen2-VL): its pair i
        /// turns by base^(−4i/rotary_dim).
        Independent = 2,
    }
}

/// Several positions a token (M-RoPE, Qwen2-VL): how many pairs turn by the first, second, third and fourth of them, in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sections {
    pub pairs: [u32; 4],
    pub order: SectionOrder,
}

impl Sections {
    /// The pair's place among those of its section, which are together.
    fn place_in_section(&self, pair: usize) -> usize {
        let pairs = self.pairs.map(|pairs| pairs as usize);
        let before: usize = pairs[..usize::from(self.axis(pair))].iter().sum();
        pair % pairs.iter().sum::<usize>() - before
    }

    /// Which of a token's positions turns the pair.
    fn axis(&self, pair: usize) -> u8 {
        let [first, second, third, fourth] = self.pairs.map(|pairs| pairs as usize);
        let place = pair % (first + second + third + fourth);
        if self.order == SectionOrder::Interleaved {
            return match place % 3 {
                0 if place < 3 * first => 0,
                1 if place < 3 * second => 1,
                2 if place < 3 * third => 2,
                _ => 3,
            };
        }
        [first, first + second, first + second + third].iter().filter(|&&end| place >= end).count() as u8
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    pub extension: f32,
    pub original_positions: u32,
    pub beta_fast: f32,
    pub beta_slow: f32,
}

/// How positions become angles.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Angles {
    pub pairs: Pairs,
    pub rotary_dim: usize,
    /// The first rotated element of a head.
    pub first: usize,
    pub base: f32,
    pub position_scale: f32,
    /// Multiplies the rotated elements.
    pub magnitude: f32,
    pub yarn: Option<Yarn>,
    /// Each token has four positions then.
    pub sections: Option<Sections>,
}

/// The most pairs of a head.
pub const MAX_ROTARY_PAIRS: usize = 288;
const _: () = assert!(2 * MAX_ROTARY_PAIRS == MAX_HEAD_DIM);

impl Angles {
    /// What a position is multiplied by for each pair, before its frequency factor; and what multiplies the elements.
    pub fn frequencies(&self) -> ([f32; MAX_ROTARY_PAIRS], f32) {
        let mut frequencies = [0.0; MAX_ROTARY_PAIRS];
        let (low, high) = self.yarn.map_or((0.0, 0.0), |yarn| self.ramp(&yarn));
        for (i, frequency) in frequencies[..self.rotary_dim / 2].iter_mut().enumerate() {
            let mix = self.yarn.map_or(0.0, |yarn| {
                let ramp = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                f64::from(yarn.extension) * (1.0 - ramp)
            });
            let place = self.independent().map_or(i, |sections| sections.place_in_section(i));
            let inverse = f64::from(self.base).powf(-((2 * place) as f64) / self.span() as f64);
            *frequency = (inverse * (f64::from(self.position_scale) * (1.0 - mix) + mix)) as f32;
        }
        (frequencies, self.factor())
    }

    /// What multiplies the elements.
    pub fn factor(&self) -> f32 {
        let longer = self.yarn.map_or(1.0, |_| 1.0 + 0.1 * (1.0 / f64::from(self.position_scale)).ln());
        (f64::from(self.magnitude) * longer) as f32
    }

    fn independent(&self) -> Option<Sections> {
        self.sections.filter(|sections| sections.order == SectionOrder::Independent)
    }

    /// The elements over which frequencies fall to the lowest: with independent sections two of them share the head.
    fn span(&self) -> usize {
        match self.independent() {
            Some(_) => self.rotary_dim / 2,
            None => self.rotary_dim,
        }
    }

    /// Which of a token's positions turns each pair.
    pub fn position_axes(&self) -> [u8; MAX_ROTARY_PAIRS] {
        let mut axes = [0; MAX_ROTARY_PAIRS];
        if let Some(sections) = self.sections {
            axes.iter_mut().enumerate().for_each(|(pair, axis)| *axis = sections.axis(pair));
        }
        axes
    }

    /// The pairs between which extrapolation gives way to interpolation.
    fn ramp(&self, yarn: &Yarn) -> (f64, f64) {
        let dim = self.span() as f64;
        let pair = |turns: f32| {
            let context = f64::from(yarn.original_positions);
            dim * (context / (f64::from(turns) * 2.0 * std::f64::consts::PI)).ln() / (2.0 * f64::from(self.base).ln())
        };
        (pair(yarn.beta_fast).floor().max(0.0), pair(yarn.beta_slow).ceil().min(dim - 1.0))
    }
}

/// The norm of a head before it turns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadNorm {
    /// [head_dim]
    pub weight: Tensor,
    pub epsilon: f32,
}

/// Further heads of the same tokens, done in the same call: keys, which turn by the same positions, or values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MoreHeads {
    pub input: Tensor,
    pub output: Tensor,
    pub rows: Option<Tensor>,
    pub norm: Option<HeadNorm>,
    pub magnitude: f32,
    /// `false`: they are copied.
    pub turn: bool,
}

/// Four axes: [batch, tokens, heads, head_dim].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RotaryEmbedding {
    pub input: Tensor,
    pub output: Tensor,
    /// I32 [tokens], with sections [4, tokens]
    pub positions: Tensor,
    /// F32 [rotary_dim / 2]
    pub factors: Option<Tensor>,
    pub angles: Angles,
    pub norm: Option<HeadNorm>,
    /// I32 [tokens], the places of the tokens in the output, which has one of a batch and any number of rows then.
    pub rows: Option<Tensor>,
    /// Keys and values beside the queries.
    pub more: [Option<MoreHeads>; 2],
}

/// The arguments' names: those of the heads themselves, of keys and of values.
const INPUTS: [&str; 3] = ["input", "key_input", "value_input"];
const OUTPUTS: [&str; 3] = ["output", "key_output", "value_output"];
const ROWS: [&str; 3] = ["rows", "key_rows", "value_rows"];
const NORM_WEIGHTS: [&str; 3] = ["norm_weight", "key_norm_weight", ""];

impl RotaryEmbedding {
    pub fn new(
        input: Tensor,
        output: Tensor,
        positions: Tensor,
        factors: Option<Tensor>,
        rows: Option<Tensor>,
        angles: Angles,
    ) -> Result<RotaryEmbedding> {
        input.expect_float("input")?;
        input.expect_readable("input")?;
        output.expect_float("output")?;
        output.expect_readable("output")?;
        output.expect_elements_apart("output")?;
        let (input, output) = (input.with_four_axes(), output.with_four_axes());
        let [batch, tokens, heads, head_dim] = input.shape;
        match rows {
            None => output.expect_shape("output", &input.shape)?,
            Some(rows) => {
                output.expect_shape("output", &[1, output.shape[1], heads, head_dim])?;
                rows.expect_dtype("rows", DType::I32)?;
                rows.expect_shape("rows", &[tokens])?;
                rows.expect_address("rows")?;
                rows.expect_apart("rows", "output", &output)?;
                expect_extent("the number of rows", output.shape[1])?;
                if batch != 1 {
                    return Err(Error::invalid(format!("`rows` are given for {batch} batches; 1 is needed")));
                }
            }
        }
        positions.expect_dtype("positions", DType::I32)?;
        match angles.sections {
            None => positions.expect_shape("positions", &[tokens])?,
            Some(sections) => {
                positions.expect_shape("positions", &[4, tokens])?;
                let total: u64 = sections.pairs.iter().map(|&pairs| u64::from(pairs)).sum();
                if total == 0 || total > MAX_ROTARY_PAIRS as u64 {
                    return Err(Error::invalid(format!(
                        "the sections have {total} pairs; 1 to {MAX_ROTARY_PAIRS} are needed"
                    )));
                }
            }
        }
        positions.expect_address("positions")?;
        positions.expect_apart("positions", "output", &output)?;
        let Angles { rotary_dim, first, base, position_scale, magnitude, yarn, .. } = angles;
        if head_dim > MAX_HEAD_DIM || rotary_dim % 2 != 0 || first.saturating_add(rotary_dim) > head_dim {
            return Err(Error::invalid(format!(
                "rotary_dim is {rotary_dim} from element {first} on; an even number within the head is needed, whose {head_dim} \
                 elements are at most {MAX_HEAD_DIM}"
            )));
        }
        if let Some(factors) = factors {
            factors.expect_dtype("frequency_factors", DType::F32)?;
            factors.expect_readable("frequency_factors")?;
            if factors.rank != 1 || factors.shape[0] < rotary_dim / 2 {
                return Err(Error::invalid(format!(
                    "tensor `frequency_factors` has shape {:?}; at least [{}] is needed",
                    factors.shape(),
                    rotary_dim / 2
                )));
            }
        }
        expect_finite_positive("base", base)?;
        expect_finite_positive("position_scale", position_scale)?;
        expect_finite_positive("magnitude", magnitude)?;
        if let Some(yarn) = yarn {
            expect_finite_positive("extension", yarn.extension)?;
            expect_finite_positive("beta_fast", yarn.beta_fast)?;
            expect_finite_positive("beta_slow", yarn.beta_slow)?;
            if base == 1.0 {
                return Err(Error::invalid("base is 1; YaRN needs another, because all pairs then turn alike"));
            }
        }
        expect_extent("the number of heads of all tokens", batch.saturating_mul(tokens).saturating_mul(heads))?;
        Ok(RotaryEmbedding { input, output, positions, factors, angles, norm: None, rows, more: [None; 2] })
    }

    /// With a norm of the heads before they turn.
    pub fn with_norm(mut self, norm: Option<HeadNorm>) -> Result<RotaryEmbedding> {
        if let Some(HeadNorm { weight, epsilon }) = norm {
            weight.expect_float("norm_weight")?;
            weight.expect_readable("norm_weight")?;
            weight.expect_shape("norm_weight", &[self.input.shape[3]])?;
            weight.expect_apart("norm_weight", "output", &self.output)?;
            expect_finite_positive("epsilon", epsilon)?;
        }
        self.norm = norm;
        Ok(self)
    }

    /// With heads of the same tokens, which no output of another kind overlaps.
    pub fn with_more(mut self, keys: Option<MoreHeads>, values: Option<MoreHeads>) -> Result<RotaryEmbedding> {
        for (kind, more) in [keys, values].into_iter().enumerate() {
            let Some(more) = more else { continue };
            let copied = Angles { rotary_dim: 0, first: 0, yarn: None, sections: None, ..self.angles };
            let angles = if more.turn { Angles { magnitude: more.magnitude, ..self.angles } } else { copied };
            // Copied heads have one position a token, which nobody reads.
            let axes = usize::from(!more.turn && self.angles.sections.is_some());
            let positions = Tensor::new(self.positions.data, DType::I32, &self.positions.shape()[axes..]);
            let positions = if axes == 0 { self.positions } else { positions };
            let one = RotaryEmbedding::new(more.input, more.output, positions, self.factors, more.rows, angles)
                .and_then(|one| one.with_norm(more.norm))
                .map_err(|error| error.context(["keys", "values"][kind]))?;
            self.more[kind] = Some(MoreHeads { input: one.input, output: one.output, ..more });
        }
        for (kind, part) in self.parts() {
            for (other, written) in self.parts().filter(|(other, _)| *other != kind) {
                part.input.expect_apart(INPUTS[kind], OUTPUTS[other], &written.output)?;
                part.output.expect_apart(OUTPUTS[kind], OUTPUTS[other], &written.output)?;
                if let Some(rows) = part.rows {
                    rows.expect_apart(ROWS[kind], OUTPUTS[other], &written.output)?;
                }
                if let Some(norm) = part.norm {
                    norm.weight.expect_apart(NORM_WEIGHTS[kind], OUTPUTS[other], &written.output)?;
                }
            }
        }
        Ok(self)
    }

    /// Each kind of heads as an operation of its own, with its place among queries, keys and values.
    pub fn parts(&self) -> impl Iterator<Item = (usize, RotaryEmbedding)> + '_ {
        (0..3).filter_map(|kind| {
            if kind == 0 {
                return Some((0, RotaryEmbedding { more: [None; 2], ..*self }));
            }
            let more = self.more[kind - 1]?;
            let angles = Angles { magnitude: more.magnitude, ..self.angles };
            let angles = if more.turn {
                angles
            } else {
                Angles { rotary_dim: 0, first: 0, magnitude: 1.0, yarn: None, ..angles }
            };
            let MoreHeads { input, output, rows, norm, .. } = more;
            Some((kind, RotaryEmbedding { input, output, rows, norm, angles, more: [None; 2], ..*self }))
        })
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("positions", Some(&self.positions));
        visit.read("frequency_factors", self.factors.as_ref());
        for (kind, part) in self.parts() {
            let stays = part.rows.is_none() && part.input.dtype == part.output.dtype;
            match stays && part.input.strides == part.output.strides {
                true => visit.read_before(INPUTS[kind], Some(&part.input), &OUTPUTS[kind..=kind]),
                false => visit.read(INPUTS[kind], Some(&part.input)),
            }
            visit.read(NORM_WEIGHTS[kind], part.norm.as_ref().map(|norm| &norm.weight));
            visit.read(ROWS[kind], part.rows.as_ref());
            visit.write(OUTPUTS[kind], Some(&part.output));
        }
    }

    pub fn cost(&self) -> Cost {
        self.parts().fold(Cost { operations: 0.0, bytes: 0.0 }, |sum, (_, part)| {
            let elements = part.input.elements() as f64;
            let width = part.input.dtype.size() + part.output.dtype.size();
            let operations = elements * if part.norm.is_some() { 7.0 } else { 3.0 };
            Cost { operations: sum.operations + operations, bytes: sum.bytes + elements * width as f64 }
        })
    }
}

//! A row's softmax, carried from tile to tile.
//!
//! Weights are powers of 2: with c = scale · log₂e the weight of a score s is 2^(c·s − shift), one fused step and the power.
//! `shift` is c times the largest score of some tile, rounded; the same rounded number stands in every weight of the row, so
//! that its rounding cancels. A score may stand up to [`SLACK`] above the shift before the shift follows it: most tiles then
//! rescale nothing, and the branch is foreseen.

use super::super::row::{vectors, Row};
use crate::operation::attention::AttentionConfig;
use crate::simd::{math, Simd};
use std::f64::consts::LN_2;
use std::ops::Range;

/// How far, as a power of 2, a weight may rise above 1. Sums of any number of weights stay far within f32.
const SLACK: f32 = 8.0;

/// What turns products into exponents.
#[derive(Clone, Copy)]
pub struct Scores {
    /// Multiplies the products in a step of its own: before a cap, and where it is below 0, since the largest product is then not
    /// the largest score. 1: no such step.
    scale: f32,
    soft_cap: f32,
    /// Multiplies what the step leaves; above 0.
    factor: f32,
}

impl Scores {
    /// `added`: what a mask holds or a slope gives is added to the scores, which then have their own scale before.
    pub fn with(config: &AttentionConfig, added: bool) -> Scores {
        let apart = config.soft_cap > 0.0 || config.scale < 0.0 || added;
        let (scale, rest) = if apart { (config.scale, 1.0) } else { (1.0, f64::from(config.scale)) };
        Scores { scale, soft_cap: config.soft_cap, factor: (rest * std::f64::consts::LOG2_E) as f32 }
    }
}

/// What joins the scores of a row with some keys, after the cap.
#[derive(Clone, Copy, Default)]
pub struct Added {
    /// Of the first key on.
    pub mask: Option<Row>,
    /// A slope that multiplies the distance of each key from the row's position, which is counted from the first key, and
    /// is taken off.
    pub slope: Option<(f32, f32)>,
    /// Keys among the visible ones, counted from the first, that do not count: between the first tokens and a window.
    pub hidden: Option<(f32, f32)>,
}

/// One row's softmax so far, beside the weighted values that the caller holds.
pub struct RunningSoftmax {
    /// What every exponent is relative to: at most [`SLACK`] below the largest, or −∞.
    pub shift: *mut f32,
    /// `S::LANES` partial sums of weights.
    pub sums: *mut f32,
    /// The row's weighted values, `width` f32, a multiple of the lanes.
    pub output: *mut f32,
    pub width: usize,
}

impl RunningSoftmax {
    /// Turns a row of products with `keys` keys, of which `visible` count, into weights relative to the new shift, and
    /// rescales what was there to it. `row` is readable and writable up to the next multiple of the lanes from `keys`; the
    /// weights past the last key are 0. `added` joins the scores of these keys.
    #[inline(always)]
    pub unsafe fn add<S: Simd>(
        &self,
        row: *mut f32,
        visible: Range<usize>,
        keys: usize,
        scores: Scores,
        Added { mask, slope, hidden }: Added,
    ) {
        let lowest = S::splat(f32::NEG_INFINITY);
        let masked = visible.start > 0 || visible.end < keys.next_multiple_of(S::LANES);
        let mut max = lowest;
        if masked
            || scores.scale != 1.0
            || scores.soft_cap > 0.0
            || mask.is_some()
            || slope.is_some()
            || hidden.is_some()
        {
            let (begin, end) = (visible.start as f32, visible.end as f32);
            for at in (0..keys).step_by(S::LANES) {
                let mut score = S::mul(S::load(row.add(at)), S::splat(scores.scale));
                if scores.soft_cap > 0.0 {
                    score = math::soft_cap::<S>(score, scores.soft_cap);
                }
                if let Some(mask) = mask {
                    score = S::add(score, mask.load::<S>(at, S::LANES.min(keys - at)));
                }
                if let Some((slope, position)) = slope {
                    let number = S::add(S::lane_numbers(), S::splat(at as f32));
                    let (behind, before) = (S::sub(S::splat(position), number), S::sub(number, S::splat(position)));
                    score = S::fma(S::max(behind, before), S::splat(-slope), score);
                }
                if masked {
                    let number = S::add(S::lane_numbers(), S::splat(at as f32));
                    score = S::select_less(number, S::splat(end), score, lowest);
                    score = S::select_less(number, S::splat(begin), lowest, score);
                }
                if let Some((begin, end)) = hidden {
                    let number = S::add(S::lane_numbers(), S::splat(at as f32));
                    let inside = S::select_less(number, S::splat(end), lowest, score);
                    score = S::select_less(number, S::splat(begin), score, inside);
                }
                S::store(row.add(at), score);
                max = S::max(max, score);
            }
        } else {
            for at in (0..keys).step_by(S::LANES) {
                max = S::max(max, S::load(row.add(at)));
            }
        }
        let largest = S::max_lane(max) * scores.factor;
        let old = *self.shift;
        if largest > old + SLACK {
            *self.shift = largest;
            if old > f32::NEG_INFINITY {
                let factor = math::exp2::<S>(S::splat(old - largest));
                S::store(self.sums, S::mul(S::load(self.sums), factor));
                for at in (0..self.width).step_by(S::LANES) {
                    S::store(self.output.add(at), S::mul(S::load(self.output.add(at)), factor));
                }
            }
        }
        // While nothing is visible every weight is 2^(−∞ − 0) = 0.
        let shift = S::splat(if *self.shift == f32::NEG_INFINITY { -0.0 } else { -*self.shift });
        let factor = S::splat(scores.factor);
        let mut sums = S::load(self.sums);
        for at in (0..keys).step_by(S::LANES) {
            let weight = math::exp2::<S>(S::fma(S::load(row.add(at)), factor, shift));
            S::store(row.add(at), weight);
            sums = S::add(sums, weight);
        }
        S::store(self.sums, sums);
    }
}

/// Stores weighted values over the sum of weights, times the values' scale, and ln of the sum in the scale of the scores.
/// A sink is a further term of the sum.
/// `values` is padded to whole vectors.
#[inline(always)]
pub unsafe fn finish<S: Simd>(
    (values, scale): (*const f32, f32),
    shift: f32,
    sum: f32,
    output: Row,
    dim: usize,
    lse: Option<*mut f32>,
    sink: Option<f32>,
) {
    // A row that saw no key has no weight.
    let mut inverse = if sum == 0.0 { 0.0 } else { scale / sum };
    let mut all = f64::from(shift) * LN_2 + f64::from(sum).ln();
    if let Some(sink) = sink.map(f64::from).filter(|&sink| sink != f64::NEG_INFINITY) {
        // exp(lse) of exp(lse) + exp(sink). A NaN of either stays NaN.
        let keys = all;
        all = keys.max(sink) + (-(keys - sink).abs()).exp().ln_1p();
        inverse *= (keys - all).exp() as f32;
    }
    let inverse = S::splat(inverse);
    for (at, lanes) in vectors::<S>(dim) {
        output.store::<S>(at, S::mul(S::load(values.add(at)), inverse), lanes);
    }
    if let Some(lse) = lse {
        lse.write(all as f32);
    }
}

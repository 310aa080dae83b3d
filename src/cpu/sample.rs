//! Draws a token from each row of logits; the rules are in `ops/sample.rs`.
//!
//! Nothing is sorted that need not be: candidates are gathered down to a weight below which the answer cannot lie, and
//! the prefix that reaches a given mass is found by halving around medians, in time linear in the candidates. NaN
//! counts as −∞.

use super::argmax::largest;
use super::row::{integers, vectors, Row};
use super::threads::Threads;
use crate::error::{Error, Result, Status};
use crate::operation::attention::philox;
use crate::operation::sample::{Sample, SampleOptions};
use crate::simd::{dispatch, math, Kernel, Simd};
use crate::tensor::Tensor;
use std::sync::Mutex;

pub fn sample(threads: &Threads, op: &Sample) -> Result<()> {
    let failure = Mutex::new(None);
    threads.run(op.logits.rows, |row, _| {
        // SAFETY: the descriptor is validated; each task writes its own row's results.
        unsafe {
            match draw_row(op, row) {
                Ok((token, probability)) => write(op, row, token, probability),
                Err(_) => *failure.lock().unwrap_or_else(|poison| poison.into_inner()) = Some(row),
            }
        }
    });
    match failure.into_inner().unwrap_or_else(|poison| poison.into_inner()) {
        None => Ok(()),
        Some(row) => {
            let bytes = op.logits.columns * std::mem::size_of::<Candidate>();
            Err(Error::new(Status::OutOfMemory, format!("sample: no memory for the candidates of row {row}"))
                .with_limit(bytes as u64, 0))
        }
    }
}

unsafe fn write(op: &Sample, row: usize, token: usize, probability: f32) {
    op.tokens.data.cast::<i32>().add(row).write(token as i32);
    if let Some(probabilities) = &op.probabilities {
        probabilities.data.cast::<f32>().add(row).write(probability);
    }
}

/// Ordered by `key`: logit first, then the lower index.
#[derive(Clone, Copy)]
struct Candidate {
    key: u64,
    weight: f32,
}

impl Candidate {
    fn new(logit: f32, index: usize, weight: f32) -> Candidate {
        // The bits of a float compare like integers once negative ones are flipped; −0 must equal 0.
        let bits = (logit + 0.0).to_bits();
        let ordered = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
        Candidate { key: u64::from(ordered) << 32 | u64::from(!(index as u32)), weight }
    }

    fn index(self) -> usize {
        !(self.key as u32) as usize
    }
}

type OutOfMemory = std::collections::TryReserveError;

unsafe fn draw_row(op: &Sample, row: usize) -> std::result::Result<(usize, f32), OutOfMemory> {
    let SampleOptions { temperature, top_k, top_p, .. } = op.options;
    let (max, first) = largest(&op.logits, row);
    if temperature == 0.0 || max == f32::NEG_INFINITY {
        return Ok((first, if max == f32::NEG_INFINITY { 0.0 } else { 1.0 }));
    }
    let logits = Row::of(&op.logits, row);
    let columns = op.logits.columns;
    let u = uniform(op, row);
    let all = Weights { logits, columns, max, temperature };
    let total = dispatch(Total(all));
    let wanted = if top_k == 0 { columns } else { columns.min(top_k as usize) };
    let mut candidates = Vec::new();
    // Logits this far below the largest suffice nearly always; the last bound takes in everything.
    for depth in [8.0, 20.0, f32::INFINITY] {
        candidates.clear();
        dispatch(Gather { all, depth, candidates: &mut candidates })?;
        let everything = depth == f32::INFINITY;
        if wanted < columns {
            if candidates.len() < wanted && !everything {
                continue;
            }
            if candidates.len() > wanted {
                candidates.select_nth_unstable_by(wanted, descending);
                candidates.truncate(wanted);
            }
        }
        let kept = if wanted < columns { mass(&candidates) } else { total };
        let mut target_mass = kept;
        if top_p < 1.0 {
            let target = f64::from(top_p) * kept;
            let Some(end) = prefix(&mut candidates, |mass| mass >= target) else {
                if everything || wanted < columns {
                    // Rounding alone: everything there is has been kept.
                    return Ok(draw(&mut candidates, u, kept, total));
                }
                continue;
            };
            candidates.truncate(end);
            target_mass = mass(&candidates);
        } else if wanted == columns && !everything && mass(&candidates) <= u * target_mass {
            continue;
        }
        return Ok(draw(&mut candidates, u, target_mass, total));
    }
    unreachable!("the last depth takes in every candidate")
}

/// The first candidate, in descending order, at which the mass passes u · kept; the last one if rounding leaves none.
fn draw(candidates: &mut [Candidate], u: f64, kept: f64, total: f64) -> (usize, f32) {
    let end = prefix(candidates, |mass| mass > u * kept).unwrap_or(candidates.len());
    let chosen = candidates[end - 1];
    (chosen.index(), (f64::from(chosen.weight) / total) as f32)
}

fn descending(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.key.cmp(&a.key)
}

fn mass(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| f64::from(candidate.weight)).sum()
}

/// Moves the shortest prefix in descending order whose mass is `enough` to the front and returns its length; `None` if
/// all of them are not enough. `enough` is monotone.
fn prefix(candidates: &mut [Candidate], enough: impl Fn(f64) -> bool) -> Option<usize> {
    // Everything before `begin` is in the prefix, and weighs `before`; the prefix ends in (begin, end] or not at all.
    let (mut begin, mut end, mut before) = (0, candidates.len(), 0.0);
    while end - begin > 32 {
        let half = (end - begin) / 2;
        candidates[begin..end].select_nth_unstable_by(half, descending);
        let upper = mass(&candidates[begin..begin + half]);
        if enough(before + upper) {
            end = begin + half;
        } else {
            before += upper;
            begin += half;
        }
    }
    candidates[begin..end].sort_unstable_by(descending);
    for (i, candidate) in candidates[begin..end].iter().enumerate() {
        before += f64::from(candidate.weight);
        if enough(before) {
            return Some(begin + i + 1);
        }
    }
    None
}

/// The weights e^((logit − max) / temperature) of a row; where max is +∞, 1 for its equals and 0 for the others.
#[derive(Clone, Copy)]
struct Weights {
    logits: Row,
    columns: usize,
    max: f32,
    temperature: f32,
}

impl Weights {
    #[inline(always)]
    unsafe fn load<S: Simd>(&self, at: usize, lanes: usize) -> (S::Vector, S::Vector) {
        let logit = S::first(lanes, self.logits.load::<S>(at, lanes), S::splat(f32::NEG_INFINITY));
        let below = S::sub(logit, S::splat(self.max));
        let weight = math::exp::<S>(S::div(below, S::splat(self.temperature)));
        // Neither less nor equal means NaN: of the logit, or of ∞ − ∞.
        let is_max = S::select_less(logit, S::splat(self.max), weight, S::splat(1.0));
        let number = S::select_less(S::splat(f32::NEG_INFINITY), logit, is_max, S::zero());
        (logit, number)
    }
}

struct Total(Weights);

impl Kernel for Total {
    type Output = f64;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> f64 {
        let mut total = 0.0;
        for begin in (0..self.0.columns).step_by(1024) {
            let mut sum = S::zero();
            for (at, lanes) in vectors::<S>(1024.min(self.0.columns - begin)) {
                sum = S::add(sum, self.0.load::<S>(begin + at, lanes).1);
            }
            total += f64::from(S::sum(sum));
        }
        total
    }
}

/// The candidates whose logit is at most `depth` temperatures below the largest.
struct Gather<'a> {
    all: Weights,
    depth: f32,
    candidates: &'a mut Vec<Candidate>,
}

impl Kernel for Gather<'_> {
    type Output = std::result::Result<(), OutOfMemory>;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> std::result::Result<(), OutOfMemory> {
        let Gather { all, depth, candidates } = self;
        let bound = if depth.is_finite() { all.max - depth * all.temperature } else { f32::NEG_INFINITY };
        let least = S::splat(bound);
        for (at, lanes) in vectors::<S>(all.columns) {
            let (logit, weight) = all.load::<S>(at, lanes);
            // Most vectors hold no candidate at all.
            let any = S::max_lane(S::select_less(logit, least, S::zero(), weight));
            if any == 0.0 {
                continue;
            }
            let (mut logits, mut weights) = ([0f32; 16], [0f32; 16]);
            S::store(logits.as_mut_ptr(), logit);
            S::store(weights.as_mut_ptr(), weight);
            candidates.try_reserve(S::LANES)?;
            for i in 0..lanes {
                if weights[i] > 0.0 && logits[i] >= bound {
                    candidates.push(Candidate::new(logits[i], at + i, weights[i]));
                }
            }
        }
        Ok(())
    }
}

fn uniform(op: &Sample, row: usize) -> f64 {
    // SAFETY: validated tensors of one integer a row.
    let value = |tensor: Option<Tensor>| tensor.map(|tensor| unsafe { integers(&tensor) }[row] as u32);
    let sequence = value(op.sequences).unwrap_or(row as u32);
    let position = value(op.positions).unwrap_or(0);
    let word = philox::<10>([position, sequence, 0, 0], [op.options.seed as u32, (op.options.seed >> 32) as u32])[0];
    f64::from(word >> 8) / f64::from(1 << 24)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(logits: &mut [f32], rows: usize, options: SampleOptions) -> (Vec<i32>, Vec<f32>) {
        let columns = logits.len() / rows;
        let (mut tokens, mut probabilities) = (vec![-1; rows], vec![f32::NAN; rows]);
        let token_tensor = Tensor::new(tokens.as_mut_ptr().cast(), crate::tensor::DType::I32, &[rows]);
        let probability_tensor = Some(Tensor::of(&mut probabilities, &[rows]));
        let logits = Tensor::of(logits, &[rows, columns]);
        let op = Sample::new(logits, options, None, None, token_tensor, probability_tensor).unwrap();
        sample(&Threads::new(2).unwrap(), &op).unwrap();
        (tokens, probabilities)
    }

    #[test]
    fn nan_infinities_and_temperature_zero() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        let options = SampleOptions { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 3 };
        let (tokens, probabilities) =
            run(&mut [nan, -inf, nan, -inf, nan, nan, inf, 0.0, nan, 1.0, nan, -inf], 4, options);
        assert_eq!((tokens[0], probabilities[0]), (1, 0.0));
        assert_eq!((tokens[1], probabilities[1]), (0, 0.0));
        assert_eq!((tokens[2], probabilities[2]), (0, 1.0));
        assert_eq!((tokens[3], probabilities[3]), (0, 1.0));
        let greedy = SampleOptions { temperature: 0.0, ..options };
        let (tokens, probabilities) = run(&mut [1.0, 5.0, 5.0, nan, -1.0, -2.0], 2, greedy);
        assert_eq!((tokens[0], probabilities[0], tokens[1]), (1, 1.0, 1));
    }
}

//! The auto-tuner: which of the kernels that can do a product does it fastest, right output provided.
//!
//! Every candidate runs once on a poisoned output and is held against the reference; only those that are right are timed,
//! in rounds, so that a clock that changes meanwhile meets all of them. The median counts. Variations of what was fast join
//! in between (`variations.rs`).

use super::case::Case;
use super::timer::Timer;
use super::trial::{Candidate, Trial};
use super::validate;
use super::workload::Workload;
use crate::device::{DeviceKind, RawHandle};
use crate::error::Result;
use crate::executor::Executor;
use crate::hardware;
use crate::memory::MemoryManager;
use crate::operation::linear_product::LinearProduct;
use crate::registry::choices::{Algorithm, Choice, Entry, Table};
use crate::registry::key::ProductKey;
use crate::stream::Stream;
use std::ops::ControlFlow;
use std::sync::Arc;

/// What the tuner asks of an executor; tests put wrong kernels in between.
pub trait Products {
    fn candidates(&self, op: &LinearProduct) -> Vec<Choice>;
    /// What `Executor::linear_variations` says.
    fn variations(&self, _op: &LinearProduct, _fastest: &[Choice]) -> Vec<Choice> {
        Vec::new()
    }
    fn default(&self, op: &LinearProduct) -> Option<Choice>;
    fn run(&self, op: &LinearProduct, choice: &Choice, stream: RawHandle) -> Result<Option<Choice>>;
    fn reference(&self, op: &LinearProduct, stream: RawHandle) -> Result<()>;
}

/// An executor's own products.
pub struct Own<'a>(pub &'a dyn Executor);

impl Products for Own<'_> {
    fn candidates(&self, op: &LinearProduct) -> Vec<Choice> {
        self.0.linear_candidates(op)
    }

    fn variations(&self, op: &LinearProduct, fastest: &[Choice]) -> Vec<Choice> {
        self.0.linear_variations(op, fastest)
    }

    fn default(&self, op: &LinearProduct) -> Option<Choice> {
        self.0.linear_default(op)
    }

    fn run(&self, op: &LinearProduct, choice: &Choice, stream: RawHandle) -> Result<Option<Choice>> {
        self.0.linear_with(op, choice, stream)
    }

    fn reference(&self, op: &LinearProduct, stream: RawHandle) -> Result<()> {
        self.0.linear_reference(op, stream)
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Timed rounds a candidate, after one that sets the number of launches.
    pub rounds: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options { rounds: 7 }
    }
}

/// What became of a candidate.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// Seconds of a launch.
    Measured(f64),
    /// Its output is wrong: why.
    Wrong(String),
    /// It does not run: why.
    Failed(String),
    /// The candidate was so much slower in the first round that it was not measured further, or a variation that is not
    /// the fastest of them.
    Slow(f64),
    /// The fastest, or the default where that is as fast.
    Chosen(f64),
}

pub struct Progress<'a> {
    pub case: usize,
    pub cases: usize,
    pub candidate: usize,
    pub candidates: usize,
    pub choice: &'a Choice,
    pub outcome: &'a Outcome,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Report {
    /// Cases that have a choice now.
    pub tuned: usize,
    /// Cases whose choice is now another than the default.
    pub changed: usize,
    /// Candidates that ran.
    pub measured: usize,
    /// Candidates with a wrong output.
    pub wrong: usize,
    /// Candidates that did not run.
    pub failed: usize,
    /// Whether the caller ended it.
    pub stopped: bool,
    /// Seconds of one launch of every tuned case, by default and as chosen.
    pub default_seconds: f64,
    pub chosen_seconds: f64,
}

/// A default within this of the fastest stays: less than two runs differ by.
pub const WORTHWHILE: f64 = 1.02;

/// Slower than the fastest by this after one round: not measured further.
const HOPELESS: f64 = 3.0;

/// Operations that the reference may take for a case, which with the comparison on the host takes tenths of a second.
fn reference_operations(device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => 1 << 25,
        DeviceKind::Cuda | DeviceKind::Tpu => 1 << 36,
    }
}

/// Bytes of the cache that a weight must not be found in.
pub fn cache_bytes(executor: &dyn Executor) -> u64 {
    match executor.info().kind {
        DeviceKind::Cuda | DeviceKind::Tpu => executor.info().l2_bytes,
        DeviceKind::Cpu => (1..=3).map(|level| hardware::cpu().cache_bytes(level)).max().unwrap_or(0),
    }
}

pub struct Tuner<'a> {
    pub memory: &'a Arc<MemoryManager>,
    pub products: &'a dyn Products,
    pub timer: &'a mut dyn Timer,
    pub stream: &'a Stream,
    pub options: Options,
    pub progress: &'a mut dyn FnMut(&Progress) -> ControlFlow<()>,
}

impl Tuner<'_> {
    /// Tunes one case after the other, handing each found entry to `keep`.
    pub fn tune(&mut self, cases: &[Case], keep: &mut dyn FnMut(Table)) -> Result<Report> {
        let mut report = Report::default();
        for (index, case) in cases.iter().enumerate() {
            let found = self.tune_case(case, (index, cases.len()), &mut report);
            let found = found.map_err(|error| error.context(format_args!("case {index}")))?;
            if let Some((key, entry)) = found {
                keep(Table::from([(key, entry)]));
            }
            if report.stopped {
                break;
            }
        }
        Ok(report)
    }

    fn tune_case(
        &mut self,
        case: &Case,
        place: (usize, usize),
        report: &mut Report,
    ) -> Result<Option<(ProductKey, Entry)>> {
        let shape = case.shape()?;
        let Some(default) = self.products.default(&shape) else { return Ok(None) };
        let executor = self.stream.executor().clone();
        let (m, n, k) = (case.rows, shape.weight.rows, shape.weight.columns);
        let rows = validate::rows(m, n, k, reference_operations(executor.info().kind));
        let workload = Workload::new(self.memory, case, cache_bytes(&*executor), &rows, self.stream)?;
        let mut references = Vec::with_capacity(rows.len());
        for rows in &rows {
            self.products.reference(&workload.reference(rows), self.stream.raw())?;
            references.push(workload.read_reference(rows, self.stream)?);
        }
        let trial = Trial { shape, place, workload, rows, references };

        let mut choices = self.products.candidates(&trial.workload.op(0));
        if !choices.iter().any(|choice| is_default(choice, &default)) {
            choices.push(default);
        }
        let mut right: Vec<(usize, Candidate)> = Vec::new();
        for index in 0..choices.len() {
            if report.stopped {
                return Ok(None);
            }
            if let Some(ran) = self.try_out(&trial, &choices, index, report)? {
                right.push((index, Candidate::new(choices[index], ran)));
            }
        }

        // The first round warms up and tells how many launches make a time that the clock resolves.
        for (_, candidate) in &mut right {
            let seconds = self.time(&trial, candidate)?;
            candidate.first(seconds);
        }
        right.extend(self.fast_variations(&trial, &mut choices, &right, report)?);
        if report.stopped {
            return Ok(None);
        }
        let fastest = right.iter().map(|(_, candidate)| candidate.times[0]).fold(f64::INFINITY, f64::min);
        let (hopeful, slow): (Vec<_>, Vec<_>) = right.into_iter().partition(|(_, candidate)| {
            candidate.times[0] <= HOPELESS * fastest || is_default(&candidate.asked, &default)
        });
        for (index, candidate) in &slow {
            self.tell(&trial, &choices, *index, &Outcome::Slow(candidate.times[0]), report);
        }
        let mut right = hopeful;
        right.iter_mut().for_each(|(_, candidate)| candidate.times.clear());
        for _ in 0..self.options.rounds {
            for (_, candidate) in &mut right {
                let seconds = self.time(&trial, candidate)?;
                candidate.times.push(seconds);
            }
        }
        for (index, candidate) in &right {
            if report.stopped {
                return Ok(None);
            }
            self.tell(&trial, &choices, *index, &Outcome::Measured(candidate.median()), report);
        }
        let usual = right.iter().position(|(_, candidate)| is_default(&candidate.asked, &default));
        let default_median = usual.map(|usual| right[usual].1.median());
        right.sort_by(|a, b| a.1.median().total_cmp(&b.1.median()));
        let best = right.first().map_or(0.0, |best| best.1.median());
        // The default in front of those that are hardly faster.
        right.sort_by_key(|(_, candidate)| {
            !(is_default(&candidate.asked, &default) && candidate.median() <= WORTHWHILE * best)
        });
        // What ran often may have been right the first time alone.
        let mut chosen = None;
        for (place, (index, candidate)) in right.iter().enumerate() {
            if self.verify(&trial, &choices, *index, report)?.is_some() {
                chosen = Some((*index, candidate, place));
                break;
            }
        }
        let Some(chosen) = chosen else { return Ok(None) };
        let left = right[chosen.2..].iter().map(|(_, candidate)| candidate.median());
        let fastest_seconds = left.fold(f64::INFINITY, f64::min);
        let seconds = chosen.1.median();
        // Without a default that runs and is right there is nothing to compare with.
        let default_seconds = default_median.unwrap_or(seconds);
        report.tuned += 1;
        report.changed += usize::from(!is_default(&chosen.1.asked, &default));
        report.default_seconds += default_seconds;
        report.chosen_seconds += seconds;
        let outcome = Outcome::Chosen(seconds);
        let (index, asked) = (chosen.0, chosen.1.asked);
        // A default that stays keeps its freedom to differ between the shapes that share the entry.
        let choice = if is_default(&asked, &default) { default } else { chosen.1.ran };
        let candidates = right.len() as u32 + slow.len() as u32;
        let entry = Entry { choice, seconds, default_seconds, fastest_seconds, candidates };
        log::info!(
            target: "nvbackend::tuning",
            "{}: {} takes {:.2} us, {} {:.2} us",
            describe(&shape), asked.label(), seconds * 1e6, default.label(), default_seconds * 1e6
        );
        self.tell(&trial, &choices, index, &outcome, report);
        Ok(Some((executor.choices().key(&shape), entry)))
    }
}

/// The first algorithm of a vendor library is what it takes without being told.
fn is_default(choice: &Choice, default: &Choice) -> bool {
    choice.kernel == default.kernel && matches!(choice.algorithm, Algorithm::Default | Algorithm::Rank(0))
}

/// `linear m=16 n=14336 k=4096, bf16 x int4 -> bf16`
pub fn describe(op: &LinearProduct) -> String {
    format!(
        "linear m={} n={} k={}, {} x {} -> {}{}{}",
        op.input.rows,
        op.weight.rows,
        op.weight.columns,
        op.input.dtype,
        op.weight.encoding,
        op.output.dtype,
        if op.weight.gated { ", gated" } else { "" },
        if op.residual.is_some() { ", plus a residual" } else { "" }
    )
}

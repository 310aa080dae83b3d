//! One candidate on one case: run and held against the reference, or timed, and told of.

use super::tuner::{describe, Outcome, Progress, Report, Tuner};
use super::validate::{compare, tolerance};
use super::workload::Workload;
use crate::error::{Error, Result, Status};
use crate::operation::linear_product::LinearProduct;
use crate::registry::choices::Choice;
use std::ops::Range;

/// Launches between two looks at the clock take about so many seconds, and are so many at most.
const BATCH_SECONDS: f64 = 5e-3;
const MOST_LAUNCHES: usize = 32;

/// A case on the device, and what its result must be.
pub(super) struct Trial {
    pub(super) shape: LinearProduct,
    /// The case's number, and how many there are.
    pub(super) place: (usize, usize),
    pub(super) workload: Workload,
    pub(super) rows: Vec<Range<usize>>,
    pub(super) references: Vec<Vec<f32>>,
}

pub(super) struct Candidate {
    /// The choice as it was asked for, and as it ran.
    pub(super) asked: Choice,
    pub(super) ran: Choice,
    pub(super) times: Vec<f64>,
    pub(super) launches: usize,
}

impl Candidate {
    pub(super) fn new(asked: Choice, ran: Choice) -> Candidate {
        Candidate { asked, ran, times: Vec::new(), launches: 1 }
    }

    /// Notes the time of a launch, and how many make one that the clock resolves.
    pub(super) fn first(&mut self, seconds: f64) {
        self.launches = (BATCH_SECONDS / seconds.max(1e-9)).clamp(1.0, MOST_LAUNCHES as f64) as usize;
        self.times.push(seconds);
    }

    pub(super) fn median(&self) -> f64 {
        let mut times = self.times.clone();
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied().unwrap_or(f64::INFINITY)
    }
}

impl Tuner<'_> {
    pub(super) fn tell(
        &mut self,
        trial: &Trial,
        choices: &[Choice],
        candidate: usize,
        outcome: &Outcome,
        report: &mut Report,
    ) {
        let ((case, cases), candidates, choice) = (trial.place, choices.len(), &choices[candidate]);
        log::debug!(target: "nvbackend::tuning", "{}: {}: {outcome:?}", describe(&trial.shape), choice.label());
        let progress = Progress { case, cases, candidate, candidates, choice, outcome };
        report.stopped |= (self.progress)(&progress).is_break();
    }

    /// `verify` for the first time, which is counted.
    pub(super) fn try_out(
        &mut self,
        trial: &Trial,
        choices: &[Choice],
        candidate: usize,
        report: &mut Report,
    ) -> Result<Option<Choice>> {
        let ran = self.verify(trial, choices, candidate, report)?;
        report.measured += usize::from(ran.is_some());
        Ok(ran)
    }

    /// What the candidate ran, if it is there and its output right.
    pub(super) fn verify(
        &mut self,
        trial: &Trial,
        choices: &[Choice],
        candidate: usize,
        report: &mut Report,
    ) -> Result<Option<Choice>> {
        let choice = &choices[candidate];
        let outcome = match self.check(trial, choice)? {
            Checked::Right(ran) => return Ok(Some(ran)),
            // Fewer algorithms than ranks: nothing to tell.
            Checked::Absent => return Ok(None),
            Checked::Wrong(why) => {
                let product = describe(&trial.shape);
                log::warn!(target: "nvbackend::tuning", "{product}: {} is wrong: {why}", choice.label());
                report.wrong += 1;
                Outcome::Wrong(why)
            }
            Checked::Failed(why) => {
                report.failed += 1;
                Outcome::Failed(why)
            }
        };
        self.tell(trial, choices, candidate, &outcome, report);
        Ok(None)
    }

    fn check(&self, trial: &Trial, choice: &Choice) -> Result<Checked> {
        let Trial { workload, rows, references, .. } = trial;
        let op = workload.op(0);
        workload.poison(self.stream)?;
        let ran = match self.products.run(&op, choice, self.stream.raw()) {
            Ok(Some(ran)) => ran,
            Ok(None) => return Ok(Checked::Absent),
            Err(error) => return failed(error),
        };
        if let Err(error) = self.stream.synchronize() {
            return failed(error);
        }
        let family = choice.kernel.kernel().family;
        let tolerance = tolerance(family, op.weight.encoding, op.input.dtype, op.output.dtype);
        for (rows, reference) in rows.iter().zip(references) {
            let output = workload.read_output(rows, self.stream)?;
            if let Err(why) = compare(&output, reference, op.output.columns, tolerance) {
                return Ok(Checked::Wrong(why));
            }
        }
        Ok(Checked::Right(ran))
    }

    pub(super) fn time(&mut self, trial: &Trial, candidate: &Candidate) -> Result<f64> {
        let (workload, products, raw) = (&trial.workload, self.products, self.stream.raw());
        self.timer.time(&candidate.asked, self.stream, candidate.launches, &mut |launch| {
            match products.run(&workload.op(launch), &candidate.asked, raw)? {
                Some(_) => Ok(()),
                // Nothing is quick to do.
                None => Err(Error::unsupported(format!("{} does not take every launch", candidate.asked.label()))),
            }
        })
    }
}

enum Checked {
    Right(Choice),
    /// It is not there for this product.
    Absent,
    Wrong(String),
    Failed(String),
}

fn failed(error: Error) -> Result<Checked> {
    its_own(error).map(Checked::Failed)
}

/// A candidate's failure is its own, but for a device that is gone.
pub(super) fn its_own(error: Error) -> Result<String> {
    match error.status {
        Status::DeviceLost => Err(error),
        _ => Ok(error.message),
    }
}

//! Variations of a vendor library's algorithms, which are many: they are timed before they are checked, because checking
//! takes far longer, and only the fastest are then checked and measured like every candidate.

use super::trial::{its_own, Candidate, Trial};
use super::tuner::{Outcome, Report, Tuner};
use crate::error::Result;
use crate::registry::choices::Choice;

/// Over all, then around the fastest by then.
const STEPS: usize = 2;

/// How many of them are measured further.
const KEPT: usize = 4;

impl Tuner<'_> {
    /// The fastest variations, checked and timed once; all that are tried are added to `choices`. `measured` were timed.
    pub(super) fn fast_variations(
        &mut self,
        trial: &Trial,
        choices: &mut Vec<Choice>,
        measured: &[(usize, Candidate)],
        report: &mut Report,
    ) -> Result<Vec<(usize, Candidate)>> {
        let mut timed: Vec<(usize, Candidate)> = Vec::new();
        for step in 0..STEPS {
            let mut known: Vec<&Candidate> = measured.iter().chain(&timed).map(|(_, candidate)| candidate).collect();
            known.sort_by(|a, b| a.times[0].total_cmp(&b.times[0]));
            let known: Vec<Choice> = known.into_iter().map(|candidate| candidate.ran).collect();
            let fastest = if step == 0 { &[] } else { known.as_slice() };
            for choice in self.products.variations(&trial.workload.op(0), fastest) {
                if report.stopped {
                    return Ok(Vec::new());
                }
                if known.contains(&choice) || choices.contains(&choice) {
                    continue;
                }
                choices.push(choice);
                let index = choices.len() - 1;
                match self.time_unchecked(trial, &choice).or_else(|error| its_own(error).map(Err))? {
                    Ok(candidate) => timed.push((index, candidate)),
                    Err(why) => {
                        report.failed += 1;
                        self.tell(trial, choices, index, &Outcome::Failed(why), report);
                    }
                }
            }
        }
        timed.sort_by(|(_, a), (_, b)| a.times[0].total_cmp(&b.times[0]));
        let mut right = Vec::with_capacity(KEPT);
        for (place, (index, candidate)) in timed.into_iter().enumerate() {
            if report.stopped {
                return Ok(Vec::new());
            }
            if place >= KEPT {
                self.tell(trial, choices, index, &Outcome::Slow(candidate.times[0]), report);
            } else if self.try_out(trial, choices, index, report)?.is_some() {
                right.push((index, candidate));
            }
        }
        Ok(right)
    }

    /// The better of two times, or why it does not run.
    fn time_unchecked(&mut self, trial: &Trial, choice: &Choice) -> Result<std::result::Result<Candidate, String>> {
        // The first launch loads the kernel.
        let Some(ran) = self.products.run(&trial.workload.op(0), choice, self.stream.raw())? else {
            return Ok(Err("it is not there for this product".into()));
        };
        self.stream.synchronize()?;
        let mut candidate = Candidate::new(*choice, ran);
        let seconds = self.time(trial, &candidate)?;
        candidate.first(seconds);
        candidate.times[0] = seconds.min(self.time(trial, &candidate)?);
        Ok(Ok(candidate))
    }
}

//! Optimisation of a recorded list: which passes run and how exact they must be, by the level, the caller's switches and, where the
//! caller sets a bound, by what was measured.

use super::list::List;
use super::measure::{self, Measured};
use super::passes::Pass;
use super::region::Ranges;
use super::report::{Exactness, Note, Report, Rewrite, Size, TakenBack};
use super::workspace::Workspace;
use super::{Node, Recorded};
use crate::error::{numbered, Error, Result};
use crate::stream::Stream;
use std::sync::Arc;

numbered! {
    /// The numbers are `NVB_OPTIMIZE_*` of the C ABI.
    pub enum Level: u32 {
        /// As recorded.
        O0 = 0,
        /// Exact rewrites.
        O1 = 1,
        /// Also those that leave out a rounding.
        O2 = 2,
        /// All, within the caller's bound.
        O3 = 3,
    }
}

impl Level {
    pub const DEFAULT: Level = Level::O2;

    /// The least exact rewrites of the level.
    pub fn allowed(self) -> Exactness {
        match self {
            Level::O0 | Level::O1 => Exactness::Exact,
            Level::O2 => Exactness::Rounding,
            Level::O3 => Exactness::Approximate,
        }
    }

    /// The level of this number; another number is the default level, with a warning, or refused.
    pub fn of(code: u32, unknown_is_error: bool) -> Result<Level> {
        match Level::from_code(code) {
            Some(level) => Ok(level),
            None if unknown_is_error => {
                Err(Error::invalid(format!("level is {code}; NVB_OPTIMIZE_O0 to NVB_OPTIMIZE_O3 (0 to 3) are known")))
            }
            None => {
                log::warn!(
                    target: "nvbackend::graph",
                    "level {code} is none of the optimisation levels 0 to 3; level {} is taken",
                    Level::DEFAULT as u32
                );
                Ok(Level::DEFAULT)
            }
        }
    }
}

/// What the caller asks for.
#[derive(Debug, Clone)]
pub struct Options {
    pub level: Level,
    /// Names of passes; empty: all.
    pub enabled: Vec<String>,
    pub disabled: Vec<String>,
    pub measure_times: bool,
    pub measure_errors: bool,
    /// Launches of each list in a measurement of times.
    pub launches: usize,
    /// The largest relative error of an output; 0: no bound.
    pub maximum_error: f64,
}

impl Options {
    pub fn of(level: Level) -> Options {
        Options {
            level,
            enabled: Vec::new(),
            disabled: Vec::new(),
            measure_times: false,
            measure_errors: false,
            launches: 0,
            maximum_error: 0.0,
        }
    }

    pub fn measures(&self) -> bool {
        self.measure_times || self.measure_errors || self.maximum_error > 0.0
    }

    /// The least exact rewrites that are made.
    fn allowed(&self) -> Exactness {
        match self.level {
            Level::O3 if self.maximum_error <= 0.0 => Level::O2.allowed(),
            level => level.allowed(),
        }
    }
}

/// For each pass of a table the least exact rewrites that it may make; `None`: it does not run.
pub type Choice = Vec<Option<Exactness>>;

/// What became of a list.
pub struct Optimized {
    pub nodes: Vec<Node>,
    pub report: Report,
    /// For the same list on other memory.
    pub choice: Choice,
}

struct Rewritten {
    nodes: Vec<Node>,
    rewrites: Vec<Rewrite>,
    notes: Vec<Note>,
}

/// A list, and what its passes may take for granted.
pub struct Subject<'a> {
    /// What passes begin with: the list as it was recorded, or as a conversion left it.
    pub recorded: &'a Arc<Recorded>,
    pub internal: &'a Ranges,
    pub workspace: &'a Workspace,
    pub passes: &'a [Pass],
}

impl Subject<'_> {
    fn choose(&self, options: &Options) -> Result<Choice> {
        let known = |name: &String| match self.passes.iter().any(|pass| pass.name == name) {
            true => Ok(()),
            false => {
                let names: Vec<_> = self.passes.iter().map(|pass| pass.name).collect();
                Err(Error::invalid(format!("`{name}` is no pass; these are: {}", names.join(", "))))
            }
        };
        options.enabled.iter().chain(&options.disabled).try_for_each(known)?;
        let runs = |pass: &Pass| {
            let named = |names: &[String]| names.iter().any(|name| name == pass.name);
            options.level != Level::O0
                && (options.enabled.is_empty() || named(&options.enabled))
                && !named(&options.disabled)
        };
        Ok(self.passes.iter().map(|pass| runs(pass).then(|| options.allowed())).collect())
    }

    fn rewrite(&self, choice: &Choice) -> Result<Rewritten> {
        let mut list = List::new(&self.recorded.nodes, self.internal, &**self.workspace.executor())?;
        for (pass, allowed) in self.passes.iter().zip(choice) {
            let Some(allowed) = *allowed else { continue };
            list.begin_pass(pass.name, allowed);
            (pass.run)(&mut list)?;
        }
        let (rewrites, notes) = (std::mem::take(&mut list.rewrites), std::mem::take(&mut list.notes));
        Ok(Rewritten { nodes: list.into_nodes(), rewrites, notes })
    }

    /// The list by this choice, without a measurement.
    pub fn by_choice(&self, level: Level, choice: Choice) -> Result<Optimized> {
        let Rewritten { nodes, rewrites, notes } = self.rewrite(&choice)?;
        let size = |nodes: &[Node]| Size { nodes: nodes.len(), cost: super::cost_of(nodes) };
        let report = Report {
            level: level as u32,
            rewrites,
            notes,
            taken_back: Vec::new(),
            before: size(&self.recorded.nodes),
            after: size(&nodes),
            times: None,
            errors: None,
        };
        Ok(Optimized { nodes, report, choice })
    }

    /// The list by what the caller asks for. `stream` is measured on, where the options ask for that.
    pub fn optimize(&self, options: &Options, stream: &Stream) -> Result<Optimized> {
        let mut choice = self.choose(options)?;
        let mut taken_back = Vec::new();
        let measured = match options.measures() {
            true => Some(Measured::begin(self.recorded, self.internal, self.workspace, stream)?),
            false => None,
        };
        if let Some(measured) = measured.as_ref().filter(|_| options.maximum_error > 0.0) {
            let bound = options.maximum_error;
            let rewritten = self.rewrite(&choice)?;
            if !within(measured.errors_of(&rewritten.nodes)?.relative, bound) {
                (choice, taken_back) = self.take_back(&choice, measured, bound)?;
            }
        }
        let mut optimized = self.by_choice(options.level, choice)?;
        optimized.report.taken_back = taken_back;
        if options.level == Level::O3 && options.maximum_error <= 0.0 {
            let text = "no bound of the error was given, so nothing approximate was taken".to_string();
            optimized.report.notes.push(Note { pass: "level", text });
        }
        if let Some(measured) = measured {
            if options.measure_errors || options.maximum_error > 0.0 {
                optimized.report.errors = Some(measured.errors_of(&optimized.nodes)?);
            }
            if options.measure_times {
                let times = measured.times_of(&optimized.nodes, options.launches.max(1))?;
                optimized.report.times = Some(times);
            }
            // What the measurement wrote is as it was.
            measured.end()?;
        }
        Ok(optimized)
    }

    /// Adds the passes one by one as far as the error stays within the bound: whole, with their exact rewrites, or not at all.
    fn take_back(&self, wanted: &Choice, measured: &Measured, bound: f64) -> Result<(Choice, Vec<TakenBack>)> {
        let mut choice: Choice = vec![None; wanted.len()];
        let mut taken_back = Vec::new();
        for (place, pass) in self.passes.iter().enumerate() {
            choice[place] = wanted[place];
            // What a pass finds depends on the passes before it that stayed.
            let rewritten = self.rewrite(&choice)?;
            let rewrites = rewritten.rewrites.iter().filter(|rewrite| rewrite.pass == pass.name).count();
            if rewrites == 0 {
                continue;
            }
            let error = measured.errors_of(&rewritten.nodes)?.relative;
            if within(error, bound) {
                continue;
            }
            taken_back.push(TakenBack { pass: pass.name, rewrites, error });
            choice[place] = Some(Exactness::Exact);
            let is_less = wanted[place] != choice[place];
            if !is_less || !within(measured.errors_of(&self.rewrite(&choice)?.nodes)?.relative, bound) {
                choice[place] = None;
            }
        }
        Ok((choice, taken_back))
    }
}

/// NaN is not.
fn within(error: f64, bound: f64) -> bool {
    error <= bound
}

/// Refuses a stream on which nothing can be measured.
pub fn expect_measurable(stream: &Stream) -> Result<()> {
    stream.expect_no_sink("a graph is measured")?;
    measure::expect_not_captured(stream)
}

#[cfg(test)]
mod tests;

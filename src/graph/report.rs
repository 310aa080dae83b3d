//! What an optimisation did: the rewrites, what was measured, and what was left as it is, as lines for people and as JSON.

use super::describe::Format;
use crate::error::{numbered, Error, Result};
use crate::operation::{Cost, OperationKind};
use std::fmt::Write as _;

numbered! {
    /// What a rewrite does to the numbers; the numbers of these are `NVB_EXACTNESS_*` of the C ABI.
    #[derive(PartialOrd, Ord)]
    pub enum Exactness: u32 {
        /// Every result is the same to the bit.
        Exact = 0,
        /// A rounding to a tensor's dtype is left out, or another kernel adds in another order: the result differs within the
        /// bounds of the operations, and not for the worse.
        Rounding = 1,
        /// Factors are multiplied in another order, or precision is given up: taken at O3 alone, and within the caller's bound.
        Approximate = 2,
    }
}

impl Exactness {
    pub fn name(self) -> &'static str {
        match self {
            Exactness::Exact => "exact",
            Exactness::Rounding => "rounding",
            Exactness::Approximate => "approximate",
        }
    }
}

/// Operations that became another one. The numbers are places in the recorded list.
#[derive(Debug, Clone, PartialEq)]
pub struct Rewrite {
    pub pass: &'static str,
    pub exactness: Exactness,
    pub before: Vec<(u32, OperationKind)>,
    /// `None`: nothing is left of them.
    pub after: Option<(u32, OperationKind)>,
}

/// Why something was left as it is.
#[derive(Debug, Clone, PartialEq)]
pub struct Note {
    pub pass: &'static str,
    pub text: String,
}

/// A pass whose rewrites were undone, since with them the error was above the bound.
#[derive(Debug, Clone, PartialEq)]
pub struct TakenBack {
    pub pass: &'static str,
    pub rewrites: usize,
    pub error: f64,
}

/// What the list is, before or after.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Size {
    pub nodes: usize,
    /// By the cost of each operation, which is counted and not measured.
    pub cost: Cost,
}

/// Medians of launches that took turns, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    pub launches: usize,
    pub before: f64,
    pub after: f64,
}

/// The outputs of the optimised list against those of the recorded one, on what lay in memory when they were measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Errors {
    /// ‖optimised − recorded‖ / ‖recorded‖, the worst of all outputs.
    pub relative: f64,
    /// max |optimised − recorded|, the worst of all outputs.
    pub absolute: f64,
    pub outputs: usize,
    /// Outputs of which a bit differs.
    pub different: usize,
    /// The worst output: the recorded node that writes it, and the argument.
    pub worst: Option<(u32, &'static str)>,
}

/// One optimisation.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    pub level: u32,
    pub rewrites: Vec<Rewrite>,
    pub notes: Vec<Note>,
    pub taken_back: Vec<TakenBack>,
    pub before: Size,
    pub after: Size,
    pub times: Option<Times>,
    pub errors: Option<Errors>,
}

impl Report {
    pub fn describe(&self, format: Format) -> Result<String> {
        match format {
            Format::Text => Ok(self.text()),
            Format::Json => Ok(self.json()),
            Format::Graphviz => {
                Err(Error::invalid("a report has no picture; NVB_GRAPH_FORMAT_TEXT or _JSON is needed"))
            }
        }
    }

    fn text(&self) -> String {
        let Report { level, before, after, .. } = self;
        let mut text = format!(
            "level O{level}: {} nodes became {}, {} bytes {} (counted, each input read and each output written once)\n",
            before.nodes, after.nodes, before.cost.bytes, after.cost.bytes
        );
        for rewrite in &self.rewrites {
            let _ = writeln!(
                text,
                "  {}: {} -> {} ({})",
                rewrite.pass,
                rewrite.before.iter().map(named).collect::<Vec<_>>().join(", "),
                rewrite.after.as_ref().map_or("nothing".to_string(), named),
                rewrite.exactness.name()
            );
        }
        for TakenBack { pass, rewrites, error } in &self.taken_back {
            let _ = writeln!(text, "  {pass}: {rewrites} rewrites taken back, with which the error was {error:e}");
        }
        for Note { pass, text: note } in &self.notes {
            let _ = writeln!(text, "  {pass}: {note}");
        }
        match &self.times {
            Some(Times { launches, before, after }) => {
                let _ = writeln!(
                    text,
                    "measured, medians of {launches} launches each: {:.3} us before, {:.3} us after",
                    before * 1e6,
                    after * 1e6
                );
            }
            None => text.push_str("times were not measured\n"),
        }
        match &self.errors {
            Some(Errors { relative, absolute, outputs, different, worst }) => {
                let _ = write!(
                    text,
                    "measured on the inputs in memory: {different} of {outputs} outputs differ, relative error {relative:e}, \
                     largest difference {absolute:e}"
                );
                if let Some((node, name)) = worst {
                    let _ = write!(text, ", the worst at `{name}` of recorded node {node}");
                }
                text.push('\n');
            }
            None => text.push_str("the error was not measured\n"),
        }
        text
    }

    fn json(&self) -> String {
        let node =
            |(place, kind): &(u32, OperationKind)| format!(r#"{{"node":{place},"operation":"{}"}}"#, kind.name());
        let rewrite = |rewrite: &Rewrite| {
            format!(
                r#"{{"pass":"{}","exactness":"{}","before":[{}],"after":{}}}"#,
                rewrite.pass,
                rewrite.exactness.name(),
                rewrite.before.iter().map(node).collect::<Vec<_>>().join(","),
                rewrite.after.as_ref().map_or("null".to_string(), node)
            )
        };
        let taken_back = |TakenBack { pass, rewrites, error }: &TakenBack| {
            format!(r#"{{"pass":"{pass}","rewrites":{rewrites},"error":{}}}"#, number(*error))
        };
        // A note has no character that JSON escapes.
        let note = |Note { pass, text }: &Note| format!(r#"{{"pass":"{pass}","text":"{text}"}}"#);
        let size = |size: &Size| {
            format!(
                r#"{{"nodes":{},"operations":{},"bytes":{}}}"#,
                size.nodes,
                number(size.cost.operations),
                number(size.cost.bytes)
            )
        };
        let times = self.times.map_or("null".to_string(), |Times { launches, before, after }| {
            format!(
                r#"{{"launches":{launches},"before_seconds":{},"after_seconds":{}}}"#,
                number(before),
                number(after)
            )
        });
        let errors = self.errors.as_ref().map_or("null".to_string(), |errors| {
            format!(
                r#"{{"relative":{},"absolute":{},"outputs":{},"different":{}}}"#,
                number(errors.relative),
                number(errors.absolute),
                errors.outputs,
                errors.different
            )
        });
        format!(
            "{{\"level\":{},\n\"before\":{},\"after\":{},\n\"rewrites\":[{}],\n\"taken_back\":[{}],\n\"notes\":[{}],\n\
             \"measured_times\":{times},\"measured_errors\":{errors}}}\n",
            self.level,
            size(&self.before),
            size(&self.after),
            self.rewrites.iter().map(rewrite).collect::<Vec<_>>().join(",\n"),
            self.taken_back.iter().map(taken_back).collect::<Vec<_>>().join(","),
            self.notes.iter().map(note).collect::<Vec<_>>().join(",")
        )
    }
}

fn named((place, kind): &(u32, OperationKind)) -> String {
    format!("{place} {}", kind.name())
}

/// JSON knows no infinity and no NaN.
fn number(value: f64) -> String {
    if value.is_finite() {
        format!("{value}")
    } else {
        "null".to_string()
    }
}

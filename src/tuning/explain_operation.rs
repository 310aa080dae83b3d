//! How any operation would run, in words: what it must do at the least, the kernel and why it is that one, how it divides the
//! work, and its workspace. Products have more to say (`explain`).

use super::attention::key_of;
use super::explain::{explain, tuned_words, INVARIANT};
use crate::executor::{Executor, Plan, Reason};
use crate::operation::linear::LinearInput;
use crate::operation::Operation;
use crate::registry::kernels_of;
use std::fmt::Write as _;

/// A few lines about what `plan`, which is of the operation, comes to.
pub fn explain_operation(executor: &dyn Executor, op: &Operation, plan: &Plan) -> String {
    if let Operation::Linear(linear) = op {
        if let (LinearInput::Floats(input), Some(output)) = (&linear.input, linear.output) {
            return explain(executor, &linear.product(0, input.rows, output)) + &workspace(plan);
        }
    }
    let cost = op.cost();
    let mut text = format!("{}: {} operations, {} bytes", op.kind().name(), cost.operations, cost.bytes);
    if plan.kernel.is_empty() {
        return text + "\nruns nothing: it is empty";
    }
    let tuned = || {
        let key = key_of(op)?;
        let entry = executor.choices().tuned_attention(|| key)?;
        Some(tuned_words(&key.to_string(), entry))
    };
    let why = match plan.reason {
        Reason::Only => "the executor has no other".to_string(),
        Reason::Default => "the default for this shape".to_string(),
        Reason::Override => "it is the override".to_string(),
        Reason::Tuned => tuned().unwrap_or_else(|| "it is tuned".to_string()),
        Reason::BatchInvariant => INVARIANT.to_string(),
    };
    let _ = write!(text, "\nruns {}: {why}", plan.kernel);
    let described = kernels_of(executor.info().kind).find(|(_, kernel)| kernel.name == plan.kernel);
    if let Some((_, kernel)) = described {
        let _ = write!(text, "\n{}: {}", kernel.name, kernel.summary);
    }
    for (name, value) in plan.parameters.iter().filter(|(name, _)| !name.is_empty()) {
        let _ = write!(text, "\n{name}: {value}");
    }
    text + &workspace(plan)
}

fn workspace(plan: &Plan) -> String {
    match plan.workspace {
        0 => "\nno workspace".to_string(),
        bytes => format!("\nworkspace: {bytes} bytes"),
    }
}

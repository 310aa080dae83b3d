//! Which kernel a product would run, and why.

use super::tuner::{describe, WORTHWHILE};
use crate::device::DeviceKind;
use crate::executor::Executor;
use crate::operation::linear_product::LinearProduct;
use crate::operation::OperationKind;
use crate::registry::choices::{Algorithm, Choice, Entry};
use crate::registry::{kernels_of, KernelId};
use std::fmt::Write as _;

/// The reason for a kernel where the executor has one for each weight.
pub const INVARIANT: &str = "batch_invariant is set, and it adds in the same order for every number of rows; \
                         overrides, tuned entries and inputs rounded to 8 bits are left aside";

/// A few lines: the product, the kernel, the reason, and what else could do it.
pub fn explain(executor: &dyn Executor, op: &LinearProduct) -> String {
    let mut text = describe(op);
    let choices = executor.choices();
    let candidates = executor.linear_candidates(op);
    let supported = |choice: &Choice| candidates.iter().any(|candidate| candidate.kernel == choice.kernel);
    let mut passed_over = Vec::new();
    let mut chosen = None;
    if let Some(id) = choices.overridden(OperationKind::Linear) {
        match supported(&Choice::of(id)) {
            true => chosen = Some((Choice::of(id), "it is the override".to_string())),
            false => passed_over.push(format!(
                "the override {} does not take it: {}",
                id.kernel().name,
                why_not(executor, op, id)
            )),
        }
    }
    let key = choices.key(op);
    match choices.tuned(op) {
        _ if chosen.is_some() => {}
        Some(entry) if supported(&entry.choice) => {
            chosen = Some((entry.choice, tuned_words(&key.to_string(), entry)));
        }
        Some(entry) => passed_over.push(format!(
            "the tuned {} does not take it: {}",
            entry.choice.kernel.kernel().name,
            why_not(executor, op, entry.choice.kernel)
        )),
        None if choices.are_fixed() => {}
        None => passed_over.push(format!("nothing is tuned for \"{key}\"")),
    }
    let default = if choices.are_fixed() { INVARIANT } else { "the default for this shape" };
    let chosen = chosen.or_else(|| Some((executor.linear_default(op)?, default.to_string())));
    let Some((choice, why)) = chosen else {
        text.push_str("\nruns nothing: the product is empty");
        return text;
    };
    let kernel = choice.kernel.kernel();
    let algorithm = match choice.algorithm {
        Algorithm::Cached(_) => " with a cached algorithm",
        _ => "",
    };
    let _ = write!(text, "\nruns {}{algorithm}: {why}", kernel.name);
    for reason in passed_over {
        let _ = write!(text, "; {reason}");
    }
    let _ = write!(text, "\n{}: {}", kernel.name, kernel.summary);
    let mut others: Vec<&str> = candidates.iter().map(|candidate| candidate.kernel.kernel().name).collect();
    others.dedup();
    others.retain(|name| *name != kernel.name);
    let _ =
        write!(text, "\nothers that can do it: {}", if others.is_empty() { "none".into() } else { others.join(", ") });
    let refused: Vec<String> = kernels_of(device_of(executor))
        .filter(|(_, kernel)| kernel.operation == OperationKind::Linear)
        .filter(|(id, kernel)| kernel.encodings.contains(&op.weight.encoding) && !supported(&Choice::of(*id)))
        .map(|(id, kernel)| format!("{} ({})", kernel.name, why_not(executor, op, id)))
        .collect();
    if !refused.is_empty() {
        let _ = write!(text, "\nthose that cannot: {}", refused.join(", "));
    }
    text
}

fn device_of(executor: &dyn Executor) -> DeviceKind {
    executor.info().kind
}

/// What tuning measured, and whether it is the fastest that is taken.
pub(super) fn tuned_words(key: &str, entry: &Entry) -> String {
    let microseconds = |seconds: f64| seconds * 1e6;
    let (taken, default) = (microseconds(entry.seconds), microseconds(entry.default_seconds));
    let mut words = format!("the tuned entry \"{key}\": {taken:.2} us, {default:.2} us by default, ");
    let _ = match entry.seconds <= entry.fastest_seconds {
        true => write!(words, "the fastest of {} that were right", entry.candidates),
        false => write!(
            words,
            "which is kept because no other of {} that were right is {:.0} % faster; one took {:.2} us",
            entry.candidates,
            (WORTHWHILE - 1.0) * 100.0,
            microseconds(entry.fastest_seconds)
        ),
    };
    words
}

/// What rules the kernel out: the first of its limits that the product is beyond, else what the executor says.
fn why_not(executor: &dyn Executor, op: &LinearProduct, id: KernelId) -> String {
    let kernel = id.kernel();
    let limits = kernel.limits;
    let aligned =
        |data: usize, stride: usize| data.is_multiple_of(limits.alignment) && stride.is_multiple_of(limits.alignment);
    let input_stride = if op.input.rows > 1 { op.input.row_stride * op.input.dtype.size() } else { 0 };
    if !kernel.encodings.contains(&op.weight.encoding) {
        format!("shape: no {} weights", op.weight.encoding)
    } else if !kernel.inputs.contains(&op.input.dtype) {
        format!("shape: no {} input", op.input.dtype)
    } else if limits.rows != 0 && op.input.rows > limits.rows {
        format!("shape: m up to {}", limits.rows)
    } else if !op.weight.columns.is_multiple_of(limits.depth_multiple) {
        format!("shape: k a multiple of {}", limits.depth_multiple)
    } else if !aligned(op.input.data as usize, input_stride) {
        format!("shape: rows of the input at multiples of {} bytes", limits.alignment)
    } else if executor.choices().are_fixed() {
        "options: batch_invariant is set".to_string()
    } else {
        executor.linear_obstacle(op, id)
    }
}

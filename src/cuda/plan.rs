//! How CUDA would run an operation, in the words of [`Plan`]: what the plans of products and of attention come to.

use super::attention::{no_decode, prefill_params};
use super::attention_plan::{DecodePlan, PrefillPlan};
use super::attention_prefix::{own_of, PrefixPlan};
use super::executor::CudaExecutor;
use super::kernel_table::kernel;
use super::{linear_quantized_input, linear_quantized_output, workspace};
use crate::error::Result;
use crate::executor::{Executor, Plan, Reason, SPLITS, STAGES, TILE_KEYS, TILE_ROWS};
use crate::operation::attention::{AttentionDecode, AttentionPrefill};
use crate::operation::linear::{Linear, LinearInput};
use crate::operation::Operation;
use crate::registry::attention_key::AttentionKey;
use crate::registry::{Family, Kernel};
use std::ptr::null_mut;

pub(super) fn of(executor: &CudaExecutor, op: &Operation) -> Result<Plan> {
    let _guard = executor.enter()?;
    let plan = match op {
        Operation::Linear(op) => of_linear(executor, op),
        Operation::AttentionPrefill(op) => of_prefill(executor, op),
        Operation::AttentionDecode(op) => of_decode(executor, op)?,
        _ => Plan::of_only(op),
    };
    Ok(Plan { workspace: workspace::bytes(executor, op), ..plan })
}

/// Of its first slice of rows where the output is quantised.
fn of_linear(executor: &CudaExecutor, op: &Linear) -> Plan {
    let output = op
        .output
        .unwrap_or_else(|| linear_quantized_output::values(op, linear_quantized_output::slice_rows(op), null_mut()));
    let product = op.product(0, output.rows, output);
    let of_codes = match op.input.part(0, output.rows) {
        LinearInput::Quantized(rows) => linear_quantized_input::kernel(executor, &rows, &product),
        LinearInput::Floats(_) => None,
    };
    match of_codes {
        Some(kernel) => Plan { kernel, ..Plan::EMPTY },
        None => Plan::of_product(executor, &product),
    }
}

fn of_prefill(executor: &CudaExecutor, op: &AttentionPrefill) -> Plan {
    let plan = PrefillPlan::of(executor, op, &mut prefill_params(op));
    let plan = plan.map(|plan| {
        let parameters =
            [(TILE_ROWS, plan.rows), ("heads that share L2", plan.heads_per_group as usize), (SPLITS, plan.parts)];
        (plan.row, parameters)
    });
    let key = || AttentionKey::of_prefill(op);
    of_row(executor, Family::AttentionPrefill, key, plan.as_ref().map(|(row, parameters)| (*row, &parameters[..])))
}

fn of_decode(executor: &CudaExecutor, op: &AttentionDecode) -> Result<Plan> {
    if let Some(prefix) = &op.prefix {
        // What follows the prefix names the kernel, and how many parts the prefix has is one parameter more.
        let plan = of_decode(executor, &own_of(executor, op, prefix))?;
        let mut parameters = plan.parameters;
        parameters[parameters.len() - 1] = ("parts of the shared prefix", PrefixPlan::of(executor, op, prefix).parts);
        return Ok(Plan { parameters, ..plan });
    }
    let plan = DecodePlan::of(executor, op);
    if plan.is_none() && op.query.tokens > 0 {
        return Err(no_decode(op));
    }
    let plan = plan.map(|plan| {
        let parameters = [
            (TILE_ROWS, plan.heads_per_chunk as usize),
            ("blocks of a key/value head", plan.chunks as usize),
            (TILE_KEYS, plan.keys),
            (SPLITS, plan.splits as usize),
            (STAGES, plan.stages),
        ];
        (plan.row, parameters)
    });
    let planned = plan.as_ref().map(|(row, parameters)| (*row, &parameters[..]));
    Ok(of_row(executor, Family::AttentionDecode, || AttentionKey::of_decode(op), planned))
}

/// Of a row of a table with the parameters of its launch; `None`: nothing runs.
fn of_row(
    executor: &CudaExecutor,
    family: Family,
    key: impl FnOnce() -> AttentionKey,
    planned: Option<(i32, &[(&'static str, usize)])>,
) -> Plan {
    let Some((id, parameters)) = planned.and_then(|(row, parameters)| Some((kernel(family, row)?, parameters))) else {
        return Plan::EMPTY;
    };
    let Kernel { name, operation, .. } = *id.kernel();
    let choices = executor.choices();
    let is_tuned = || choices.tuned_attention(key).is_some_and(|entry| entry.choice.kernel == id);
    let reason = match choices.overridden(operation) {
        Some(kernel) if kernel == id => Reason::Override,
        _ if is_tuned() => Reason::Tuned,
        _ => Reason::Default,
    };
    Plan { kernel: name, reason, ..Plan::EMPTY }.with_parameters(parameters)
}

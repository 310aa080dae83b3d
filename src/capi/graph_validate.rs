//! What a device lacks for a graph.

use super::environment::element;
use super::graph::{nvb_graph, GRAPHS};
use super::prelude::*;
use crate::graph::finding::{Finding, Severity, Target, Topic};
use crate::hardware::target;
use std::sync::PoisonError;

/// `severity`: the graph runs, and something is worth knowing.
pub const NVB_SEVERITY_NOTE: u32 = 0;
/// `severity`: the graph runs slower than it could, or only if something is seen to.
pub const NVB_SEVERITY_WARNING: u32 = 1;
/// `severity`: the graph does not run.
pub const NVB_SEVERITY_ERROR: u32 = 2;

/// `topic`: the device as such, or that the graph is another one's.
pub const NVB_TOPIC_DEVICE: u32 = 0;
/// `topic`: what the compute capability has no kernel for, or slower ones.
pub const NVB_TOPIC_CAPABILITY: u32 = 1;
/// `topic`: a dtype without arithmetic of its own.
pub const NVB_TOPIC_DTYPE: u32 = 2;
/// `topic`: memory that is missing or asleep, and copies of memory.
pub const NVB_TOPIC_MEMORY: u32 = 3;
/// `topic`: a library that is missing, or what this one was built for.
pub const NVB_TOPIC_LIBRARY: u32 = 4;

/// What `nvb_graph_validate` found, in numbers.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_graph_validation {
    pub struct_size: usize,
    /// Findings of each severity; `nvb_graph_get_finding` has them, errors first.
    pub errors: u32,
    pub warnings: u32,
    pub notes: u32,
    /// 10 · major + minor of a GPU, 0 of the CPU.
    pub compute_capability: i32,
    /// Bytes of device memory that the graph names, each once, and on its own device the workspace of its most demanding operation.
    pub memory_needed: u64,
    /// Bytes that the device has; 0 where that is not known.
    pub memory_total: u64,
    /// The device's name.
    pub device: [c_char; 128],
}

/// One thing that a device lacks for a graph.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_graph_finding {
    pub struct_size: usize,
    /// `NVB_SEVERITY_…`
    pub severity: u32,
    /// `NVB_TOPIC_…`
    pub topic: u32,
    /// How many nodes it is about; 0: the graph as a whole.
    pub nodes: u32,
    /// The first of them.
    pub first_node: u32,
    /// A sentence.
    pub text: [c_char; 512],
}
versioned!(nvb_graph_validation, nvb_graph_finding);

/// Tells what `device` lacks for the list that the graph launches (capability, dtype, memory, library), before anything runs; nothing
/// is queued and no memory of the graph touched. `device` is NULL or "" for the graph's own, on which each operation is planned as a
/// launch would; "cpu", "cuda:N" or "auto" for one of this machine; or, for devices that are not here, a compute capability ("9.0")
/// or a product ("H200", "NVIDIA GeForce RTX 4090", "A100 80GB"), of which is told what follows from capability and data sheet. Fills in
/// `validation`, whose `struct_size` is set first, and keeps the findings for `nvb_graph_get_finding` until the next call. Findings are
/// no error of the call.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (nothing was recorded; a name that is none, which the message answers with those that are);
/// what the driver says where "cuda:N" is asked for and is not there.
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_validate(
    graph: *mut nvb_graph,
    device: *const c_char,
    validation: *mut nvb_graph_validation,
) -> nvb_status {
    guard!(nvb_graph_validate, {
        let object = GRAPHS.get(graph)?;
        // SAFETY: NULL or NUL-terminated, by the header's contract.
        let name = unsafe { text("device", device)? };
        let own = object.backend.device();
        let target = match name.as_str() {
            "" => Target { own: true, ..target::here(own.clone()) },
            _ => {
                let target = target::target(&name)?;
                let is_own = target.here && (target.info.kind, target.info.ordinal) == (own.kind, own.ordinal);
                Target { own: is_own, info: if is_own { own.clone() } else { target.info.clone() }, ..target }
            }
        };
        let found = object.graph.validate(&target)?;
        let value = nvb_graph_validation {
            struct_size: 0,
            errors: found.count(Severity::Error),
            warnings: found.count(Severity::Warning),
            notes: found.count(Severity::Note),
            compute_capability: found.target.compute_capability,
            memory_needed: found.memory_needed,
            memory_total: found.target.total_memory,
            device: fixed_text(&found.target.name),
        };
        // SAFETY: a struct with its size set, by the header's contract.
        unsafe { write(validation, &value)? };
        *object.findings.lock().unwrap_or_else(PoisonError::into_inner) = found.findings;
        Ok(())
    })
}

/// Describes the finding at `index` of the last `nvb_graph_validate`, which counted them; set `finding->struct_size` first.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (an index beyond the last).
#[no_mangle]
pub unsafe extern "C" fn nvb_graph_get_finding(
    graph: *const nvb_graph,
    index: u32,
    finding: *mut nvb_graph_finding,
) -> nvb_status {
    guard!(nvb_graph_get_finding, {
        let object = GRAPHS.get(graph)?;
        let findings = object.findings.lock().unwrap_or_else(PoisonError::into_inner);
        let Finding { severity, topic, text, node, nodes } = element("finding", &findings, index)?;
        let value = nvb_graph_finding {
            struct_size: 0,
            severity: match severity {
                Severity::Note => NVB_SEVERITY_NOTE,
                Severity::Warning => NVB_SEVERITY_WARNING,
                Severity::Error => NVB_SEVERITY_ERROR,
            },
            topic: match topic {
                Topic::Device => NVB_TOPIC_DEVICE,
                Topic::Capability => NVB_TOPIC_CAPABILITY,
                Topic::Dtype => NVB_TOPIC_DTYPE,
                Topic::Memory => NVB_TOPIC_MEMORY,
                Topic::Library => NVB_TOPIC_LIBRARY,
            },
            nodes: *nodes,
            first_node: node.unwrap_or(0),
            text: fixed_text(text),
        };
        // SAFETY: a struct with its size set, by the header's contract.
        unsafe { write(finding, &value) }
    })
}

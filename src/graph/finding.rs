//! What a validation tells: findings with severities, and the device that they are about.

use crate::device::DeviceInfo;

/// A device that a list is validated for.
#[derive(Debug, Clone)]
pub struct Target {
    pub info: DeviceInfo,
    /// It is one of this machine's.
    pub here: bool,
    /// It is the device of the list's backend.
    pub own: bool,
    /// Whether cuBLASLt was found; `None` where that is not known.
    pub cublaslt: Option<bool>,
    /// What the kernels of this library were built for, "80;90a"; empty in a build without CUDA.
    pub architectures: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// The list runs, and something is worth knowing.
    Note,
    /// The list runs slower than it could, or only if something is seen to.
    Warning,
    /// The list does not run.
    Error,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topic {
    Device,
    Capability,
    Dtype,
    Memory,
    Library,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub severity: Severity,
    pub topic: Topic,
    pub text: String,
    /// The first node that it is about.
    pub node: Option<u32>,
    /// How many nodes it is about.
    pub nodes: u32,
}

#[derive(Debug, Clone)]
pub struct Validation {
    pub target: DeviceInfo,
    /// Bytes of device memory that the list names, and the workspace of its most demanding operation where that is known.
    pub memory_needed: u64,
    /// Errors first.
    pub findings: Vec<Finding>,
}

impl Validation {
    pub fn count(&self, severity: Severity) -> u32 {
        self.findings.iter().filter(|finding| finding.severity == severity).count() as u32
    }
}

//! The CPU's kernels: how many columns of the weight a task has. All give the same bits, because none changes the order in
//! which products are added; they differ in what stays in a core's caches and in how evenly the threads are loaded.

use super::{Family, Kernel, Limits, EVERY_ENCODING, FLOATS};
use crate::device::DeviceKind;
use crate::operation::OperationKind;

const fn columns(name: &'static str, columns: usize, summary: &'static str) -> Kernel {
    Kernel {
        name,
        operation: OperationKind::Linear,
        device: DeviceKind::Cpu,
        family: Family::Columns(columns),
        inputs: FLOATS,
        encodings: EVERY_ENCODING,
        limits: Limits::NONE,
        summary,
    }
}

pub const KERNELS: &[Kernel] = &[
    columns("linear_cpu", 0, "Four tasks a thread, as wide as a slice of the weight fits a core's second cache level."),
    columns("linear_cpu_16", 16, "Tasks of 16 columns."),
    columns("linear_cpu_32", 32, "Tasks of 32 columns."),
    columns("linear_cpu_64", 64, "Tasks of 64 columns."),
    columns("linear_cpu_128", 128, "Tasks of 128 columns."),
    columns("linear_cpu_256", 256, "Tasks of 256 columns."),
    columns("linear_cpu_512", 512, "Tasks of 512 columns."),
];

//! The CPU's kernels: how many columns of the weight a task has. All give the same bits, because none changes the order in
//! which products are added; they differ in what stays in a core's caches and in how evenly the threads are loaded.

use super::{Family, Kernel, Limits, FLOATS};
use crate::device::DeviceKind;
use crate::operation::OperationKind;
use crate::tensor::DType;
use crate::weight::{BlockFormat, Encoding};

/// Every encoding, blocks of files included.
const ALL: &[Encoding] = &{
    let mut all = [Encoding::Float(DType::F32); 7 + BlockFormat::ALL.len()];
    all[1] = Encoding::Float(DType::F16);
    all[2] = Encoding::Float(DType::Bf16);
    let mut at = 0;
    while at < Encoding::QUANTIZED.len() {
        all[3 + at] = Encoding::QUANTIZED[at];
        at += 1;
    }
    at = 0;
    while at < BlockFormat::ALL.len() {
        all[7 + at] = Encoding::Blocks(BlockFormat::ALL[at]);
        at += 1;
    }
    all
};

const fn columns(name: &'static str, columns: usize, summary: &'static str) -> Kernel {
    Kernel {
        name,
        operation: OperationKind::Linear,
        device: DeviceKind::Cpu,
        family: Family::Columns(columns),
        inputs: FLOATS,
        encodings: ALL,
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

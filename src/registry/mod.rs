//! The kernels and strategies that products and attention can take, by name: what lists, overrides, tuning files and
//! explanations speak of. [`choices`] keeps what was chosen among them.

pub mod attention_key;
pub mod choices;
mod cpu;
mod cuda;
pub mod key;

use crate::device::DeviceKind;
use crate::error::{Error, Result, Status};
use crate::operation::OperationKind;
use crate::tensor::DType;
use crate::weight::{BlockFormat, Encoding};

/// A kernel or strategy that computes an operation.
#[derive(Debug)]
pub struct Kernel {
    pub name: &'static str,
    pub operation: OperationKind,
    pub device: DeviceKind,
    pub family: Family,
    pub inputs: &'static [DType],
    /// The weight's encodings, or those of keys and values.
    pub encodings: &'static [Encoding],
    /// What it asks for beyond the encodings; the executor knows the rest.
    pub limits: Limits,
    /// One sentence.
    pub summary: &'static str,
}

/// The family that a kernel belongs to, by which executors launch it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// A row of the table in csrc/linear/linear.cu.
    FloatKernel,
    /// A row of the table in csrc/linear/linear_quantized.cu.
    QuantizedKernel,
    /// A float product of cuBLASLt, one of its algorithms.
    Vendor,
    /// Float products with slices of the dequantised weight.
    Dequantized,
    /// csrc/linear/sm90/linear_wgmma.cu, with a float weight.
    Wgmma,
    /// The input rounded to 8 bits, and a product of cuBLASLt; changes the result, so the backend's options must allow it.
    RoundedInput,
    /// The input rounded to 8 bits, and a product of csrc/linear/sm90/linear_wgmma.cu; it changes the result, too.
    RoundedWgmma,
    /// A row of the table in csrc/attention/attention_prefill.cu.
    AttentionPrefill,
    /// A row of the table in csrc/attention/attention_decode.cu.
    AttentionDecode,
    /// Tasks of so many columns on the CPU's threads; 0: as many as the shape suggests.
    Columns(usize),
}

/// Necessary, not sufficient: a product within them may still be refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Oldest compute capability, 10 · major + minor; 0: any.
    pub capability: i32,
    /// Runs on devices of that capability alone.
    pub exact: bool,
    /// Most rows of the input (M); 0: any.
    pub rows: usize,
    /// K, or attention's head_dim, is a multiple of it.
    pub depth_multiple: usize,
    /// Bytes that the addresses of the input's and the weight's rows are a multiple of; of queries, keys and values in attention.
    pub alignment: usize,
}

impl Limits {
    const NONE: Limits = Limits { capability: 0, exact: false, rows: 0, depth_multiple: 1, alignment: 1 };
}

const FLOATS: &[DType] = &DType::FLOATS;
const HALVES: &[DType] = &[DType::F16, DType::Bf16];
const FLOAT_ENCODINGS: &[Encoding] =
    &[Encoding::Float(DType::F32), Encoding::Float(DType::F16), Encoding::Float(DType::Bf16)];
const HALF_ENCODINGS: &[Encoding] = &[Encoding::Float(DType::F16), Encoding::Float(DType::Bf16)];
const QUANTIZED: &[Encoding] = &Encoding::QUANTIZED;
const BLOCKS: usize = BlockFormat::ALL.len();
/// The quantised encodings, and the blocks of files.
const QUANTIZED_AND_BLOCKS: &[Encoding] = &with_blocks::<{ Encoding::QUANTIZED.len() + BLOCKS }>(QUANTIZED);
const BLOCK_ENCODINGS: &[Encoding] = &with_blocks::<BLOCKS>(&[]);
const EVERY_ENCODING: &[Encoding] =
    &joined::<{ FLOAT_ENCODINGS.len() + QUANTIZED_AND_BLOCKS.len() }>(FLOAT_ENCODINGS, QUANTIZED_AND_BLOCKS);

const fn with_blocks<const N: usize>(first: &[Encoding]) -> [Encoding; N] {
    let mut blocks = [Encoding::Blocks(BlockFormat::ALL[0]); BLOCKS];
    let mut at = 0;
    while at < BLOCKS {
        blocks[at] = Encoding::Blocks(BlockFormat::ALL[at]);
        at += 1;
    }
    joined(first, &blocks)
}

/// One list behind the other; N is the number of both.
const fn joined<const N: usize>(first: &[Encoding], second: &[Encoding]) -> [Encoding; N] {
    let mut all = [second[0]; N];
    let mut at = 0;
    while at < N {
        all[at] = if at < first.len() { first[at] } else { second[at - first.len()] };
        at += 1;
    }
    all
}

/// A kernel's place in [`kernels`]: what tables hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KernelId(u16);

impl KernelId {
    pub fn kernel(self) -> &'static Kernel {
        let index = self.index();
        cuda::KERNELS.get(index).unwrap_or_else(|| &cpu::KERNELS[index - cuda::KERNELS.len()])
    }

    /// Its place among all kernels.
    pub fn index(self) -> usize {
        self.0.into()
    }

    pub fn from_index(index: usize) -> Option<KernelId> {
        (index < cuda::KERNELS.len() + cpu::KERNELS.len()).then_some(KernelId(index as u16))
    }
}

/// Every kernel of the library, CUDA's first.
pub fn kernels() -> impl Iterator<Item = (KernelId, &'static Kernel)> {
    (0..).map(KernelId).zip(cuda::KERNELS.iter().chain(cpu::KERNELS))
}

/// The kernels of one kind of device.
pub fn kernels_of(device: DeviceKind) -> impl Iterator<Item = (KernelId, &'static Kernel)> {
    kernels().filter(move |(_, kernel)| kernel.device == device)
}

/// The kernel of this name for an operation on a device, or an error that lists what there is.
pub fn find(device: DeviceKind, operation: OperationKind, name: &str) -> Result<KernelId> {
    let all = || kernels_of(device).filter(|(_, kernel)| kernel.operation == operation);
    if let Some((id, _)) = all().find(|(_, kernel)| kernel.name == name) {
        return Ok(id);
    }
    let names: Vec<&str> = all().map(|(_, kernel)| kernel.name).collect();
    let operation = operation.name();
    let what = match names.is_empty() {
        true => format!("operation {operation} has no kernels to choose among here"),
        false => format!("{name:?} is no kernel of {operation} here; there are {}", names.join(", ")),
    };
    Err(Error::new(Status::Configuration, what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_ids_are_places() {
        let mut names = Vec::new();
        for (id, kernel) in kernels() {
            assert!(id.kernel().name == kernel.name && KernelId::from_index(id.index()) == Some(id));
            assert!(kernel.name.starts_with(kernel.operation.name()));
            assert!(!names.contains(&kernel.name), "{}", kernel.name);
            assert!(!kernel.inputs.is_empty() && !kernel.encodings.is_empty() && kernel.summary.ends_with('.'));
            names.push(kernel.name);
        }
        assert_eq!(KernelId::from_index(names.len()), None);
    }

    #[test]
    fn an_unknown_name_is_answered_with_what_there_is() {
        assert_eq!(
            find(DeviceKind::Cpu, OperationKind::Linear, "linear_cpu_64").unwrap().kernel().family,
            Family::Columns(64)
        );
        let error = find(DeviceKind::Cpu, OperationKind::Linear, "linear_simt").unwrap_err();
        assert_eq!(error.status, Status::Configuration);
        assert!(error.message.contains("\"linear_simt\" is no kernel") && error.message.contains("linear_cpu_64"));
        assert!(find(DeviceKind::Cuda, OperationKind::Linear, "x").unwrap_err().message.contains("linear_simt, "));
        assert!(find(DeviceKind::Cuda, OperationKind::Softmax, "x")
            .unwrap_err()
            .message
            .contains("softmax has no kernels"));
    }
}

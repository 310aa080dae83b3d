//! The description of a device: a GPU, a TPU or the host's processor. Detection fills it in, an executor says by it what it
//! works with, and the C ABI converts it.

use super::features::Features;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceKind {
    #[default]
    Cpu,
    Cuda,
    Tpu,
}

/// A number that the device does not have or tell is 0, a text empty.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DeviceInfo {
    pub kind: DeviceKind,
    /// The CUDA ordinal, the chip's number, or 0 for the CPU.
    pub ordinal: i32,
    pub name: String,
    /// "Hopper", "TPU v5p", "x86_64"
    pub architecture: String,
    /// 10 · major + minor of a GPU. That of a backend's device is the architecture whose kernels run.
    pub compute_capability: i32,
    /// "GPU-…" as nvidia-smi prints it
    pub uuid: String,
    /// "0000:0f:00.0"
    pub pci_bus_id: String,
    /// −1 if unknown
    pub numa_node: i32,
    /// Streaming multiprocessors, or hardware threads of the CPU that this process may use. Those of a backend on the CPU are
    /// the threads that it computes with.
    pub multiprocessors: i32,
    pub total_memory: u64,
    pub l2_bytes: u64,
    /// Bytes per second of the device's memory, at its highest clock.
    pub peak_bandwidth: u64,
    pub features: Features,
    pub clock_mhz: i32,
    pub memory_clock_mhz: i32,
    pub memory_bus_bits: i32,
    /// Bytes that one block may have at most.
    pub shared_memory_per_block: i32,
    pub shared_memory_per_multiprocessor: i32,
    pub registers_per_multiprocessor: i32,
    pub threads_per_multiprocessor: i32,
    pub warp_size: i32,
    pub copy_engines: i32,
    /// 1000 · major + 10 · minor of the CUDA version that the driver supports
    pub driver_version: i32,
    /// Why a backend cannot be created on it; empty if one can.
    pub obstacle: String,
}

impl DeviceInfo {
    /// How `nvb_backend_options.device` names it.
    pub fn selector(&self) -> String {
        match self.kind {
            DeviceKind::Cpu => "cpu".to_string(),
            DeviceKind::Cuda => format!("cuda:{}", self.ordinal),
            DeviceKind::Tpu => format!("tpu:{}", self.ordinal),
        }
    }

    pub fn new(kind: DeviceKind, ordinal: i32) -> DeviceInfo {
        DeviceInfo { kind, ordinal, numa_node: -1, ..DeviceInfo::default() }
    }
}

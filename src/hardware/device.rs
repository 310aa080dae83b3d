//! One device of this machine: a GPU, a TPU or the host's processor.

use super::cpu::CpuProfile;
use super::features::Features;
use super::tpu::{Chip, Tpus};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Cpu,
    Cuda,
    Tpu,
}

/// A number that the device does not have or tell is 0, a text empty.
#[derive(Debug, Clone, PartialEq)]
pub struct Device {
    pub kind: Kind,
    /// The CUDA ordinal, the chip's number, or 0 for the CPU.
    pub ordinal: i32,
    pub name: String,
    /// "Hopper", "TPU v5p", "x86_64"
    pub architecture: String,
    /// 10 · major + minor of a GPU
    pub compute_capability: i32,
    /// "GPU-…" as nvidia-smi prints it
    pub uuid: String,
    /// "0000:0f:00.0"
    pub pci_bus_id: String,
    /// −1 if unknown
    pub numa_node: i32,
    /// Streaming multiprocessors, or hardware threads of the CPU that this process may use.
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
    pub driver_version: i32,
    /// Why a backend cannot be created on it; empty if one can.
    pub obstacle: String,
}

impl Device {
    /// How `nvb_backend_options.device` names it.
    pub fn selector(&self) -> String {
        match self.kind {
            Kind::Cpu => "cpu".to_string(),
            Kind::Cuda => format!("cuda:{}", self.ordinal),
            Kind::Tpu => format!("tpu:{}", self.ordinal),
        }
    }

    pub fn new(kind: Kind, ordinal: i32) -> Device {
        Device {
            kind,
            ordinal,
            name: String::new(),
            architecture: String::new(),
            compute_capability: 0,
            uuid: String::new(),
            pci_bus_id: String::new(),
            numa_node: -1,
            multiprocessors: 0,
            total_memory: 0,
            l2_bytes: 0,
            peak_bandwidth: 0,
            features: Features::default(),
            clock_mhz: 0,
            memory_clock_mhz: 0,
            memory_bus_bits: 0,
            shared_memory_per_block: 0,
            shared_memory_per_multiprocessor: 0,
            registers_per_multiprocessor: 0,
            threads_per_multiprocessor: 0,
            warp_size: 0,
            copy_engines: 0,
            driver_version: 0,
            obstacle: String::new(),
        }
    }

    pub fn of_cpu(profile: &CpuProfile) -> Device {
        let sets = profile.instruction_sets;
        let features = Features::default()
            .with(Features::F16, sets.has("avx512_fp16"))
            .with(Features::BF16, ["avx512_bf16", "amx_bf16", "bf16"].iter().any(|set| sets.has(set)))
            .with(Features::UNIFIED_ADDRESSING, true);
        Device {
            name: profile.name.clone(),
            architecture: profile.architecture.to_string(),
            multiprocessors: profile.available_threads as i32,
            total_memory: profile.usable_memory(),
            l2_bytes: profile.cache_bytes(2),
            features,
            clock_mhz: profile.maximum_mhz as i32,
            ..Device::new(Kind::Cpu, 0)
        }
    }

    pub fn of_tpu(tpus: &Tpus, ordinal: usize) -> Device {
        let Chip { generation, pci_bus_id, numa_node } = &tpus.chips[ordinal];
        let obstacle = match tpus.refusal.as_str() {
            "" => "this build has no executor for TPUs".to_string(),
            refusal => format!("this build has no executor for TPUs; besides, {refusal}"),
        };
        Device {
            name: generation.name().to_string(),
            architecture: generation.name().to_string(),
            pci_bus_id: pci_bus_id.clone(),
            numa_node: *numa_node,
            total_memory: generation.memory(),
            peak_bandwidth: generation.bandwidth(),
            features: Features::BF16,
            obstacle,
            ..Device::new(Kind::Tpu, ordinal as i32)
        }
    }
}

//! Devices: what this machine has, before a backend is created on it.

use super::prelude::*;
use crate::device::{DeviceInfo, DeviceKind};
use crate::hardware;

/// `nvb_device_info.kind`: the host's processor.
pub const NVB_DEVICE_CPU: u32 = 0;
/// `nvb_device_info.kind`: a CUDA GPU.
pub const NVB_DEVICE_CUDA: u32 = 1;
/// `nvb_device_info.kind`: a TPU. Listed and ranked; no backend runs on it yet.
pub const NVB_DEVICE_TPU: u32 = 2;

/// `nvb_device_info.features`: 16-bit floats, packed arithmetic.
pub const NVB_FEATURE_F16: u64 = 0x1;
/// `nvb_device_info.features`: bfloat16 arithmetic.
pub const NVB_FEATURE_BF16: u64 = 0x2;
/// `nvb_device_info.features`: 8-bit float products.
pub const NVB_FEATURE_FP8: u64 = 0x4;
/// `nvb_device_info.features`: 4-bit float products.
pub const NVB_FEATURE_FP4: u64 = 0x8;
/// `nvb_device_info.features`: Matrix units of an NVIDIA GPU.
pub const NVB_FEATURE_TENSOR_CORES: u64 = 0x10;
/// `nvb_device_info.features`: `cp.async`: copies to shared memory that bypass the registers.
pub const NVB_FEATURE_ASYNC_COPY: u64 = 0x20;
/// `nvb_device_info.features`: The tensor memory accelerator.
pub const NVB_FEATURE_TMA: u64 = 0x40;
/// `nvb_device_info.features`: Warp-group products of Hopper.
pub const NVB_FEATURE_WGMMA: u64 = 0x80;
/// `nvb_device_info.features`: Thread block clusters.
pub const NVB_FEATURE_CLUSTERS: u64 = 0x100;
/// `nvb_device_info.features`: Programmatic dependent launch.
pub const NVB_FEATURE_PROGRAMMATIC_LAUNCH: u64 = 0x200;
/// `nvb_device_info.features`: Kernels whose whole grid synchronises.
pub const NVB_FEATURE_COOPERATIVE_LAUNCH: u64 = 0x400;
/// `nvb_device_info.features`: Memory that moves between host and device by itself.
pub const NVB_FEATURE_MANAGED_MEMORY: u64 = 0x800;
/// `nvb_device_info.features`: Host and device may use managed memory at once.
pub const NVB_FEATURE_CONCURRENT_MANAGED_ACCESS: u64 = 0x1000;
/// `nvb_device_info.features`: The device reads plain host memory.
pub const NVB_FEATURE_PAGEABLE_MEMORY_ACCESS: u64 = 0x2000;
/// `nvb_device_info.features`: Stream-ordered allocation.
pub const NVB_FEATURE_MEMORY_POOLS: u64 = 0x4000;
/// `nvb_device_info.features`: Address ranges that are backed piece by piece.
pub const NVB_FEATURE_VIRTUAL_MEMORY: u64 = 0x8000;
/// `nvb_device_info.features`: One address space with the host.
pub const NVB_FEATURE_UNIFIED_ADDRESSING: u64 = 0x10000;
/// `nvb_device_info.features`: Atomics on host memory at full speed.
pub const NVB_FEATURE_HOST_NATIVE_ATOMICS: u64 = 0x20000;
/// `nvb_device_info.features`: Memory errors are corrected; it is switched on.
pub const NVB_FEATURE_ECC: u64 = 0x40000;
/// `nvb_device_info.features`: The device shares the host's memory.
pub const NVB_FEATURE_INTEGRATED: u64 = 0x80000;
/// `nvb_device_info.features`: Network adapters reach its memory.
pub const NVB_FEATURE_GPU_DIRECT_RDMA: u64 = 0x100000;
/// `nvb_device_info.features`: Streams may have priorities.
pub const NVB_FEATURE_STREAM_PRIORITIES: u64 = 0x200000;

/// A device. A number that it does not have or tell is 0, a text empty.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_device_info {
    pub struct_size: usize,
    /// `NVB_DEVICE_CPU`, `NVB_DEVICE_CUDA` or `NVB_DEVICE_TPU`.
    pub kind: u32,
    /// The CUDA ordinal, the TPU chip's number; 0 on the CPU.
    pub ordinal: i32,
    /// 10 · major + minor, such as 90; 0 on the CPU.
    pub compute_capability: i32,
    /// Streaming multiprocessors; on the CPU, threads.
    pub multiprocessors: i32,
    /// Bytes of device memory; on the CPU, of main memory.
    pub total_memory: u64,
    /// Bytes of the second-level cache; 0 if unknown.
    pub l2_bytes: u64,
    /// 1000 · major + 10 · minor of the CUDA version that the driver supports; 0 on the CPU.
    pub driver_version: i32,
    /// Must be 0.
    pub reserved: i32,
    pub name: [c_char; 128],
    /// `NVB_FEATURE_…` bits.
    pub features: u64,
    /// Bytes per second of the device's memory at its highest clock.
    pub peak_bandwidth: u64,
    /// "GPU-…" as nvidia-smi prints it.
    pub uuid: [c_char; 48],
    /// Such as "Hopper", "TPU v5p" or "x86_64".
    pub architecture: [c_char; 32],
    /// Such as "0000:0f:00.0".
    pub pci_bus_id: [c_char; 16],
    /// The NUMA node that it is attached to; −1 if unknown.
    pub numa_node: i32,
    pub clock_mhz: i32,
    pub memory_clock_mhz: i32,
    pub memory_bus_bits: i32,
    /// Bytes of shared memory that one block may have at most.
    pub shared_memory_per_block: i32,
    pub shared_memory_per_multiprocessor: i32,
    /// 32-bit registers.
    pub registers_per_multiprocessor: i32,
    pub threads_per_multiprocessor: i32,
    pub warp_size: i32,
    /// Engines that copy while kernels run.
    pub copy_engines: i32,
    /// The reason, in a sentence, why no backend can be created on the device; empty if one can.
    pub obstacle: [c_char; 256],
}
versioned!(nvb_device_info);

pub(super) fn kind_code(kind: DeviceKind) -> u32 {
    match kind {
        DeviceKind::Cpu => NVB_DEVICE_CPU,
        DeviceKind::Cuda => NVB_DEVICE_CUDA,
        DeviceKind::Tpu => NVB_DEVICE_TPU,
    }
}

pub(super) fn convert(device: &DeviceInfo) -> nvb_device_info {
    copied!(nvb_device_info from device {
        ordinal, compute_capability, multiprocessors, total_memory, l2_bytes, driver_version, peak_bandwidth,
        numa_node, clock_mhz, memory_clock_mhz, memory_bus_bits, shared_memory_per_block,
        shared_memory_per_multiprocessor, registers_per_multiprocessor, threads_per_multiprocessor, warp_size,
        copy_engines;
        kind: kind_code(device.kind),
        reserved: 0,
        name: fixed_text(&device.name),
        features: device.features.0,
        uuid: fixed_text(&device.uuid),
        architecture: fixed_text(&device.architecture),
        pci_bus_id: fixed_text(&device.pci_bus_id),
        obstacle: fixed_text(&device.obstacle),
    })
}

/// Writes the number of CUDA devices. Without a driver or a device this is `NVB_ERROR_CUDA_NOT_AVAILABLE`, with the
/// reason as the error's text, and `count` is left alone. The first call loads the driver.
#[no_mangle]
pub unsafe extern "C" fn nvb_cuda_get_device_count(count: *mut i32) -> nvb_status {
    guard!(nvb_cuda_get_device_count, {
        let gpus = hardware::gpus()?;
        // SAFETY: NULL is checked; otherwise valid by the header's contract.
        unsafe { write_out("count", count, gpus.len() as i32) }
    })
}

/// Describes CUDA device `ordinal`; set `info->struct_size` first. No context is created on the device.
#[no_mangle]
pub unsafe extern "C" fn nvb_cuda_get_device_info(ordinal: i32, info: *mut nvb_device_info) -> nvb_status {
    guard!(nvb_cuda_get_device_info, {
        let device = hardware::gpu_at(ordinal)?;
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(info, &convert(device)) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::features::Features;

    #[test]
    fn feature_constants_agree_with_the_bits() {
        assert_eq!(NVB_FEATURE_BF16, Features::BF16.0);
        assert_eq!(NVB_FEATURE_TMA, Features::TMA.0);
        assert_eq!(NVB_FEATURE_COOPERATIVE_LAUNCH, Features::COOPERATIVE_LAUNCH.0);
        assert_eq!(NVB_FEATURE_ECC, Features::ECC.0);
        assert_eq!(NVB_FEATURE_STREAM_PRIORITIES, Features::STREAM_PRIORITIES.0);
    }

    #[test]
    fn a_backend_s_device_has_the_executor_s_threads() {
        let executor = crate::cpu::CpuExecutor::new(1).unwrap();
        let info = convert(crate::device::Device::info(&executor));
        assert_eq!((info.kind, info.multiprocessors), (NVB_DEVICE_CPU, 1));
        assert_ne!(info.architecture[0], 0);
    }
}

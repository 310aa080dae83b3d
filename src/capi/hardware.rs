//! Every device of the machine: its usage, which device reaches which, and which suits a workload.

use super::device::{convert, kind_code, nvb_device_info};
use super::environment::element;
use super::prelude::*;
use crate::hardware::{self, peer, recommend, recommend::Workload, usage};

/// `nvb_device_usage.known`: the field of this name was told.
pub const NVB_USAGE_UTILIZATION: u32 = 0x1;
pub const NVB_USAGE_MEMORY_UTILIZATION: u32 = 0x2;
pub const NVB_USAGE_MEMORY: u32 = 0x4;
pub const NVB_USAGE_TEMPERATURE: u32 = 0x8;
pub const NVB_USAGE_POWER: u32 = 0x10;
pub const NVB_USAGE_POWER_LIMIT: u32 = 0x20;
pub const NVB_USAGE_CLOCK: u32 = 0x40;
pub const NVB_USAGE_MEMORY_CLOCK: u32 = 0x80;
pub const NVB_USAGE_ECC: u32 = 0x100;
pub const NVB_USAGE_ECC_ERRORS: u32 = 0x200;
pub const NVB_USAGE_THROTTLE_REASONS: u32 = 0x400;
pub const NVB_USAGE_PROCESSES: u32 = 0x800;

/// What a device is doing now. Fields whose bit in `known` is clear are 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_device_usage {
    pub struct_size: usize,
    /// `NVB_USAGE_…` bits.
    pub known: u32,
    /// Percent of the time in which a kernel ran; on the CPU, of the time since the last call.
    pub utilization: u32,
    /// Percent of the time in which the memory was read or written.
    pub memory_utilization: u32,
    /// Degrees Celsius.
    pub temperature: u32,
    /// Milliwatts.
    pub power: u32,
    pub power_limit: u32,
    /// MHz.
    pub clock: u32,
    pub memory_clock: u32,
    /// 1 if error correction is on.
    pub ecc_enabled: u32,
    /// Processes that compute on it.
    pub processes: u32,
    /// Bytes, of all processes together.
    pub memory_used: u64,
    pub memory_total: u64,
    /// Memory errors since the driver was loaded.
    pub ecc_corrected: u64,
    pub ecc_uncorrected: u64,
    /// NVML's `nvmlClocksThrottleReason…` bits; 0: nothing holds the clocks down.
    pub throttle_reasons: u64,
}

/// How one GPU reaches another's memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_peer_access {
    pub struct_size: usize,
    /// 1 if loads, stores and copies can go directly.
    pub accessible: u32,
    /// The driver's order of the links, 0 the fastest.
    pub performance_rank: i32,
    /// 1 if atomics work over the link.
    pub native_atomics: u32,
    /// Must be 0.
    pub reserved: u32,
}

/// `workload`: long prompts, short answers; bounded by arithmetic.
pub const NVB_WORKLOAD_PREFILL: u32 = 0;
/// `workload`: short prompts, long answers; bounded by memory bandwidth.
pub const NVB_WORKLOAD_DECODE: u32 = 1;
/// `workload`: bounded by arithmetic and by memory size.
pub const NVB_WORKLOAD_TRAINING: u32 = 2;
/// `workload`: a device that is always there and that other work does not wait for.
pub const NVB_WORKLOAD_TEST: u32 = 3;

/// One place in the ranking of the devices for a workload.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_recommendation {
    pub struct_size: usize,
    /// Places in the ranking, which is the number of devices.
    pub count: u32,
    /// For `nvb_hardware_get_device_info`.
    pub device_index: u32,
    /// `NVB_DEVICE_…`
    pub kind: u32,
    /// 1 if a backend can be created on it; else `reason` says what stands in the way.
    pub runnable: u32,
    /// For `nvb_backend_options.device`; "tpu:N" is answered with `NVB_ERROR_UNSUPPORTED`, as there is no executor for TPUs
    /// yet.
    pub device: [c_char; 16],
    pub name: [c_char; 128],
    /// Why it stands at this place.
    pub reason: [c_char; 512],
}
versioned!(nvb_device_usage, nvb_peer_access, nvb_recommendation);

/// Writes the number of devices: GPUs, TPUs and the CPU, so at least 1. The first call starts the CUDA driver if there
/// is one; a driver that does not start lists no GPU, and `nvb_hardware_get_environment` says why.
#[no_mangle]
pub unsafe extern "C" fn nvb_hardware_get_device_count(count: *mut u32) -> nvb_status {
    guard!(nvb_hardware_get_device_count, {
        // SAFETY: NULL is checked; otherwise valid by the header's contract.
        unsafe { write_out("count", count, hardware::devices().len() as u32) }
    })
}

/// Describes the device at `index`: GPUs by ordinal, then TPUs, then the CPU. Set `info->struct_size` first. Detected
/// once a process; no context is created.
#[no_mangle]
pub unsafe extern "C" fn nvb_hardware_get_device_info(index: u32, info: *mut nvb_device_info) -> nvb_status {
    guard!(nvb_hardware_get_device_info, {
        let device = hardware::device_at(index)?;
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(info, &convert(device)) }
    })
}

/// Asks the device at `index` what it is doing: a GPU through NVML, which is opened with the first question, the CPU
/// through /proc. Set `usage->struct_size` first.
/// Errors: `NVB_ERROR_UNSUPPORTED` (the library of NVML is missing, a TPU), `NVB_ERROR_CUDA_NOT_AVAILABLE` (NVML does
/// not start because no driver is loaded, a build without CUDA), `NVB_ERROR_DEVICE` (no permission),
/// `NVB_ERROR_DEVICE_LOST` (the GPU has fallen off the bus), `NVB_ERROR_IO` (/proc cannot be read),
/// `NVB_ERROR_INVALID_ARGUMENT` (an index beyond the last).
#[no_mangle]
pub unsafe extern "C" fn nvb_hardware_get_usage(index: u32, usage: *mut nvb_device_usage) -> nvb_status {
    guard!(nvb_hardware_get_usage, {
        let value = convert_usage(&usage::usage(hardware::device_at(index)?)?);
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(usage, &value) }
    })
}

fn convert_usage(usage: &usage::Usage) -> nvb_device_usage {
    fn tell<T: Default>(known: &mut u32, value: Option<T>, bit: u32) -> T {
        *known |= if value.is_some() { bit } else { 0 };
        value.unwrap_or_default()
    }
    let mut known = 0;
    let told = &mut known;
    // Two numbers each, which are told together.
    let memory = usage.memory_used.zip(usage.memory_total).map_or(0, |_| NVB_USAGE_MEMORY);
    let errors = usage.ecc_corrected.zip(usage.ecc_uncorrected).map_or(0, |_| NVB_USAGE_ECC_ERRORS);
    let value = nvb_device_usage {
        struct_size: 0,
        known: 0,
        utilization: tell(told, usage.utilization, NVB_USAGE_UTILIZATION),
        memory_utilization: tell(told, usage.memory_utilization, NVB_USAGE_MEMORY_UTILIZATION),
        temperature: tell(told, usage.temperature, NVB_USAGE_TEMPERATURE),
        power: tell(told, usage.power, NVB_USAGE_POWER),
        power_limit: tell(told, usage.power_limit, NVB_USAGE_POWER_LIMIT),
        clock: tell(told, usage.clock_mhz, NVB_USAGE_CLOCK),
        memory_clock: tell(told, usage.memory_clock_mhz, NVB_USAGE_MEMORY_CLOCK),
        ecc_enabled: tell(told, usage.ecc_enabled, NVB_USAGE_ECC).into(),
        processes: tell(told, usage.processes, NVB_USAGE_PROCESSES),
        memory_used: tell(told, usage.memory_used, memory),
        memory_total: tell(told, usage.memory_total, memory),
        ecc_corrected: tell(told, usage.ecc_corrected, errors),
        ecc_uncorrected: tell(told, usage.ecc_uncorrected, errors),
        throttle_reasons: tell(told, usage.throttle_reasons, NVB_USAGE_THROTTLE_REASONS),
    };
    nvb_device_usage { known, ..value }
}

/// Writes how CUDA device `ordinal` reaches the memory of `peer`; set `access->struct_size` first.
/// Errors: `NVB_ERROR_CUDA_NOT_AVAILABLE`, `NVB_ERROR_DEVICE` (no such ordinal).
#[no_mangle]
pub unsafe extern "C" fn nvb_hardware_get_peer_access(
    ordinal: i32,
    peer: i32,
    access: *mut nvb_peer_access,
) -> nvb_status {
    guard!(nvb_hardware_get_peer_access, {
        let found = peer::peer_access(ordinal, peer)?;
        let value = nvb_peer_access {
            struct_size: 0,
            accessible: found.accessible.into(),
            performance_rank: found.performance_rank,
            native_atomics: found.native_atomics.into(),
            reserved: 0,
        };
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(access, &value) }
    })
}

/// Lets work of `backend` read and write the memory of `peer`, in this direction only: from then on its operations and
/// copies take blocks of `peer`'s managers as they take its own. Repeating it is fine. It orders nothing: let a stream
/// of the one wait for an event of the other. Where a range of `peer`'s ends is not checked. Backends of one device, and
/// CPU backends, reach each other's memory anyway.
/// Errors: `NVB_ERROR_UNSUPPORTED` (no link between the two, or a GPU and the CPU).
#[no_mangle]
pub unsafe extern "C" fn nvb_backend_enable_peer_access(
    backend: *const nvb_backend,
    peer: *const nvb_backend,
) -> nvb_status {
    guard!(nvb_backend_enable_peer_access, {
        let object = BACKENDS.get(backend)?;
        let peer = BACKENDS.get(peer)?;
        object.backend.executor().enable_peer_access(&**peer.backend.executor())
    })
}

/// Writes the device at `place` (0: the best) of the ranking for `workload` (`NVB_WORKLOAD_…`); set
/// `recommendation->struct_size` first. Default order: Hopper and Blackwell, TPU v5p and later, A100, TPU v4 and v5e,
/// other NVIDIA GPUs, older TPUs, the CPU; test work turns it round.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (an unknown workload, a place beyond the last).
#[no_mangle]
pub unsafe extern "C" fn nvb_hardware_recommend(
    workload: u32,
    place: u32,
    recommendation: *mut nvb_recommendation,
) -> nvb_status {
    guard!(nvb_hardware_recommend, {
        let workload = Workload::from_code(workload)
            .ok_or_else(|| Error::invalid(format!("workload is {workload}; NVB_WORKLOAD_… (0 to 3) is needed")))?;
        let devices = hardware::devices();
        let places = recommend::recommend(devices, workload);
        let chosen = element("place", &places, place)?;
        let device = &devices[chosen.index];
        let value = nvb_recommendation {
            struct_size: 0,
            count: places.len() as u32,
            device_index: chosen.index as u32,
            kind: kind_code(device.kind),
            runnable: device.obstacle.is_empty().into(),
            device: fixed_text(&device.selector()),
            name: fixed_text(&device.name),
            reason: fixed_text(&chosen.reason),
        };
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(recommendation, &value) }
    })
}

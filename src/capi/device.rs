//! Devices: what this machine has, before a backend is created on it.

use super::guard::guard;
use super::status::nvb_status;
use super::structs::{fixed_text, versioned, write, write_out};
use crate::backend;
use crate::error::{Error, Status};
use crate::executor::{DeviceInfo, DeviceKind};
use std::ffi::c_char;

/// `nvb_device_info.kind`: the host's processor.
pub const NVB_DEVICE_CPU: u32 = 0;
/// `nvb_device_info.kind`: a CUDA GPU.
pub const NVB_DEVICE_CUDA: u32 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_device_info {
    pub struct_size: usize,
    /// `NVB_DEVICE_CPU` or `NVB_DEVICE_CUDA`.
    pub kind: u32,
    /// The CUDA ordinal; 0 on the CPU.
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
}
versioned!(nvb_device_info);

pub(super) fn convert(device: &DeviceInfo) -> nvb_device_info {
    nvb_device_info {
        struct_size: 0,
        kind: match device.kind {
            DeviceKind::Cpu => NVB_DEVICE_CPU,
            DeviceKind::Cuda => NVB_DEVICE_CUDA,
        },
        ordinal: device.ordinal,
        compute_capability: device.compute_capability,
        multiprocessors: device.multiprocessors,
        total_memory: device.total_memory,
        l2_bytes: device.l2_bytes,
        driver_version: device.driver_version,
        reserved: 0,
        name: fixed_text(&device.name),
    }
}

/// Writes the number of CUDA devices. Without a driver or a device this is `NVB_ERROR_CUDA_NOT_AVAILABLE`, with the
/// reason as the error's text, and `count` is left alone. The first call loads the driver.
#[no_mangle]
pub unsafe extern "C" fn nvb_cuda_get_device_count(count: *mut i32) -> nvb_status {
    guard!(nvb_cuda_get_device_count, {
        let devices = backend::cuda_devices()?;
        // SAFETY: NULL is checked; otherwise valid by the header's contract.
        unsafe { write_out("count", count, devices.len() as i32) }
    })
}

/// Describes CUDA device `ordinal`; set `info->struct_size` first. No context is created on the device.
#[no_mangle]
pub unsafe extern "C" fn nvb_cuda_get_device_info(ordinal: i32, info: *mut nvb_device_info) -> nvb_status {
    guard!(nvb_cuda_get_device_info, {
        let devices = backend::cuda_devices()?;
        let device = usize::try_from(ordinal).ok().and_then(|index| devices.get(index)).ok_or_else(|| {
            Error::new(Status::Device, format!("CUDA device {ordinal}; this machine has {}", devices.len()))
                .with_limit(ordinal.max(0) as u64, devices.len() as u64)
        })?;
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(info, &convert(device)) }
    })
}

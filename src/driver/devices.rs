//! The machine's CUDA devices, asked for once a process.

use super::{check, check_functions, check_loaded, exit};
use crate::device::{DeviceInfo, DeviceKind};
use crate::error::{Error, Result, Status};
use cust::device::{Device, DeviceAttribute};
use cust::error::CudaResult;
use cust::sys::{self, CUresult};

/// Every device, or the reason why there is none. Starts the driver; `hardware::gpus` completes the descriptions and keeps them.
pub fn list() -> Result<Vec<DeviceInfo>> {
    check_loaded()?;
    check_functions()?;
    let _inside = exit::enter()?;
    let (mut driver_version, mut count) = (0, 0);
    // Not through cust's types, which tell "unknown error" where the reason matters most.
    // SAFETY: the driver is initialised first, and the pointers are valid.
    unsafe {
        start(sys::cuInit(0))?;
        exit::DRIVER.have_begun();
        check(sys::cuDriverGetVersion(&mut driver_version), "cuDriverGetVersion")?;
        start(sys::cuDeviceGetCount(&mut count))?;
    }
    if count == 0 {
        return Err(Error::new(Status::CudaNotAvailable, "the CUDA driver works and lists no device"));
    }
    (0..count)
        .map(|ordinal| {
            describe(ordinal as u32, driver_version).map_err(|error| super::error(error as i32, "describing a device"))
        })
        .collect()
}

/// The result of a call without which there is no CUDA.
fn start(result: CUresult) -> Result<()> {
    let Err(mut error) = check(result, "starting CUDA") else { return Ok(()) };
    error.status = Status::CudaNotAvailable;
    // "OS call failed" and "unknown error" are what a container without the device files, or a missing module, looks like.
    if matches!(error.cuda_code, 304 | 999) {
        error = error.with_advice(
            "may this process open /dev/nvidiactl and /dev/nvidia-uvm, and is the nvidia_uvm module loaded?",
        );
    }
    Err(error)
}

fn describe(ordinal: u32, driver_version: i32) -> CudaResult<DeviceInfo> {
    let device = Device::get_device(ordinal)?;
    let attribute = |attribute: DeviceAttribute| device.get_attribute(attribute);
    Ok(DeviceInfo {
        name: device.name()?,
        compute_capability: 10 * attribute(DeviceAttribute::ComputeCapabilityMajor)?
            + attribute(DeviceAttribute::ComputeCapabilityMinor)?,
        multiprocessors: attribute(DeviceAttribute::MultiprocessorCount)?,
        total_memory: device.total_memory()? as u64,
        l2_bytes: attribute(DeviceAttribute::L2CacheSize)?.max(0) as u64,
        driver_version,
        ..DeviceInfo::new(DeviceKind::Cuda, ordinal as i32)
    })
}

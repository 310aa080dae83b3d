//! The machine's CUDA devices, asked for once a process.

use super::driver::{check, check_functions, check_loaded};
use crate::error::{Error, Result, Status};
use crate::executor::{DeviceInfo, DeviceKind};
use cust::device::{Device, DeviceAttribute};
use cust::error::CudaResult;
use cust::sys::{self, CUresult};
use std::sync::OnceLock;

/// Every device, or the reason why there is none. Devices do not come and go within a process, so a list is kept; what
/// kept it from being made may pass, so a failure is not.
pub fn list() -> Result<Vec<DeviceInfo>> {
    static DEVICES: OnceLock<Vec<DeviceInfo>> = OnceLock::new();
    if let Some(devices) = DEVICES.get() {
        return Ok(devices.clone());
    }
    let devices = detect()?;
    Ok(DEVICES.get_or_init(|| devices).clone())
}

fn detect() -> Result<Vec<DeviceInfo>> {
    check_loaded()?;
    check_functions()?;
    let (mut driver_version, mut count) = (0, 0);
    // Not through cust's types, which tell "unknown error" where the reason matters most.
    // SAFETY: the driver is initialised first, and the pointers are valid.
    unsafe {
        start(sys::cuInit(0))?;
        check(sys::cuDriverGetVersion(&mut driver_version), "cuDriverGetVersion")?;
        start(sys::cuDeviceGetCount(&mut count))?;
    }
    if count == 0 {
        return Err(Error::new(Status::CudaNotAvailable, "the CUDA driver works and lists no device"));
    }
    (0..count)
        .map(|ordinal| {
            describe(ordinal as u32, driver_version)
                .map_err(|error| super::driver::error(error as i32, "describing a device"))
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
        kind: DeviceKind::Cuda,
        ordinal: ordinal as i32,
        name: device.name()?,
        compute_capability: 10 * attribute(DeviceAttribute::ComputeCapabilityMajor)?
            + attribute(DeviceAttribute::ComputeCapabilityMinor)?,
        multiprocessors: attribute(DeviceAttribute::MultiprocessorCount)?,
        total_memory: device.total_memory()? as u64,
        l2_bytes: attribute(DeviceAttribute::L2CacheSize)?.max(0) as u64,
        driver_version,
    })
}

/// Whether one of `architectures` ("80;90a") has machine code for `capability`, or PTX of an older one that the driver
/// compiles: machine code runs on later minor versions of its major version, an `a` target on exactly its own.
pub fn kernels_run_on(architectures: &str, capability: i32) -> bool {
    architectures.split(';').any(|name| {
        let (number, exact) = match name.strip_suffix('a') {
            Some(number) => (number, true),
            None => (name, false),
        };
        let Ok(built) = number.parse::<i32>() else { return false };
        // The build embeds PTX of its newest plain architecture, so any plain one at or below the device will do.
        if exact {
            built == capability
        } else {
            built <= capability
        }
    })
}

#[cfg(test)]
mod tests {
    use super::kernels_run_on;

    #[test]
    fn architectures_are_matched_as_the_driver_does() {
        assert!(kernels_run_on("80;90a", 90));
        assert!(kernels_run_on("80;90a", 86));
        assert!(kernels_run_on("80;90a", 100), "through the PTX of 80");
        assert!(!kernels_run_on("90a", 100));
        assert!(!kernels_run_on("90a", 89));
        assert!(!kernels_run_on("80;90a", 75));
        assert!(!kernels_run_on("", 90));
    }
}

//! The machine's CUDA devices, asked for once a process.

use super::driver::{check, check_loaded};
use crate::error::{Error, Result, Status};
use crate::executor::{DeviceInfo, DeviceKind};
use cust::device::{Device, DeviceAttribute};
use cust::error::CudaResult;
use cust::sys;
use std::sync::OnceLock;

/// Every device, or the reason why there is none. The answer is kept: devices do not come and go within a process.
pub fn list() -> Result<Vec<DeviceInfo>> {
    static DEVICES: OnceLock<Result<Vec<DeviceInfo>>> = OnceLock::new();
    DEVICES.get_or_init(detect).clone()
}

fn detect() -> Result<Vec<DeviceInfo>> {
    check_loaded()?;
    cust::init(cust::CudaFlags::empty()).map_err(|error| not_available(error as i32))?;
    let mut driver_version = 0;
    // SAFETY: the driver is initialised and the pointer valid.
    check(unsafe { sys::cuDriverGetVersion(&mut driver_version) }, "cuDriverGetVersion")?;
    let count = Device::num_devices().map_err(|error| not_available(error as i32))?;
    if count == 0 {
        return Err(Error::new(Status::CudaNotAvailable, "the CUDA driver works and lists no device"));
    }
    (0..count)
        .map(|ordinal| {
            describe(ordinal, driver_version).map_err(|error| super::driver::error(error as i32, "describing a device"))
        })
        .collect()
}

fn not_available(code: i32) -> Error {
    let mut error = super::driver::error(code, "starting CUDA");
    error.status = Status::CudaNotAvailable;
    error
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

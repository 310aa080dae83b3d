//! The machine's CUDA devices, asked for once a process.

use super::driver::{check, check_functions, check_loaded};
use crate::device::{DeviceInfo, DeviceKind};
use crate::error::{Error, Result, Status};
use cust::device::{Device, DeviceAttribute};
use cust::error::CudaResult;
use cust::sys::{self, CUresult};

/// Every device, or the reason why there is none. Starts the driver; `hardware::gpus` completes the descriptions and keeps them.
pub fn list() -> Result<Vec<DeviceInfo>> {
    check_loaded()?;
    check_functions()?;
    let _inside = super::exit::enter()?;
    let (mut driver_version, mut count) = (0, 0);
    // Not through cust's types, which tell "unknown error" where the reason matters most.
    // SAFETY: the driver is initialised first, and the pointers are valid.
    unsafe {
        start(sys::cuInit(0))?;
        super::exit::DRIVER.have_begun();
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

/// Whether one of `architectures` ("80;90a") has machine code for `capability`, or PTX of an older one that the driver
/// compiles: machine code runs on later minor versions of its major version, an `a` target on exactly its own.
pub fn kernels_run_on(architectures: &str, capability: i32) -> bool {
    newest_kernels(architectures, capability).is_some()
}

/// The newest of `architectures` whose code a device of `capability` runs: what its kernels may be asked for, which on a
/// newer device is less than the device could do.
pub fn newest_kernels(architectures: &str, capability: i32) -> Option<i32> {
    let runs = |name: &str| {
        let (number, exact) = match name.strip_suffix('a') {
            Some(number) => (number, true),
            None => (name, false),
        };
        let built = number.parse::<i32>().ok()?;
        // The build embeds PTX of its newest plain architecture, so any plain one at or below the device will do.
        let fits = if exact { built == capability } else { built <= capability };
        fits.then_some(built)
    };
    architectures.split(';').filter_map(runs).max()
}

/// The statically linked runtime needs a driver of its own major version or later (CUDA Compatibility, "Minor Version
/// Compatibility"); versions are 1000 · major + 10 · minor.
pub fn check_driver_version(driver: i32, runtime: i32) -> Result<()> {
    if driver / 1000 >= runtime / 1000 {
        return Ok(());
    }
    let text = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
    Err(Error::new(
        Status::CudaNotAvailable,
        format!(
            "the driver supports CUDA {}; this library was built with CUDA {} and needs a driver for {}.0 or later",
            text(driver),
            text(runtime),
            runtime / 1000
        ),
    )
    .with_advice("update the NVIDIA driver, or build the library with an older toolkit")
    .with_limit(runtime as u64, driver as u64))
}

#[cfg(test)]
mod tests {
    use super::{check_driver_version, kernels_run_on, newest_kernels};

    #[test]
    fn an_old_driver_is_named_with_what_it_lacks() {
        assert!(check_driver_version(13000, 13020).is_ok(), "minor versions are compatible");
        assert!(check_driver_version(13000, 12080).is_ok());
        let error = check_driver_version(12040, 13000).unwrap_err();
        assert!(error.message.contains("supports CUDA 12.4") && error.message.contains("for 13.0"), "{error}");
    }

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

    #[test]
    fn kernels_are_asked_for_what_was_built() {
        assert_eq!(newest_kernels("75;80;90a", 90), Some(90));
        assert_eq!(newest_kernels("75;80;90a", 89), Some(80));
        assert_eq!(newest_kernels("80", 90), Some(80), "clusters and programmatic launches are not in this code");
        assert_eq!(newest_kernels("75;80;89;90a", 100), Some(89));
        assert_eq!(newest_kernels("90a", 100), None);
    }
}

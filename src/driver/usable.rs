//! Which devices and drivers the kernels in this library run on.

use crate::device::DeviceInfo;
use crate::error::{Error, Result, Status};

/// The oldest compute capability that the kernels are written for.
pub const OLDEST: i32 = 70;

/// Whether this library's kernels run on the device with its driver.
pub fn check_usable(device: &DeviceInfo) -> Result<()> {
    let runtime = env!("NVB_BUILD_CUDA_VERSION").parse().expect("build.rs writes a number");
    check_driver_version(device.driver_version, runtime)?;
    let capability = device.compute_capability;
    if capability < OLDEST {
        return Err(Error::new(
            Status::InvalidComputeCapability,
            format!(
                "{} has compute capability {}.{}; 7.0 is the oldest supported",
                device.name,
                capability / 10,
                capability % 10
            ),
        ));
    }
    if !kernels_run_on(built_architectures(), capability) {
        return Err(Error::new(
            Status::InvalidArchitecture,
            format!(
                "this library holds kernels for {} and none that run on {} (compute capability {}.{})",
                built_architectures(),
                device.name,
                capability / 10,
                capability % 10
            ),
        )
        .with_advice(format!("build it with NVB_CUDA_ARCHITECTURES={capability}")));
    }
    Ok(())
}

pub fn built_architectures() -> &'static str {
    option_env!("NVB_BUILD_ARCHITECTURES").unwrap_or("")
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

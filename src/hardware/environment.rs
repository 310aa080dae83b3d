//! The software around the devices: driver, runtime, what the kernels were built for, and the optional libraries.

use super::diagnosis::DriverTraces;
use super::library::{look_up, Library, CANDIDATES};
use super::system::System;
use super::tpu::Tpus;

#[derive(Debug, Clone, PartialEq)]
pub struct Environment {
    /// The version of the kernel module, such as "580.95.05"; empty if none is loaded.
    pub kernel_module: String,
    /// 1000 · major + 10 · minor of the CUDA version that the driver supports; 0 without a driver.
    pub driver_version: i32,
    /// The version of the CUDA runtime in this library; 0 in a build without CUDA.
    pub runtime_version: i32,
    /// "80;90a"; empty in a build without CUDA.
    pub architectures: &'static str,
    pub kernel: String,
    /// The CUDA driver, NVML, cuBLASLt, NCCL and libtpu.
    pub libraries: Vec<Library>,
    /// Why no CUDA device can be used; empty if one can.
    pub obstacle: String,
}

impl Environment {
    /// Opens each library for a moment; the first call may take tens of milliseconds.
    pub fn detect(system: &System, tpus: &Tpus) -> Environment {
        let mut libraries: Vec<Library> = CANDIDATES.iter().map(look_up).collect();
        libraries.push(libtpu(tpus));
        let devices = super::gpus();
        Environment {
            kernel_module: DriverTraces::read(system).kernel_module,
            driver_version: match &devices {
                Ok(devices) => devices.first().map_or(0, |device| device.driver_version),
                Err(_) => libraries[0].version,
            },
            runtime_version: option_env!("NVB_BUILD_CUDA_VERSION").and_then(|text| text.parse().ok()).unwrap_or(0),
            architectures: option_env!("NVB_BUILD_ARCHITECTURES").unwrap_or(""),
            kernel: system.text("proc/sys/kernel/osrelease").unwrap_or_default(),
            libraries,
            obstacle: devices.err().map(|error| format!("{error} ({})", error.advice)).unwrap_or_default(),
        }
    }
}

/// Looked up as a file only: opening it may ask a metadata server.
fn libtpu(tpus: &Tpus) -> Library {
    let path = tpus.library.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
    let reason = match path.as_str() {
        "" => "libtpu.so is neither at TPU_LIBRARY_PATH nor in /usr/lib, /usr/local/lib or /lib".to_string(),
        _ => String::new(),
    };
    Library { name: "libtpu".to_string(), path, version: 0, reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::fixture::Fixture;

    #[test]
    fn every_library_is_found_or_has_a_reason() {
        let fixture = Fixture::new();
        fixture.write("proc/sys/kernel/osrelease", "6.1.0\n");
        let environment = Environment::detect(&fixture.system(), &Tpus::default());
        assert_eq!(environment.libraries.len(), 5);
        for library in &environment.libraries {
            assert_ne!(library.path.is_empty(), library.reason.is_empty(), "{library:?}");
        }
        assert_eq!((environment.kernel.as_str(), environment.kernel_module.as_str()), ("6.1.0", ""));
    }
}

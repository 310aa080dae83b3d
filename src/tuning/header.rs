//! What a tuning file belongs to. Times on another GPU, under another driver or of other kernels say nothing here, so a
//! file that differs in any of these is not used at all.

use crate::configuration::Configuration;
use crate::device::{DeviceInfo, DeviceKind};
use crate::hardware;

/// The version of the file's form; a change of it makes older files foreign.
const FORMAT: &str = "3";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Names and values in the order in which the file has them.
    pub fields: Vec<(&'static str, String)>,
}

impl Header {
    /// Names the device and the libraries that products on it go to.
    pub fn of(device: &DeviceInfo, configuration: &Configuration) -> Header {
        let (driver, cublaslt) = match device.kind {
            DeviceKind::Cuda => cuda_versions(configuration),
            DeviceKind::Cpu | DeviceKind::Tpu => (String::new(), String::new()),
        };
        Header {
            fields: vec![
                ("format", FORMAT.to_string()),
                ("device", device.name.clone()),
                ("architecture", device.compute_capability.to_string()),
                // A part of a GPU has fewer; on the CPU, threads.
                ("multiprocessors", device.multiprocessors.to_string()),
                ("driver", driver),
                ("cublaslt", cublaslt),
                ("build", format!("{} {}", env!("CARGO_PKG_VERSION"), env!("NVB_BUILD_HASH"))),
            ],
        }
    }
}

fn cuda_versions(configuration: &Configuration) -> (String, String) {
    let environment = hardware::environment();
    let cublaslt = environment.libraries.iter().find(|library| library.name == "cuBLASLt");
    let cublaslt = match cublaslt {
        Some(library) if !configuration.own_kernels_only() && !library.path.is_empty() => library.version.to_string(),
        _ => "none".to_string(),
    };
    (format!("{} {}", environment.kernel_module, environment.driver_version), cublaslt)
}

//! Why CUDA does not start here: what the driver answered, set beside what /dev, /proc and the PCI bus show.

use super::system::System;
use crate::error::Error;

const NVIDIA: &str = "0x10de";

/// What of a driver is there to see without opening it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DriverTraces {
    /// The version of the kernel module, such as "580.95.05"; empty if none is loaded.
    pub kernel_module: String,
    /// NVIDIA display or compute devices on the PCI bus.
    pub pci_devices: Vec<String>,
    /// /dev/nvidiactl, /dev/nvidia0, … that exist.
    pub device_files: Vec<String>,
    /// The first of them that cannot be opened, with the system's reason.
    pub refusal: String,
}

impl DriverTraces {
    pub fn read(system: &System) -> DriverTraces {
        let names = system.names("dev");
        let of_driver = |name: &&String| {
            let rest = name.strip_prefix("nvidia");
            rest.is_some_and(|rest| rest == "ctl" || (!rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit())))
        };
        let device_files: Vec<String> = names.iter().filter(of_driver).map(|name| format!("/dev/{name}")).collect();
        let refused = |file: &String| system.refusal(&file[1..]).map(|reason| format!("{file}: {reason}"));
        DriverTraces {
            kernel_module: kernel_module_version(&system.text("proc/driver/nvidia/version").unwrap_or_default()),
            pci_devices: pci_devices(system),
            refusal: device_files.iter().find_map(refused).unwrap_or_default(),
            device_files,
        }
    }

    /// What to do about a CUDA that does not start.
    pub fn advice(&self) -> String {
        let on_bus = || self.pci_devices.join(", ");
        if !self.refusal.is_empty() {
            return format!("this user may not open {}", self.refusal);
        }
        match (self.kernel_module.as_str(), self.device_files.is_empty(), self.pci_devices.is_empty()) {
            ("", _, true) => "no NVIDIA device is on the PCI bus; use device \"cpu\"".to_string(),
            ("", _, false) => {
                format!("an NVIDIA device is on the PCI bus ({}) and no driver is loaded: install one", on_bus())
            }
            (version, true, _) => format!(
                "kernel module {version} is loaded and no /dev/nvidia* is visible: a container needs the GPUs passed in \
                 (docker run --gpus all)"
            ),
            (version, false, _) => format!(
                "kernel module {version} is loaded: install libcuda.so.1 of the same version, or pass it into the \
                 container (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
            ),
        }
    }
}

/// Adds to a failure to start CUDA what this machine shows about its cause.
pub fn explain(error: Error, system: &System) -> Error {
    if !error.advice.is_empty() {
        return error;
    }
    let advice = DriverTraces::read(system).advice();
    error.with_advice(advice)
}

/// The number in "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  …" and in the open module's line.
pub fn kernel_module_version(text: &str) -> String {
    let line = text.lines().find(|line| line.starts_with("NVRM version")).unwrap_or_default();
    let is_version = |word: &&str| word.contains('.') && word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    line.split_ascii_whitespace().find(is_version).unwrap_or_default().to_string()
}

/// 3D controllers and display adapters (PCI class 03) of NVIDIA.
fn pci_devices(system: &System) -> Vec<String> {
    let folder = "sys/bus/pci/devices";
    let mut names = system.names(folder);
    names.retain(|name| {
        let text = |file: &str| system.text(&format!("{folder}/{name}/{file}")).unwrap_or_default();
        text("vendor") == NVIDIA && text("class").starts_with("0x03")
    });
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;
    use crate::hardware::fixture::Fixture;

    const VERSION: &str = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (x@y)\n\
                           GCC version:  gcc version 12.2.0\n";

    fn with_gpu() -> Fixture {
        let fixture = Fixture::new();
        fixture.write("sys/bus/pci/devices/0000:0f:00.0/vendor", "0x10de");
        fixture.write("sys/bus/pci/devices/0000:0f:00.0/class", "0x030200");
        fixture.write("sys/bus/pci/devices/0000:10:00.0/vendor", "0x10de");
        fixture.write("sys/bus/pci/devices/0000:10:00.0/class", "0x068000"); // an NVSwitch
        fixture
    }

    fn advice(fixture: &Fixture) -> String {
        let error = Error::new(Status::CudaNotAvailable, "no driver");
        explain(error, &fixture.system()).advice
    }

    #[test]
    fn each_cause_has_its_own_answer() {
        assert!(advice(&Fixture::new()).contains("no NVIDIA device is on the PCI bus"));
        let fixture = with_gpu();
        let text = advice(&fixture);
        assert!(
            text.contains("0000:0f:00.0") && !text.contains("0000:10:00.0") && text.contains("no driver is loaded")
        );
        fixture.write("proc/driver/nvidia/version", VERSION);
        let text = advice(&fixture);
        assert!(text.contains("580.65.06") && text.contains("--gpus all"), "{text}");
        fixture.write("dev/nvidia0", "");
        fixture.write("dev/nvidia-uvm", "");
        let text = advice(&fixture);
        assert!(text.contains("libcuda.so.1 of the same version"), "{text}");
    }

    #[test]
    fn a_file_that_may_not_be_opened_is_named() {
        let fixture = with_gpu();
        fixture.write("proc/driver/nvidia/version", VERSION);
        // A folder cannot be opened for writing by anyone, root included.
        fixture.write("dev/nvidia0/x", "");
        let text = advice(&fixture);
        assert!(text.contains("/dev/nvidia0:"), "{text}");
    }

    #[test]
    fn advice_that_is_there_already_stays() {
        let error = Error::new(Status::CudaNotAvailable, "no driver").with_advice("as it is");
        assert_eq!(explain(error, &Fixture::new().system()).advice, "as it is");
    }

    #[test]
    fn module_versions_are_read_from_both_modules() {
        assert_eq!(kernel_module_version(VERSION), "580.65.06");
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.223.02  Sat Oct  7";
        assert_eq!(kernel_module_version(closed), "470.223.02");
        assert_eq!(kernel_module_version("nothing"), "");
    }
}

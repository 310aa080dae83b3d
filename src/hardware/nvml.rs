//! NVML, opened with the first question. It stays open: it keeps the driver loaded on machines without a display.

use super::usage::Usage;
use crate::error::{Error, Result, Status};
use crate::fork::PerProcess;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::Nvml;
use std::sync::OnceLock;

fn nvml() -> Result<&'static Nvml> {
    static NVML: PerProcess<OnceLock<Result<Nvml>>> = PerProcess::new(OnceLock::new);
    let explain = |error: NvmlError| convert(&error, "opening NVML (libnvidia-ml.so.1)");
    let answer = match NVML.get() {
        Some(answer) => answer,
        None => match Nvml::init() {
            Err(error) if may_pass(&error) => return Err(explain(error)),
            opened => NVML.get_or_init(|| opened.map_err(explain)),
        },
    };
    answer.as_ref().map_err(Clone::clone)
}

/// A library that is not there stays away; what one that is there answers may change, as the driver is loaded.
fn may_pass(error: &NvmlError) -> bool {
    !matches!(error, NvmlError::LibloadingError(_) | NvmlError::LibraryNotFound)
}

/// Each value is asked for alone: boards differ in what they tell, and an old driver lacks functions.
pub fn usage(pci_bus_id: &str) -> Result<Usage> {
    let device =
        nvml()?.device_by_pci_bus_id(pci_bus_id).map_err(|error| convert(&error, "finding the GPU in NVML"))?;
    let utilization = match device.utilization_rates() {
        // The device is gone or forbidden: no other value will come either.
        Err(error @ (NvmlError::GpuLost | NvmlError::NoPermission)) => {
            return Err(convert(&error, "asking NVML for the GPU's usage"))
        }
        other => other.ok(),
    };
    let memory = device.memory_info().ok();
    let ecc = |kind: MemoryError| device.total_ecc_errors(kind, EccCounter::Volatile).ok();
    Ok(Usage {
        utilization: utilization.as_ref().map(|rates| rates.gpu),
        memory_utilization: utilization.as_ref().map(|rates| rates.memory),
        memory_used: memory.as_ref().map(|memory| memory.used),
        memory_total: memory.as_ref().map(|memory| memory.total),
        temperature: device.temperature(TemperatureSensor::Gpu).ok(),
        power: device.power_usage().ok(),
        power_limit: device.enforced_power_limit().ok(),
        clock_mhz: device.clock_info(Clock::SM).ok(),
        memory_clock_mhz: device.clock_info(Clock::Memory).ok(),
        ecc_enabled: device.is_ecc_enabled().ok().map(|state| state.currently_enabled),
        ecc_corrected: ecc(MemoryError::Corrected),
        ecc_uncorrected: ecc(MemoryError::Uncorrected),
        throttle_reasons: device.current_throttle_reasons().ok().map(|reasons| reasons.bits()),
        processes: device.running_compute_processes_count().ok(),
    })
}

fn convert(error: &NvmlError, doing: &str) -> Error {
    let status = match error {
        NvmlError::GpuLost => Status::DeviceLost,
        NvmlError::LibloadingError(_) | NvmlError::LibraryNotFound | NvmlError::NotSupported => Status::Unsupported,
        NvmlError::DriverNotLoaded => Status::CudaNotAvailable,
        _ => Status::Device,
    };
    let advice = match error {
        NvmlError::NoPermission => "this user may not ask: run as a member of the group that owns /dev/nvidia*",
        NvmlError::LibRmVersionMismatch => {
            "the driver was updated while its kernel module is loaded: restart the machine"
        }
        NvmlError::LibloadingError(_) | NvmlError::LibraryNotFound => {
            "NVML comes with the driver; in a container, NVIDIA_DRIVER_CAPABILITIES needs `utility`"
        }
        _ => "",
    };
    Error::new(status, format!("{doing}: {error}")).with_advice(advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_told_apart() {
        assert_eq!(convert(&NvmlError::GpuLost, "x").status, Status::DeviceLost);
        assert_eq!(convert(&NvmlError::NotSupported, "x").status, Status::Unsupported);
        assert_eq!(convert(&NvmlError::DriverNotLoaded, "x").status, Status::CudaNotAvailable);
        assert!(may_pass(&NvmlError::DriverNotLoaded) && !may_pass(&NvmlError::LibraryNotFound));
        let refused = convert(&NvmlError::NoPermission, "x");
        assert!(refused.status == Status::Device && refused.advice.contains("/dev/nvidia*"));
    }
}

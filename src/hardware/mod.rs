//! What this machine has: devices, their usage, the software around them, and which device suits a workload.
//!
//! Detection runs once a process, as a rule, and part by part, so that asking for the CPU does not load a GPU driver. Everything
//! that reads /sys, /proc or /dev does so through [`system::System`].

pub mod cpu;
pub mod diagnosis;
pub mod environment;
#[cfg(test)]
mod fixture;
#[cfg(feature = "cuda")]
mod gpu;
pub mod instruction_sets;
pub mod library;
#[cfg(feature = "cuda")]
mod nvml;
pub mod peer;
pub mod recommend;
pub mod system;
pub mod target;
pub mod tpu;
pub mod usage;

use crate::device::DeviceInfo;
use crate::error::{Error, Result, Status};
use crate::fork::PerProcess;
use cpu::CpuProfile;
use environment::Environment;
use instruction_sets::InstructionSets;
use std::sync::OnceLock;
use system::System;
use tpu::Tpus;

/// The host's processor.
pub fn cpu() -> &'static CpuProfile {
    static CPU: PerProcess<CpuProfile> = PerProcess::new(|| {
        let mut profile = CpuProfile::detect(&System::live());
        profile.instruction_sets = profile.instruction_sets.union(InstructionSets::of_this_cpu());
        profile
    });
    &CPU
}

/// The TPUs, found without asking anything but the file system and the environment.
pub fn tpus() -> &'static Tpus {
    static TPUS: PerProcess<Tpus> = PerProcess::new(|| Tpus::detect(&System::live(), |name| std::env::var(name).ok()));
    &TPUS
}

/// Every device: GPUs by ordinal, then TPUs, then the CPU. Loads the CUDA driver. A list without the GPUs of a driver
/// that may yet answer is not the last word.
pub fn devices() -> &'static [DeviceInfo] {
    static WITH_GPUS: PerProcess<OnceLock<Vec<DeviceInfo>>> = PerProcess::new(OnceLock::new);
    static WITHOUT_GPUS: PerProcess<OnceLock<Vec<DeviceInfo>>> = PerProcess::new(OnceLock::new);
    if let Some(devices) = WITH_GPUS.get() {
        return devices;
    }
    match gpus() {
        Ok(gpus) => WITH_GPUS.get_or_init(|| all_devices(gpus)),
        Err(_) => WITHOUT_GPUS.get_or_init(|| all_devices(&[])),
    }
}

fn all_devices(gpus: &[DeviceInfo]) -> Vec<DeviceInfo> {
    let mut devices = gpus.to_vec();
    devices.extend(tpus().devices());
    devices.push(cpu_device().clone());
    devices
}

/// The GPUs in the order of their ordinals, or why there is none. No context is created. The answer is kept, as devices do not
/// come and go within a process; what the driver itself refuses with a code (busy, no permission) may pass, and is asked for
/// again.
pub fn gpus() -> Result<&'static [DeviceInfo]> {
    static ANSWER: PerProcess<OnceLock<Result<Vec<DeviceInfo>>>> = PerProcess::new(OnceLock::new);
    let explain = |error| diagnosis::explain(error, &System::live());
    let answer = match ANSWER.get() {
        Some(answer) => answer,
        None => match list_gpus() {
            Err(error) if error.cuda_code != 0 => return Err(explain(error)),
            answer => ANSWER.get_or_init(|| answer.map_err(explain)),
        },
    };
    answer.as_deref().map_err(Error::clone)
}

#[cfg(feature = "cuda")]
fn list_gpus() -> Result<Vec<DeviceInfo>> {
    gpu::list()
}

#[cfg(not(feature = "cuda"))]
fn list_gpus() -> Result<Vec<DeviceInfo>> {
    Err(built_without_cuda())
}

#[cfg(not(feature = "cuda"))]
pub fn built_without_cuda() -> Error {
    Error::new(Status::CudaNotAvailable, "this libnvbackend was built without CUDA (--no-default-features)")
        .with_advice("use device \"cpu\", or a build with CUDA")
}

/// The GPU of this ordinal.
pub fn gpu_at(ordinal: i32) -> Result<&'static DeviceInfo> {
    let gpus = gpus()?;
    gpus.iter().find(|gpu| gpu.ordinal == ordinal).ok_or_else(|| {
        Error::new(Status::Device, format!("CUDA device {ordinal}; this machine has {}", gpus.len()))
            .with_limit(ordinal.max(0) as u64, gpus.len() as u64)
    })
}

/// The host's processor as a device.
pub fn cpu_device() -> &'static DeviceInfo {
    static DEVICE: PerProcess<DeviceInfo> = PerProcess::new(|| cpu().device());
    &DEVICE
}

/// Place `index` in [`devices`].
pub fn device_at(index: u32) -> Result<&'static DeviceInfo> {
    let devices = devices();
    devices.get(index as usize).ok_or_else(|| {
        Error::invalid(format!("device index {index}; this machine has {} devices", devices.len()))
            .with_limit(index.into(), devices.len() as u64)
    })
}

/// The software around the devices.
pub fn environment() -> &'static Environment {
    static ENVIRONMENT: PerProcess<Environment> = PerProcess::new(|| Environment::detect(&System::live(), tpus()));
    &ENVIRONMENT
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceKind;

    #[test]
    fn the_cpu_is_the_last_device() {
        let cpu = devices().last().unwrap();
        assert_eq!((cpu.kind, cpu.selector().as_str()), (DeviceKind::Cpu, "cpu"));
        assert!(device_at(u32::MAX).unwrap_err().message.contains("4294967295"));
        assert_eq!(cpu.obstacle, "");
    }
}

//! What this machine has: devices, their usage, the software around them, and which device suits a workload.
//!
//! Detection runs once a process, as a rule, and part by part, so that asking for the CPU does not load a GPU driver. Everything
//! that reads /sys, /proc or /dev does so through [`system::System`].

pub mod cpu;
pub mod device;
pub mod diagnosis;
pub mod environment;
pub mod features;
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
pub mod tpu;
pub mod usage;

use crate::error::{Error, Result};
use crate::executor::{DeviceInfo, DeviceKind};
use crate::fork::PerProcess;
use cpu::CpuProfile;
use device::{Device, Kind};
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
pub fn devices() -> &'static [Device] {
    static WITH_GPUS: PerProcess<OnceLock<Vec<Device>>> = PerProcess::new(OnceLock::new);
    static WITHOUT_GPUS: PerProcess<OnceLock<Vec<Device>>> = PerProcess::new(OnceLock::new);
    if let Some(devices) = WITH_GPUS.get() {
        return devices;
    }
    match gpus() {
        Ok(gpus) => WITH_GPUS.get_or_init(|| all_devices(gpus)),
        Err(_) => WITHOUT_GPUS.get_or_init(|| all_devices(&[])),
    }
}

fn all_devices(gpus: &[Device]) -> Vec<Device> {
    let mut devices = gpus.to_vec();
    devices.extend((0..tpus().chips.len()).map(|chip| Device::of_tpu(tpus(), chip)));
    devices.push(cpu_device().clone());
    devices
}

/// The GPUs, or why there is none to describe. No context is created; a description is made once, a failure is not kept.
pub fn gpus() -> Result<&'static [Device]> {
    static GPUS: PerProcess<OnceLock<Vec<Device>>> = PerProcess::new(OnceLock::new);
    if let Some(gpus) = GPUS.get() {
        return Ok(gpus);
    }
    let gpus = describe(&crate::backend::cuda_devices()?)?;
    Ok(GPUS.get_or_init(|| gpus))
}

#[cfg(feature = "cuda")]
fn describe(listed: &[DeviceInfo]) -> Result<Vec<Device>> {
    let system = System::live();
    listed.iter().map(|info| gpu::describe(info, &system)).collect()
}

#[cfg(not(feature = "cuda"))]
fn describe(_listed: &[DeviceInfo]) -> Result<Vec<Device>> {
    Ok(Vec::new())
}

/// A backend's device: what its executor works with (a forced architecture, its threads), and the rest as detected.
pub fn device_of(info: &DeviceInfo) -> Result<Device> {
    let detected = match info.kind {
        DeviceKind::Cpu => Some(cpu_device()),
        DeviceKind::Cuda => gpus()?.iter().find(|gpu| gpu.ordinal == info.ordinal),
    };
    let kind = if info.kind == DeviceKind::Cpu { Kind::Cpu } else { Kind::Cuda };
    Ok(Device {
        name: info.name.clone(),
        compute_capability: info.compute_capability,
        multiprocessors: info.multiprocessors,
        total_memory: info.total_memory,
        l2_bytes: info.l2_bytes,
        driver_version: info.driver_version,
        ..detected.cloned().unwrap_or_else(|| Device::new(kind, info.ordinal))
    })
}

fn cpu_device() -> &'static Device {
    static DEVICE: PerProcess<Device> = PerProcess::new(|| Device::of_cpu(cpu()));
    &DEVICE
}

/// Place `index` in [`devices`].
pub fn device_at(index: u32) -> Result<&'static Device> {
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

    #[test]
    fn the_cpu_is_the_last_device() {
        let cpu = devices().last().unwrap();
        assert_eq!((cpu.kind, cpu.selector().as_str()), (Kind::Cpu, "cpu"));
        assert!(device_at(u32::MAX).unwrap_err().message.contains("4294967295"));
        assert_eq!(cpu.obstacle, "");
    }
}

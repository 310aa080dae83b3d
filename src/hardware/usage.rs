//! What a device is doing now: of a GPU through NVML, which is opened at run time, of the CPU from /proc.

use super::system::{find_bytes, System};
use crate::device::{DeviceInfo, DeviceKind};
use crate::error::{Error, Result, Status};
use crate::fork::PerProcess;
use std::sync::Mutex;

/// A value that the device or the system does not tell is `None`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Usage {
    /// Percent of the time in which a kernel ran, of NVML's last sample; on the CPU, of the time since the last call.
    pub utilization: Option<u32>,
    /// Percent of the time in which the memory was read or written.
    pub memory_utilization: Option<u32>,
    pub memory_used: Option<u64>,
    pub memory_total: Option<u64>,
    /// Degrees Celsius
    pub temperature: Option<u32>,
    /// Milliwatts
    pub power: Option<u32>,
    pub power_limit: Option<u32>,
    pub clock_mhz: Option<u32>,
    pub memory_clock_mhz: Option<u32>,
    pub ecc_enabled: Option<bool>,
    /// Since the driver was loaded.
    pub ecc_corrected: Option<u64>,
    pub ecc_uncorrected: Option<u64>,
    /// NVML's bits of what holds the clocks down; 0: nothing.
    pub throttle_reasons: Option<u64>,
    pub processes: Option<u32>,
}

pub fn usage(device: &DeviceInfo) -> Result<Usage> {
    match device.kind {
        DeviceKind::Cpu => cpu_usage(&System::live()),
        DeviceKind::Cuda => gpu_usage(device),
        DeviceKind::Tpu => Err(Error::unsupported("the usage of a TPU cannot be asked for")),
    }
}

#[cfg(feature = "cuda")]
fn gpu_usage(device: &DeviceInfo) -> Result<Usage> {
    super::nvml::usage(&device.pci_bus_id)
}

#[cfg(not(feature = "cuda"))]
fn gpu_usage(_device: &DeviceInfo) -> Result<Usage> {
    Err(Error::new(Status::CudaNotAvailable, "this libnvbackend was built without CUDA"))
}

/// (busy, all) ticks of all processors since the system started.
type Ticks = (u64, u64);

fn cpu_usage(system: &System) -> Result<Usage> {
    static LAST: PerProcess<Mutex<Ticks>> = PerProcess::new(Default::default);
    let read = |path: &str| {
        system.text(path).ok_or_else(|| Error::new(Status::Io, format!("/{path} cannot be read on this system")))
    };
    let meminfo = read("proc/meminfo")?;
    let now = ticks(&read("proc/stat")?);
    let mut last = LAST.lock().unwrap_or_else(|poison| poison.into_inner());
    let utilization = now.and_then(|now| busy_percent(*last, now));
    *last = now.unwrap_or(*last);
    let total = find_bytes(&meminfo, "MemTotal");
    let available = find_bytes(&meminfo, "MemAvailable");
    Ok(Usage {
        utilization,
        memory_used: total.zip(available).map(|(total, available)| total.saturating_sub(available)),
        memory_total: total,
        temperature: temperature(system),
        clock_mhz: system.number::<u32>("sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq").map(|khz| khz / 1000),
        ..Usage::default()
    })
}

/// The "cpu" line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal (guest time is in user).
fn ticks(stat: &str) -> Option<Ticks> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let numbers: Vec<u64> = line.split_ascii_whitespace().take(8).filter_map(|number| number.parse().ok()).collect();
    let all: u64 = numbers.iter().sum();
    let idle = numbers.get(3)? + numbers.get(4).unwrap_or(&0);
    Some((all - idle, all))
}

fn busy_percent(last: Ticks, now: Ticks) -> Option<u32> {
    let all = now.1.checked_sub(last.1).filter(|ticks| *ticks > 0)?;
    Some((100 * now.0.saturating_sub(last.0) / all).min(100) as u32)
}

/// The temperature of the processor's package, where a sensor names it.
fn temperature(system: &System) -> Option<u32> {
    let folder = "sys/class/thermal";
    let zone = system.names(folder).into_iter().find(|zone| {
        let kind = system.text(&format!("{folder}/{zone}/type")).unwrap_or_default();
        matches!(kind.as_str(), "x86_pkg_temp" | "cpu-thermal" | "cpu_thermal")
    })?;
    system.number::<i64>(&format!("{folder}/{zone}/temp")).map(|millidegrees| (millidegrees / 1000).max(0) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::fixture::Fixture;

    #[test]
    fn the_cpu_is_read_from_proc() {
        let fixture = Fixture::new();
        assert_eq!(cpu_usage(&fixture.system()).unwrap_err().status, Status::Io);
        fixture.write("proc/meminfo", "MemTotal: 100 kB\nMemAvailable: 25 kB\n");
        fixture.write("proc/stat", "cpu  10 0 10 70 10 0 0 0 5 0\ncpu0 1 1 1 1\n");
        fixture.write("sys/class/thermal/thermal_zone0/type", "acpitz");
        fixture.write("sys/class/thermal/thermal_zone1/type", "x86_pkg_temp");
        fixture.write("sys/class/thermal/thermal_zone1/temp", "54321");
        fixture.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", "2900000");
        let usage = cpu_usage(&fixture.system()).unwrap();
        assert_eq!((usage.memory_used, usage.memory_total), (Some(75 << 10), Some(100 << 10)));
        assert_eq!((usage.temperature, usage.clock_mhz, usage.power), (Some(54), Some(2900), None));
    }

    #[test]
    fn utilisation_is_what_was_busy_in_between() {
        assert_eq!(ticks("cpu  10 0 10 70 10 0 0 0 5 0\n"), Some((20, 100)));
        assert_eq!(ticks("cpu0 1 2 3 4\n"), None);
        assert_eq!(busy_percent((20, 100), (70, 200)), Some(50));
        assert_eq!(busy_percent((20, 100), (20, 100)), None, "no time has passed");
        assert_eq!(busy_percent((20, 100), (10, 50)), None, "another machine's numbers");
    }

    #[test]
    fn a_tpu_has_no_usage() {
        assert_eq!(usage(&DeviceInfo::new(DeviceKind::Tpu, 0)).unwrap_err().status, Status::Unsupported);
    }
}

//! What the system says about this machine.

use crate::error::{Error, Result, Status};
use crate::fork::PerProcess;

/// (available, total) bytes: what new work may use without swapping, and what there is.
pub fn memory() -> Result<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/meminfo")
        .map_err(|error| Error::new(Status::Io, format!("cannot read /proc/meminfo: {error}")))?;
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
    };
    match (bytes("MemAvailable:"), bytes("MemTotal:")) {
        (Some(available), Some(total)) => Ok((available, total)),
        _ => Err(Error::new(Status::Io, "/proc/meminfo has no MemAvailable or no MemTotal")),
    }
}

/// The processor's name, read once a process.
pub fn name() -> &'static str {
    static NAME: PerProcess<String> = PerProcess::new(|| {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name = text.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(':'));
        name.map_or_else(|| std::env::consts::ARCH.to_string(), |(_, name)| name.trim().to_string())
    });
    &NAME
}

/// Bytes of a core's second cache level, read once a process; 0 if the system does not say.
pub fn l2_bytes() -> u64 {
    static BYTES: PerProcess<u64> = PerProcess::new(|| {
        let text = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index2/size").unwrap_or_default();
        text.trim().strip_suffix('K').and_then(|number| number.parse::<u64>().ok()).unwrap_or(0) * 1024
    });
    *BYTES
}

//! What the system says about this machine.

use crate::error::{Error, Result, Status};

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

//! What a memory manager holds and has done: numbers, and reports as text and JSON.

use super::memory::{nvb_memory_manager, MEMORY_MANAGERS};
use super::prelude::*;
use crate::allocation::{no_memory, Text};
use crate::memory::ladder::{LADDER, RECOVERY_STEPS};
use crate::memory::MemoryManager;
use std::io::ErrorKind;
use std::path::Path;

/// Taken without a lock, so numbers of a moment of much traffic may differ by the calls under way.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_memory_statistics {
    pub struct_size: usize,
    /// Bytes in live blocks, as requested, those of weights and caches included.
    pub allocated: u64,
    /// The largest `allocated` so far.
    pub peak: u64,
    /// Live blocks.
    pub blocks: u64,
    /// Allocations so far.
    pub allocations: u64,
    /// Frees so far.
    pub frees: u64,
    /// Allocations refused so far.
    pub failures: u64,
    /// The manager's limit in bytes, 0: none.
    pub limit: u64,
    /// Bytes that the device had free when the driver was asked last, as by `nvb_memory_query_device` and whenever the
    /// manager of a GPU grows; on the CPU, available main memory.
    pub device_free: u64,
    pub device_total: u64,
    /// Bytes that the manager holds of the device.
    pub reserved: u64,
    pub peak_reserved: u64,
    /// Held bytes in no live block: `reserved` − `allocated`.
    pub cached: u64,
    /// Held bytes in whole free units: `nvb_memory_trim` gives them back, and any allocation may use them.
    pub free: u64,
    /// The longest run of addresses that one block could get.
    pub largest_free: u64,
    /// Bytes in blocks that were placed outside the device's memory because it was full.
    pub spilled: u64,
    /// Bytes in live blocks of pools that a capture has used.
    pub captured: u64,
    /// Bytes of the device that were neither free nor this manager's when the driver was asked last: other managers and
    /// processes, contexts, libraries.
    pub unaccounted: u64,
    /// Bytes of the device that the manager leaves free for others (`nvb_memory_options.margin`).
    pub margin: u64,
    /// The part of `reserved`, 0 to 1, that is neither allocated nor free in whole units: what rounding up, partly used
    /// slabs, and blocks that threads keep for their next allocations cost.
    pub fragmentation: f64,
}
versioned!(nvb_memory_statistics);

/// Recovery steps of the out-of-memory ladder, in the order in which an allocation takes them. Threads' caches go back to
/// the slabs, and empty slabs to the free units.
pub const NVB_RECOVERY_STEP_CACHES: u32 = 0;
/// Blocks of other streams whose work has passed go back as well.
pub const NVB_RECOVERY_STEP_PASSED_WORK: u32 = 1;
/// The stream, or else the host, waits for work of other streams that holds memory back.
pub const NVB_RECOVERY_STEP_WAIT: u32 = 2;
/// Memory behind free units is mapped where the request can use it.
pub const NVB_RECOVERY_STEP_TRIM: u32 = 3;
/// The engine's reclaim callbacks are asked.
pub const NVB_RECOVERY_STEP_CALLBACKS: u32 = 4;
/// Other threads free something, for as long as `wait_microseconds` says.
pub const NVB_RECOVERY_STEP_OTHER_THREADS: u32 = 5;
/// The block is placed in host or unified memory, if `spill` says so.
pub const NVB_RECOVERY_STEP_SPILL: u32 = 6;
/// The number of recovery steps.
pub const NVB_RECOVERY_STEP_COUNT: u32 = 7;

const _: () = assert!(RECOVERY_STEPS == NVB_RECOVERY_STEP_COUNT as usize);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_memory_recovery_step_statistics {
    pub struct_size: usize,
    /// Allocations that reached this step.
    pub tried: u64,
    /// Allocations that succeeded after this step.
    pub helped: u64,
    pub name: [c_char; 32],
}
versioned!(nvb_memory_recovery_step_statistics);

/// Fills `statistics`; set its `struct_size` first. Takes no lock and asks no driver, so it costs less than a
/// microsecond and works while a capture runs and after a device is lost.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_get_statistics(
    memory: *mut nvb_memory_manager,
    statistics: *mut nvb_memory_statistics,
) -> nvb_status {
    guard!(nvb_memory_get_statistics, {
        let object = MEMORY_MANAGERS.get(memory)?;
        let values = object.memory().get_statistics();
        let value = copied!(nvb_memory_statistics from values {
            allocated, peak, blocks, allocations, frees, failures, limit, device_free, device_total, reserved,
            peak_reserved, cached, largest_free, spilled, captured, unaccounted, margin, fragmentation;
            free: values.free_pages,
        });
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(statistics, &value) }
    })
}

/// Asks the driver how many bytes the device has free and in all (on the CPU: the system, for main memory). Either
/// pointer may be NULL. The statistics repeat the answer and reckon `unaccounted` with it. Costs microseconds.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_query_device(
    memory: *mut nvb_memory_manager,
    device_free: *mut u64,
    device_total: *mut u64,
) -> nvb_status {
    guard!(nvb_memory_query_device, {
        let (free, total) = MEMORY_MANAGERS.get(memory)?.memory().ask_device()?;
        // SAFETY: NULL or valid, by the header's contract.
        unsafe {
            write_optional(device_free, free);
            write_optional(device_total, total);
        }
        Ok(())
    })
}

/// # Safety
/// `out` is NULL or valid for writing.
pub(super) unsafe fn write_optional<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: the caller's contract.
        unsafe { out.write(value) };
    }
}

/// Fills `statistics` for one recovery step (`NVB_RECOVERY_STEP_…`) of the out-of-memory ladder; set its `struct_size`
/// first. Takes no lock.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_get_recovery_step_statistics(
    memory: *mut nvb_memory_manager,
    step: u32,
    statistics: *mut nvb_memory_recovery_step_statistics,
) -> nvb_status {
    guard!(nvb_memory_get_recovery_step_statistics, {
        let object = MEMORY_MANAGERS.get(memory)?;
        let name = LADDER.get(step as usize).map(|step| step.name());
        let name =
            name.ok_or_else(|| Error::invalid(format!("step is {step}; NVB_RECOVERY_STEP_… (0 to 6) is needed")))?;
        let counts = object.memory().get_statistics().recovery_steps[step as usize];
        let value = copied!(nvb_memory_recovery_step_statistics from counts {
            tried, helped;
            name: fixed_text(name),
        });
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(statistics, &value) }
    })
}

/// `peak` and `peak_reserved` start again at what is in use and held now. Takes no lock.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_reset_peaks(memory: *mut nvb_memory_manager) -> nvb_status {
    guard!(nvb_memory_reset_peaks, {
        MEMORY_MANAGERS.get(memory)?.memory().reset_peaks();
        Ok(())
    })
}

/// Copies a report of live blocks for people: how many, and with leak tracking the places in the program that allocated
/// them, those with the most bytes first. `addr2line -e FILE OFFSET` tells the line of a frame that has no name.
///
/// `text` receives at most `capacity` bytes with the closing NUL and may be NULL; `needed`, if not NULL, receives the
/// bytes that the whole text needs, NUL included. Another thread's allocations may change the report between two calls.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_get_leak_report(
    memory: *mut nvb_memory_manager,
    text: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> nvb_status {
    guard!(nvb_memory_get_leak_report, {
        let report = MEMORY_MANAGERS.get(memory)?.memory().leak_report()?;
        // SAFETY: the caller's buffer and pointer, by the header's contract.
        unsafe { give_text(&report, text, capacity, needed) }
    })
}

/// Copies the manager's whole state as JSON: statistics, recovery steps, pools, size classes, the physical memory behind
/// the addresses, every live block, the places that leak tracking recorded, and the trace if there is one.
/// `tools/memory_timeline.py` draws it. `text`, `capacity` and `needed` as in `nvb_memory_get_leak_report`. Takes locks
/// for short moments only; its size grows with the live blocks, so `nvb_memory_write_snapshot` serves large ones better.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_get_snapshot(
    memory: *mut nvb_memory_manager,
    text: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> nvb_status {
    guard!(nvb_memory_get_snapshot, {
        let object = MEMORY_MANAGERS.get(memory)?;
        let mut json = Text::default();
        object.memory().write_snapshot(&mut json).map_err(|error| match error.kind() {
            ErrorKind::OutOfMemory => no_memory(json.bytes.len(), "the snapshot"),
            _ => Error::new(Status::Io, error.to_string()),
        })?;
        let json = String::from_utf8_lossy(&json.bytes);
        // SAFETY: the caller's buffer and pointer, by the header's contract.
        unsafe { give_text(&json, text, capacity, needed) }
    })
}

/// Writes what `nvb_memory_get_snapshot` copies to a file: a new one, or instead of a regular one. It is written beside
/// that in the same folder and renamed at the end, so that after an error, as on a full disk, all is as before.
/// Errors: `NVB_ERROR_IO` with the path.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_write_snapshot(memory: *mut nvb_memory_manager, path: *const c_char) -> nvb_status {
    guard!(nvb_memory_write_snapshot, {
        let object = MEMORY_MANAGERS.get(memory)?;
        // SAFETY: a NUL-terminated string or NULL, by the header's contract.
        let path = unsafe { text("path", path)? };
        if path.is_empty() {
            return Err(Error::invalid("`path` is NULL or empty"));
        }
        write_file(object.memory(), &path)
    })
}

fn write_file(memory: &MemoryManager, path: &str) -> Result<()> {
    crate::file::replace(Path::new(path), |file| memory.write_snapshot(file)).map_err(|error| match error.kind() {
        ErrorKind::OutOfMemory => no_memory(0, "the snapshot"),
        _ => Error::new(Status::Io, format!("writing {path}: {error}")),
    })
}

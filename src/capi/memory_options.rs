//! What memory managers are created with, and an engine's own allocator.

use super::backend_options::{set_choice, set_number, set_switch};
use super::prelude::*;
use crate::configuration::field::{find, Value};
use crate::configuration::memory::{LeakTracking, LimitOf, Spill};
use crate::configuration::Configuration;
use crate::memory::allocator::EngineAllocator;
use crate::memory::MemoryOptions;

/// `nvb_memory_options`: "none", where 0 means the default.
pub const NVB_MEMORY_NONE: u64 = 0xffff_ffff_ffff_ffff;

/// `space`: the memory of the backend's device.
pub const NVB_MEMORY_DEVICE: u32 = 0;
/// `space`: main memory, whatever the backend's device is. What is freed may be used again at once, so work that copies
/// from or to a block must have finished before.
pub const NVB_MEMORY_HOST: u32 = 1;

/// `limit_of`: `limit_fraction` is a part of all the device's memory.
pub const NVB_LIMIT_OF_TOTAL: u32 = 1;
/// `limit_of`: `limit_fraction` is a part of what is free when the manager is created.
pub const NVB_LIMIT_OF_FREE: u32 = 2;

/// `leak_tracking`: nothing is recorded.
pub const NVB_LEAK_TRACKING_OFF: u32 = 1;
/// `leak_tracking`: the place of one allocation in every `leak_sample_bytes` of a thread is recorded, and of each that has
/// as many.
pub const NVB_LEAK_TRACKING_SAMPLED: u32 = 2;
/// `leak_tracking`: the place of every allocation is, which makes each cost microseconds.
pub const NVB_LEAK_TRACKING_FULL: u32 = 3;

/// `spill`: an allocation that finds no device memory fails.
pub const NVB_SPILL_NEVER: u32 = 1;
/// `spill`: it gets page-locked host memory, which the device reads over the bus.
pub const NVB_SPILL_PINNED: u32 = 2;
/// `spill`: it gets unified memory, which the driver moves.
pub const NVB_SPILL_MANAGED: u32 = 3;

/// Returns `bytes` (never 0) of the device's memory at a multiple of `alignment` (a power of two), which work queued on
/// `stream` from then on may use; NULL if there are none.
pub type nvb_allocate_callback = Option<
    unsafe extern "C" fn(bytes: usize, alignment: usize, stream: *mut c_void, user_data: *mut c_void) -> *mut c_void,
>;

/// Takes back what `allocate` returned for `bytes`, to be used again after the work queued on `stream` so far.
pub type nvb_free_callback =
    Option<unsafe extern "C" fn(pointer: *mut c_void, bytes: usize, stream: *mut c_void, user_data: *mut c_void)>;

/// An engine's allocator, which a memory manager then takes every block of device memory from, one by one. Limits,
/// statistics, leak tracking, traces and reclaim callbacks work over it; pooling, and so sleep, does not.
///
/// The functions are called from any thread, also at once; they do not throw and do not call the manager. They stay
/// valid until the last user of the manager is gone. `stream` is a `cudaStream_t`; it is NULL on the CPU and where
/// all work that used the block has finished.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_allocator {
    pub struct_size: usize,
    pub allocate: nvb_allocate_callback,
    pub free: nvb_free_callback,
    /// Handed to both.
    pub user_data: *mut c_void,
}
versioned!(nvb_allocator { allocate, free });

/// Options of a memory manager: those of `nvb_configuration` under `memory`, each by its own name, and besides where the memory
/// lies and an engine's allocator. For `nvb_memory_manager_create` 0 is the default, in `nvb_backend_options.memory` what the
/// configuration says. Read before the call that takes them returns.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_memory_options {
    pub struct_size: usize,
    /// Bytes that the manager may hold of its memory; 0: see `limit_fraction`. Below 64 MiB blocks are not pooled but
    /// counted singly.
    pub limit: u64,
    /// The limit as a part, 0 to 1, of what `limit_of` names. Not together with `limit`. 0: no limit on
    /// a GPU, which ends where its memory does; all of main memory on the host, whose system promises more than it has.
    pub limit_fraction: f64,
    /// Bytes of the device that stay free for what allocates beside the manager, such as CUDA's contexts, libraries and
    /// other processes: the manager does not grow further than that. 0: on a GPU the larger of 512 MiB and a fiftieth of its
    /// memory, but at most a twentieth; none on the host. `NVB_MEMORY_NONE`: none.
    pub margin: u64,
    /// Bytes taken from the device at creation, so that the first allocations are fast; no more than a limit in bytes.
    /// Ignored where blocks are allocated one by one: without `pooling`, with an `allocator`, or a limit below 64 MiB.
    pub initial_bytes: u64,
    /// Addresses to reserve; they cost no memory. 0: four times the device's memory. A quarter of them is kept for blocks
    /// of up to 1 MiB; a block for which the others have no room in one piece is allocated singly. At least 2 MiB.
    pub range_bytes: u64,
    /// Bytes that each thread keeps for its next allocations. 0: a 1024th of the device's memory, 8 to 64 MiB.
    /// `NVB_MEMORY_NONE`: none.
    pub thread_cache_bytes: u64,
    /// For `NVB_LEAK_TRACKING_SAMPLED`; 0: 512 KiB.
    pub leak_sample_bytes: u64,
    /// The newest events that the trace keeps, 48 bytes each; up to 2^24. 0: no trace. Every traced allocation takes the
    /// long way, past what the thread keeps.
    pub trace_events: u64,
    /// How long an allocation that found no memory waits for other threads to free some; 0: not at all.
    pub wait_microseconds: u64,
    /// NULL: the library's own allocation.
    pub allocator: *const nvb_allocator,
    /// `NVB_MEMORY_DEVICE` or `NVB_MEMORY_HOST`.
    pub space: u32,
    /// `NVB_LIMIT_OF_TOTAL` or `NVB_LIMIT_OF_FREE`.
    pub limit_of: u32,
    /// `NVB_LEAK_TRACKING_…`
    pub leak_tracking: u32,
    /// `NVB_SPILL_…`
    pub spill: u32,
    /// `NVB_SWITCH_…`; off: every block is an allocation of its own, as memory checkers want it.
    pub pooling: u32,
    /// `NVB_SWITCH_…`; on: freed blocks, those of pools that are cleared or destroyed too, are overwritten with zero before anybody else, the
    /// driver or the engine's allocator gets them.
    pub zero_on_free: u32,
    /// `NVB_SWITCH_…`; off: no more is taken than `initial_bytes`.
    pub growth: u32,
    /// Must be 0.
    pub reserved: u32,
}
versioned!(nvb_memory_options { allocator });

/// What a manager beside a backend's own is created with, and its space (`NVB_MEMORY_…`). The pointer may be NULL.
///
/// # Safety
/// NULL, or a struct with its size set; so is its allocator.
pub(super) unsafe fn convert(options: *const nvb_memory_options) -> Result<(MemoryOptions, u32)> {
    if options.is_null() {
        return Ok((MemoryOptions::default(), NVB_MEMORY_DEVICE));
    }
    // SAFETY: the caller's contract.
    let options = unsafe { read(options)? };
    if options.space > NVB_MEMORY_HOST {
        return Err(Error::new(
            Status::Configuration,
            format!("space is {}; NVB_MEMORY_DEVICE or NVB_MEMORY_HOST (0 or 1) is needed", options.space),
        ));
    }
    let mut configuration = Configuration::default();
    // SAFETY: the caller's contract.
    let allocator = unsafe { apply(&mut configuration, &options)? };
    configuration.validate()?;
    Ok((MemoryOptions { allocator, ..configuration.memory.options() }, options.space))
}

/// Overrides the fields of the configuration that the options name, and returns what is in no configuration.
///
/// # Safety
/// The allocator is NULL or a struct with its size set.
pub(super) unsafe fn apply(
    configuration: &mut Configuration,
    options: &nvb_memory_options,
) -> Result<Option<EngineAllocator>> {
    expect_reserved(options.reserved)?;
    // A limit of either form replaces one of the other.
    if options.limit != 0 {
        configuration.memory.limit_fraction = 0.0;
    }
    if options.limit_fraction != 0.0 {
        if options.limit == 0 {
            configuration.memory.limit = 0;
        }
        find("memory.limit_fraction")?.set(configuration, Value::Number(options.limit_fraction))?;
    }
    set_number(configuration, "memory.limit", options.limit)?;
    set_choice(configuration, "memory.limit_of", options.limit_of, LimitOf::NAMES)?;
    set_bytes_or_none(configuration, "memory.margin", options.margin)?;
    set_number(configuration, "memory.initial_bytes", options.initial_bytes)?;
    set_switch(configuration, "memory.growth", options.growth)?;
    set_number(configuration, "memory.range_bytes", options.range_bytes)?;
    set_switch(configuration, "memory.pooling", options.pooling)?;
    set_bytes_or_none(configuration, "memory.thread_cache_bytes", options.thread_cache_bytes)?;
    set_switch(configuration, "memory.zero_on_free", options.zero_on_free)?;
    set_choice(configuration, "memory.leak_tracking", options.leak_tracking, LeakTracking::NAMES)?;
    set_number(configuration, "memory.leak_sample_bytes", options.leak_sample_bytes)?;
    set_number(configuration, "memory.trace_events", options.trace_events)?;
    set_number(configuration, "memory.wait_microseconds", options.wait_microseconds)?;
    set_choice(configuration, "memory.spill", options.spill, Spill::NAMES)?;
    // SAFETY: the caller's contract.
    unsafe { allocator(options.allocator) }
}

fn set_bytes_or_none(configuration: &mut Configuration, field: &str, bytes: u64) -> Result<()> {
    match bytes {
        NVB_MEMORY_NONE => find(field)?.set_text(configuration, "none"),
        _ => set_number(configuration, field, bytes),
    }
}

unsafe fn allocator(allocator: *const nvb_allocator) -> Result<Option<EngineAllocator>> {
    if allocator.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's contract.
    let allocator = unsafe { read(allocator)? };
    match (allocator.allocate, allocator.free) {
        (Some(allocate), Some(free)) => Ok(Some(EngineAllocator { allocate, free, user_data: allocator.user_data })),
        _ => Err(Error::new(Status::Configuration, "the allocator lacks `allocate` or `free`")),
    }
}

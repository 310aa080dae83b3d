//! Memory managers: allocation, copies and statistics of one device's memory.

use super::backend::{nvb_backend, stream_of, BACKENDS};
use super::guard::guard;
use super::handle::{Table, Validity};
use super::shortcut;
use super::status::nvb_status;
use super::stream::{nvb_stream, STREAMS};
use super::structs::{expect_out, versioned, write, write_out};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::executor::CopyKind;
use crate::stream::Stream;
use std::ffi::c_void;
use std::sync::Arc;

/// The memory of one device. From `nvb_backend_get_memory_manager`.
///
/// Threads: every call may run at once from many threads.
pub struct nvb_memory_manager {
    _private: [u8; 0],
}

/// `nvb_memory_copy`: from host to device memory.
pub const NVB_COPY_HOST_TO_DEVICE: u32 = 1;
/// `nvb_memory_copy`: from device to host memory.
pub const NVB_COPY_DEVICE_TO_HOST: u32 = 2;
/// `nvb_memory_copy`: within the device's memory; the ranges must not overlap.
pub const NVB_COPY_DEVICE_TO_DEVICE: u32 = 3;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_memory_statistics {
    pub struct_size: usize,
    /// Bytes in live blocks, those of weights and caches included.
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
    /// Bytes that the device has free; on the CPU, available main memory. 0 where the driver does not say.
    pub device_free: u64,
    pub device_total: u64,
}
versioned!(nvb_memory_statistics);

pub(super) static MEMORY_MANAGERS: Table<Backend> = Table::new("memory manager", 2);

/// The manager behind a handle, which keeps its backend alive, and the stream of the call.
fn memory_and_stream(memory: *mut nvb_memory_manager, stream: *mut nvb_stream) -> Result<(Arc<Backend>, Arc<Stream>)> {
    let backend = MEMORY_MANAGERS.get(memory)?;
    let stream = stream_of(&backend, stream)?;
    Ok((backend, stream))
}

fn validity(memory: *mut nvb_memory_manager, stream: *mut nvb_stream) -> Result<[Validity; 2]> {
    let owner = MEMORY_MANAGERS.validity(memory)?;
    Ok([owner, if stream.is_null() { owner } else { STREAMS.validity(stream)? }])
}

fn allocate_by_handles(memory: *mut nvb_memory_manager, stream: *mut nvb_stream, bytes: usize) -> Result<*mut c_void> {
    if let Some(raw) = shortcut::stream(memory, stream) {
        if let Some(block) = MEMORY_MANAGERS.with(memory, |backend| backend.memory().allocate_at_once(bytes, raw))? {
            return Ok(block);
        }
    }
    let (backend, object) = memory_and_stream(memory, stream)?;
    let (memories, raw) = (backend.memory(), object.raw());
    let block = memories.allocate(bytes, raw)?;
    shortcut::keep(memory, stream, || validity(memory, stream), raw, || memories.shortcut(raw));
    Ok(block)
}

fn free_by_handles(memory: *mut nvb_memory_manager, stream: *mut nvb_stream, pointer: *mut c_void) -> Result<()> {
    if pointer.is_null() {
        return validity(memory, stream).map(|_| ());
    }
    if let Some(raw) = shortcut::stream(memory, stream) {
        if MEMORY_MANAGERS.with(memory, |backend| backend.memory().free_at_once(pointer, raw))? {
            return Ok(());
        }
    }
    let (backend, object) = memory_and_stream(memory, stream)?;
    let (memories, raw) = (backend.memory(), object.raw());
    memories.free(pointer, raw)?;
    shortcut::keep(memory, stream, || validity(memory, stream), raw, || memories.shortcut(raw));
    Ok(())
}

/// Gives the handle back; NULL is fine. Blocks stay valid while the backend, a child of it or another handle lives;
/// blocks that are never freed are reported as a warning in the log and freed with the last of these.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_manager_destroy(memory: *mut nvb_memory_manager) -> nvb_status {
    guard!(nvb_memory_manager_destroy, { MEMORY_MANAGERS.remove(memory) })
}

/// Allocates `bytes` (at least 1) of device memory, aligned to 256 bytes, contents undefined. Work queued on `stream`
/// from now on may use the block at once, other streams after an event. Does not synchronise.
/// Errors: `NVB_ERROR_OUT_OF_MEMORY` with the bytes requested and the limit in the detail.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_allocate(
    memory: *mut nvb_memory_manager,
    bytes: usize,
    stream: *mut nvb_stream,
    pointer: *mut *mut c_void,
) -> nvb_status {
    guard!(nvb_memory_allocate, {
        expect_out("pointer", pointer)?;
        let block = match shortcut::allocate(memory, stream, bytes) {
            Some(block) => block,
            None => allocate_by_handles(memory, stream, bytes)?,
        };
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { pointer.write(block) };
        Ok(())
    })
}

/// Frees a block of this manager; NULL is fine. The memory is reused only after the work queued on `stream` so far. Other
/// streams that use the block must have been synchronised, or `stream` made to wait for them.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` for a pointer that is not a live block (freed twice, foreign, inside a block).
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_free(
    memory: *mut nvb_memory_manager,
    pointer: *mut c_void,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_memory_free, {
        if shortcut::free(memory, stream, pointer) {
            return Ok(());
        }
        free_by_handles(memory, stream, pointer)
    })
}

/// Copies `bytes` on `stream` and returns. `kind` is `NVB_COPY_…`. Host memory must stay valid until the stream has
/// passed the copy; copies of pageable host memory may block. Device ranges must lie inside live blocks of this manager.
/// May be captured. On the CPU all kinds are plain copies.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_copy(
    memory: *mut nvb_memory_manager,
    destination: *mut c_void,
    source: *const c_void,
    bytes: usize,
    kind: u32,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_memory_copy, {
        let (backend, stream) = memory_and_stream(memory, stream)?;
        let memory = backend.memory();
        let kind = match kind {
            NVB_COPY_HOST_TO_DEVICE => CopyKind::HostToDevice,
            NVB_COPY_DEVICE_TO_HOST => CopyKind::DeviceToHost,
            NVB_COPY_DEVICE_TO_DEVICE => CopyKind::DeviceToDevice,
            other => return Err(Error::invalid(format!("kind is {other}; NVB_COPY_… (1 to 3) is needed"))),
        };
        if bytes == 0 {
            return Ok(());
        }
        for (name, pointer, device) in [
            ("destination", destination.cast_const(), kind != CopyKind::DeviceToHost),
            ("source", source, kind != CopyKind::HostToDevice),
        ] {
            if pointer.is_null() {
                return Err(Error::invalid(format!("`{name}` is NULL")));
            }
            if device
                && !memory.owns(pointer, bytes)
                && (memory.owns(pointer, 1) || !memory.executor().can_access(pointer)?)
            {
                return Err(Error::invalid(format!(
                    "`{name}`: {bytes} bytes from {pointer:p} do not lie inside device memory"
                )));
            }
        }
        // SAFETY: device ranges were checked, host ranges are valid by the header's contract.
        unsafe { memory.executor().copy(destination, source, bytes, kind, stream.raw()) }
    })
}

/// Sets `bytes` of device memory to `value` (0 to 255) on `stream`. The range must lie inside a live block.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_fill(
    memory: *mut nvb_memory_manager,
    destination: *mut c_void,
    value: u32,
    bytes: usize,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_memory_fill, {
        let (backend, stream) = memory_and_stream(memory, stream)?;
        let memory = backend.memory();
        let value = u8::try_from(value).map_err(|_| Error::invalid(format!("value is {value}; 0 to 255 is needed")))?;
        if bytes == 0 {
            return Ok(());
        }
        if !memory.owns(destination, bytes) {
            return Err(Error::invalid(format!(
                "`destination`: {bytes} bytes from {destination:p} do not lie inside a live block"
            )));
        }
        // SAFETY: the range lies inside a live block.
        unsafe { memory.executor().fill(destination, value, bytes, stream.raw()) }
    })
}

/// Fills `statistics`; set its `struct_size` first. Asks the driver for the device's free memory, and is readable all the
/// same when the driver fails or the device is lost.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_get_statistics(
    memory: *mut nvb_memory_manager,
    statistics: *mut nvb_memory_statistics,
) -> nvb_status {
    guard!(nvb_memory_get_statistics, {
        let backend = MEMORY_MANAGERS.get(memory)?;
        let memory = backend.memory();
        let values = memory.get_statistics();
        let executor = memory.executor();
        let (device_free, device_total) = executor.memory_info().unwrap_or((0, executor.device().total_memory));
        let value = nvb_memory_statistics {
            struct_size: 0,
            allocated: values.allocated,
            peak: values.peak,
            blocks: values.blocks,
            allocations: values.allocations,
            frees: values.frees,
            failures: values.failures,
            limit: values.limit,
            device_free,
            device_total,
        };
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(statistics, &value) }
    })
}

/// Allocates `bytes` (at least 1) of host memory that copies to and from the device run fastest with: page-locked on
/// CUDA, plain on the CPU. Free it with `nvb_host_free` and the same size.
#[no_mangle]
pub unsafe extern "C" fn nvb_host_allocate(
    backend: *const nvb_backend,
    bytes: usize,
    pointer: *mut *mut c_void,
) -> nvb_status {
    guard!(nvb_host_allocate, {
        let object = BACKENDS.get(backend)?;
        expect_out("pointer", pointer)?;
        if bytes == 0 {
            return Err(Error::invalid("bytes is 0; at least 1 is needed"));
        }
        let block = object.backend.executor().host_allocate(bytes)?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("pointer", pointer, block) }
    })
}

/// Frees memory of `nvb_host_allocate`; NULL is fine. Copies that use it must have finished.
#[no_mangle]
pub unsafe extern "C" fn nvb_host_free(backend: *const nvb_backend, pointer: *mut c_void, bytes: usize) -> nvb_status {
    guard!(nvb_host_free, {
        let object = BACKENDS.get(backend)?;
        if !pointer.is_null() {
            // SAFETY: the header's contract: allocated by this backend with this size, freed once.
            unsafe { object.backend.executor().host_free(pointer, bytes) };
        }
        Ok(())
    })
}

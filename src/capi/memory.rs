//! Memory managers: allocation, copies and fills of one device's memory, or the host's.

use super::memory_options::{convert, nvb_memory_options, NVB_MEMORY_HOST};
use super::prelude::*;
use super::shortcut::{self, Owner};
use super::tensor::{nvb_tensor, tensor_shape};
use crate::device::{CopyKind, Device, ManagedAdvice, RawHandle};
use crate::memory::{expect_awake, Blocks, MemoryManager};
use crate::operation::memory_copy::MemoryCopy;
use crate::operation::memory_fill::MemoryFill;
use crate::operation::Operation;
use crate::stream::Stream;

/// The memory of one device, or of the host: blocks that are reused in the order of streams. From
/// `nvb_backend_get_memory_manager` or `nvb_memory_manager_create`.
///
/// Blocks up to 1 MiB come from slabs, larger ones are runs of 2 MiB units of one reserved range of addresses, which
/// physical memory is mapped behind as it is needed. Each thread keeps some blocks for itself, and none of its calls
/// waits for another thread's. When memory is short the recovery steps of a ladder (`NVB_RECOVERY_STEP_…`) are taken
/// before an allocation fails.
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

/// `nvb_memory_advise`: read by many and written rarely, so each processor keeps a copy.
pub const NVB_ADVICE_READ_MOSTLY: u32 = 1;
/// `nvb_memory_advise`: stays on the device unless it must move.
pub const NVB_ADVICE_PREFER_DEVICE: u32 = 2;
/// `nvb_memory_advise`: stays in main memory unless it must move.
pub const NVB_ADVICE_PREFER_HOST: u32 = 3;
/// `nvb_memory_advise`: the device keeps a mapping wherever the memory is.
pub const NVB_ADVICE_ACCESSED_BY_DEVICE: u32 = 4;
/// `nvb_memory_advise`: takes all of the above back.
pub const NVB_ADVICE_NONE: u32 = 5;

pub struct ManagerObject {
    backend: Arc<Backend>,
    memory: Arc<MemoryManager>,
}

impl ManagerObject {
    /// The backend's own manager.
    pub fn of(backend: &Arc<Backend>) -> Arc<ManagerObject> {
        Arc::new(ManagerObject { backend: backend.clone(), memory: backend.memory().clone() })
    }

    pub fn backend(&self) -> &Arc<Backend> {
        &self.backend
    }

    pub fn memory(&self) -> &Arc<MemoryManager> {
        &self.memory
    }

    /// Queues work on the manager's memory, or does it by `run` where that is the host's beside a GPU.
    fn queue(
        &self,
        op: impl Into<Operation>,
        stream: &Stream,
        run: impl FnOnce(&dyn Device, RawHandle) -> Result<()>,
    ) -> Result<()> {
        let (op, device) = (op.into(), self.memory.device());
        if std::ptr::addr_eq(device, Arc::as_ptr(self.backend.executor())) {
            return self.backend.queue(op, stream);
        }
        stream.expect_unrecorded("a copy or fill of main memory by the host")?;
        op.expect_apart()?;
        run(device, stream.raw())
    }
}

impl Owner for ManagerObject {
    const KIND: usize = 2;

    fn table() -> &'static Table<ManagerObject> {
        &MEMORY_MANAGERS
    }

    fn backend(&self) -> &Backend {
        &self.backend
    }

    fn blocks(&self) -> &dyn Blocks {
        &*self.memory
    }
}

pub(super) static MEMORY_MANAGERS: Table<ManagerObject> = Table::new("memory manager", ManagerObject::KIND);

/// The manager behind a handle, which keeps its backend alive, and the stream of the call.
fn memory_and_stream(
    memory: *mut nvb_memory_manager,
    stream: *mut nvb_stream,
) -> Result<(Arc<ManagerObject>, Arc<Stream>)> {
    let object = MEMORY_MANAGERS.get(memory)?;
    let stream = stream_of(&object.backend, stream)?;
    Ok((object, stream))
}

/// Creates a memory manager beside the backend's own, with a limit, pools and statistics of its own, over the memory of
/// the backend's device or over main memory (`options->space`). Operations take its blocks as they take the others.
/// Options may be NULL for the defaults. With `initial_bytes` it asks the driver for memory, else for addresses only.
///
/// Over main memory on a GPU, copies and fills through this manager are the host's and are done when the call returns.
/// Errors: `NVB_ERROR_CONFIGURATION` (an option), `NVB_ERROR_OUT_OF_MEMORY` (`initial_bytes`).
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_manager_create(
    backend: *const nvb_backend,
    options: *const nvb_memory_options,
    memory: *mut *mut nvb_memory_manager,
) -> nvb_status {
    guard!(nvb_memory_manager_create, {
        let backend = BACKENDS.get(backend)?.backend.clone();
        expect_out("memory", memory)?;
        // SAFETY: a struct with its size set or NULL, by the header's contract.
        let (options, space) = unsafe { convert(options)? };
        let created = if space == NVB_MEMORY_HOST {
            backend.create_host_memory_manager(options)?
        } else {
            backend.create_memory_manager(options)?
        };
        let handle = MEMORY_MANAGERS.insert(Arc::new(ManagerObject { backend, memory: created }))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("memory", memory, handle) }
    })
}

/// Gives the handle back; NULL is fine. Blocks stay valid while another handle, a pool or, for a backend's own manager,
/// the backend or a child of it lives; blocks that are never freed are reported as a warning in the log, with the
/// places that leak tracking recorded, and freed with the last of these. The log callback of a backend hears of it only
/// while that backend's handle lives, so destroy its managers first.
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
    guard!(
        nvb_memory_allocate,
        || {
            // SAFETY: NULL or valid, by the header's contract.
            unsafe { shortcut::allocate_by_shortcut::<ManagerObject, _>(memory, stream, bytes, pointer) }
        },
        {
            expect_out("pointer", pointer)?;
            let block = shortcut::allocate::<ManagerObject, _>(memory, stream, bytes)?;
            // SAFETY: checked for NULL, valid by the header's contract.
            unsafe { pointer.write(block) };
            Ok(())
        }
    )
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
    guard!(nvb_memory_free, || shortcut::free_by_shortcut::<ManagerObject, _>(memory, stream, pointer), {
        shortcut::free::<ManagerObject, _>(memory, stream, pointer)
    })
}

/// Frees each of `count` blocks as `nvb_memory_free` does, such as the pages of a sequence that has ended; NULL among
/// them is fine. It is the faster way for blocks that another thread allocated. On an error the blocks before the one
/// that it names (`pointers[i]`) have been freed, that one and those behind it have not.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_free_many(
    memory: *mut nvb_memory_manager,
    pointers: *const *mut c_void,
    count: usize,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_memory_free_many, {
        // SAFETY: `count` pointers, by the header's contract.
        let pointers = unsafe { slice("pointers", pointers, count)? };
        shortcut::free_many::<ManagerObject, _>(memory, stream, pointers)
    })
}

/// Allocates as `nvb_memory_allocate` does, at a multiple of `alignment`: a power of two of at most 2 MiB.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_allocate_aligned(
    memory: *mut nvb_memory_manager,
    bytes: usize,
    alignment: usize,
    stream: *mut nvb_stream,
    pointer: *mut *mut c_void,
) -> nvb_status {
    guard!(nvb_memory_allocate_aligned, {
        let (object, stream) = memory_and_stream(memory, stream)?;
        expect_out("pointer", pointer)?;
        let block = object.memory.allocate_aligned(bytes, alignment, stream.raw())?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("pointer", pointer, block) }
    })
}

/// Allocates as `nvb_memory_allocate` does, for a contiguous tensor of `rank` extents (host memory), which `tensor`
/// receives; its `data` is what is freed. A size that overflows or is 0 is an `NVB_ERROR_INVALID_ARGUMENT`, too.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_allocate_tensor(
    memory: *mut nvb_memory_manager,
    dtype: u32,
    rank: u32,
    shape: *const i64,
    stream: *mut nvb_stream,
    tensor: *mut nvb_tensor,
) -> nvb_status {
    guard!(nvb_memory_allocate_tensor, {
        let (object, stream) = memory_and_stream(memory, stream)?;
        expect_out("tensor", tensor)?;
        // SAFETY: `rank` extents, by the header's contract.
        let (dtype, extents) = unsafe { tensor_shape(dtype, rank, shape)? };
        let created = object.memory.allocate_tensor(dtype, &extents, stream.raw())?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("tensor", tensor, nvb_tensor::contiguous(created.data, dtype, &extents)) }
    })
}

/// Allocates `bytes` (at least 1) of unified memory, which host and device address alike and the driver moves between
/// them. Aligned to 256 bytes; counted in the statistics but not in the limit. `nvb_memory_free` takes it back and
/// waits for the device. May synchronise; not to be captured. On the CPU it is plain memory.
/// Errors: `NVB_ERROR_OUT_OF_MEMORY`; `NVB_ERROR_UNSUPPORTED` where the device has none.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_allocate_managed(
    memory: *mut nvb_memory_manager,
    bytes: usize,
    pointer: *mut *mut c_void,
) -> nvb_status {
    guard!(nvb_memory_allocate_managed, {
        let object = MEMORY_MANAGERS.get(memory)?;
        expect_out("pointer", pointer)?;
        let block = object.memory.allocate_managed(bytes)?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("pointer", pointer, block) }
    })
}

/// Says how a range of unified memory will be used (`NVB_ADVICE_…`). Nothing happens for other blocks of this manager,
/// so an engine may advise what spilled without asking where it went. Does not synchronise.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_advise(
    memory: *mut nvb_memory_manager,
    pointer: *mut c_void,
    bytes: usize,
    advice: u32,
) -> nvb_status {
    guard!(nvb_memory_advise, {
        let object = MEMORY_MANAGERS.get(memory)?;
        let advice = match advice {
            NVB_ADVICE_READ_MOSTLY => ManagedAdvice::ReadMostly,
            NVB_ADVICE_PREFER_DEVICE => ManagedAdvice::PreferDevice,
            NVB_ADVICE_PREFER_HOST => ManagedAdvice::PreferHost,
            NVB_ADVICE_ACCESSED_BY_DEVICE => ManagedAdvice::AccessedByDevice,
            NVB_ADVICE_NONE => ManagedAdvice::Nothing,
            other => return Err(Error::invalid(format!("advice is {other}; NVB_ADVICE_… (1 to 5) is needed"))),
        };
        object.memory.advise(pointer, bytes, advice)
    })
}

/// Queues the move of a range of unified memory to main memory (`to_host` 1) or to the device (0) on `stream`, so that
/// later work need not wait for single pages. Nothing happens for other blocks of this manager.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_prefetch(
    memory: *mut nvb_memory_manager,
    pointer: *mut c_void,
    bytes: usize,
    to_host: u32,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_memory_prefetch, {
        let (object, stream) = memory_and_stream(memory, stream)?;
        if to_host > 1 {
            return Err(Error::invalid(format!("to_host is {to_host}; 0 or 1 is needed")));
        }
        stream.expect_unrecorded("a prefetch")?;
        object.memory.prefetch(pointer, bytes, to_host == 1, stream.raw())
    })
}

/// Allocates `bytes` (at least 1) of page-locked host memory, on the NUMA node that the device is nearest to; on the CPU
/// plain memory. Copies from and to it run at the bus's speed and beside other work. Aligned to 256 bytes; counted in
/// the statistics but not in the limit. `nvb_memory_free` takes it back and waits for the device. The driver is asked
/// each time and may synchronise: keep what is used often. Errors: `NVB_ERROR_OUT_OF_MEMORY`.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_allocate_pinned(
    memory: *mut nvb_memory_manager,
    bytes: usize,
    pointer: *mut *mut c_void,
) -> nvb_status {
    guard!(nvb_memory_allocate_pinned, {
        let object = MEMORY_MANAGERS.get(memory)?;
        expect_out("pointer", pointer)?;
        let block = object.memory.allocate_pinned(bytes)?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("pointer", pointer, block) }
    })
}

/// Copies `bytes` on `stream` and returns. `kind` is `NVB_COPY_…`. Host memory must stay valid until the stream has
/// passed the copy; copies of pageable host memory may block. Device ranges must lie inside live blocks of this manager,
/// or in memory that the device reaches otherwise, such as a peer's. The two ranges may be the same one, and must not overlap
/// otherwise. May be captured. On the CPU all kinds are plain copies.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT`: a range that is neither, ranges that overlap, or blocks of this manager while it
/// sleeps.
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
        let (object, stream) = memory_and_stream(memory, stream)?;
        let memory = object.memory();
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
            expect_awake(pointer)?;
            if device
                && !memory.owns(pointer, bytes)
                && (memory.owns(pointer, 1) || !memory.device().can_access(pointer)?)
            {
                return Err(Error::invalid(format!(
                    "`{name}`: {bytes} bytes from {pointer:p} do not lie inside device memory"
                )));
            }
        }
        // SAFETY: device ranges were checked, host ranges are valid by the header's contract.
        let op = unsafe { MemoryCopy::new(destination, source, bytes, kind) };
        object.queue(op, &stream, |device, stream| op.run(device, stream))
    })
}

/// Sets `bytes` of device memory to `value` (0 to 255) on `stream`. The range must lie inside a live block.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT`: it does not, or the manager sleeps.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_fill(
    memory: *mut nvb_memory_manager,
    destination: *mut c_void,
    value: u32,
    bytes: usize,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_memory_fill, {
        let (object, stream) = memory_and_stream(memory, stream)?;
        let memory = object.memory();
        let value = u8::try_from(value).map_err(|_| Error::invalid(format!("value is {value}; 0 to 255 is needed")))?;
        if bytes == 0 {
            return Ok(());
        }
        if !memory.owns(destination, bytes) {
            return Err(Error::invalid(format!(
                "`destination`: {bytes} bytes from {destination:p} do not lie inside a live block"
            )));
        }
        expect_awake(destination)?;
        // SAFETY: the range lies inside a live block.
        let op = unsafe { MemoryFill::new(destination, value, bytes) };
        object.queue(op, &stream, |device, stream| op.run(device, stream))
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

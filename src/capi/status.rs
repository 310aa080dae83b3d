//! Status codes and the last error of each thread.

use super::guard::guard;
use super::last_error::with_last_error;
use super::structs::{copied, copy_texts, versioned, write};
use crate::error::{Error, Status};
use std::ffi::c_char;

/// The outcome of a call: `NVB_OK` or an `NVB_ERROR…` code. 32 bits, 0 is success.
pub type nvb_status = i32;

pub const NVB_OK: nvb_status = 0;
/// The root of all errors in `nvb_status_parent`'s tree.
pub const NVB_ERROR: nvb_status = 1;
/// An argument is NULL, out of range, of the wrong shape, dtype or memory space, or a handle is not alive.
pub const NVB_ERROR_INVALID_ARGUMENT: nvb_status = 100;
/// An option of a `create` call does not make sense.
pub const NVB_ERROR_CONFIGURATION: nvb_status = 200;
/// The request is valid and this build or device has no code for it.
pub const NVB_ERROR_UNSUPPORTED: nvb_status = 300;
/// A device or its driver failed.
pub const NVB_ERROR_DEVICE: nvb_status = 400;
/// No driver, no device, a build without CUDA, a process that exits or a child of `fork`; the message says which. Parent:
/// `NVB_ERROR_DEVICE`.
pub const NVB_ERROR_CUDA_NOT_AVAILABLE: nvb_status = 401;
/// An earlier call left the device unusable for this process. Parent: `NVB_ERROR_DEVICE`.
pub const NVB_ERROR_DEVICE_LOST: nvb_status = 402;
/// The device is older than the oldest kernels. Parent: `NVB_ERROR_DEVICE`.
pub const NVB_ERROR_INVALID_COMPUTE_CAPABILITY: nvb_status = 403;
/// The library holds no kernels that this device runs. Parent: `NVB_ERROR_DEVICE`.
pub const NVB_ERROR_INVALID_ARCHITECTURE: nvb_status = 404;
/// Memory could not be allocated for a reason other than too little of it.
pub const NVB_ERROR_MEMORY_ALLOCATION: nvb_status = 500;
/// The device's memory or the manager's limit is used up. Parent: `NVB_ERROR_MEMORY_ALLOCATION`.
pub const NVB_ERROR_OUT_OF_MEMORY: nvb_status = 501;
/// A kernel could not be started.
pub const NVB_ERROR_KERNEL_LAUNCH: nvb_status = 600;
/// A kernel could not be built or loaded. Parent: `NVB_ERROR_KERNEL_LAUNCH`.
pub const NVB_ERROR_KERNEL_BUILD: nvb_status = 601;
/// Attention options that contradict each other.
pub const NVB_ERROR_ATTENTION: nvb_status = 700;
/// An FP8 conversion or product failed.
pub const NVB_ERROR_FP8: nvb_status = 800;
/// A graph could not be optimised.
pub const NVB_ERROR_OPTIMIZATION: nvb_status = 900;
/// Devices could not talk to each other.
pub const NVB_ERROR_COMMUNICATION: nvb_status = 1000;
/// A struct of another version of this library. Parent: `NVB_ERROR_INVALID_ARGUMENT`.
pub const NVB_ERROR_ABI_MISMATCH: nvb_status = 1100;
/// A file could not be read or written.
pub const NVB_ERROR_IO: nvb_status = 1200;
/// A bug in the library; the object of the call refuses further calls.
pub const NVB_ERROR_INTERNAL: nvb_status = 1300;

/// Numbers behind the calling thread's last error.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_error_detail {
    pub struct_size: usize,
    pub status: nvb_status,
    /// The CUDA driver's or runtime's code, 0 if CUDA had no part in it.
    pub cuda_code: i32,
    /// What was asked for (bytes, a length, an index), 0 if the message names no amount.
    pub requested: u64,
    /// The limit that it met, 0 likewise.
    pub limit: u64,
}
versioned!(nvb_error_detail);

/// What the memory manager held when the calling thread's last error was `NVB_ERROR_OUT_OF_MEMORY`. All in bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_memory_failure {
    pub struct_size: usize,
    pub requested: u64,
    /// What the manager may hold; 0: none.
    pub limit: u64,
    /// In live blocks.
    pub allocated: u64,
    /// Held of the device.
    pub held: u64,
    /// Held, and in no live block.
    pub cached: u64,
    /// The largest block that could be had, of held memory in one piece or of what may still be taken. Little of it beside
    /// much in `cached` is fragmentation.
    pub largest_free: u64,
    /// What the device had free, and has in all.
    pub device_free: u64,
    pub device_total: u64,
    /// Bit k: recovery step k (`NVB_RECOVERY_STEP_…`) of the ladder was tried.
    pub recovery_steps_tried: u32,
    /// Must be 0.
    pub reserved: u32,
}
versioned!(nvb_memory_failure);

/// The constant's name, such as "NVB_ERROR_OUT_OF_MEMORY"; "unknown status" for a number that is none.
/// The string lives as long as the library.
#[no_mangle]
pub unsafe extern "C" fn nvb_status_name(status: nvb_status) -> *const c_char {
    // No guard: nothing here can panic, and there is no status to return.
    Status::from_code(status).map_or(c"unknown status", Status::c_name).as_ptr()
}

/// The next more general status, up to `NVB_ERROR`; `NVB_OK` for `NVB_OK`, `NVB_ERROR` for an unknown number.
#[no_mangle]
pub unsafe extern "C" fn nvb_status_parent(status: nvb_status) -> nvb_status {
    // No guard: nothing here can panic, and the return value is the answer.
    Status::from_code(status).map_or(Status::Error, Status::parent) as nvb_status
}

/// Copies the text of the calling thread's last error: what failed, with the values and limits, and what to do about
/// it. It stays until the next failing call of the same thread; successful calls leave it alone.
///
/// `text` receives at most `capacity` bytes with the closing NUL; it may be NULL to ask for the size. Returns the bytes
/// that the whole text needs, NUL included; 1 (an empty text) when this thread has met no error.
#[no_mangle]
pub unsafe extern "C" fn nvb_last_error_message(text: *mut c_char, capacity: usize) -> usize {
    // No guard: nothing here can panic, and the return value is the answer.
    with_last_error(|last| {
        // SAFETY: the caller's buffer holds `capacity` bytes.
        unsafe { copy_texts(&last.map_or([""; 4], full_text), text, capacity) }
    })
}

/// Copies as `nvb_last_error_message` does the text of the error that led to the last one: `depth` 0 is the last error
/// itself, 1 its cause, and so on to what failed first. Returns 1 (an empty text) past the end of the chain.
#[no_mangle]
pub unsafe extern "C" fn nvb_last_error_cause(depth: u32, text: *mut c_char, capacity: usize) -> usize {
    // No guard: nothing here can panic, and the return value is the answer.
    with_last_error(|last| {
        let error = last.and_then(|error| error.chain().nth(depth as usize));
        // SAFETY: the caller's buffer holds `capacity` bytes.
        unsafe { copy_texts(&error.map_or([""; 4], full_text), text, capacity) }
    })
}

/// The pieces of the text, which is not put together: a call that reads an error allocates nothing.
fn full_text(error: &Error) -> [&str; 4] {
    match error.advice.as_str() {
        "" => [&error.message, "", "", ""],
        advice => [&error.message, " (", advice, ")"],
    }
}

/// The numbers of the calling thread's last error; all 0 when it has met none. Set `detail->struct_size` first.
#[no_mangle]
pub unsafe extern "C" fn nvb_last_error_get(detail: *mut nvb_error_detail) -> nvb_status {
    guard!(nvb_last_error_get, {
        let value = with_last_error(|last| {
            last.map_or(
                nvb_error_detail { struct_size: 0, status: NVB_OK, cuda_code: 0, requested: 0, limit: 0 },
                |error| nvb_error_detail {
                    struct_size: 0,
                    status: error.status as nvb_status,
                    cuda_code: error.cuda_code,
                    requested: error.requested,
                    limit: error.limit,
                },
            )
        });
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(detail, &value) }
    })
}

/// The memory manager's state at the calling thread's last error; all 0 when that was no want of memory. Set
/// `failure->struct_size` first.
#[no_mangle]
pub unsafe extern "C" fn nvb_last_error_get_memory(failure: *mut nvb_memory_failure) -> nvb_status {
    guard!(nvb_last_error_get_memory, {
        let state = with_last_error(|last| last.and_then(|error| error.memory.as_deref().copied()));
        let state = state.unwrap_or_default();
        let value = copied!(nvb_memory_failure from state {
            requested, limit, allocated, cached, largest_free, device_free, device_total, recovery_steps_tried;
            held: state.reserved,
            reserved: 0,
        });
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(failure, &value) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_agree_with_the_enum() {
        let constants = [
            NVB_OK,
            NVB_ERROR,
            NVB_ERROR_INVALID_ARGUMENT,
            NVB_ERROR_CONFIGURATION,
            NVB_ERROR_UNSUPPORTED,
            NVB_ERROR_DEVICE,
            NVB_ERROR_CUDA_NOT_AVAILABLE,
            NVB_ERROR_DEVICE_LOST,
            NVB_ERROR_INVALID_COMPUTE_CAPABILITY,
            NVB_ERROR_INVALID_ARCHITECTURE,
            NVB_ERROR_MEMORY_ALLOCATION,
            NVB_ERROR_OUT_OF_MEMORY,
            NVB_ERROR_KERNEL_LAUNCH,
            NVB_ERROR_KERNEL_BUILD,
            NVB_ERROR_ATTENTION,
            NVB_ERROR_FP8,
            NVB_ERROR_OPTIMIZATION,
            NVB_ERROR_COMMUNICATION,
            NVB_ERROR_ABI_MISMATCH,
            NVB_ERROR_IO,
            NVB_ERROR_INTERNAL,
        ];
        assert_eq!(constants.to_vec(), Status::ALL.map(|status| status as i32).to_vec());
    }
}

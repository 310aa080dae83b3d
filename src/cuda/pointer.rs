//! What CUDA knows about an address.

use super::peer::Peers;
use super::prelude::*;
use crate::device::Device;
use cust::sys::{self, cudaError_enum, CUpointer_attribute as Attribute};

/// Whether the device reads and writes there: its own memory, what another GPU has opened to it, or page-locked memory of
/// the host. The context is current.
pub(super) fn can_access(executor: &CudaExecutor, peers: &Peers, pointer: *const c_void) -> Result<bool> {
    const DEVICE: u32 = 2;
    // SAFETY: the attribute is an enumeration of 32 bits.
    match unsafe { ask(executor, Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer, 0u32)? } {
        Some(DEVICE) => {}
        // Page-locked host memory, which the device reads in place; or an address that CUDA does not know: plain host memory.
        known => return Ok(known.is_some()),
    }
    // SAFETY: the attribute is an int.
    let ordinal = unsafe { ask(executor, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer, -1i32)? };
    match ordinal {
        Some(ordinal) if ordinal != executor.info().ordinal => is_open(executor, peers, ordinal, pointer),
        known => Ok(known.is_some()),
    }
}

/// Whether memory of another device is open to this one. Access is enabled for one backend at a time: for its address
/// ranges and its pool, and for whatever `cuMemAlloc` gave. Each must be asked about in its own way: on an H200 (driver 580)
/// `cuMemGetAccess` knows mapped memory alone, and the pointer's access flags are "read and write" for the rest.
fn is_open(executor: &CudaExecutor, peers: &Peers, ordinal: i32, pointer: *const c_void) -> Result<bool> {
    const READ_AND_WRITE: u64 = 3;
    let mut location =
        sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: executor.info().ordinal };
    let mut flags = 0;
    // SAFETY: valid pointers, and any address may be asked about.
    match unsafe { sys::cuMemGetAccess(&mut flags, &location, pointer as u64) } {
        cudaError_enum::CUDA_SUCCESS if flags == READ_AND_WRITE => return Ok(true),
        // Not open, or not memory that somebody mapped, or an old driver.
        cudaError_enum::CUDA_SUCCESS
        | cudaError_enum::CUDA_ERROR_NOT_FOUND
        | cudaError_enum::CUDA_ERROR_INVALID_VALUE
        | cudaError_enum::CUDA_ERROR_NOT_PERMITTED
        | cudaError_enum::CUDA_ERROR_NOT_SUPPORTED => {}
        code => executor.check(code, "cuMemGetAccess")?,
    }
    let nowhere: sys::CUmemoryPool = std::ptr::null_mut();
    // SAFETY: the attribute is a handle.
    let pool = unsafe { ask(executor, Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, pointer, nowhere)? };
    if let Some(pool) = pool.filter(|pool| !pool.is_null()) {
        let mut flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE;
        // SAFETY: the pool of a live block, and valid pointers; the driver writes one of the enumeration's values.
        let result = unsafe { sys::cuMemPoolGetAccess(&mut flags, pool, &mut location) };
        executor.check(result, "cuMemPoolGetAccess")?;
        return Ok(flags == sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    }
    // Only what `cuMemAlloc` gives may be sent to other processes in this way.
    // SAFETY: the attribute is a boolean, for which the driver has 32 bits or less.
    let plain = unsafe { ask(executor, Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pointer, 0u32)? };
    Ok(plain.is_some_and(|plain| plain & 0xff != 0) && peers.include(ordinal))
}

/// An attribute of the address; `None`: CUDA does not know the address, or not the attribute.
///
/// # Safety
/// `T` is as large as the attribute.
unsafe fn ask<T>(
    executor: &CudaExecutor,
    attribute: Attribute,
    pointer: *const c_void,
    mut value: T,
) -> Result<Option<T>> {
    // SAFETY: the value has room by the caller's word, and any address may be asked about.
    match unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, pointer as u64) } {
        cudaError_enum::CUDA_SUCCESS => Ok(Some(value)),
        cudaError_enum::CUDA_ERROR_INVALID_VALUE => Ok(None),
        code => executor.check(code, "cuPointerGetAttribute").map(|()| None),
    }
}

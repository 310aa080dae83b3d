//! What CUDA knows about an address.

use super::executor::CudaExecutor;
use crate::error::Result;
use crate::executor::Executor;
use cust::sys::{self, cudaError_enum};
use std::ffi::c_void;

/// Whether the device reads and writes there: its own memory, or page-locked memory of the host. The context is current.
pub(super) fn can_access(executor: &CudaExecutor, pointer: *const c_void) -> Result<bool> {
    let mut ordinal = 0i32;
    let mut memory_type = 0u32;
    let attribute = |attribute, value: *mut c_void| {
        // SAFETY: the value is 32 bits wide as both attributes want it, and any address may be asked about.
        unsafe { sys::cuPointerGetAttribute(value, attribute, pointer as u64) }
    };
    use sys::CUpointer_attribute::{CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
    match attribute(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (&mut memory_type as *mut u32).cast()) {
        cudaError_enum::CUDA_SUCCESS => {}
        // An address that CUDA does not know: plain host memory.
        cudaError_enum::CUDA_ERROR_INVALID_VALUE => return Ok(false),
        code => return executor.check(code, "cuPointerGetAttribute").map(|()| false),
    }
    const DEVICE: u32 = 2;
    if memory_type != DEVICE {
        // Page-locked host memory, which the device reads in place.
        return Ok(true);
    }
    executor.check(
        attribute(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, (&mut ordinal as *mut i32).cast()),
        "cuPointerGetAttribute",
    )?;
    Ok(ordinal == executor.device().ordinal)
}

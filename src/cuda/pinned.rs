//! Page-locked memory of the host. The context is current in every call.

use super::context::PrimaryContext;
use super::numa::PreferNode;
use crate::error::Result;
use cust::sys;
use std::ffi::c_void;

/// Every context of the process may copy from and to it.
const PORTABLE: u32 = 1;

/// On the NUMA node if there is one.
pub fn allocate(bytes: usize, node: Option<u32>, context: &PrimaryContext) -> Result<*mut c_void> {
    let mut pointer = std::ptr::null_mut();
    // The driver takes the pages where this thread's policy says.
    let _policy = node.map(PreferNode::enter);
    // Any thread may be capturing a stream, and the driver would end its capture.
    let _relaxed = context.relax_capture()?;
    // SAFETY: a valid pointer.
    context
        .check(unsafe { sys::cuMemHostAlloc(&mut pointer, bytes, PORTABLE) }, "allocating page-locked host memory")?;
    Ok(pointer)
}

/// # Safety
/// The pointer is one of `allocate` and freed once, and no work on any stream uses it any more.
pub unsafe fn free(pointer: *mut c_void, context: &PrimaryContext) {
    // It matters only while a stream is captured, so the memory goes in any case.
    let _relaxed = context.relax_capture().or_else(|_| context.relax_capture());
    if context.is_lost() {
        return;
    }
    // SAFETY: the caller's contract.
    if let Err(error) = context.check(unsafe { sys::cuMemFreeHost(pointer) }, "freeing page-locked host memory") {
        log::warn!(target: "nvbackend::cuda", "{error}");
    }
}

//! Memory of the CPU executor: the system's, aligned as a device's would be, refused where the machine has not got it.

use super::machine;
use crate::error::{Error, Result, Status};
use std::alloc::Layout;
use std::ffi::c_void;

/// What `Executor::allocate` promises.
const ALIGNMENT: usize = 256;

/// From this size on a block is aligned to huge pages and asks for them: fewer page walks while a weight is streamed.
const HUGE_BLOCK: usize = 4 << 20;
const HUGE_PAGE: usize = 2 << 20;

/// From this size on the machine's free memory is asked first: Linux grants more than it has, and ends the process
/// that uses it.
const CHECKED_BLOCK: usize = 64 << 20;

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes, if bytes >= HUGE_BLOCK { HUGE_PAGE } else { ALIGNMENT }).ok()
}

/// `bytes` > 0.
pub fn allocate(bytes: usize) -> Result<*mut c_void> {
    let (available, _) = if bytes >= CHECKED_BLOCK { machine::memory()? } else { (u64::MAX, 0) };
    let fail = |limit: u64| {
        Error::new(Status::OutOfMemory, format!("{bytes} bytes of host memory are not to be had"))
            .with_limit(bytes as u64, limit)
    };
    if bytes as u64 > available {
        return Err(fail(available));
    }
    let layout = layout(bytes).ok_or_else(|| fail(isize::MAX as u64))?;
    // SAFETY: the size is not 0.
    let pointer = unsafe { std::alloc::alloc(layout) };
    if pointer.is_null() {
        return Err(fail(0));
    }
    #[cfg(target_os = "linux")]
    if bytes >= HUGE_BLOCK {
        // SAFETY: advice on whole pages of the block above. A refusal costs speed only.
        unsafe { libc::madvise(pointer.cast(), bytes / HUGE_PAGE * HUGE_PAGE, libc::MADV_HUGEPAGE) };
    }
    Ok(pointer.cast())
}

/// # Safety
/// `pointer` came from [`allocate`] with the same `bytes` and has not been freed.
pub unsafe fn free(pointer: *mut c_void, bytes: usize) {
    if let Some(layout) = layout(bytes) {
        std::alloc::dealloc(pointer.cast(), layout);
    }
}

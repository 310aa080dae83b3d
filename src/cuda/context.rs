//! The device's primary context, made current around calls and put back as it was.

use super::driver::check;
use crate::error::{Error, Result};
use cust::context::Context;
use cust::device::Device;
use cust::sys::{self, CUcontext};
use std::ffi::{c_char, c_int, CStr};
use std::mem::ManuallyDrop;

pub struct PrimaryContext {
    context: ManuallyDrop<Context>,
    raw: CUcontext,
}

// SAFETY: a primary context belongs to the device, not to a thread, and may be current in any number of threads.
unsafe impl Send for PrimaryContext {}
// SAFETY: as above.
unsafe impl Sync for PrimaryContext {}

impl PrimaryContext {
    /// Retains it; cust also makes it current here, which is undone.
    pub fn retain(ordinal: i32) -> Result<PrimaryContext> {
        let before = current();
        let created = Device::get_device(ordinal as u32).and_then(Context::new);
        let result = created.map_err(|error| super::driver::error(error as i32, "retaining the primary context"));
        // SAFETY: what was current before, NULL included, may be current again.
        unsafe { sys::cuCtxSetCurrent(before) };
        let context = result?;
        let raw = context.as_raw();
        Ok(PrimaryContext { context: ManuallyDrop::new(context), raw })
    }

    /// Makes the context current in this thread until the guard is dropped: the engine's own choice of device stays.
    pub fn enter(&self) -> Result<ContextGuard> {
        let before = current();
        if before == self.raw {
            return Ok(ContextGuard { restore: None });
        }
        // SAFETY: the context is retained for as long as `self` lives.
        check(unsafe { sys::cuCtxSetCurrent(self.raw) }, "cuCtxSetCurrent")?;
        Ok(ContextGuard { restore: Some(before) })
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // At process exit the driver may be gone already; cust's drop would then panic on its error, so the result of
        // the explicit form is what counts, and a context that cannot be released is left to the driver.
        // SAFETY: `context` is not used again.
        let context = unsafe { ManuallyDrop::take(&mut self.context) };
        if let Err((error, context)) = Context::drop(context) {
            log::debug!(target: "nvbackend::cuda", "releasing the primary context: {}", error as i32);
            std::mem::forget(context);
        }
    }
}

fn current() -> CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: the pointer is valid; on failure it stays NULL, which is what an uninitialised driver has.
    unsafe { sys::cuCtxGetCurrent(&mut context) };
    context
}

pub struct ContextGuard {
    restore: Option<CUcontext>,
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        if let Some(context) = self.restore {
            // SAFETY: this context was current when the guard was made.
            unsafe { sys::cuCtxSetCurrent(context) };
        }
    }
}

extern "C" {
    // The statically linked CUDA runtime.
    fn cudaGetErrorString(code: c_int) -> *const c_char;
}

/// A launcher's `cudaError_t` as an error; the runtime shares the driver's numbers for everything that is latched.
pub fn runtime_error(code: i32, doing: &str) -> Error {
    // SAFETY: any number is accepted; the string is static.
    let text = unsafe { CStr::from_ptr(cudaGetErrorString(code)) }.to_string_lossy();
    super::driver::describe(code, doing, &text)
}

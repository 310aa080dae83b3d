//! The device's primary context, made current around calls and put back as it was; waits for all of its work; and the mark
//! of a device that is lost, after which nothing touches CUDA.

use super::all_work::{AllWork, NoWait};
use crate::device::a_device_is_lost;
use crate::driver::exit::{self, Inside};
use crate::driver::{self, is_sticky};
use crate::error::{Error, Result, Status};
use cust::sys::{self, cudaError_enum, CUcontext, CUresult};
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, CStr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

extern "C" {
    fn nvb_cuda_set_context(number: u64);
}

pub struct PrimaryContext {
    raw: CUcontext,
    /// One that no other has, though its context may lie where an earlier one did.
    number: u64,
    ordinal: i32,
    shared: &'static Shared,
}

/// What all backends of a device share in this process, as they share its primary context.
#[derive(Default)]
struct Shared {
    /// The first sticky error, which ends the context until the process ends.
    lost: OnceLock<Error>,
    all_work: AllWork,
}

// SAFETY: a primary context belongs to the device, not to a thread, and may be current in any number of threads.
unsafe impl Send for PrimaryContext {}
// SAFETY: as above.
unsafe impl Sync for PrimaryContext {}

fn shared(ordinal: i32) -> &'static Shared {
    static DEVICES: Mutex<BTreeMap<i32, &'static Shared>> = Mutex::new(BTreeMap::new());
    let mut devices = DEVICES.lock().unwrap_or_else(|poison| poison.into_inner());
    devices.entry(ordinal).or_insert_with(|| Box::leak(Box::default()))
}

impl PrimaryContext {
    pub fn retain(ordinal: i32) -> Result<PrimaryContext> {
        let shared = shared(ordinal);
        let _inside = exit::enter()?;
        refuse_lost(&shared.lost)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a valid pointer; the ordinal was listed, and for CUDA devices handle and ordinal are the same number.
        match unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, ordinal) } {
            cudaError_enum::CUDA_SUCCESS => {
                exit::CONTEXT.have_begun();
                static NUMBERS: AtomicU64 = AtomicU64::new(1);
                Ok(PrimaryContext { raw, number: NUMBERS.fetch_add(1, Ordering::Relaxed), ordinal, shared })
            }
            code => Err(mark(&shared.lost, ordinal, driver::error(code as i32, "retaining the primary context"))),
        }
    }

    pub fn raw(&self) -> CUcontext {
        self.raw
    }

    /// Makes the context current in this thread until the guard is dropped: the engine's own choice of device stays.
    pub fn enter(&self) -> Result<ContextGuard<'_>> {
        refuse_lost(&self.shared.lost)?;
        let inside = exit::enter()?;
        // SAFETY: writes a number of this thread's.
        unsafe { nvb_cuda_set_context(self.number) };
        let mut before = std::ptr::null_mut();
        // SAFETY: a valid pointer.
        self.check(unsafe { sys::cuCtxGetCurrent(&mut before) }, "cuCtxGetCurrent")?;
        if before == self.raw {
            return Ok(ContextGuard { context: self, restore: None, _inside: inside });
        }
        // SAFETY: the context is retained for as long as `self` lives.
        self.check(unsafe { sys::cuCtxSetCurrent(self.raw) }, "cuCtxSetCurrent")?;
        Ok(ContextGuard { context: self, restore: Some(before), _inside: inside })
    }

    /// Enters as `enter` does, for calls that give something back; `None` if the device is lost or the process exits.
    /// What they leave is left for the life of the process, so entering is tried twice, and then they go on without.
    pub fn enter_to_release(&self) -> Option<ContextGuard<'_>> {
        let inside = exit::enter().ok()?;
        let entered = self.enter().or_else(|_| self.enter());
        if self.is_lost() {
            return None;
        }
        Some(entered.unwrap_or(ContextGuard { context: self, restore: None, _inside: inside }))
    }

    pub fn is_lost(&self) -> bool {
        self.shared.lost.get().is_some()
    }

    pub fn refuse_lost(&self) -> Result<()> {
        refuse_lost(&self.shared.lost)
    }

    /// Keeps other threads from waiting for all work of the device, which ends what this one captures.
    pub fn hold_off_waits(&self) -> NoWait<'_> {
        self.shared.all_work.hold_off()
    }

    /// Waits for all work of the device. The context must be current.
    pub fn wait_for_all_work(&self) -> Result<()> {
        self.shared.all_work.wait(|| {
            // The thread before may have found out.
            self.refuse_lost()?;
            // SAFETY: no arguments; a context is current.
            self.check(unsafe { sys::cuCtxSynchronize() }, "waiting for the device")
        })
    }

    /// Lets this thread call, until the guard is dropped, what CUDA's strictest mode forbids while another thread captures
    /// a graph.
    pub fn relax_capture(&self) -> Result<RelaxedCapture<'_>> {
        self.refuse_lost()?;
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a valid pointer, which receives the mode before.
        self.check(
            unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) },
            "relaxing this thread's capture mode",
        )?;
        Ok(RelaxedCapture { context: self, before: mode })
    }

    /// A driver call's result; a sticky error is remembered.
    pub fn check(&self, result: CUresult, doing: &str) -> Result<()> {
        match result {
            cudaError_enum::CUDA_SUCCESS => Ok(()),
            code => Err(self.latch(driver::error(code as i32, doing))),
        }
    }

    /// Remembers a sticky error.
    pub fn latch(&self, error: Error) -> Error {
        mark(&self.shared.lost, self.ordinal, error)
    }
}

fn refuse_lost(lost: &OnceLock<Error>) -> Result<()> {
    let Some(error) = lost.get() else { return Ok(()) };
    Err(error.clone().context("an earlier call left the device unusable for this process"))
}

fn mark(lost: &OnceLock<Error>, ordinal: i32, error: Error) -> Error {
    if is_sticky(error.cuda_code) && lost.set(Error { status: Status::DeviceLost, ..error.clone() }).is_ok() {
        a_device_is_lost();
        log::error!(target: "nvbackend::cuda", "cuda:{ordinal} is lost: {error}");
    }
    error
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        let Ok(_inside) = exit::enter() else { return };
        if self.is_lost() {
            return;
        }
        // SAFETY: retained once by `retain`, and nothing of it is used after this.
        let result = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.ordinal) };
        if let Err(error) = self.check(result, "releasing the primary context") {
            log::debug!(target: "nvbackend::cuda", "{error}");
        }
    }
}

pub struct ContextGuard<'a> {
    context: &'a PrimaryContext,
    restore: Option<CUcontext>,
    _inside: Inside,
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        let Some(before) = self.restore else { return };
        let put_back = || {
            // SAFETY: this context was current when the guard was made.
            self.context.check(unsafe { sys::cuCtxSetCurrent(before) }, "putting the caller's context back")
        };
        // Tried twice: what follows in this thread is the engine's own work.
        if let Err(error) = put_back() {
            if self.context.is_lost() || put_back().is_err() {
                log::error!(target: "nvbackend::cuda", "{error}");
            }
        }
    }
}

pub struct RelaxedCapture<'a> {
    context: &'a PrimaryContext,
    before: sys::CUstreamCaptureMode,
}

impl Drop for RelaxedCapture<'_> {
    fn drop(&mut self) {
        let put_back = || {
            self.context.refuse_lost()?;
            let mut mode = self.before;
            // SAFETY: a valid pointer and a mode that the driver gave.
            self.context
                .check(unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) }, "restoring the capture mode")
        };
        // It is tried twice: the engine captures in this thread, too.
        if let Err(error) = put_back().or_else(|_| put_back()) {
            log::error!(target: "nvbackend::cuda", "{error}");
        }
    }
}

extern "C" {
    // The statically linked CUDA runtime.
    fn cudaGetErrorString(code: c_int) -> *const c_char;
    fn cudaGetLastError() -> c_int;
}

/// A launcher's `cudaError_t` as an error; the runtime shares the driver's numbers for everything that is latched. The
/// runtime keeps an error for the thread until it is fetched: what a launcher has only looked at, or got from a call
/// before its launch, would otherwise be taken for a failure of the next one.
pub fn runtime_error(code: i32, doing: &str) -> Error {
    // SAFETY: no arguments; any thread.
    unsafe { cudaGetLastError() };
    // SAFETY: any number is accepted; the string is static.
    let text = unsafe { CStr::from_ptr(cudaGetErrorString(code)) }.to_string_lossy();
    driver::describe(code, doing, &text)
}

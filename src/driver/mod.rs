//! CUDA's driver: whether it is there, its status codes as errors, its devices, and when it must not be called.
//!
//! `cust` and its bindings are the driver API; csrc/driver binds the driver's library on first use, so all of this loads
//! on a machine without one.

pub mod devices;
pub mod exit;
pub mod usable;

use crate::error::{Error, Result, Status};
use cust::sys::{cudaError_enum, CUresult};
use std::ffi::{c_char, c_int, CStr};

extern "C" {
    // csrc/driver/driver.c
    fn nvb_driver_loaded() -> c_int;
    fn nvb_driver_error() -> *const c_char;
    fn nvb_driver_has(name: *const c_char) -> c_int;
    fn nvb_driver_unnamed_status() -> c_int;
}

/// What the executor and the device query call. Drivers for the CUDA version that this library is built with have all
/// of them.
const FUNCTIONS: [&CStr; 42] = [
    c"cuInit",
    c"cuDriverGetVersion",
    c"cuDeviceGetCount",
    c"cuDeviceGet",
    c"cuDeviceGetName",
    c"cuDeviceTotalMem_v2",
    c"cuDeviceGetAttribute",
    c"cuDeviceGetUuid",
    c"cuDeviceGetP2PAttribute",
    c"cuDeviceCanAccessPeer",
    c"cuDevicePrimaryCtxRetain",
    c"cuDevicePrimaryCtxRelease_v2",
    c"cuCtxGetCurrent",
    c"cuCtxSetCurrent",
    c"cuCtxSynchronize",
    c"cuCtxEnablePeerAccess",
    c"cuCtxGetStreamPriorityRange",
    c"cuMemGetInfo_v2",
    c"cuMemAlloc_v2",
    c"cuMemFree_v2",
    c"cuMemHostAlloc",
    c"cuMemFreeHost",
    c"cuMemcpyHtoDAsync_v2",
    c"cuMemcpyDtoHAsync_v2",
    c"cuMemcpyDtoDAsync_v2",
    c"cuMemcpy2DAsync_v2",
    c"cuMemsetD8Async",
    c"cuPointerGetAttribute",
    c"cuStreamCreateWithPriority",
    c"cuStreamDestroy_v2",
    c"cuStreamSynchronize",
    c"cuStreamQuery",
    c"cuStreamWaitEvent",
    c"cuStreamIsCapturing",
    c"cuLaunchHostFunc",
    c"cuEventCreate",
    c"cuEventDestroy_v2",
    c"cuEventRecord",
    c"cuEventQuery",
    c"cuEventSynchronize",
    c"cuEventElapsedTime",
    c"cuThreadExchangeStreamCaptureMode",
];

/// What memory pools take; without one of these, memory comes from plain allocations.
const POOL_FUNCTIONS: [&CStr; 6] = [
    c"cuMemPoolCreate",
    c"cuMemPoolSetAttribute",
    c"cuMemPoolSetAccess",
    c"cuMemPoolDestroy",
    c"cuMemAllocFromPoolAsync",
    c"cuMemFreeAsync",
];

/// What address ranges take; without one of these, blocks are allocated singly.
const VIRTUAL_MEMORY_FUNCTIONS: [&CStr; 8] = [
    c"cuMemAddressReserve",
    c"cuMemAddressFree",
    c"cuMemGetAllocationGranularity",
    c"cuMemCreate",
    c"cuMemRelease",
    c"cuMemMap",
    c"cuMemUnmap",
    c"cuMemSetAccess",
];

/// What captures take; without one of these, graphs are launched operation by operation.
const GRAPH_FUNCTIONS: [&CStr; 6] = [
    c"cuStreamBeginCapture_v2",
    c"cuStreamEndCapture",
    c"cuGraphInstantiateWithFlags",
    c"cuGraphLaunch",
    c"cuGraphDestroy",
    c"cuGraphExecDestroy",
];

/// Whether libcuda could be opened, and if not, the dynamic loader's reason.
pub fn check_loaded() -> Result<()> {
    // SAFETY: no arguments; any thread.
    if unsafe { nvb_driver_loaded() } != 0 {
        return Ok(());
    }
    // SAFETY: a string that lives as long as the process.
    let reason = unsafe { CStr::from_ptr(nvb_driver_error()) }.to_string_lossy();
    Err(Error::new(Status::CudaNotAvailable, format!("the CUDA driver could not be opened: {reason}")))
}

fn has(name: &CStr) -> bool {
    // SAFETY: a NUL-terminated name; any thread.
    unsafe { nvb_driver_has(name.as_ptr()) != 0 }
}

/// Names what the driver lacks, before its absence shows up as a failure in the middle of work.
pub fn check_functions() -> Result<()> {
    let missing: Vec<_> = FUNCTIONS.iter().filter(|name| !has(name)).map(|name| name.to_string_lossy()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::new(Status::CudaNotAvailable, format!("the CUDA driver lacks {}", missing.join(", ")))
        .with_advice("install a newer driver"))
}

/// Refuses work that takes one more function than `FUNCTIONS`.
pub fn require(name: &CStr) -> Result<()> {
    if has(name) {
        return Ok(());
    }
    Err(Error::unsupported(format!("the CUDA driver lacks {}", name.to_string_lossy()))
        .with_advice("install a newer driver"))
}

pub fn has_pool_functions() -> bool {
    POOL_FUNCTIONS.iter().all(|name| has(name))
}

pub fn has_virtual_memory_functions() -> bool {
    VIRTUAL_MEMORY_FUNCTIONS.iter().all(|name| has(name))
}

pub fn has_graph_functions() -> bool {
    GRAPH_FUNCTIONS.iter().all(|name| has(name))
}

/// Status, and what a code means, for the codes that callers meet; the driver's own text describes the others.
fn family(code: i32) -> Status {
    match code {
        2 => Status::OutOfMemory,
        // not initialised, stub library, driver too old, device in another process's exclusive use, no device, driver
        // and kernel module of two versions
        3 | 34 | 35 | 46 | 100 | 803 | 804 => Status::CudaNotAvailable,
        // invalid image, no binary for this GPU, invalid or unsupported PTX, unsupported toolchain
        200 | 209 | 218 | 222 => Status::InvalidArchitecture,
        // launch out of resources, cooperative launch too large
        701 | 720 => Status::KernelLaunch,
        _ if is_sticky(code) => Status::DeviceLost,
        _ => Status::Device,
    }
}

/// Errors after which this process's use of the device is over: those of which cuda.h (CUDA 13.0) says that the process
/// must be relaunched, a destroyed context, a device assertion, and uncorrectable ECC and NVLink errors.
pub fn is_sticky(code: i32) -> bool {
    matches!(code, 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810 | 911)
}

/// A driver call's code as an error.
pub fn error(code: i32, doing: &str) -> Error {
    const UNKNOWN: i32 = 999;
    // cust's enum holds no number that it does not name; the trampolines keep such a number apart.
    // SAFETY: no arguments; any thread.
    let code = match unsafe {
        if code == UNKNOWN {
            nvb_driver_unnamed_status()
        } else {
            0
        }
    } {
        0 => code,
        unnamed => unnamed,
    };
    describe(code, doing, &description(code))
}

/// The error of a code with its text.
pub fn describe(code: i32, doing: &str, text: &str) -> Error {
    Error::new(family(code), format!("{doing}: CUDA error {code} ({text})")).with_cuda_code(code)
}

fn description(code: i32) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the bindings' enum must hold a named value, so the number is passed through the function's C signature;
    // the driver (or the stand-in without one) writes a static string or NULL.
    let status = unsafe {
        let describe: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int =
            std::mem::transmute(cust::sys::cuGetErrorString as *const ());
        describe(code, &mut text)
    };
    if status != 0 || text.is_null() {
        return "no description".to_string();
    }
    // SAFETY: a static, NUL-terminated string of the driver.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// A driver call's result outside any executor.
pub fn check(result: CUresult, doing: &str) -> Result<()> {
    match result {
        cudaError_enum::CUDA_SUCCESS => Ok(()),
        code => Err(error(code as i32, doing)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_fall_into_families() {
        assert_eq!(family(2), Status::OutOfMemory);
        assert_eq!(family(100), Status::CudaNotAvailable);
        assert_eq!(family(700), Status::DeviceLost);
        assert_eq!(family(209), Status::InvalidArchitecture);
        assert_eq!(family(1), Status::Device);
        assert_eq!(family(46), Status::CudaNotAvailable);
        assert!(!is_sticky(2) && !is_sticky(1) && !is_sticky(46) && is_sticky(716) && is_sticky(721));
    }
}

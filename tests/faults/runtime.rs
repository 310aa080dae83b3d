//! A stand-in for the CUDA runtime: what nvcc's launch stubs and the launchers call, on top of the fake driver.
//!
//! NVIDIA's static runtime starts on NVIDIA's driver only. These definitions stand before its archive on the link line,
//! so that none of it is linked into this program; a runtime function that the library calls and that is missing here
//! shows up as symbols defined twice. Kernels are not run: what is tested is everything around them.

use crate::fake::fake;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::sync::{Mutex, PoisonError};

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Dim3 {
    x: c_uint,
    y: c_uint,
    z: c_uint,
}

type Configuration = (Dim3, Dim3, usize, *mut c_void);

const INSUFFICIENT_DRIVER: c_int = 35;
const MISSING_CONFIGURATION: c_int = 52;
const NOT_SUPPORTED: c_int = 801;

thread_local! {
    static CONFIGURATIONS: RefCell<Vec<Configuration>> = const { RefCell::new(Vec::new()) };
    static LAST_ERROR: Cell<c_int> = const { Cell::new(0) };
}

fn remember(status: c_int) -> c_int {
    if status != 0 {
        LAST_ERROR.set(status);
    }
    status
}

/// The kernels' mangled names by the addresses of their stubs.
static NAMES: Mutex<Vec<(usize, String)>> = Mutex::new(Vec::new());
/// The stubs of what was launched since it was last asked for.
static LAUNCHED: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

/// The mangled names of the kernels that were launched since the call before, each once.
pub fn launched() -> Vec<String> {
    let stubs = std::mem::take(&mut *LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner));
    let names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    let name = |stub| names.iter().find(|(known, _)| *known == stub).map(|(_, name)| name.clone());
    stubs.into_iter().map(|stub| name(stub).unwrap_or_else(|| format!("a kernel at {stub:#x}"))).collect()
}

#[no_mangle]
extern "C" fn __cudaRegisterFatBinary(_binary: *const c_void) -> *mut *mut c_void {
    // A handle that only comes back to the two functions below.
    std::ptr::dangling_mut()
}

#[no_mangle]
extern "C" fn __cudaRegisterFatBinaryEnd(_handle: *mut *mut c_void) {}

/// A variable of a kernel in device memory, which no kernel here reads.
#[no_mangle]
#[allow(clippy::too_many_arguments)]
extern "C" fn __cudaRegisterVar(
    _handle: *mut *mut c_void,
    _host: *mut c_char,
    _address: *mut c_char,
    _name: *const c_char,
    _external: c_int,
    _bytes: usize,
    _constant: c_int,
    _global: c_int,
) {
}

#[no_mangle]
extern "C" fn __cudaUnregisterFatBinary(_handle: *mut *mut c_void) {}

#[no_mangle]
#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn __cudaRegisterFunction(
    _handle: *mut *mut c_void,
    stub: *const c_void,
    _symbol: *const c_char,
    name: *const c_char,
    _thread_limit: c_int,
    _thread: *const c_void,
    _block: *const c_void,
    _block_shape: *const c_void,
    _grid_shape: *const c_void,
    _warp_size: *const c_int,
) {
    // SAFETY: nvcc hands over the name of the kernel, closed with a NUL.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    NAMES.lock().unwrap_or_else(PoisonError::into_inner).push((stub as usize, name));
}

#[no_mangle]
extern "C" fn __cudaPushCallConfiguration(grid: Dim3, block: Dim3, shared: usize, stream: *mut c_void) -> c_uint {
    CONFIGURATIONS.with(|stack| stack.borrow_mut().push((grid, block, shared, stream)));
    0
}

#[no_mangle]
unsafe extern "C" fn __cudaPopCallConfiguration(
    grid: *mut Dim3,
    block: *mut Dim3,
    shared: *mut usize,
    stream: *mut *mut c_void,
) -> c_int {
    let Some(top) = CONFIGURATIONS.with(|stack| stack.borrow_mut().pop()) else {
        return remember(MISSING_CONFIGURATION);
    };
    // SAFETY: the launch stub's local variables.
    unsafe {
        grid.write(top.0);
        block.write(top.1);
        shared.write(top.2);
        stream.write(top.3);
    }
    0
}

#[no_mangle]
unsafe extern "C" fn __cudaGetKernel(kernel: *mut *const c_void, stub: *const c_void) -> c_int {
    // SAFETY: the launch stub's static variable.
    unsafe { kernel.write(stub) };
    0
}

#[no_mangle]
extern "C" fn __cudaLaunchKernel(
    kernel: *const c_void,
    grid: Dim3,
    block: Dim3,
    arguments: *mut *mut c_void,
    shared: usize,
    stream: *mut c_void,
) -> c_int {
    type Launch = extern "C" fn(
        *const c_void,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        *mut c_void,
        *mut *mut c_void,
        *mut *mut c_void,
    ) -> c_int;
    // SAFETY: the driver's type of this function.
    let Some(launch) = fake().and_then(|fake| unsafe { fake.function::<Launch>(c"cuLaunchKernel") }) else {
        return remember(INSUFFICIENT_DRIVER);
    };
    let none = std::ptr::null_mut();
    let shared = shared as c_uint;
    LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner).insert(kernel as usize);
    remember(launch(kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, stream, arguments, none))
}

/// What the launch stubs of CUDA 12 call.
#[no_mangle]
extern "C" fn cudaLaunchKernel(
    stub: *const c_void,
    grid: Dim3,
    block: Dim3,
    arguments: *mut *mut c_void,
    shared: usize,
    stream: *mut c_void,
) -> c_int {
    __cudaLaunchKernel(stub, grid, block, arguments, shared, stream)
}

/// `cudaLaunchConfig_t`; its attributes say how a launch may overlap with the one before, which nothing here does.
#[repr(C)]
struct LaunchConfiguration {
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: *mut c_void,
    attributes: *const c_void,
    attribute_count: c_uint,
}

#[no_mangle]
unsafe extern "C" fn cudaLaunchKernelExC(
    configuration: *const LaunchConfiguration,
    stub: *const c_void,
    arguments: *mut *mut c_void,
) -> c_int {
    // SAFETY: the launcher's local variable.
    let LaunchConfiguration { grid, block, shared, stream, .. } = unsafe { configuration.read() };
    __cudaLaunchKernel(stub, grid, block, arguments, shared, stream)
}

#[no_mangle]
extern "C" fn cudaFuncSetAttribute(kernel: *const c_void, attribute: c_int, value: c_int) -> c_int {
    type Set = extern "C" fn(*const c_void, c_int, c_int) -> c_int;
    // SAFETY: the driver's type of this function.
    let Some(set) = fake().and_then(|fake| unsafe { fake.function::<Set>(c"cuFuncSetAttribute") }) else {
        return remember(INSUFFICIENT_DRIVER);
    };
    remember(set(kernel, attribute, value))
}

/// There is one device.
#[no_mangle]
unsafe extern "C" fn cudaGetDevice(device: *mut c_int) -> c_int {
    // SAFETY: the caller's variable.
    unsafe { device.write(0) };
    0
}

/// The fake driver has no calculator, so that callers do without.
#[no_mangle]
extern "C" fn cudaOccupancyMaxActiveClusters(
    _clusters: *mut c_int,
    _kernel: *const c_void,
    _configuration: *const c_void,
) -> c_int {
    remember(NOT_SUPPORTED)
}

#[no_mangle]
extern "C" fn cudaGetLastError() -> c_int {
    LAST_ERROR.replace(0)
}

#[no_mangle]
extern "C" fn cudaPeekAtLastError() -> c_int {
    LAST_ERROR.get()
}

#[no_mangle]
extern "C" fn cudaGetErrorString(_status: c_int) -> *const c_char {
    c"the stand-in runtime's text".as_ptr()
}

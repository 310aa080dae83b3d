//! Functions that an engine brings. They keep to the header's rules.

use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

static HEARD: AtomicU64 = AtomicU64::new(0);

extern "C" fn log(_level: u32, target: *const c_char, message: *const c_char, length: usize, _user_data: *mut c_void) {
    // SAFETY: texts with a closing NUL, by the header.
    let (target, text) = unsafe { (std::ffi::CStr::from_ptr(target), std::ffi::CStr::from_ptr(message)) };
    if target.is_empty() || text.count_bytes() != length {
        crate::crash::fail("a log record without a target, or of another length than it says");
    }
    HEARD.fetch_add(1, Ordering::Relaxed);
}

extern "C" fn allocate(bytes: usize, alignment: usize, _stream: *mut c_void, _user_data: *mut c_void) -> *mut c_void {
    if bytes == 0 || !alignment.is_power_of_two() {
        crate::crash::fail("the engine's allocator was asked for no bytes, or for an alignment that is none");
    }
    if bytes > 64 << 20 {
        return std::ptr::null_mut();
    }
    let mut block = std::ptr::null_mut();
    // SAFETY: a power of two of at least a pointer's size.
    match unsafe { libc::posix_memalign(&mut block, alignment.max(8), bytes) } {
        0 => block,
        _ => std::ptr::null_mut(),
    }
}

extern "C" fn free(pointer: *mut c_void, _bytes: usize, _stream: *mut c_void, _user_data: *mut c_void) {
    // SAFETY: a block of `allocate`, freed once.
    unsafe { libc::free(pointer) }
}

extern "C" fn reclaim(_bytes: u64, user_data: *mut c_void) -> u64 {
    HEARD.fetch_add(1, Ordering::Relaxed);
    // Some claim to have freed what they have not.
    user_data as u64 & 0xff00
}

extern "C" fn stream(_user_data: *mut c_void) {
    HEARD.fetch_add(1, Ordering::Relaxed);
}

extern "C" fn tune(progress: *const c_void, user_data: *mut c_void) -> u32 {
    if progress.is_null() {
        crate::crash::fail("tuning reported nothing");
    }
    user_data as u32 & 1
}

/// The head of `nvb_kernel_plan`.
#[repr(C)]
struct PlanHead {
    struct_size: usize,
    operation: u32,
    reason: u32,
    kernel: *const c_char,
    text: *const c_char,
}

extern "C" fn plan(plan: *const c_void, _user_data: *mut c_void) {
    // SAFETY: a plan with its texts, by the header.
    let (plan, text) = unsafe {
        let plan = &*plan.cast::<PlanHead>();
        (plan, std::ffi::CStr::from_ptr(plan.text))
    };
    if plan.kernel.is_null() || text.is_empty() || plan.struct_size < size_of::<PlanHead>() || plan.reason > 4 {
        crate::crash::fail("a plan without a text, or of no reason");
    }
    HEARD.fetch_add(u64::from(plan.operation), Ordering::Relaxed);
}

/// The address of a callback of the header's type.
pub fn address(kind: &str) -> usize {
    match kind {
        "nvb_log_callback" => log as *const () as usize,
        "nvb_allocate_callback" => allocate as *const () as usize,
        "nvb_free_callback" => free as *const () as usize,
        "nvb_reclaim_callback" => reclaim as *const () as usize,
        "nvb_stream_callback" => stream as *const () as usize,
        "nvb_plan_callback" => plan as *const () as usize,
        "nvb_tune_callback" => tune as *const () as usize,
        _ => panic!("fuzz/src/header/callbacks.rs has no function of the type {kind}"),
    }
}

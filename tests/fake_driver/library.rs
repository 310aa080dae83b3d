//! libnvbackend.so with a stand-in for NVIDIA's CUDA runtime, which starts on NVIDIA's driver alone: on the fake driver
//! every launch is counted and none computes. tests/fake_driver/sweep.py runs programs on it.

pub use nvbackend::*;

#[path = "../faults/runtime.rs"]
mod runtime;
/// The fault tests alone ask which kernels ran.
const _: fn() -> Vec<String> = runtime::launched;

mod fake {
    use std::ffi::{c_char, c_void, CStr};

    extern "C" {
        // csrc/driver/driver.c
        fn nvb_driver_function(name: *const c_char) -> *mut c_void;
    }

    /// The driver that the library has opened.
    pub struct Fake;

    pub fn fake() -> Option<&'static Fake> {
        Some(&Fake)
    }

    impl Fake {
        /// The function behind a name; `F` must be its type.
        pub unsafe fn function<F: Copy>(&self, name: &CStr) -> Option<F> {
            assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
            // SAFETY: a NUL-terminated name; any thread.
            let address = unsafe { nvb_driver_function(name.as_ptr()) };
            // SAFETY: function pointers have the size of an address, and the type is the caller's promise.
            (!address.is_null()).then(|| unsafe { std::mem::transmute_copy(&address) })
        }
    }
}

//! The Gemma example's reader of safetensors files.
#![no_main]

use std::io::Write as _;
use std::os::fd::{AsRawFd as _, FromRawFd as _};

extern "C" {
    fn nvb_fuzz_read_safetensors(path: *const std::ffi::c_char) -> usize;
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // SAFETY: a name; the descriptor is this file's alone.
    let mut file = unsafe { std::fs::File::from_raw_fd(libc::memfd_create(c"safetensors".as_ptr(), 0)) };
    file.write_all(bytes).expect("memory for the file");
    let path = std::ffi::CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).expect("no NUL");
    // SAFETY: a path with a closing NUL.
    unsafe { nvb_fuzz_read_safetensors(path.as_ptr()) };
});

//! GGUF files in memory that traps behind their last byte: all that a file tells is read.
#![no_main]

#[path = "../src/crash.rs"]
mod crash;

use nvbackend::capi::gguf::*;
use std::ffi::{c_char, CStr};

const INTERNAL: i32 = 1300;

/// A struct of the header with its size set.
fn sized<T>() -> T {
    // SAFETY: structs of integers and pointers, which begin with their size.
    unsafe {
        let mut value: T = std::mem::zeroed();
        (&raw mut value).cast::<usize>().write(size_of::<T>());
        value
    }
}

/// Pages of the input with a closed one behind them.
struct Guarded {
    base: *mut libc::c_void,
    pages: usize,
}

const PAGE: usize = 4096;

impl Guarded {
    fn new(bytes: &[u8]) -> (Guarded, *const u8) {
        let pages = bytes.len().next_multiple_of(PAGE);
        // SAFETY: fresh memory of `pages` bytes and a page.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let base = libc::mmap(std::ptr::null_mut(), pages + PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(base, libc::MAP_FAILED);
            let start = base.cast::<u8>().add(pages - bytes.len());
            start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            assert_eq!(libc::mprotect(base.cast::<u8>().add(pages).cast(), PAGE, libc::PROT_NONE), 0);
            (Guarded { base, pages }, start)
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`.
        unsafe { libc::munmap(self.base, self.pages + PAGE) };
    }
}

/// Reads `count` bytes, so that a range which is not the file's traps.
fn touch(data: *const u8, count: usize) {
    if count > 0 {
        // SAFETY: what the library says is there; if it is wrong, this is where it shows.
        unsafe { std::hint::black_box((data.read_volatile(), data.add(count - 1).read_volatile())) };
    }
}

fn expect(fine: bool, what: &str) {
    if !fine {
        crash::fail(what);
    }
}

/// Bytes of a number of this type in a file.
fn width(kind: u32) -> usize {
    match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        _ => 0,
    }
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    crash::watch();
    let (_guarded, data) = Guarded::new(bytes);
    let mut file = std::ptr::null_mut();
    // SAFETY: the bytes outlive the handle; structs have their sizes set; what is read is what the library names.
    unsafe {
        let status = nvb_gguf_open_memory(data.cast(), bytes.len(), &mut file);
        expect(status != INTERNAL, "a bug met by nvb_gguf_open_memory");
        if status != 0 {
            return;
        }
        let mut info: nvb_gguf_info = sized();
        expect(nvb_gguf_get_info(file, &mut info) == 0, "an open file tells nothing");
        for index in 0..info.tensor_count as usize {
            let mut tensor: nvb_gguf_tensor = sized();
            expect(nvb_gguf_get_tensor(file, index, &mut tensor) == 0, "a tensor that is counted is missing");
            touch(tensor.data.cast(), tensor.bytes as usize);
            let mut found: nvb_gguf_tensor = sized();
            let status = nvb_gguf_find_tensor(file, tensor.name, &mut found);
            // Names are bytes of the file's, and the look-up takes UTF-8.
            let is_text = CStr::from_ptr(tensor.name).to_str().is_ok_and(|name| !name.is_empty());
            expect(status == 0 || !is_text, "a tensor is not found by its name");
        }
        for index in 0..info.value_count as usize {
            let mut value: nvb_gguf_value = sized();
            expect(nvb_gguf_get_value(file, index, &mut value) == 0, "a value that is counted is missing");
            let _: *const c_char = value.key;
            match value.content {
                NVB_GGUF_TEXT => touch(value.data.cast(), value.count as usize),
                NVB_GGUF_ARRAY => touch(value.data.cast(), value.count as usize * width(value.element_kind)),
                NVB_GGUF_TEXTS => {
                    let count = value.count as usize;
                    for at in (0..count.min(64)).chain([count.saturating_sub(1), count]) {
                        let (mut text, mut length) = (std::ptr::null(), 0);
                        let status = nvb_gguf_get_text(file, value.key, at, &mut text, &mut length);
                        expect(status != INTERNAL, "a bug met by nvb_gguf_get_text");
                        if status == 0 {
                            expect(at < count, "a text behind the last");
                            touch(text.cast(), length);
                        }
                    }
                }
                _ => {}
            }
        }
        expect(nvb_gguf_destroy(file) == 0, "a file that does not close");
    }
});

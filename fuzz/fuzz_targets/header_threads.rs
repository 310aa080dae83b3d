//! Calls of every function of the header by four threads on the same objects.
#![no_main]

#[path = "../src/crash.rs"]
mod crash;
#[path = "../src/header/mod.rs"]
mod header;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| header::run(bytes, 4));

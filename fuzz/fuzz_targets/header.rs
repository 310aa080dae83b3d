//! Sequences of calls of every function of the header, on one thread.
#![no_main]

#[path = "../src/crash.rs"]
mod crash;
#[path = "../src/header/mod.rs"]
mod header;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| header::run(bytes, 1));

//! Operation sequences of the memory manager against their model, as in tests/memory, led by what they reach.
#![no_main]

#[path = "../../tests/memory/sequence.rs"]
mod sequence;
// Other tests need more of it.
#[allow(dead_code)]
#[path = "../../tests/memory/simulated.rs"]
mod simulated;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sequence::run(bytes));

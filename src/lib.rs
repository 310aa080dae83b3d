//! An inference backend behind a C ABI: attention, products, quantised weights and memory on NVIDIA GPUs and the CPU.
//!
//! A C call is checked in [`capi`], becomes a validated descriptor in [`operation`], and is handed to the
//! stream's [`executor::Executor`]. `docs/design.md` is the plan behind the layout.
//!
//! # For Rust programs
//!
//! **API:** the functions, structs and constants of [`capi`], which are those of `include/nvbackend.h`, a module for each
//! part of the header, with the header's contracts and its promise of compatibility. They check what they are handed; what
//! they cannot check, such as the memory behind a pointer, is why they are `unsafe`. [`capi::structs::init`] stands for the
//! header's `_init` functions. `examples/linear.rs` is a whole program:
//!
//! ```sh
//! cargo run --release --example linear --no-default-features
//! ```
//!
//! **Not API:** every other module, and in `capi` what is not named `nvb_` or `NVB_`, but for `init`. They are public for
//! the library's own tests, benchmarks and fuzzers. They may change with every commit, and they trust their callers: a
//! [`tensor::Tensor`] that names memory which does not exist is refused by `capi`, and read by what lies below.

// An engine's output is its own.
#![deny(clippy::print_stdout, clippy::print_stderr, clippy::dbg_macro)]

mod allocation;
pub mod backend;
pub mod capi;
pub mod configuration;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
#[cfg(feature = "cuda")]
pub mod driver;
pub mod error;
pub mod executor;
mod file;
pub mod fork;
pub mod graph;
pub mod hardware;
pub mod kv_cache;
pub mod loading;
pub mod logging;
pub mod memory;
pub mod metrics;
pub mod operation;
pub mod registry;
mod reserve;
pub mod simd;
pub mod stream;
pub mod tensor;
mod thread;
mod thread_end;
pub mod tuning;
pub mod weight;

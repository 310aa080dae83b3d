//! An inference backend behind a C ABI: attention, products, quantised weights and memory on NVIDIA GPUs and the CPU.
//!
//! A C call is checked in [`capi`], becomes a validated descriptor in [`ops`] or [`attention`], and is handed to the
//! stream's [`executor::Executor`]. `docs/design.md` is the plan behind the layout.

// An engine's output is its own.
#![deny(clippy::print_stdout, clippy::print_stderr, clippy::dbg_macro)]

mod allocation;
pub mod attention;
pub mod backend;
pub mod capi;
pub mod configuration;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
pub mod error;
pub mod executor;
mod file;
pub mod fork;
pub mod hardware;
pub mod logging;
pub mod memory;
pub mod metrics;
pub mod operation;
pub mod ops;
pub mod registry;
mod reserve;
pub mod stream;
pub mod tensor;
mod thread;
mod thread_end;
pub mod tuning;
pub mod weight;

//! The C ABI: the only `extern "C"` code. Each function checks, converts, calls and reports; no logic lives here.
//!
//! Every exported function is written as `pub unsafe extern "C" fn nvb_x(…) { guard!(nvb_x, { … }) }`, because cbindgen
//! reads the source before macros expand. `tests/exports.rs` compares the functions with the uses of `guard!` and with
//! the exported symbols, so that none can miss the panic guard.

// The C names are the ABI.
#![allow(non_camel_case_types)]
// Safety contracts are the header's comments; each pointer is checked for NULL and each handle for being alive.
#![allow(clippy::missing_safety_doc)]

pub mod attention;
pub mod attention_merge;
pub mod attention_plan;
pub mod attention_tuning;
pub mod backend;
pub mod backend_options;
pub mod block_rows;
pub mod configuration;
pub mod device;
pub mod environment;
pub mod event;
pub mod gguf;
pub mod graph;
pub mod graph_fp8;
pub mod graph_optimize;
pub mod graph_profile;
pub mod graph_validate;
pub mod guard;
pub mod handle;
pub mod hardware;
pub mod kernel;
pub mod kv_cache;
pub mod kv_swap;
mod last_error;
pub mod memory;
pub mod memory_control;
pub mod memory_options;
pub mod memory_statistics;
pub mod metrics;
pub mod operations;
pub mod pool;
mod prelude;
pub mod products;
pub mod rows;
pub mod sampling;
mod shortcut;
pub mod status;
pub mod stream;
pub mod stream_manager;
pub mod strided;
pub mod structs;
pub mod tensor;
pub mod tuning;
pub mod version;
pub mod weight;
pub mod weight_blocks;
pub mod workspace;

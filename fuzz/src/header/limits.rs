//! What the fuzzer leaves out: values that the header leaves to the caller's care, and those that cost more than a step may.

use super::memory::LARGEST;

/// Elements, so that an operation takes microseconds even where strides of 0 make much of little memory.
pub const ELEMENTS: u64 = 1 << 15;

/// A number as it is given, from what was drawn. Counts and sizes of the caller's memory must be true, or so large that the
/// library refuses them by themselves.
pub fn number(owner: &str, name: &str, value: u64) -> u64 {
    let refused = value > isize::MAX as u64;
    match (owner, name) {
        (_, "capacity") if owner != "nvb_kv_cache_options" => value,
        (_, "part_count" | "sequence_count" | "measurement_count" | "count") if value > 4 && !refused => value % 4,
        (_, "scale_bytes" | "zero_bytes" | "order_bytes") if value > LARGEST as u64 && !refused => LARGEST as u64,
        ("nvb_weight_blocks" | "nvb_gguf_open_memory", "bytes") if value > LARGEST as u64 && !refused => LARGEST as u64,
        // Threads are started where the library takes their number.
        (_, "threads") if value <= 4096 => value % 4,
        (_, "wait_microseconds") => value.min(100),
        (_, "trace_events") if value <= 1 << 24 => value.min(4096),
        ("nvb_memory_options", "initial_bytes") if !refused => value.min(4 << 20),
        ("nvb_tune_options", "rounds") => value.min(2),
        ("nvb_graph_optimize_options" | "nvb_graph_profile_options" | "nvb_graph_fp8_options", "launches")
            if value <= 1 << 20 =>
        {
            1
        }
        ("nvb_attention_benchmark", "rounds") if value <= 10_000 => 1,
        ("nvb_linear_case", "rows" | "columns" | "depth") if value > 128 && !refused => value % 128,
        // Below 64 MiB blocks are counted singly; without a limit a cache of gigabytes would be taken.
        ("nvb_backend_options", "memory_limit") if value == 0 => 256 << 20,
        ("nvb_memory_set_limit", "bytes") if value == 0 => 256 << 20,
        _ => value,
    }
}

/// Whether a step may make the call: what costs milliseconds is made for few of the steps that name it, and what ends the
/// objects of the others too.
pub fn runs(function: &str, value: u8) -> bool {
    match function {
        "nvb_tune_linear" | "nvb_tune_attention" | "nvb_attention_benchmark" => value % 32 == 0,
        "nvb_backend_create" => value % 4 == 0,
        "nvb_backend_destroy" | "nvb_test_inject_panic" => value % 8 == 0,
        _ if function.ends_with("_destroy") => value % 4 == 0,
        _ => true,
    }
}

/// Whether the header wants all other threads out of the objects of the call meanwhile.
pub fn runs_alone(function: &str) -> bool {
    [
        "nvb_memory_sleep",
        "nvb_memory_wake",
        "nvb_pool_clear",
        "nvb_pool_destroy",
        "nvb_memory_manager_destroy",
        "nvb_backend_destroy",
    ]
    .contains(&function)
}

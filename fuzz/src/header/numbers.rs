//! Numbers that make a valid call, by the names that the header gives them; 0, the default, where it has no more to say.

use super::palette::{size, Random};
use super::tensors::Extents;

pub fn valid(owner: &str, name: &str, extents: &Extents, random: &mut Random) -> u64 {
    let value = |name: &str| extents.values[name] as u64;
    let real = |value: f32| u64::from(value.to_bits());
    match (owner, name) {
        ("nvb_weight_blocks", "rows") => value("file rows"),
        ("nvb_weight_blocks", "columns") => value("file columns"),
        ("nvb_weight_blocks", "source_format") => 0,
        ("nvb_weight_blocks", "group_size") => random.of(&[0, 32, 64, 128]),
        ("nvb_weight_desc", "source_format") => value("source format"),
        ("nvb_block_tensor", "source_format") => random.of(&[1, 3, 12, 13, 14, 18, 8, 20]),
        ("nvb_block_tensor", "rank") => 2,
        ("nvb_block_rows_args", "direction") => random.below(2) as u64,
        ("nvb_weight_get_block_bytes", "source_format") => 1 + random.below(20) as u64,
        ("nvb_weight_desc", "source") => random.of(&[0, 0, 1, 2, 3]),
        ("nvb_weight_desc", "format") => random.below(10) as u64,
        ("nvb_weight_desc", "arrangement") => u64::from(random.one_in(4)),
        ("nvb_memory_options", "limit") => random.of(&[0, 0, 64 << 20, 128 << 20, 1 << 20]),
        ("nvb_memory_options", "limit_fraction") => 0,
        ("nvb_backend_options", "memory_limit") => random.of(&[128 << 20, 256 << 20]),
        ("nvb_backend_options", "log_level") => random.of(&[0, 1, 2, 3, 4, 5, u64::from(u32::MAX)]),
        ("nvb_backend_options", "preset") => random.of(&[0, 0, 0, 0, 0, 2, 3, 4]),
        ("nvb_backend_options", "fp8" | "tensor_cores") => random.of(&[0, 0, 0, 1, 2, 3]),
        ("nvb_backend_options", "precision") => random.below(5) as u64,
        ("nvb_kv_cache_options", "dtype" | "value_dtype") => random.of(&[0, 0, 1, 2, 3, 5, 6, 7, 8, 9]),
        ("nvb_attention_shape", "query_dtype" | "output_dtype") => random.below(4) as u64,
        ("nvb_kernel_override", "operation") => 2,
        ("nvb_linear_case", "rows") => random.of(&[1, 4, 17, 64]),
        ("nvb_linear_case", "columns" | "depth") => random.of(&[32, 64]),
        ("nvb_linear_case", "format") => random.below(8) as u64,
        ("nvb_graph_describe", "format") => random.below(3) as u64,
        ("nvb_graph_get_report", "format") => random.below(2) as u64,
        ("nvb_graph_optimize", "level") => random.below(4) as u64,
        ("nvb_graph_optimize_options", "maximum_error") => random.of(&[0, 0, 0.01f64.to_bits()]),
        ("nvb_graph_get_profile", "format") => random.of(&[0, 1, 3]),
        ("nvb_graph_rebind", "bytes") => random.of(&[64, 4096, 65_536]),
        ("nvb_linear_case", "input_dtype" | "output_dtype") => random.below(4) as u64,
        ("nvb_memory_copy", "kind") => 1 + random.below(3) as u64,
        ("nvb_memory_copy" | "nvb_memory_fill" | "nvb_memory_advise" | "nvb_memory_prefetch", "bytes") => {
            random.of(&[0, 1, 100, 256, 4096])
        }
        ("nvb_memory_fill", "value") => random.below(256) as u64,
        ("nvb_stream_set_workspace", "bytes") => random.of(&[0, 256, 4096, 65_536]),
        ("nvb_host_allocate", "bytes") => random.of(&[1, 256, 4096, 1 << 20]),
        ("nvb_kv_cache_options", "page_tokens") => random.of(&[0, 0, 1, 4, 16]),
        ("nvb_kv_cache_options", "pages") => random.of(&[0, 0, 0, 8]),
        ("nvb_kv_cache_options", "window") => random.of(&[0, 0, 0, 8]),
        ("nvb_kv_cache_options", "max_append") => random.of(&[0, 0, 0, 4]),
        (_, "sequence" | "from" | "to") => random.below(3) as u64,
        (_, "tokens") => random.of(&[0, 1, 4, 5, 17, 24]),
        (_, "capacity") if owner != "nvb_kv_cache_options" => random.of(&[0, 1, 2, 16, 300, 4096]),
        (_, "query_heads") => random.of(&[2, 4]),
        (_, "kv_heads") => random.of(&[1, 2]),
        (_, "head_dim") => random.of(&[16, 16, 8, 64]),
        (_, "layers" | "sequences") => 1 + random.below(3) as u64,
        (_, "capacity") => random.of(&[1, 24, 40]),
        (_, "window") => random.of(&[0, 0, 1, 8]),
        (_, "scale" | "factor" | "epsilon" | "alpha" | "position_scale" | "query_scale") => {
            random.of(&[0, real(1.0), real(0.5), real(2.0)])
        }
        (_, "sink_tokens") => random.of(&[0, 0, 0, 1, 4]),
        (_, "dropout") => random.of(&[0, 0, real(0.1), real(0.5)]),
        (_, "dropout_seed" | "dropout_offset") => random.next() >> 16,
        (_, "soft_cap" | "weight_offset" | "temperature") => random.of(&[0, real(1.0), real(30.0)]),
        (_, "top_p") => random.of(&[0, real(0.9), real(0.1)]),
        (_, "top_k") => random.of(&[0, 1, 3, 50]),
        (_, "bytes") => size(random),
        (_, "alignment") => 1 << random.below(22),
        (_, "part_count" | "sequence_count") => value("sequences"),
        (_, "count") => 1 + random.below(2) as u64,
        (_, "rank") => 1 + random.below(3) as u64,
        (_, "dtype") => 1 + random.below(4) as u64,
        (_, "rotary_dim") => random.of(&[0, 0, 8]),
        (_, "max_kv_length") => random.of(&[0, 0, 20]),
        (_, "activation") => random.below(4) as u64,
        (_, "groups") => random.of(&[1, 1, 2, 8]),
        (_, "layout" | "pairs" | "order") => random.below(2) as u64,
        (_, "section_order") => random.below(3) as u64,
        (_, "function") => 1 + random.below(19) as u64,
        (_, "granularity") => random.of(&[0, 0, 0, 1, 2, 3, 4]),
        (_, "group_size") => random.of(&[0, 0, 32, 128]),
        (_, "zero_points" | "clipping" | "transpose_a" | "transpose_b" | "bidirectional" | "bias" | "residual") => {
            u64::from(random.one_in(4))
        }
        ("nvb_attention_decode_args", "rows_per_sequence") => value("R"),
        (_, "rows_per_sequence") => random.of(&[0, 1, 2]),
        (_, "prefill") => random.below(2) as u64,
        (_, "operation") => random.below(27) as u64,
        (_, "layer") => random.of(&[0, 0, 0, 1]),
        (_, "index" | "depth" | "place" | "recovery_step") => random.of(&[0, 0, 1, 2, 5]),
        (_, "workload" | "preset" | "advice") => random.below(6) as u64,
        (_, "status") => random.of(&[0, 1, 100, 501, 1300]),
        (_, "enabled" | "keep_content" | "to_host" | "rotate" | "write_scales") => random.below(2) as u64,
        (_, "range_bytes") => random.of(&[0, 0, 256 << 20]),
        (_, "leak_tracking" | "spill" | "limit_of" | "pooling" | "zero_on_free" | "growth" | "profiling") => {
            if random.one_in(4) {
                1 + random.below(3) as u64
            } else {
                0
            }
        }
        (_, "quantized_activations" | "batch_invariant" | "vendor_libraries" | "attention") => {
            random.of(&[0, 0, 0, 1, 2])
        }
        (_, "space") => random.of(&[0, 0, 0, 0, 1, 2]),
        (_, "trace_events") => random.of(&[0, 0, 100]),
        (_, "margin" | "thread_cache_bytes") => random.of(&[0, 0, u64::MAX, 1 << 20]),
        (_, "timeout_ns" | "priority") => random.of(&[0, 1, 1000]),
        (_, "id") => 1 + random.below(3) as u64,
        (_, "seed") => random.next(),
        (_, "threads") => random.of(&[1, 2]),
        _ => 0,
    }
}

//! tests/c/abi_layout.h states the size and the offsets of every public struct as Rust lays them out, for the C compiler
//! to hold against include/nvbackend.h.
//!
//! NVB_UPDATE_HEADER=1 writes the file; without it this test fails when the two differ.

use nvbackend::capi::attention::*;
use nvbackend::capi::backend_options::*;
use nvbackend::capi::device::*;
use nvbackend::capi::environment::*;
use nvbackend::capi::gguf::*;
use nvbackend::capi::hardware::*;
use nvbackend::capi::kernel::*;
use nvbackend::capi::kv_cache::*;
use nvbackend::capi::memory_options::*;
use nvbackend::capi::memory_statistics::*;
use nvbackend::capi::metrics::*;
use nvbackend::capi::operations::*;
use nvbackend::capi::pool::*;
use nvbackend::capi::products::*;
use nvbackend::capi::sampling::*;
use nvbackend::capi::status::*;
use nvbackend::capi::stream_manager::*;
use nvbackend::capi::tensor::*;
use nvbackend::capi::tuning::*;
use nvbackend::capi::version::*;
use nvbackend::capi::weight::*;
use nvbackend::capi::weight_blocks::*;
use std::fmt::Write as _;
use std::mem::{align_of, offset_of, size_of};
use std::path::PathBuf;

struct Layout {
    name: &'static str,
    size: usize,
    alignment: usize,
    fields: Vec<(&'static str, usize)>,
}

macro_rules! layouts {
    ($($name:ident { $($field:ident),+ $(,)? })+) => {
        vec![$(Layout {
            name: stringify!($name),
            size: size_of::<$name>(),
            alignment: align_of::<$name>(),
            fields: vec![$((stringify!($field), offset_of!($name, $field))),+],
        }),+]
    };
}

fn layouts() -> Vec<Layout> {
    layouts! {
        nvb_error_detail { struct_size, status, cuda_code, requested, limit }
        nvb_memory_failure {
            struct_size, requested, limit, allocated, held, cached, largest_free, device_free, device_total, recovery_steps_tried,
            reserved,
        }
        nvb_build_info { struct_size, cuda, cuda_toolkit_version, architectures }
        nvb_tensor { data, dtype, rank, shape, strides }
        nvb_quantized_rows { data, scales, rows, columns, row_stride, format, given_scales }
        nvb_device_info {
            struct_size, kind, ordinal, compute_capability, multiprocessors, total_memory, l2_bytes, driver_version,
            reserved, name, features, peak_bandwidth, uuid, architecture, pci_bus_id, numa_node, clock_mhz,
            memory_clock_mhz, memory_bus_bits, shared_memory_per_block, shared_memory_per_multiprocessor,
            registers_per_multiprocessor, threads_per_multiprocessor, warp_size, copy_engines, obstacle,
        }
        nvb_cpu_profile {
            struct_size, name, vendor, architecture, instruction_sets, sockets, cores, threads, available_threads,
            maximum_mhz, numa_nodes, l1_data_bytes, l1_instruction_bytes, l2_bytes, l3_bytes, l3_shared_by,
            cache_line_bytes, total_memory, memory_limit,
        }
        nvb_numa_node { struct_size, id, threads, total_memory, free_memory, thread_numbers }
        nvb_environment {
            struct_size, driver_version, runtime_version, libraries, reserved, kernel_module, kernel, architectures,
            obstacle,
        }
        nvb_library { struct_size, found, version, name, path, reason }
        nvb_allocator { struct_size, allocate, free, user_data }
        nvb_memory_options {
            struct_size, limit, limit_fraction, margin, initial_bytes, range_bytes, thread_cache_bytes, leak_sample_bytes,
            trace_events, wait_microseconds, allocator, space, limit_of, leak_tracking, spill, pooling, zero_on_free,
            growth, reserved,
        }
        nvb_backend_options {
            struct_size, configuration, device, preset, threads, architecture, precision, fp8, tensor_cores, attention,
            vendor_libraries, quantized_activations, batch_invariant, linear_kernel, tuning_file, memory_limit, memory,
            profiling, log_level, log_callback, log_user_data,
        }
        nvb_device_usage {
            struct_size, known, utilization, memory_utilization, temperature, power, power_limit, clock, memory_clock,
            ecc_enabled, processes, memory_used, memory_total, ecc_corrected, ecc_uncorrected, throttle_reasons,
        }
        nvb_peer_access { struct_size, accessible, performance_rank, native_atomics, reserved }
        nvb_recommendation { struct_size, count, device_index, kind, runnable, device, name, reason }
        nvb_memory_statistics {
            struct_size, allocated, peak, blocks, allocations, frees, failures, limit, device_free, device_total,
            reserved, peak_reserved, cached, free, largest_free, spilled, captured, unaccounted, margin, fragmentation,
        }
        nvb_memory_recovery_step_statistics { struct_size, tried, helped, name }
        nvb_pool_statistics { struct_size, allocated, peak, blocks, allocations, frees, failures }
        nvb_stream_manager_options { struct_size, streams_per_priority, reserved }
        nvb_stream_statistics { struct_size, streams, users, busy, reserved }
        nvb_weight_blocks {
            data, bytes, rows, columns, row_stride, scales, scale_bytes, zeros, zero_bytes, order, order_bytes, scale_dtype,
            group_size, granularity, version, source_format, scale, reserved,
        }
        nvb_weight_desc {
            struct_size, parts, part_count, arrangement, source, format, granularity, group_size, zero_points, clipping,
            source_format, blocks,
        }
        nvb_weight_info {
            struct_size, rows, columns, output_columns, bytes, dtype, gated, encoding, granularity, group_size, zero_points,
            scale_bytes, relative_error,
        }
        nvb_gguf_info { struct_size, tensor_count, value_count, bytes, version, alignment }
        nvb_gguf_tensor { struct_size, name, data, bytes, shape, rank, kind, dtype, source_format }
        nvb_gguf_value { struct_size, key, data, count, integer, real, content, element_kind }
        nvb_kv_cache_options { struct_size, layers, slots, kv_heads, head_dim, capacity, dtype }
        nvb_attention_options {
            struct_size, query_heads, kv_heads, head_dim, window, scale, soft_cap, bidirectional, reserved,
        }
        nvb_attention_prefill_args {
            struct_size, query, output, lse, query_starts, sequence_count, cache, slots, kv_lengths, key, value,
            key_starts, layer, reserved,
        }
        nvb_attention_decode_args {
            struct_size, query, output, lse, cache, positions, slots, layer, max_kv_length,
        }
        nvb_embedding_args { struct_size, tokens, table, output, scale, reserved }
        nvb_rms_norm_args {
            struct_size, input, post_weight, residual, residual_output, weight, output, epsilon, weight_offset,
            quantized_output,
        }
        nvb_layer_norm_args { struct_size, input, residual, residual_output, weight, bias, output, epsilon, reserved }
        nvb_linear_args {
            struct_size, input, weight, bias, output, activation, reserved, quantized_input, residual, quantized_output,
        }
        nvb_gated_activation_args { struct_size, gate, up, output, activation, reserved, quantized_output }
        nvb_rope_args {
            struct_size, query, query_output, query_norm, key, key_output, key_norm, value, positions, slots, cache,
            layer, rotary_dim, base, position_scale, query_scale, epsilon, weight_offset, reserved,
        }
        nvb_kv_cache_append_args { struct_size, key, value, positions, slots, cache, layer, reserved }
        nvb_matmul_args { struct_size, a, b, output, alpha, transpose_a, transpose_b, reserved }
        nvb_grouped_linear_args { struct_size, input, offsets, weight, bias, output, activation, reserved }
        nvb_softmax_args { struct_size, input, output, scale, reserved }
        nvb_elementwise_args { struct_size, input, second, output, factor, activation }
        nvb_argmax_args { struct_size, logits, tokens }
        nvb_sample_args {
            struct_size, logits, sequences, positions, tokens, probabilities, seed, temperature, top_p, top_k, reserved,
        }
        nvb_operation_metrics {
            struct_size, calls, timed_calls, seconds, shortest_seconds, longest_seconds, operations, bytes,
            bytes_per_second, operations_per_second, name,
        }
        nvb_linear_case {
            struct_size, weight, rows, columns, depth, input_dtype, output_dtype, activation, bias, format, granularity,
            group_size, zero_points, arrangement, residual,
        }
        nvb_tune_options { struct_size, rounds, clock }
        nvb_tune_progress {
            struct_size, case_index, case_count, candidate, candidate_count, outcome, reserved, seconds, name, reason,
        }
        nvb_tune_report {
            struct_size, tuned, changed, measured, wrong, failed, stopped, saved, default_seconds, chosen_seconds,
            file_error,
        }
        nvb_kernel_info {
            struct_size, operation, device_kind, compute_capability, depth_multiple, alignment, overridden, maximum_rows,
            name, inputs, encodings, summary,
        }
    }
}

fn generate() -> String {
    let mut text = String::from(
        "// The layout of every public struct, as Rust has it. Generated by tests/abi_layout.rs; `make header` makes it again.\n\
         #include <stdalign.h>\n#include <stddef.h>\n\n#include \"nvbackend.h\"\n",
    );
    for Layout { name, size, alignment, fields } in layouts() {
        let mut line = |condition: String, what: &str| {
            writeln!(text, "_Static_assert({condition}, \"{what}\");").unwrap();
        };
        line(format!("sizeof({name}) == {size}"), name);
        line(format!("alignof({name}) == {alignment}"), name);
        for (field, offset) in fields {
            line(format!("offsetof({name}, {field}) == {offset}"), field);
        }
    }
    text
}

#[test]
fn the_c_side_asserts_the_layout_of_the_rust_side() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/c/abi_layout.h");
    let generated = generate();
    if std::env::var_os("NVB_UPDATE_HEADER").is_some() {
        std::fs::write(&path, &generated).expect("tests/c/abi_layout.h is writable");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == generated, "tests/c/abi_layout.h is out of date, run `make header`");
}

/// A struct or a field that the table above forgets would be one that nobody asserts.
#[test]
fn the_table_has_every_struct_and_field_of_the_header() {
    let header = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("include/nvbackend.h");
    let header = std::fs::read_to_string(header).expect("include/nvbackend.h");
    let mut declared = Vec::new();
    for block in header.split("typedef struct {").skip(1) {
        let (body, rest) = block.split_once("\n}").expect("structs are closed");
        let name = rest.split(';').next().expect("a name").trim();
        let lines = body.lines().map(str::trim).filter(|line| line.ends_with(';') && !line.starts_with("//"));
        let fields = lines.map(|line| {
            let field = line.trim_end_matches(';').split('[').next().expect("a declaration");
            field.rsplit([' ', '*']).next().expect("a name").to_string()
        });
        declared.push((name.to_string(), fields.collect::<Vec<_>>()));
    }
    let listed: Vec<_> = layouts()
        .into_iter()
        .map(|layout| {
            (layout.name.to_string(), layout.fields.iter().map(|field| field.0.to_string()).collect::<Vec<_>>())
        })
        .collect();
    assert_eq!(declared, listed);
}

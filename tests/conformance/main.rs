//! Conformance: every operation on every device that is present, against the operation's formula in f64.
//!
//! Inputs are fresh in each run and lie between poisoned guards; outputs are poisoned first, and nothing else may
//! change. NVB_TEST_DEVICE ("cpu", "cuda:0") names one device, NVB_TEST_SEED repeats a run, NVB_TEST_TRACE names each
//! case before it runs; NVB_TEST_LEVEL is what `level.rs` sets. The program needs no file, so that it can be packed for a machine that has a GPU and no toolchain.

mod activation;
mod argmax;
mod attention_batch;
mod attention_cases;
mod attention_decode;
mod attention_decode_graph;
mod attention_decode_rope;
mod attention_device_lengths;
mod attention_dropout;
mod attention_head_terms;
mod attention_prefill;
mod attention_prefix;
mod attention_row_masks;
mod batch_invariance;
mod block_rows;
mod block_weights;
mod compare;
mod device;
mod embedding;
mod graph;
mod grouped_linear;
mod grouped_linear_by_id;
mod kv_cache;
mod kv_cache_cases;
mod kv_cache_rows;
mod level;
mod linear;
mod linear_quantized;
mod linear_quantized_input;
mod linear_quantized_output;
mod linear_residual;
mod matmul;
mod memory;
mod pack_blocks;
mod quantize;
mod quantized_rows;
mod random;
mod rope;
mod rotary_embedding;
mod run;
mod sample;
mod scatter_rows;
mod sort_rows;
mod stream;
mod strided;
mod weight;
mod weight_formats;
mod workspace;
mod writes_all;

use nvbackend::operation_modules;
nvbackend::plain_operations!(operation_modules);

//! Every operation once: each launches at least one kernel, and some take workspace from the stream's scratch memory.

use crate::engine::{call, tensor, versioned, Engine, Failure, Handle, ABSENT};
use nvbackend::capi::attention::*;
use nvbackend::capi::operations::*;
use nvbackend::capi::sampling::*;
use nvbackend::capi::stream::nvb_stream_synchronize;
use nvbackend::capi::tensor::*;
use nvbackend::capi::weight::*;
use std::ptr::null_mut;

/// Tokens; large enough for the tensor-core products of a prompt.
const T: i64 = 48;
const WIDTH: i64 = 64;
const VOCABULARY: i64 = 3000;
const HEAD_DIM: i64 = 32;

/// Carves tensors out of one block, each on a 256-byte boundary.
struct Arena {
    next: *mut u8,
    end: *mut u8,
}

impl Arena {
    fn tensor(&mut self, dtype: u32, shape: &[i64]) -> nvb_tensor {
        let size = if dtype == NVB_DTYPE_BF16 { 2 } else { 4 };
        let bytes = (shape.iter().product::<i64>() as usize * size).next_multiple_of(256);
        let data = self.next.cast();
        self.next = self.next.wrapping_add(bytes);
        assert!(self.next <= self.end, "the arena is too small");
        tensor(data, dtype, shape)
    }
}

pub fn run(engine: &Engine) -> Result<(), Failure> {
    const ARENA_BYTES: usize = 4 << 20;
    let stream = engine.stream()?;
    let block = engine.block(ARENA_BYTES, stream.raw)?;
    let next = block.pointer.cast::<u8>();
    let mut arena = Arena { next, end: next.wrapping_add(ARENA_BYTES) };
    let backend = engine.backend.raw;
    let host = vec![0u16; (VOCABULARY * WIDTH) as usize];
    let part = |rows: i64, columns: i64| tensor(host.as_ptr().cast_mut().cast(), NVB_DTYPE_BF16, &[rows, columns]);
    let table = engine.weight(&[part(VOCABULARY, WIDTH)], NVB_WEIGHT_STACKED, NVB_SOURCE_HOST)?;
    let gated = engine.weight(&[part(WIDTH, WIDTH), part(WIDTH, WIDTH)], NVB_WEIGHT_GATED, NVB_SOURCE_HOST)?;
    let cache = engine.kv_cache()?;
    let tokens = arena.tensor(NVB_DTYPE_I32, &[T]);
    let hidden = arena.tensor(NVB_DTYPE_BF16, &[T, WIDTH]);
    let output = arena.tensor(NVB_DTYPE_BF16, &[T, WIDTH]);
    let codes = arena.tensor(NVB_DTYPE_BF16, &[T, WIDTH]);
    let scales = arena.tensor(NVB_DTYPE_F32, &[T]);

    let mut args: nvb_embedding_args = versioned();
    (args.tokens, args.table, args.output) = (tokens, table.raw, hidden);
    call!(nvb_embedding(backend, &args, stream.raw))?;

    let mut args: nvb_rms_norm_args = versioned();
    (args.input, args.output) = (hidden, output);
    call!(nvb_rms_norm(backend, &args, stream.raw))?;

    for rows in [1, 8, T] {
        let mut args: nvb_linear_args = versioned();
        args.input = tensor(hidden.data, NVB_DTYPE_BF16, &[rows, WIDTH]);
        args.output = tensor(output.data, NVB_DTYPE_BF16, &[rows, WIDTH]);
        (args.weight, args.activation) = (gated.raw, NVB_ACTIVATION_GELU_TANH);
        call!(nvb_linear(backend, &args, stream.raw))?;
        args.residual = args.output;
        call!(nvb_linear(backend, &args, stream.raw))?;
        args.quantized_output = nvb_quantized_rows {
            data: codes.data,
            scales: scales.data.cast(),
            rows,
            columns: WIDTH,
            row_stride: 0,
            format: NVB_WEIGHT_FORMAT_INT8,
            given_scales: 0,
        };
        call!(nvb_linear(backend, &args, stream.raw))?;
    }

    let mut args: nvb_gated_activation_args = versioned();
    (args.gate, args.up, args.output) = (hidden, hidden, output);
    call!(nvb_gated_activation(backend, &args, stream.raw))?;

    let heads = |rows: i64, heads: i64| tensor(hidden.data, NVB_DTYPE_BF16, &[rows, heads, HEAD_DIM]);
    let mut args: nvb_rope_args = versioned();
    (args.query, args.query_output) = (heads(2, 2), heads(2, 2));
    let key = tensor(codes.data, NVB_DTYPE_BF16, &[2, 1, HEAD_DIM]);
    (args.key, args.value, args.cache) = (key, key, cache.raw);
    args.positions = tensor(tokens.data, NVB_DTYPE_I32, &[2]);
    call!(nvb_rope(backend, &args, stream.raw))?;

    let mut options: nvb_attention_options = versioned();
    (options.query_heads, options.kv_heads, options.head_dim) = (2, 1, HEAD_DIM as u32);
    let mut attention = Handle::new(nvb_attention_destroy);
    call!(nvb_attention_create(backend, &options, &mut attention.raw))?;
    let mut args: nvb_attention_prefill_args = versioned();
    (args.query, args.output, args.lse) = (heads(2, 2), tensor(output.data, NVB_DTYPE_BF16, &[2, 2, HEAD_DIM]), ABSENT);
    let (query_starts, kv_lengths) = ([0, 2], [2]);
    (args.query_starts, args.sequence_count) = (query_starts.as_ptr(), 1);
    (args.cache, args.kv_lengths) = (cache.raw, kv_lengths.as_ptr());
    call!(nvb_attention_prefill(attention.raw, &args, stream.raw))?;
    let mut args: nvb_attention_decode_args = versioned();
    (args.query, args.output) = (heads(2, 2), tensor(output.data, NVB_DTYPE_BF16, &[2, 2, HEAD_DIM]));
    (args.cache, args.positions) = (cache.raw, tensor(tokens.data, NVB_DTYPE_I32, &[2]));
    call!(nvb_attention_decode(attention.raw, &args, stream.raw))?;

    let logits = arena.tensor(NVB_DTYPE_F32, &[2, VOCABULARY]);
    let mut args: nvb_softmax_args = versioned();
    (args.input, args.output) = (logits, logits);
    call!(nvb_softmax(backend, &args, stream.raw))?;
    let mut args: nvb_elementwise_args = versioned();
    (args.input, args.second, args.output) = (hidden, hidden, output);
    call!(nvb_add(backend, &args, stream.raw))?;
    let mut args: nvb_argmax_args = versioned();
    (args.logits, args.tokens) = (logits, tensor(tokens.data, NVB_DTYPE_I32, &[2]));
    call!(nvb_argmax(backend, &args, stream.raw))?;
    let mut args: nvb_sample_args = versioned();
    (args.logits, args.tokens) = (logits, tensor(tokens.data, NVB_DTYPE_I32, &[2]));
    (args.temperature, args.top_k) = (1.0, 40);
    call!(nvb_sample(backend, &args, stream.raw))?;
    call!(nvb_stream_synchronize(stream.raw))?;
    // The default stream has scratch memory of its own.
    call!(nvb_sample(backend, &args, null_mut()))
}

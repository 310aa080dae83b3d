//! A stream's workspace of the caller's: as much as a query says is enough and nothing is allocated, a byte less is
//! refused without a launch.

use crate::driver::{passes, works};
use crate::engine::{call, tensor, versioned, Engine, Failure, Handle};
use crate::fake::{Books, Fake};
use nvbackend::capi::attention::*;
use nvbackend::capi::operations::*;
use nvbackend::capi::sampling::*;
use nvbackend::capi::status::*;
use nvbackend::capi::tensor::*;
use nvbackend::capi::weight::*;
use nvbackend::capi::workspace::*;
use std::path::Path;
use std::ptr::null_mut;

const WIDTH: i64 = 256;
const BLOCK_BYTES: usize = 16 << 20;

type Call<'a> = (&'static str, Box<dyn Fn(&mut usize) -> Result<(), Failure> + 'a>, Run<'a>);
type Run<'a> = Box<dyn Fn() -> Result<(), Failure> + 'a>;

pub fn callers(file: &Path) -> Result<String, String> {
    passes(|| {
        let fake = Fake::open(file);
        let engine = Engine::new().map_err(|failure| failure.to_string())?;
        let stream = engine.stream().map_err(|failure| failure.to_string())?;
        let block = engine.block(BLOCK_BYTES, stream.raw).map_err(|failure| failure.to_string())?;
        let data = engine.block(BLOCK_BYTES, stream.raw).map_err(|failure| failure.to_string())?;
        let (backend, raw, at) = (engine.backend.raw, stream.raw, data.pointer);
        let written = at.wrapping_byte_add(BLOCK_BYTES / 4);
        let host = vec![0u16; (WIDTH * WIDTH) as usize];
        let part = tensor(host.as_ptr().cast_mut().cast(), NVB_DTYPE_BF16, &[WIDTH, WIDTH]);
        let weight = engine.quantized(&[part], NVB_SOURCE_HOST).map_err(|failure| failure.to_string())?;
        let cache = engine.kv_cache().map_err(|failure| failure.to_string())?;

        let mut linear: nvb_linear_args = versioned();
        linear.input = tensor(at, NVB_DTYPE_BF16, &[70, WIDTH]);
        linear.output = tensor(written, NVB_DTYPE_BF16, &[70, WIDTH]);
        linear.weight = weight.raw;
        let mut options: nvb_attention_options = versioned();
        (options.query_heads, options.kv_heads, options.head_dim) = (2, 1, 32);
        let mut attention = Handle::new(nvb_attention_destroy);
        works(call!(nvb_attention_create(backend, &options, &mut attention.raw)))?;
        let mut decode: nvb_attention_decode_args = versioned();
        (decode.query, decode.output) =
            (tensor(at, NVB_DTYPE_BF16, &[2, 2, 32]), tensor(written, NVB_DTYPE_BF16, &[2, 2, 32]));
        let positions = data.pointer.wrapping_byte_add(BLOCK_BYTES / 2);
        (decode.cache, decode.positions) = (cache.raw, tensor(positions, NVB_DTYPE_I32, &[2]));
        let mut sample: nvb_sample_args = versioned();
        (sample.logits, sample.tokens) = (tensor(at, NVB_DTYPE_F32, &[2, 3000]), tensor(written, NVB_DTYPE_I32, &[2]));
        (sample.temperature, sample.top_k) = (1.0, 40);

        let calls: [Call; 3] = [
            (
                "linear",
                Box::new(|bytes| call!(nvb_linear_get_workspace_size(backend, &linear, bytes))),
                Box::new(|| call!(nvb_linear(backend, &linear, raw))),
            ),
            (
                "attention_decode",
                Box::new(|bytes| call!(nvb_attention_decode_get_workspace_size(attention.raw, &decode, bytes))),
                Box::new(|| call!(nvb_attention_decode(attention.raw, &decode, raw))),
            ),
            (
                "sample",
                Box::new(|bytes| call!(nvb_sample_get_workspace_size(backend, &sample, bytes))),
                Box::new(|| call!(nvb_sample(backend, &sample, raw))),
            ),
        ];
        for (name, query, run) in &calls {
            let mut bytes = 0;
            works(query(&mut bytes))?;
            if bytes == 0 || bytes > BLOCK_BYTES {
                return Err(format!("{name} needs {bytes} bytes"));
            }
            works(call!(nvb_stream_set_workspace(raw, block.pointer, bytes)))?;
            let before = fake.books();
            works(run())?;
            let after = fake.books();
            if held(&after) != held(&before) || after.launches == before.launches {
                return Err(format!("{name}: {before:?} before, {after:?} after"));
            }
            works(call!(nvb_stream_set_workspace(raw, block.pointer, bytes - 1)))?;
            let before = fake.books();
            match run() {
                Err(failure)
                    if failure.status == NVB_ERROR_INVALID_ARGUMENT && failure.text.contains(&bytes.to_string()) => {}
                other => return Err(format!("{name} with a byte too little: {other:?}")),
            }
            if fake.books().launches != before.launches || held(&fake.books()) != held(&before) {
                return Err(format!("{name} was refused and launched"));
            }
        }
        works(call!(nvb_stream_set_workspace(raw, null_mut(), 0)))?;
        calls.iter().try_for_each(|(_, _, run)| works(run()))?;
        // A handle that ends with a workspace set, which stays the caller's.
        works(call!(nvb_stream_set_workspace(raw, block.pointer, 4096)))
    })?;
    Ok("three operations in exactly what they need".to_string())
}

/// What the device holds.
fn held(books: &Books) -> [i64; 6] {
    [books.blocks, books.bytes, books.host_blocks, books.mappings, books.physicals, books.pools]
}

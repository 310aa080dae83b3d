//! `attention_decode` in a recorded list, where it reads keys before the nodes in front of it have ended: what it must not
//! read early is the query, and the key and value of the token that the list appends.

use crate::attention_cases::{filled_cache, Keys};
use crate::run::{check, PLAIN};
use nvbackend::device::CopyKind;
use nvbackend::error::Result;
use nvbackend::graph::Graph;
use nvbackend::operation::attention::{AttentionConfig, AttentionDecode, DecodeRows};
use nvbackend::operation::rms_norm::RmsNorm;
use nvbackend::operation::rope::{Append, Rope, RopeArguments};
use nvbackend::operation::Operation;
use nvbackend::stream::Stream;
use nvbackend::tensor::{DType, Tensor};
use std::sync::Arc;

/// Of a row so long that its norm takes a while.
const SLOW_COLUMNS: usize = 1 << 16;
const ROUNDS: usize = 6;

#[derive(Debug, Clone, Copy)]
struct Case {
    dim: usize,
    heads: (usize, usize),
    /// Tokens of the sequence, the new one among them.
    length: usize,
    window: usize,
    /// Whether the list appends the new token, or the cache has all.
    appends: bool,
}

#[test]
fn launches_read_what_the_list_writes() {
    let mut cases = Vec::new();
    for appends in [true, false] {
        for (dim, heads) in [(64, (8, 2)), (128, (8, 2)), (256, (4, 2)), (96, (6, 3)), (128, (20, 1))] {
            for length in [1, 63, 64, 65, 700, 5000] {
                cases.push(Case { dim, heads, length, window: 0, appends });
            }
            cases.push(Case { dim, heads, length: 3000, window: 1500, appends });
        }
    }
    check("attention_decode in a recorded list", &cases, |run, case| {
        let &Case { dim, heads: (heads, kv_heads), length, window, appends } = case;
        let config =
            AttentionConfig { query_heads: heads, kv_heads, head_dim: dim, window, causal: true, ..Default::default() };
        let config = AttentionConfig::new(config)?;
        let keys = Keys::new(run, &config, DType::Bf16, length);
        let cache = filled_cache(run, &config, DType::Bf16, 1, length + 1, &[(0, &keys)])?;
        let layer = cache.layer(1)?;
        // Query, key and value are the start of what the slow norm writes.
        let source = run.output(DType::F32, &[1, SLOW_COLUMNS], PLAIN)?;
        let row = run.output(DType::F32, &[1, SLOW_COLUMNS], PLAIN)?;
        let output = run.output(DType::F32, &[1, heads, dim], PLAIN)?;
        let part = |from: usize, heads: usize| {
            Tensor::new(row.data.wrapping_byte_add(4 * from * dim), DType::F32, &[1, heads, dim])
        };
        let slow: Operation = RmsNorm {
            input: source,
            post_weight: None,
            residual: None,
            residual_output: None,
            weight: None,
            output: Some(row),
            quantized_output: None,
            epsilon: 1e-6,
            weight_offset: 0.0,
        }
        .validated()?
        .into();
        let positions = run.integers(&[length as i32 - 1])?;
        let append: Operation = Rope::new(RopeArguments {
            query: None,
            query_output: None,
            query_norm: None,
            query_scale: 1.0,
            key: Some(part(heads, kv_heads)),
            key_output: None,
            key_norm: None,
            value: Some(part(heads + kv_heads, kv_heads)),
            epsilon: 1e-6,
            weight_offset: 0.0,
            positions,
            rotation: None,
            append: Some(Append { cache: layer, sequences: None }),
        })?
        .into();
        let rows = DecodeRows { per_sequence: 1, positions, sequences: None, max_kv_length: length };
        let decode: Operation = AttentionDecode::new(config, part(0, heads), layer, output, None, rows)?.into();
        let list = if appends { vec![slow, append, decode] } else { vec![slow, decode] };

        let (backend, raw) = (&run.device.backend, run.stream.raw());
        let stream = Arc::new(Stream::new(backend.executor(), 0)?);
        let graph = Graph::new(backend.executor(), backend.memory());
        graph.begin(&stream)?;
        list.iter().try_for_each(|op| backend.queue(op.clone(), &stream))?;
        graph.end(&stream)?;
        for _ in 0..ROUNDS {
            let values: Vec<f32> = run.random.normals(SLOW_COLUMNS, 1.0).iter().map(|&value| value as f32).collect();
            // SAFETY: the tensor has as many elements, and the wait is before the host's go.
            unsafe {
                let bytes = size_of_val(&values[..]);
                run.executor().copy(source.data, values.as_ptr().cast(), bytes, CopyKind::HostToDevice, raw)?;
            }
            run.stream.synchronize()?;
            graph.launch(&stream)?;
            stream.synchronize()?;
            let launched = run.read(&output)?;
            let waiting = |op: &Operation| -> Result<()> {
                backend.queue(op.clone(), &stream)?;
                stream.synchronize()
            };
            list.iter().try_for_each(waiting)?;
            let called = run.read(&output)?;
            if launched != called || !called.iter().all(|value| value.is_finite()) {
                let differ = launched.iter().zip(&called).filter(|(a, b)| a != b).count();
                return Err(format!("{differ} of {} values differ from those of calls", called.len()).into());
            }
        }
        Ok(())
    });
}

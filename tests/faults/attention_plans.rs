//! The plans of attention by what runs: over shapes, dtypes, windows and numbers of sequences the kernel that a plan names is the
//! one that is launched, in exactly the workspace that the plan asks for, and the override runs where it can. The memory behind
//! the descriptors is nobody's, because no kernel computes.

use crate::driver::passes;
use crate::fake::Fake;
use crate::runtime;
use nvbackend::backend::Backend;
use nvbackend::configuration::Configuration;
use nvbackend::device::RawHandle;
use nvbackend::operation::attention::{AttentionConfig, AttentionDecode, AttentionPrefill, DecodeRows, KeySource};
use nvbackend::operation::{Operation, OperationKind};
use nvbackend::tensor::{CacheLayer, DType, Tensor};
use std::ffi::c_void;
use std::path::Path;

/// Bytes of workspace that none of these calls needs more than.
const LARGEST: usize = 1 << 30;
const CAPACITY: usize = 65_536;

/// The block that is number `block`.
fn address(block: usize) -> *mut c_void {
    std::ptr::without_provenance_mut((0x100 + block) << 40)
}

fn cache(config: &AttentionConfig, dtype: DType, sequences: usize) -> CacheLayer {
    let AttentionConfig { kv_heads: heads, head_dim, .. } = *config;
    CacheLayer::contiguous((address(0), address(1)), dtype, [sequences, heads, CAPACITY, head_dim])
}

/// `rows` of `per_sequence` each.
fn decode(
    config: AttentionConfig,
    dtypes: [DType; 2],
    (rows, per_sequence): (usize, usize),
    longest: usize,
) -> Result<Operation, String> {
    let [query, kept] = dtypes;
    let shape = [rows, config.query_heads, config.head_dim];
    let tensor = |block, dtype, shape: &[usize]| Tensor::new(address(block), dtype, shape);
    AttentionDecode::new(
        config,
        tensor(2, query, &shape),
        cache(&config, kept, rows.max(1)),
        tensor(3, query, &shape),
        Some(tensor(4, DType::F32, &shape[..2])),
        DecodeRows { per_sequence, positions: tensor(5, DType::I32, &[rows]), sequences: None, max_kv_length: longest },
    )
    .map(Operation::from)
    .map_err(|error| error.message)
}

fn prefill(config: AttentionConfig, dtypes: [DType; 2], sequences: usize, rows: usize) -> Result<Operation, String> {
    let [query, kept] = dtypes;
    let shape = [sequences * rows, config.query_heads, config.head_dim];
    let starts: Vec<i32> = (0..=sequences).map(|sequence| (sequence * rows) as i32).collect();
    let places: Vec<i32> = (0..sequences as i32).collect();
    let lengths: Vec<i32> = (0..sequences).map(|sequence| (rows + 7 * sequence) as i32).collect();
    let source = KeySource::Cache { layer: cache(&config, kept, sequences), sequences: &places, kv_lengths: &lengths };
    let (x, y) = (Tensor::new(address(2), query, &shape), Tensor::new(address(3), query, &shape));
    AttentionPrefill::new(config, x, &starts, source, y, None).map(Operation::from).map_err(|error| error.message)
}

fn check(backend: &Backend, block: *mut c_void, op: &Operation, is_empty: bool) -> Result<(), String> {
    let (executor, stream) = (backend.executor(), backend.default_stream().raw());
    let plan = executor.plan(op).map_err(|error| error.message)?;
    // SAFETY: the block holds as many bytes, and nobody else uses it.
    let workspace = |bytes: usize| unsafe {
        executor.stream_set_workspace(stream, if bytes == 0 { std::ptr::null_mut() } else { block }, bytes)
    };
    let bytes = plan.workspace;
    if bytes > LARGEST {
        return Err(format!("it asks for {bytes} bytes of workspace"));
    }
    workspace(bytes).map_err(|error| error.message)?;
    runtime::launched();
    executor.run(op, stream).map_err(|error| format!("in {bytes} bytes: {}", error.message))?;
    let launched = runtime::launched();
    let named = |kernel: &String| !plan.kernel.is_empty() && kernel.contains(plan.kernel);
    if is_empty != plan.kernel.is_empty() || launched.len() != usize::from(!is_empty) || !launched.iter().all(named) {
        return Err(format!("{plan:?} launches {launched:?}"));
    }
    if bytes > 0 {
        workspace(bytes - 1).map_err(|error| error.message)?;
        if executor.run(op, stream).is_ok() {
            return Err(format!("it asks for {bytes} bytes, and runs with one less"));
        }
    }
    workspace(0).map_err(|error| error.message)?;
    let kind = op.kind();
    let plain =
        if kind == OperationKind::AttentionPrefill { "attention_prefill_simt" } else { "attention_decode_simt" };
    executor.choices().set_override(kind, plain).map_err(|error| error.message)?;
    let chosen = executor.plan(op).map_err(|error| error.message)?;
    executor.run(op, stream).map_err(|error| error.message)?;
    let launched = runtime::launched();
    executor.choices().set_override(kind, "").map_err(|error| error.message)?;
    match is_empty || chosen.kernel == plain && launched.iter().all(|kernel| kernel.contains(plain)) {
        true => Ok(()),
        false => Err(format!("with the override {plain} {chosen:?} launches {launched:?}")),
    }
}

pub fn attention(file: &Path) -> Result<String, String> {
    let configurations = [
        r#"{"device": "cuda:0"}"#,
        r#"{"device": "cuda:0", "architecture": 80}"#,
        r#"{"device": "cuda:0", "attention": "plain"}"#,
    ];
    for json in configurations {
        let mut configuration = Configuration::default();
        configuration.apply_json(json).map_err(|error| error.message)?;
        passes(|| {
            Fake::open(file);
            let backend = Backend::new(configuration.clone()).map_err(|error| error.message)?;
            let block = backend.memory().allocate(LARGEST, RawHandle::NULL).map_err(|error| error.message)?;
            for (query_heads, kv_heads) in [(8, 8), (8, 2), (32, 8), (16, 1), (3, 1)] {
                for head_dim in [7, 40, 64, 96, 128, 256, 512] {
                    for window in [0, 128] {
                        let config = AttentionConfig {
                            query_heads,
                            kv_heads,
                            head_dim,
                            scale: 1.0,
                            soft_cap: 0.0,
                            window,
                            causal: true,
                            ..AttentionConfig::default()
                        };
                        for dtypes in [[DType::Bf16; 2], [DType::F32, DType::F16], [DType::F32; 2]] {
                            let try_one = |op: Operation, is_empty: bool, size: (usize, usize)| {
                                check(&backend, block, &op, is_empty)
                                    .map_err(|problem| format!("{json}: {config:?} {dtypes:?} {size:?}: {problem}"))
                            };
                            for rows in [(0, 1), (1, 1), (2, 1), (32, 1), (200, 1), (4, 4), (96, 3), (0, 16), (32, 16)]
                            {
                                for longest in [1, 17, 100, 1024, 32_768] {
                                    let op = decode(config, dtypes, rows, longest)?;
                                    try_one(op, rows.0 == 0, (rows.0, longest))?;
                                }
                            }
                            for size in [(0, 0), (1, 1), (3, 200), (130, 2)] {
                                let op = prefill(config, dtypes, size.0, size.1)?;
                                try_one(op, size.0 == 0, size)?;
                            }
                        }
                    }
                }
            }
            backend.memory().free(block, RawHandle::NULL).map_err(|error| error.message)
        })?;
    }
    Ok(format!("{} configurations", configurations.len()))
}

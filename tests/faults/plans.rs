//! The plan of products by what runs: over shapes, encodings, dtypes and epilogues the kernel that is named as the default is one of
//! the candidates, each candidate runs, and each product runs in exactly the workspace that is asked for it. The memory
//! behind the descriptors is nobody's, because no kernel computes.

use crate::driver::passes;
use crate::fake::Fake;
use crate::runtime;
use nvbackend::backend::Backend;
use nvbackend::configuration::Configuration;
use nvbackend::device::RawHandle;
use nvbackend::operation::linear::{Linear, LinearTensors};
use nvbackend::operation::linear_product::LinearProduct;
use nvbackend::operation::quantized_rows::QuantizedRows;
use nvbackend::operation::{Activation, Operation};
use nvbackend::tensor::{DType, Tensor};
use nvbackend::weight::{Encoding, Scales, WeightView};
use std::ffi::c_void;
use std::path::Path;

/// Bytes of workspace that none of these products needs more than.
const LARGEST: usize = 512 << 20;

/// The block that is number `block`, and bytes into it.
fn address(block: usize, offset: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(((0x100 + block) << 36) + offset)
}

fn weights(n: usize, k: usize, gated: bool) -> Vec<WeightView> {
    let float = |dtype| WeightView::float(address(0, 0), dtype, n, k, k, gated);
    let quantized = |encoding, scales| WeightView { encoding, scales, ..float(DType::F32) };
    let (rows, blocks) = (Scales::Rows(address(1, 0).cast()), Scales::Blocks(address(1, 0).cast()));
    let groups = Scales::Groups { size: 64, data: address(1, 0).cast() };
    let int4 = quantized(Encoding::Int4, groups);
    let mut all: Vec<WeightView> = DType::FLOATS.map(float).into();
    all.extend(
        [Encoding::Int8, Encoding::Fp8E4m3, Encoding::Fp8E5m2, Encoding::Sfp].map(|encoding| quantized(encoding, rows)),
    );
    all.extend([quantized(Encoding::Int8, groups), quantized(Encoding::Fp8E4m3, blocks), int4]);
    all.push(WeightView { zero_points: address(2, 0).cast(), ..int4 });
    all.push(WeightView { order: address(3, 0).cast(), ..int4 });
    all
}

/// What a product varies in beside its weight and its rows.
#[derive(Debug, Clone, Copy)]
struct Variant {
    /// Bytes that the input lies off a boundary.
    offset: usize,
    gated: bool,
    output: Option<DType>,
    epilogue: bool,
    quantized: (bool, bool),
}

const PLAIN: Variant = Variant { offset: 0, gated: false, output: None, epilogue: false, quantized: (false, false) };
const VARIANTS: [Variant; 7] = [
    PLAIN,
    Variant { gated: true, ..PLAIN },
    Variant { output: Some(DType::F32), ..PLAIN },
    Variant { offset: 4, ..PLAIN },
    Variant { epilogue: true, ..PLAIN },
    Variant { quantized: (true, false), ..PLAIN },
    Variant { quantized: (true, true), ..PLAIN },
];

fn tensors(variant: Variant, weight: &WeightView, m: usize) -> LinearTensors {
    let Variant { offset, output, epilogue, quantized, .. } = variant;
    let input = weight.dtype().unwrap_or(DType::Bf16);
    let encoding = if weight.encoding == Encoding::Int8 { Encoding::Int8 } else { Encoding::Fp8E4m3 };
    let codes = |block: usize, columns: usize| QuantizedRows {
        data: address(block, 0),
        scales: address(block + 1, 0).cast(),
        given_scales: false,
        encoding,
        rows: m,
        columns,
        row_stride: columns,
    };
    let output = Tensor::new(address(5, 0), output.unwrap_or(input), &[m, weight.output_columns()]);
    LinearTensors {
        input: (!quantized.0).then(|| Tensor::new(address(4, offset), input, &[m, weight.columns])),
        quantized_input: quantized.0.then(|| codes(6, weight.columns)),
        bias: epilogue.then(|| Tensor::new(address(8, 0), output.dtype, &[weight.rows])),
        residual: epilogue.then_some(output),
        output: Some(output),
        quantized_output: quantized.1.then(|| codes(9, weight.output_columns())),
    }
}

fn check(backend: &Backend, block: *mut c_void, variant: Variant, weight: WeightView, m: usize) -> Result<(), String> {
    let (executor, stream) = (backend.executor(), backend.default_stream().raw());
    let tensors = tensors(variant, &weight, m);
    let op = Operation::from(Linear::new(tensors, weight, Activation::None).map_err(|error| error.message)?);
    let bytes = executor.plan(&op).map_err(|error| error.message)?.workspace;
    // SAFETY: the block holds as many bytes, and nobody else uses it.
    let workspace = |bytes: usize| unsafe {
        executor.stream_set_workspace(stream, if bytes == 0 { std::ptr::null_mut() } else { block }, bytes)
    };
    if bytes > LARGEST {
        return Err(format!("it asks for {bytes} bytes of workspace"));
    }
    workspace(bytes).map_err(|error| error.message)?;
    runtime::launched();
    executor.run(&op, stream).map_err(|error| format!("in {bytes} bytes: {}", error.message))?;
    let launched = runtime::launched();
    if launched.is_empty() != (m == 0) {
        return Err(format!("{m} rows launch {launched:?}"));
    }
    if bytes > 0 {
        workspace(bytes - 1).map_err(|error| error.message)?;
        if executor.run(&op, stream).is_ok() {
            return Err(format!("it asks for {bytes} bytes, and runs with one less"));
        }
    }
    workspace(0).map_err(|error| error.message)?;
    let (Some(input), Some(output), false) = (tensors.input, tensors.output, m == 0) else { return Ok(()) };
    let op =
        LinearProduct::new(input, weight, tensors.bias, Activation::None, output).map_err(|error| error.message)?;
    let candidates = executor.linear_candidates(&op);
    let default = executor.linear_default(&op).ok_or("no default")?;
    if !candidates.iter().any(|candidate| candidate.kernel == default.kernel) {
        return Err(format!("{} is the default, and no candidate", default.label()));
    }
    // With `batch_invariant` an unaligned input is copied first, which a kernel by its name alone does not do.
    for candidate in candidates.into_iter().filter(|_| !executor.choices().are_fixed()) {
        let ran = executor.linear_with(&op, &candidate, stream).map_err(|error| error.message)?;
        if ran.is_none() || runtime::launched().is_empty() {
            return Err(format!("{} is a candidate, and does not run", candidate.label()));
        }
    }
    Ok(())
}

pub fn products(file: &Path) -> Result<String, String> {
    let configurations = [
        r#"{"device": "cuda:0"}"#,
        r#"{"device": "cuda:0", "quantized_activations": true}"#,
        r#"{"device": "cuda:0", "quantized_activations": true, "architecture": 80}"#,
        r#"{"device": "cuda:0", "batch_invariant": true}"#,
        r#"{"device": "cuda:0", "linear_kernel": "linear_simt"}"#,
    ];
    let mut count = 0;
    for json in configurations {
        let mut configuration = Configuration::default();
        configuration.apply_json(json).map_err(|error| error.message)?;
        passes(|| {
            Fake::open(file);
            let backend = Backend::new(configuration.clone()).map_err(|error| error.message)?;
            let block = backend.memory().allocate(LARGEST, RawHandle::NULL).map_err(|error| error.message)?;
            for (n, k) in [(256, 512), (4096, 2560), (250, 128), (64, 192)] {
                for variant in VARIANTS {
                    for weight in weights(n, k, variant.gated) {
                        for m in [0, 1, 2, 8, 9, 16, 17, 33, 64, 65, 192, 1000] {
                            check(&backend, block, variant, weight, m).map_err(|problem| {
                                format!("{json}: {:?} {n} x {k}, {m} rows, {variant:?}: {problem}", weight.encoding)
                            })?;
                        }
                    }
                }
            }
            backend.memory().free(block, RawHandle::NULL).map_err(|error| error.message)
        })?;
        count += 1;
    }
    Ok(format!("{count} configurations"))
}

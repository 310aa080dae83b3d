//! Workspace of the caller's: a query's answer is enough to the byte, less is refused before anything is queued, and the
//! results are those with the library's own workspace.

use crate::attention_cases::{filled_cache, one_row, Keys};
use crate::compare::{encode, FLOATS};
use crate::run::{check, expect_error, Failure, Layout, Run, PLAIN, UNALIGNED};
use crate::weight_formats::formats;
use nvbackend::backend::Backend;
use nvbackend::configuration::Configuration;
use nvbackend::error::{Result, Status};
use nvbackend::executor::Executor;
use nvbackend::kv_cache::KvCache;
use nvbackend::loading::{Source, Weight};
use nvbackend::operation::argmax::Argmax;
use nvbackend::operation::attention::{AttentionConfig, AttentionDecode};
use nvbackend::operation::grouped_linear::{GroupedLinear, Routing};
use nvbackend::operation::linear::{Linear, LinearTensors};
use nvbackend::operation::linear_product::LinearProduct;
use nvbackend::operation::matmul::Matmul;
use nvbackend::operation::quantized_rows::QuantizedRows;
use nvbackend::operation::sample::{Sample, SampleOptions};
use nvbackend::operation::sort_rows::SortRows;
use nvbackend::operation::Activation;
use nvbackend::operation::Operation;
use nvbackend::stream::manager::StreamManager;
use nvbackend::stream::Stream;
use nvbackend::tensor::{DType, Tensor};
use nvbackend::weight::{Arrangement, Encoding, Format, Granularity};
use std::ptr::null_mut;

#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Weight format (none: floats of the input's dtype), rows, input, output, gated.
    Linear(Option<Format>, usize, DType, DType, bool),
    /// A linear product with an input in this encoding.
    Codes(Option<Format>, usize, Encoding),
    /// Weight format, rows, the input's encoding (none: floats), columns: the result is left in 8 bits.
    ToCodes(Option<Format>, usize, Option<Encoding>, usize),
    Grouped(usize),
    Matmul(DType, usize),
    /// Rows, heads, keys.
    Decode(usize, usize, usize),
    Argmax(usize, usize),
    Sample(usize, usize),
    /// Rows, columns; the first 40 or all.
    Sort(usize, usize),
}

#[derive(Debug, Clone, Copy)]
struct Case {
    kind: Kind,
    layout: Layout,
    quantized_activations: bool,
    batch_invariant: bool,
}

const CASE: Case =
    Case { kind: Kind::Argmax(1, 1), layout: PLAIN, quantized_activations: false, batch_invariant: false };

/// An operation over tensors of the case, and what has to live as long.
struct Prepared {
    op: Operation,
    outputs: Vec<Tensor>,
    _weight: Option<Weight>,
    _cache: Option<KvCache>,
}

impl Prepared {
    fn needs(&self, executor: &dyn Executor) -> Result<usize> {
        executor.plan(&self.op).map(|plan| plan.workspace)
    }

    fn queue(&self, executor: &dyn Executor, stream: &Stream) -> Result<()> {
        executor.run(&self.op, stream.raw())
    }

    fn results(&self, run: &Run) -> Result<Vec<u64>> {
        let mut bits = Vec::new();
        for output in &self.outputs {
            bits.extend(run.read(output)?.into_iter().map(f64::to_bits));
        }
        Ok(bits)
    }

    /// Puts the poison back.
    fn poison(&self, run: &Run) -> Result<Vec<u64>> {
        for output in &self.outputs {
            // SAFETY: one of the case's outputs, contiguous.
            unsafe { run.executor().fill(output.data, 0xff, output.span_bytes(), run.stream.raw())? };
        }
        run.stream.synchronize()?;
        self.results(run)
    }
}

fn weight(run: &mut Run, format: Option<Format>, float: DType, gated: bool, (n, k): (usize, usize)) -> Result<Weight> {
    let dtype = if format.is_some() { DType::F32 } else { float };
    let values = |run: &mut Run| encode(dtype, &run.random.normals(n * k, 1.0 / (k as f64).sqrt()));
    let mut parts: Vec<Vec<u8>> = (0..1 + usize::from(gated)).map(|_| values(run)).collect();
    let tensors: Vec<Tensor> =
        parts.iter_mut().map(|part| Tensor::new(part.as_mut_ptr().cast(), dtype, &[n, k])).collect();
    let arrangement = if gated { Arrangement::Gated } else { Arrangement::Stacked };
    Weight::new(run.device.backend.memory(), &tensors, arrangement, Source::Host, format, run.stream)
}

/// Input in 8 bits, [m, K].
fn codes(run: &mut Run, m: usize, encoding: Encoding, layout: Layout) -> Result<QuantizedRows> {
    let codes: Vec<u8> = (0..m * K).map(|_| run.random.below(100) as u8).collect();
    let scales: Vec<u8> = (0..m).flat_map(|_| 0.01f32.to_le_bytes()).collect();
    let row_stride = K + layout.padding;
    let data = run.byte_rows((m, K), row_stride, layout.offset, Some(&codes))?;
    let scales = run.byte_rows((m, 4), 4, 0, Some(&scales))?.cast();
    Ok(QuantizedRows { data, scales, given_scales: false, encoding, rows: m, columns: K, row_stride })
}

const N: usize = 128;
const K: usize = 512;

fn prepare(run: &mut Run, case: &Case) -> std::result::Result<Prepared, Failure> {
    let none = |op, outputs| Prepared { op, outputs, _weight: None, _cache: None };
    Ok(match case.kind {
        Kind::Linear(format, m, input, output, gated) => {
            let weight = weight(run, format, input, gated, (N, K))?;
            let (input, _) = run.normal(input, &[m, K], case.layout, 1.0)?;
            let output = run.output(output, &[m, N], PLAIN)?;
            let op = LinearProduct::new(input, weight.view(), None, Activation::None, output)?;
            Prepared { _weight: Some(weight), ..none(op.into(), vec![output]) }
        }
        Kind::Codes(format, m, encoding) => {
            let weight = weight(run, format, DType::Bf16, false, (N, K))?;
            let rows = codes(run, m, encoding, case.layout)?;
            let output = run.output(DType::Bf16, &[m, N], PLAIN)?;
            let op = Linear::new(
                LinearTensors { quantized_input: Some(rows), output: Some(output), ..LinearTensors::default() },
                weight.view(),
                Activation::Silu,
            )?;
            Prepared { _weight: Some(weight), ..none(op.into(), vec![output]) }
        }
        Kind::ToCodes(format, m, encoding, n) => {
            let weight = weight(run, format, DType::Bf16, false, (n, K))?;
            let mut tensors = LinearTensors::default();
            match encoding {
                Some(encoding) => tensors.quantized_input = Some(codes(run, m, encoding, case.layout)?),
                None => tensors.input = Some(run.normal(DType::Bf16, &[m, K], case.layout, 1.0)?.0),
            }
            let data = run.byte_rows((m, n), n, 0, None)?;
            let scales = run.output(DType::F32, &[m], PLAIN)?;
            let (encoding, given_scales) = (Encoding::Int8, false);
            let (words, scale_data) = (Tensor::new(data, DType::I32, &[m, n / 4]), scales.data.cast());
            let rows =
                QuantizedRows { data, scales: scale_data, given_scales, encoding, rows: m, columns: n, row_stride: n };
            let output = run.output(DType::Bf16, &[m, n], PLAIN)?;
            let op = Linear::new(
                LinearTensors { output: Some(output), quantized_output: Some(rows), ..tensors },
                weight.view(),
                Activation::GeluTanh,
            )?;
            Prepared { _weight: Some(weight), ..none(op.into(), vec![output, scales, words]) }
        }
        Kind::Grouped(m) => {
            let weight = weight(run, None, DType::Bf16, false, (2 * N, K))?;
            let (input, _) = run.normal(DType::Bf16, &[m, K], case.layout, 1.0)?;
            let offsets = run.integers(&[0, m as i32 / 2, m as i32])?;
            let output = run.output(DType::F32, &[m, N], PLAIN)?;
            let op = GroupedLinear::new(
                input,
                (Routing::Offsets(offsets), 0),
                weight.view(),
                None,
                Activation::None,
                output,
            )?;
            Prepared { _weight: Some(weight), ..none(op.into(), vec![output]) }
        }
        Kind::Matmul(dtype, m) => {
            let (a, _) = run.normal(dtype, &[2, m, K], PLAIN, 1.0)?;
            let (b, _) = run.normal(dtype, &[2, K, N], PLAIN, 1.0)?;
            let output = run.output(DType::F32, &[2, m, N], PLAIN)?;
            none(Matmul::new(a, b, false, false, 1.0, output)?.into(), vec![output])
        }
        Kind::Decode(rows, heads, keys) => {
            let config = AttentionConfig::new(AttentionConfig {
                query_heads: heads,
                kv_heads: heads / 2,
                head_dim: 64,
                scale: 0.0,
                soft_cap: 0.0,
                window: 0,
                causal: true,
                ..AttentionConfig::default()
            })?;
            let all: Vec<Keys> = (0..rows).map(|_| Keys::new(run, &config, DType::Bf16, keys)).collect();
            let placed: Vec<(usize, &Keys)> = all.iter().enumerate().collect();
            let cache = filled_cache(run, &config, DType::Bf16, rows, keys + 8, &placed)?;
            let shape = [rows, heads, 64];
            let (query, _) = run.normal(DType::Bf16, &shape, PLAIN, 1.0)?;
            let output = run.output(DType::F32, &shape, PLAIN)?;
            let positions = run.integers(&vec![keys as i32 - 1; rows])?;
            let op =
                AttentionDecode::new(config, query, cache.layer(1)?, output, None, one_row(positions, None, keys))?;
            Prepared { _cache: Some(cache), ..none(op.into(), vec![output]) }
        }
        Kind::Argmax(rows, columns) => {
            let (logits, _) = run.normal(DType::F32, &[rows, columns], PLAIN, 1.0)?;
            let tokens = run.output(DType::I32, &[rows], PLAIN)?;
            none(Argmax::new(logits, tokens)?.into(), vec![tokens])
        }
        Kind::Sort(rows, columns) => {
            let (input, _) = run.normal(DType::F32, &[rows, columns], PLAIN, 1.0)?;
            let output = run.output(DType::I32, &[rows, columns.min(40)], PLAIN)?;
            none(SortRows::new(input, output, true)?.into(), vec![output])
        }
        Kind::Sample(rows, columns) => {
            let (logits, _) = run.normal(DType::Bf16, &[rows, columns], PLAIN, 1.0)?;
            let tokens = run.output(DType::I32, &[rows], PLAIN)?;
            let probabilities = run.output(DType::F32, &[rows], PLAIN)?;
            let options = SampleOptions { temperature: 1.0, top_k: 50, top_p: 0.9, seed: 7 };
            let op = Sample::new(logits, options, None, None, tokens, Some(probabilities))?;
            none(op.into(), vec![tokens, probabilities])
        }
    })
}

fn backend(run: &Run, case: &Case) -> Result<Backend> {
    Backend::new(Configuration {
        device: run.device.name.to_string(),
        quantized_activations: case.quantized_activations,
        batch_invariant: case.batch_invariant,
        ..Configuration::default()
    })
}

fn cases() -> Vec<Case> {
    let rows = |encoding| Format::new(encoding, Granularity::Rows, false, false).ok();
    let mut cases = Vec::new();
    let mut add = |kind| cases.push(Case { kind, ..CASE });
    for m in [1, 8, 17, 40, 200] {
        for dtype in FLOATS {
            add(Kind::Linear(None, m, dtype, dtype, m % 2 == 1));
        }
        add(Kind::Linear(None, m, DType::Bf16, DType::F16, false));
        for format in formats().into_iter().filter(|format| !format.clipping && !format.zero_points) {
            add(Kind::Linear(Some(format), m, DType::Bf16, DType::Bf16, m % 2 == 0));
        }
        for encoding in [Encoding::Int8, Encoding::Fp8E4m3] {
            add(Kind::Codes(rows(encoding), m, encoding));
            add(Kind::Codes(None, m, encoding));
        }
        add(Kind::ToCodes(None, m, None, N));
        add(Kind::ToCodes(rows(Encoding::Int8), m, None, N));
        add(Kind::ToCodes(rows(Encoding::Int8), m, Some(Encoding::Int8), N));
        add(Kind::ToCodes(rows(Encoding::Fp8E4m3), m, Some(Encoding::Int8), N));
        add(Kind::Grouped(m));
        add(Kind::Matmul(DType::Bf16, m));
    }
    // More than one slice of 64 MiB of f32, the last of a few rows.
    add(Kind::ToCodes(None, 517, None, 1 << 15));
    add(Kind::ToCodes(rows(Encoding::Int8), 2400, Some(Encoding::Int8), 14336));
    for (rows, heads, keys) in [(1, 8, 5000), (3, 4, 100), (40, 8, 300), (250, 16, 20)] {
        add(Kind::Decode(rows, heads, keys));
    }
    for (rows, columns) in [(1, 262_144), (5, 1000), (3, 1)] {
        add(Kind::Argmax(rows, columns));
        add(Kind::Sample(rows, columns));
        add(Kind::Sort(rows, columns));
    }
    // One variant of each product, in turn.
    let products = |case: &&Case| match case.kind {
        Kind::ToCodes(_, m, ..) => m <= 200,
        kind => !matches!(kind, Kind::Decode(..) | Kind::Argmax(..) | Kind::Sample(..) | Kind::Sort(..)),
    };
    let variant = |(i, &case): (usize, &Case)| {
        let unaligned = Case { layout: UNALIGNED, ..case };
        [
            unaligned,
            Case { quantized_activations: true, ..case },
            Case { batch_invariant: true, ..case },
            Case { batch_invariant: true, ..unaligned },
        ][i % 4]
    };
    let options: Vec<Case> = cases.iter().filter(products).enumerate().map(variant).collect();
    [cases, options].concat()
}

#[test]
fn as_much_as_the_query_says() {
    check("caller's workspace", &cases(), |run, case| {
        let backend = backend(run, case)?;
        let executor = backend.executor();
        let prepared = prepare(run, case)?;
        let poison = prepared.results(run)?;
        prepared.queue(&**executor, run.stream)?;
        let expected = prepared.results(run)?;
        let bytes = prepared.needs(&**executor)?;
        if run.device.is_cpu() && bytes != 0 {
            return Err(format!("{bytes} bytes on the CPU").into());
        }
        let stream = Stream::new(executor, 0)?;
        // Between guards, so that a byte written behind it is seen.
        let data = run.byte_rows((1, bytes.max(1)), bytes.max(1), 0, None)?;
        for given in [bytes.max(1), bytes.saturating_sub(1)].into_iter().take_while(|&given| given > 0) {
            // SAFETY: a block of the case's, which outlives the stream.
            unsafe { stream.set_workspace(data, given)? };
            prepared.poison(run)?;
            // Twice: counters are left as they were found.
            let outcome = prepared.queue(&**executor, &stream).and_then(|()| prepared.queue(&**executor, &stream));
            stream.synchronize()?;
            let results = prepared.results(run)?;
            if given >= bytes {
                outcome?;
                if results != expected {
                    return Err(format!("other results with {given} bytes of workspace").into());
                }
                continue;
            }
            let (needed, given) = (bytes.to_string(), given.to_string());
            expect_error(outcome, Status::InvalidArgument, &["workspace", &needed, &given])?;
            if results != poison {
                return Err("a refused call has written".to_string().into());
            }
        }
        // SAFETY: nothing is set.
        unsafe { stream.set_workspace(null_mut(), 0)? };
        prepared.queue(&**executor, &stream)?;
        stream.synchronize()?;
        match prepared.results(run)? == expected {
            true => Ok(()),
            false => Err("other results once the workspace is taken away".to_string().into()),
        }
    });
}

/// Operations that need workspace of different shapes share one, in any order.
#[test]
fn one_workspace_for_all() {
    check("shared workspace", &[()], |run, ()| {
        let case = CASE;
        let backend = backend(run, &case)?;
        let executor = backend.executor();
        let int4 = Format::new(Encoding::Int4, Granularity::Groups(32), false, false).ok();
        let kinds = [
            Kind::Decode(40, 8, 300),
            Kind::Linear(int4, 40, DType::Bf16, DType::Bf16, false),
            Kind::Decode(250, 16, 20),
            Kind::Sample(4, 50_000),
            Kind::Linear(int4, 200, DType::Bf16, DType::F32, true),
            Kind::ToCodes(int4, 70, None, N),
            Kind::Codes(Format::new(Encoding::Int8, Granularity::Rows, false, false).ok(), 200, Encoding::Int8),
            Kind::Argmax(2, 100_000),
            Kind::Sort(2, 100_000),
        ];
        let mut all = Vec::new();
        for kind in kinds {
            all.push(prepare(run, &Case { kind, ..case })?);
        }
        let mut expected = Vec::new();
        let mut bytes = 1;
        for prepared in &all {
            prepared.queue(&**executor, run.stream)?;
            expected.push(prepared.results(run)?);
            bytes = bytes.max(prepared.needs(&**executor)?);
        }
        let stream = Stream::new(executor, 0)?;
        let data = run.byte_rows((1, bytes), bytes, 0, None)?;
        // SAFETY: a block of the case's, which outlives the stream.
        unsafe { stream.set_workspace(data, bytes)? };
        // As they stand, backwards, and beginning in the middle.
        let last = all.len() - 1;
        let orders: [&dyn Fn(usize) -> usize; 3] = [&|i| i, &|i| last - i, &|i| (i + last / 2) % all.len()];
        for (round, order) in orders.iter().enumerate() {
            for prepared in &all {
                prepared.poison(run)?;
            }
            for place in 0..all.len() {
                all[order(place)].queue(&**executor, &stream)?;
            }
            stream.synchronize()?;
            for (place, prepared) in all.iter().enumerate() {
                if prepared.results(run)? != expected[place] {
                    return Err(format!("round {round}: other results of {:?}", kinds[place]).into());
                }
            }
        }
        #[cfg(feature = "cuda")]
        if !run.device.is_cpu() {
            return capture::replay(run, &stream, data, bytes, &**executor, &all, &expected);
        }
        Ok(())
    });
}

#[test]
fn what_is_no_workspace_is_refused() {
    check("refused workspace", &[()], |run, ()| {
        let executor = run.device.backend.executor();
        let stream = Stream::new(executor, 0)?;
        let memory = run.device.backend.memory();
        let block = memory.allocate(4096, run.stream.raw())?;
        let freed = memory.allocate(4096, run.stream.raw())?;
        memory.free(freed, run.stream.raw())?;
        run.stream.synchronize()?;
        let host = [0u8; 1024];
        let mut wrong: Vec<(*mut std::ffi::c_void, usize, &[&str])> = vec![
            (null_mut(), 4096, &["NULL", "4096"]),
            (block, 0, &["bytes is 0"]),
            (block.wrapping_byte_add(128), 1024, &["multiple of 256"]),
            (block, 1 << 40, &["live block"]),
        ];
        if std::env::var("NVB_TEST_POOLING").map_or(true, |value| value != "off") {
            wrong.push((freed, 4096, &["live block"]));
        }
        if !run.device.is_cpu() {
            let aligned = (host.as_ptr() as usize).next_multiple_of(256) as *mut std::ffi::c_void;
            wrong.push((aligned, 256, &["not memory of"]));
        }
        for (data, bytes, words) in wrong {
            // SAFETY: refused.
            expect_error(unsafe { stream.set_workspace(data, bytes) }, Status::InvalidArgument, words)?;
        }
        let manager = StreamManager::new(executor, 1)?;
        let shared = manager.acquire(0)?;
        // SAFETY: refused.
        let outcome = unsafe { shared.set_workspace(block, 4096) };
        expect_error(outcome, Status::InvalidArgument, &["stream manager"])?;
        // SAFETY: a live block, taken away again before it is freed.
        unsafe {
            stream.set_workspace(block, 4096)?;
            stream.set_workspace(null_mut(), 0)?;
        }
        Ok(memory.free(block, run.stream.raw())?)
    });
}

/// Graphs of work with a caller's workspace, which allocate nothing.
#[cfg(feature = "cuda")]
mod capture {
    use super::{Executor, Failure, Prepared, Run, Status, Stream};
    use crate::run::{expect_error, Outcome};
    use cust::sys::{self, cudaError_enum, CUgraphNodeType_enum, CUresult};
    use std::ffi::c_void;
    use std::ptr::null_mut;

    fn ok(code: CUresult) -> Outcome {
        match code {
            cudaError_enum::CUDA_SUCCESS => Ok(()),
            other => Err(Failure::from(format!("the driver answers {other:?}"))),
        }
    }

    /// Other tests end backends meanwhile, which waits for the device and so invalidates captures of any thread.
    const ATTEMPTS: usize = 20;

    pub fn replay(
        run: &Run,
        stream: &Stream,
        workspace: *mut c_void,
        bytes: usize,
        executor: &dyn Executor,
        all: &[Prepared],
        expected: &[Vec<u64>],
    ) -> Outcome {
        let raw = stream.raw().0.cast();
        let (mut context, mut graph, mut executable) = (null_mut(), null_mut(), null_mut());
        // SAFETY: valid pointers, a live stream, and handles that are destroyed once.
        unsafe {
            ok(sys::cuDevicePrimaryCtxRetain(&mut context, 0))?;
            ok(sys::cuCtxSetCurrent(context))?;
            let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            for attempts_left in (0..ATTEMPTS).rev() {
                ok(sys::cuStreamBeginCapture_v2(raw, mode))?;
                let queued = all.iter().try_for_each(|prepared| prepared.queue(executor, stream));
                let refused = stream.set_workspace(workspace, bytes);
                let ended = sys::cuStreamEndCapture(raw, &mut graph);
                if ended == cudaError_enum::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED && attempts_left > 0 {
                    continue;
                }
                ok(ended)?;
                queued?;
                expect_error(refused, Status::InvalidArgument, &["captured"])?;
                break;
            }
            let mut count = 0;
            ok(sys::cuGraphGetNodes(graph, null_mut(), &mut count))?;
            let mut nodes = vec![null_mut(); count];
            ok(sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count))?;
            for node in nodes {
                let mut kind = CUgraphNodeType_enum::CU_GRAPH_NODE_TYPE_EMPTY;
                ok(sys::cuGraphNodeGetType(node, &mut kind))?;
                if matches!(
                    kind,
                    CUgraphNodeType_enum::CU_GRAPH_NODE_TYPE_MEM_ALLOC
                        | CUgraphNodeType_enum::CU_GRAPH_NODE_TYPE_MEM_FREE
                ) {
                    return Err("the graph allocates".to_string().into());
                }
            }
            ok(sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0))?;
        }
        for round in 0..3 {
            for prepared in all {
                prepared.poison(run)?;
            }
            // SAFETY: an executable graph whose memory lives, and a live stream.
            ok(unsafe { sys::cuGraphLaunch(executable, raw) })?;
            stream.synchronize()?;
            for (prepared, expected) in all.iter().zip(expected) {
                if prepared.results(run)? != *expected {
                    return Err(format!("other results in replay {round}").into());
                }
                // Between replays the workspace serves work that is not captured.
                prepared.queue(executor, stream)?;
            }
        }
        stream.synchronize()?;
        // SAFETY: handles of this function, whose work has run.
        unsafe {
            ok(sys::cuGraphExecDestroy(executable))?;
            ok(sys::cuGraphDestroy(graph))?;
            ok(sys::cuCtxSetCurrent(null_mut()))?;
            ok(sys::cuDevicePrimaryCtxRelease_v2(0))
        }
    }
}

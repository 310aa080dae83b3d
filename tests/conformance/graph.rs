//! Graphs: random lists of operations on shared memory give, recorded and launched, the bytes that the calls give.

use crate::random::Random;
use crate::run::{check, Run};
use nvbackend::device::{CopyKind, DeviceKind};
use nvbackend::error::Result;
use nvbackend::graph::optimize::{Level, Options};
use nvbackend::graph::Graph;
use nvbackend::operation::elementwise::{Elementwise, ElementwiseKind};
use nvbackend::operation::linear::{Linear, LinearTensors};
use nvbackend::operation::memory_copy::MemoryCopy;
use nvbackend::operation::memory_fill::MemoryFill;
use nvbackend::operation::rms_norm::RmsNorm;
use nvbackend::operation::softmax::Softmax;
use nvbackend::operation::{Activation, Operation};
use nvbackend::stream::Stream;
use nvbackend::tensor::{DType, Tensor};
use nvbackend::weight::WeightView;
use std::ffi::c_void;
use std::sync::Arc;

const WIDTH: usize = 24;
const ROWS: usize = 32;
const BYTES: usize = ROWS * WIDTH * 4;

/// An operation on random rows of the block, in any of which others work too; `None`: it is refused, as where its output
/// overlaps its input in a part.
fn operation(random: &mut Random, block: *mut c_void) -> Option<Operation> {
    let (rows, columns) = (1 + random.below(6), random.choose(&[WIDTH, WIDTH / 2]));
    let mut place = || {
        let at = random.below(ROWS - rows) * WIDTH + random.choose(&[0, WIDTH - columns]);
        block.wrapping_byte_add(4 * at)
    };
    let places = [place(), place(), place()];
    let tensor = |at: usize| Tensor::new(places[at], DType::F32, &[rows, columns]).with_strides(&[WIDTH, 1]);
    let (input, output, second) = (tensor(0), tensor(random.choose(&[0, 1])), tensor(2));
    let vector = |at: usize| Tensor::new(places[at], DType::F32, &[columns]);
    let (weight, post_weight) = (random.choose(&[None, Some(vector(2))]), random.choose(&[None, Some(vector(0))]));
    let bytes = 4 * (1 + random.below(rows * WIDTH / 2));
    let op: Operation = match random.below(9) {
        0 => Softmax::new(input, output, 1.0).ok()?.into(),
        1 => Elementwise::new(ElementwiseKind::Add, input, Some(second), output).ok()?.into(),
        2 => Elementwise::new(ElementwiseKind::Scale(0.5), input, None, output).ok()?.into(),
        3 => {
            let norm = RmsNorm {
                input,
                post_weight,
                residual: Some(second),
                residual_output: None,
                weight,
                output: Some(output),
                quantized_output: None,
                epsilon: 1e-6,
                weight_offset: 0.0,
            };
            norm.validated().ok()?.into()
        }
        4 => {
            let weight = WeightView::float(block, DType::F32, columns, columns, columns, false);
            let (input, output) = (Some(input), Some(tensor(random.choose(&[1, 2]))));
            let tensors = LinearTensors { input, output, ..LinearTensors::default() };
            Linear::new(tensors, weight, Activation::None).ok()?.into()
        }
        5 => {
            let kind = ElementwiseKind::Activation(Activation::Silu);
            Elementwise::new(kind, input, None, output).ok()?.into()
        }
        6 => Elementwise::new(ElementwiseKind::Convert, input, None, output).ok()?.into(),
        // SAFETY: rows of the block, which lives as long as the operation is used.
        7 => unsafe { MemoryCopy::new(places[0], places[1], bytes, CopyKind::DeviceToDevice) }.into(),
        // SAFETY: as above.
        _ => unsafe { MemoryFill::new(places[0], 0x3f, bytes) }.into(),
    };
    op.expect_apart().is_ok().then_some(op)
}

/// What the block holds after `work`, which begins with the same bytes each time.
fn result(run: &Run, block: *mut c_void, bytes: &[u8], work: impl FnOnce() -> Result<()>) -> Result<Vec<u8>> {
    let (executor, raw) = (run.executor(), run.stream.raw());
    let mut after = vec![0u8; BYTES];
    // SAFETY: a block of these bytes, and host memory that outlives the copies.
    unsafe { executor.copy(block, bytes.as_ptr().cast(), BYTES, CopyKind::HostToDevice, raw)? };
    run.stream.synchronize()?;
    work()?;
    // SAFETY: as above.
    unsafe { executor.copy(after.as_mut_ptr().cast(), block, BYTES, CopyKind::DeviceToHost, raw)? };
    run.stream.synchronize()?;
    Ok(after)
}

#[test]
fn launches_give_what_the_calls_give() {
    let lengths: Vec<usize> = (0..40).map(|case| case % 20).collect();
    check("graphs", &lengths, |run, &length| {
        let (backend, raw) = (&run.device.backend, run.stream.raw());
        let memory = backend.memory().clone();
        let block = memory.allocate(BYTES, raw)?;
        let values: Vec<f32> = run.random.normals(ROWS * WIDTH, 1.0).iter().map(|&value| value as f32).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut list = Vec::new();
        while list.len() < length {
            list.extend(operation(&mut run.random, block));
        }
        let stream = Arc::new(Stream::new(backend.executor(), 0)?);
        let queue = || list.iter().try_for_each(|op| backend.queue(op.clone(), &stream));
        let eager = result(run, block, &bytes, || queue().and_then(|()| queue()).and_then(|()| stream.synchronize()))?;

        let graph = Graph::new(backend.executor(), backend.memory());
        let unchanged = result(run, block, &bytes, || {
            graph.begin(&stream)?;
            queue()?;
            graph.end(&stream)
        })?;
        let launch = || graph.launch(&stream);
        let replayed =
            result(run, block, &bytes, || launch().and_then(|()| launch()).and_then(|()| stream.synchronize()))?;
        let nodes = &graph.recorded().expect("it was recorded").nodes;
        let earlier = |(index, deps): (usize, &[u32])| deps.iter().all(|&node| (node as usize) < index);
        let ordered = nodes.iter().map(|node| &node.dependencies[..]).enumerate().all(earlier);
        memory.free(block, raw)?;
        match (unchanged == bytes, replayed == eager, ordered && nodes.len() == length) {
            (true, true, true) => Ok(()),
            found => Err(format!("recorded without running, equal, in order: {found:?}").into()),
        }
    });
}

/// ‖a − b‖ / ‖b‖ of F32 values; 0 where one is not finite, since products of products may be anything then.
fn difference(a: &[u8], b: &[u8]) -> f64 {
    let values = |bytes: &[u8]| -> Vec<f64> {
        bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect()
    };
    let (a, b) = (values(a), values(b));
    if a.iter().chain(&b).any(|value| !value.is_finite()) {
        return 0.0;
    }
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    squares(&mut a.iter().zip(&b).map(|(a, b)| a - b)) / squares(&mut b.iter().copied()).max(f64::MIN_POSITIVE)
}

/// What random lists on few places leave is the same to the bit at the level of exact rewrites, wherever nothing was called internal,
/// and everywhere else within the bounds of the operations.
#[test]
fn optimised_lists_leave_what_the_recorded_ones_leave() {
    let lengths: Vec<usize> = (0..120).map(|case| 2 + case % 24).collect();
    check("optimised graphs", &lengths, |run, &length| {
        let (backend, raw) = (&run.device.backend, run.stream.raw());
        let memory = backend.memory().clone();
        let block = memory.allocate(BYTES, raw)?;
        let values: Vec<f32> = run.random.normals(ROWS * WIDTH, 1.0).iter().map(|&value| value as f32).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        // Of few operations that come again in random order, so that they repeat and follow each other.
        let mut known = Vec::new();
        while known.len() < 2 + length / 2 {
            known.extend(operation(&mut run.random, block));
        }
        let list: Vec<Operation> = (0..length).map(|_| known[run.random.below(known.len())].clone()).collect();
        let stream = Arc::new(Stream::new(backend.executor(), 0)?);
        let graph = Graph::new(backend.executor(), backend.memory());
        graph.begin(&stream)?;
        list.iter().try_for_each(|op| backend.queue(op.clone(), &stream))?;
        graph.end(&stream)?;
        // The last rows are internal, and what is left there is not compared.
        let internal = run.random.choose(&[0, ROWS / 2]) * WIDTH * 4;
        if internal > 0 {
            let start = block as usize + BYTES - internal;
            graph.mark_internal(start..start + internal);
        }
        let launched = || -> Result<Vec<u8>> {
            let work = || (0..2).try_for_each(|_| graph.launch(&stream)).and_then(|()| stream.synchronize());
            let mut after = result(run, block, &bytes, work)?;
            after.truncate(BYTES - internal);
            Ok(after)
        };
        let expected = launched()?;
        for level in [Level::O1, Level::O2, Level::O3] {
            graph.optimize(&Options::of(level), &stream)?;
            let found = launched()?;
            // All of it is F32, in which nothing is rounded in between: on the CPU every rewrite here is exact.
            let exact = level == Level::O1 || backend.executor().info().kind == DeviceKind::Cpu;
            if found != expected && (exact || difference(&found, &expected) > 1e-2) {
                let report = graph.report()?;
                memory.free(block, raw)?;
                return Err(format!("{level:?} changed the result by {:?}", report.rewrites).into());
            }
        }
        Ok(memory.free(block, raw)?)
    });
}

/// A norm whose weight another norm writes late: in the list before it, in the list behind it for the launch after, or on the
/// stream before the launch. Kernels that begin early read none of these before they are there.
#[test]
fn a_weight_that_is_written_late_is_read_as_written() {
    const COLUMNS: usize = 1024;
    const SLOW_COLUMNS: usize = 1 << 16;
    const ROUNDS: usize = 8;
    check("weights that are written late", &[0, 1, 2], |run, &writer| {
        let values = run.random.normals(COLUMNS, 1.0);
        let rounds: Vec<_> = (0..ROUNDS).map(|_| run.random.normals(SLOW_COLUMNS, 1.0)).collect();
        let (backend, raw) = (&run.device.backend, run.stream.raw());
        let (memory, executor) = (backend.memory().clone(), run.executor());
        let bytes = 4 * SLOW_COLUMNS;
        let [source, weight, input, output] = {
            let mut blocks = [std::ptr::null_mut(); 4];
            for block in &mut blocks {
                *block = memory.allocate(bytes, raw)?;
            }
            blocks
        };
        let row = |data, columns| Tensor::new(data, DType::F32, &[1, columns]);
        let norm = |input, weight, output, columns| -> Result<Operation> {
            let norm = RmsNorm {
                input: row(input, columns),
                post_weight: None,
                residual: None,
                residual_output: None,
                weight,
                output: Some(row(output, columns)),
                quantized_output: None,
                epsilon: 1e-6,
                weight_offset: 0.0,
            };
            Ok(norm.validated()?.into())
        };
        // The weight is the start of a row so long that writing it takes a while.
        let slow = norm(source, None, weight, SLOW_COLUMNS)?;
        let read = norm(input, Some(Tensor::new(weight, DType::F32, &[COLUMNS])), output, COLUMNS)?;
        let stream = Arc::new(Stream::new(backend.executor(), 0)?);
        let graph = Graph::new(backend.executor(), backend.memory());
        graph.begin(&stream)?;
        let list = [vec![&slow, &read], vec![&read, &slow], vec![&read]][writer].clone();
        list.iter().try_for_each(|op| backend.queue((*op).clone(), &stream))?;
        graph.end(&stream)?;
        let upload = |block: *mut c_void, values: &[f64]| {
            let values: Vec<f32> = values.iter().map(|&value| value as f32).collect();
            // SAFETY: the block has room for them, and the wait is before they go.
            unsafe { executor.copy(block, values.as_ptr().cast(), 4 * values.len(), CopyKind::HostToDevice, raw)? };
            run.stream.synchronize()
        };
        let download = || -> Result<Vec<u8>> {
            let mut after = vec![0u8; 4 * COLUMNS];
            // SAFETY: as above.
            unsafe { executor.copy(after.as_mut_ptr().cast(), output, after.len(), CopyKind::DeviceToHost, raw)? };
            run.stream.synchronize()?;
            Ok(after)
        };
        upload(input, &values)?;
        let mut found = Ok(());
        for values in &rounds {
            upload(source, values)?;
            // What a launch leaves, and what calls that wait for each other leave.
            let mut outputs = Vec::new();
            for waits in [false, true] {
                upload(weight, &[f64::NAN; COLUMNS])?;
                let calls = || -> Result<()> {
                    if writer != 0 {
                        backend.queue(slow.clone(), &stream)?;
                    }
                    if !waits {
                        return graph.launch(&stream);
                    }
                    stream.synchronize()?;
                    for op in &list {
                        backend.queue((*op).clone(), &stream)?;
                        stream.synchronize()?;
                    }
                    Ok(())
                };
                calls()?;
                stream.synchronize()?;
                outputs.push(download()?);
            }
            let finite = outputs[1].chunks_exact(4).all(|v| f32::from_le_bytes([v[0], v[1], v[2], v[3]]).is_finite());
            if outputs[0] != outputs[1] || !finite {
                found = Err(format!("equal: {}, finite: {finite}", outputs[0] == outputs[1]).into());
                break;
            }
        }
        for block in [source, weight, input, output] {
            memory.free(block, raw)?;
        }
        found
    });
}

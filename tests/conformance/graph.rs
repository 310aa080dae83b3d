//! Graphs: random lists of operations on shared memory give, recorded and launched, the bytes that the calls give.

use crate::random::Random;
use crate::run::{check, Run};
use nvbackend::device::CopyKind;
use nvbackend::error::Result;
use nvbackend::graph::Graph;
use nvbackend::operation::elementwise::{Elementwise, ElementwiseKind};
use nvbackend::operation::memory_copy::MemoryCopy;
use nvbackend::operation::memory_fill::MemoryFill;
use nvbackend::operation::rms_norm::RmsNorm;
use nvbackend::operation::softmax::Softmax;
use nvbackend::operation::Operation;
use nvbackend::stream::Stream;
use nvbackend::tensor::{DType, Tensor};
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
    let bytes = 4 * (1 + random.below(rows * WIDTH / 2));
    let op: Operation = match random.below(6) {
        0 => Softmax::new(input, output, 1.0).ok()?.into(),
        1 => Elementwise::new(ElementwiseKind::Add, input, Some(second), output).ok()?.into(),
        2 => Elementwise::new(ElementwiseKind::Scale(0.5), input, None, output).ok()?.into(),
        3 => {
            let norm = RmsNorm {
                input,
                post_weight: None,
                residual: Some(second),
                residual_output: None,
                weight: None,
                output: Some(output),
                quantized_output: None,
                epsilon: 1e-6,
                weight_offset: 0.0,
            };
            norm.validated().ok()?.into()
        }
        // SAFETY: rows of the block, which lives as long as the operation is used.
        4 => unsafe { MemoryCopy::new(places[0], places[1], bytes, CopyKind::DeviceToDevice) }.into(),
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

        let graph = Graph::new(backend.executor());
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

//! A graph recorded, launched on two streams, put to sleep in between, and destroyed: captured where the driver can. It takes
//! over the workspace of another one, which is too small for it.

use crate::engine::{call, tensor, versioned, wrong, Engine, Failure, Handle};
use crate::fake::{fake, Books};
use nvbackend::capi::attention::*;
use nvbackend::capi::graph::*;
use nvbackend::capi::memory::*;
use nvbackend::capi::memory_control::*;
use nvbackend::capi::operations::*;
use nvbackend::capi::stream::*;
use nvbackend::capi::tensor::*;
use nvbackend::capi::weight::*;
use std::ptr::null_mut;

const ROWS: i64 = 48;
const WIDTH: i64 = 64;
const BYTES: usize = (ROWS * WIDTH * 2) as usize;

pub fn run(engine: &Engine) -> Result<(), Failure> {
    let (recorded, other) = (engine.stream()?, engine.stream()?);
    let block = engine.block(4 * BYTES, other.raw)?;
    let at = |place: usize| block.pointer.wrapping_byte_add(place * BYTES);
    let host = vec![0u16; (WIDTH * WIDTH) as usize];
    let part = tensor(host.as_ptr().cast_mut().cast(), NVB_DTYPE_BF16, &[WIDTH, WIDTH]);
    let weight = engine.weight(&[part], NVB_WEIGHT_STACKED, NVB_SOURCE_HOST)?;
    let cache = engine.kv_cache()?;
    let mut options: nvb_attention_options = versioned();
    (options.query_heads, options.kv_heads, options.head_dim) = (2, 1, 32);
    let mut attention = Handle::new(nvb_attention_destroy);
    call!(nvb_attention_create(engine.backend.raw, &options, &mut attention.raw))?;

    let mut small = Handle::new(nvb_graph_destroy);
    call!(nvb_graph_create(engine.backend.raw, &mut small.raw))?;
    call!(nvb_graph_begin(small.raw, recorded.raw))?;
    call!(nvb_memory_fill(engine.memory.raw, at(3), 7, BYTES, recorded.raw))?;
    call!(nvb_graph_end(small.raw, recorded.raw))?;
    launch(engine, &small, &other, at(3))?;

    let mut graph = Handle::new(nvb_graph_destroy);
    call!(nvb_graph_create(engine.backend.raw, &mut graph.raw))?;
    let before = books();
    call!(nvb_graph_begin(graph.raw, recorded.raw))?;
    let stream = recorded.raw;
    let mut linear: nvb_linear_args = versioned();
    linear.input = tensor(at(0), NVB_DTYPE_BF16, &[ROWS, WIDTH]);
    linear.output = tensor(at(1), NVB_DTYPE_BF16, &[ROWS, WIDTH]);
    linear.weight = weight.raw;
    call!(nvb_linear(engine.backend.raw, &linear, stream))?;
    let mut decode: nvb_attention_decode_args = versioned();
    decode.query = tensor(at(0), NVB_DTYPE_BF16, &[2, 2, 32]);
    decode.output = tensor(at(1), NVB_DTYPE_BF16, &[2, 2, 32]);
    (decode.cache, decode.positions) = (cache.raw, tensor(at(2), NVB_DTYPE_I32, &[2]));
    call!(nvb_attention_decode(attention.raw, &decode, stream))?;
    call!(nvb_memory_fill(engine.memory.raw, at(2), 7, BYTES, stream))?;
    call!(nvb_memory_copy(engine.memory.raw, at(3), at(2), BYTES, NVB_COPY_DEVICE_TO_DEVICE, stream))?;
    call!(nvb_graph_end(graph.raw, stream))?;
    if books().launches != before.launches {
        return Err(wrong("nvb_graph_end", "a kernel was launched while the graph was recorded"));
    }
    // The graph keeps what it needs of these.
    drop((weight, cache, attention, recorded));

    call!(nvb_graph_share_workspace(graph.raw, small.raw))?;
    launch(engine, &graph, &other, at(3))?;
    launch(engine, &small, &other, at(3))?;
    let once = books();
    launch(engine, &graph, &other, at(3))?;
    let twice = books();
    if twice.launches - once.launches != 2 || (twice.blocks, twice.graphs) != (once.blocks, once.graphs) {
        return Err(wrong("nvb_graph_launch", format!("{once:?}, and after the second launch {twice:?}")));
    }
    if sleep_and_wake(engine)? {
        launch(engine, &graph, &other, at(3))?;
    }
    drop(small);
    launch(engine, &graph, &other, at(3))?;
    let mut info: nvb_graph_info = versioned();
    call!(nvb_graph_get_info(graph.raw, &mut info))?;
    match (info.nodes, info.workspace_graphs) {
        (4, 1) => Ok(()),
        _ => Err(wrong("nvb_graph_get_info", format!("{} nodes, {} graphs", info.nodes, info.workspace_graphs))),
    }
}

fn books() -> Books {
    fake().map_or_else(Books::default, |fake| fake.books())
}

/// Launches, and looks at what the last node wrote to `copied`.
fn launch(
    engine: &Engine,
    graph: &Handle<nvb_graph>,
    stream: &Handle<nvb_stream>,
    copied: *mut std::ffi::c_void,
) -> Result<(), Failure> {
    let mut bytes = vec![0u8; BYTES];
    call!(nvb_memory_fill(engine.memory.raw, copied, 0, BYTES, stream.raw))?;
    call!(nvb_graph_launch(graph.raw, stream.raw))?;
    let to = bytes.as_mut_ptr().cast();
    call!(nvb_memory_copy(engine.memory.raw, to, copied, BYTES, NVB_COPY_DEVICE_TO_HOST, stream.raw))?;
    call!(nvb_stream_synchronize(stream.raw))?;
    match bytes.iter().all(|&byte| byte == 7) {
        true => Ok(()),
        false => Err(wrong("nvb_graph_launch", "the last node has not run")),
    }
}

/// Lets the engine's memory sleep and wakes it, where it can.
fn sleep_and_wake(engine: &Engine) -> Result<bool, Failure> {
    match call!(nvb_memory_sleep(engine.memory.raw, 1, null_mut())) {
        Err(failure) if failure.status == nvbackend::capi::status::NVB_ERROR_UNSUPPORTED => Ok(false),
        Err(failure) => Err(failure),
        Ok(()) => {
            let woken = call!(nvb_memory_wake(engine.memory.raw, null_mut()));
            // Not even a fault may leave the engine asleep.
            if woken.is_err() {
                let _ = call!(nvb_memory_wake(engine.memory.raw, null_mut()));
            }
            woken.map(|()| true)
        }
    }
}

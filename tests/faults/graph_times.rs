//! What graphs cost the host, on a driver that does nothing: recording an operation, optimising a list and replaying it.
//!
//! Each figure is the best of several rounds, so that a machine that does other things meanwhile does not decide.

use crate::driver::{passes, works};
use crate::engine::{call, tensor, versioned, Engine, Failure, Handle};
use crate::fake::Fake;
use nvbackend::capi::attention::*;
use nvbackend::capi::graph::*;
use nvbackend::capi::graph_optimize::*;
use nvbackend::capi::operations::*;
use nvbackend::capi::stream::*;
use nvbackend::capi::tensor::*;
use nvbackend::capi::weight::*;
use std::path::Path;
use std::ptr::null_mut;
use std::time::Instant;

const LAYERS: usize = 48;
const NODES: usize = 8 * LAYERS;
const WIDTH: i64 = 64;
const HEADS: i64 = 2;
const HEAD_DIM: i64 = 32;
const ROUNDS: usize = 20;
/// A launch that changes nothing, from its call to its return.
const MOST_REPLAY: f64 = 10e-6;
/// Of an operation, beyond its eager call.
const MOST_RECORDING: f64 = 2e-6;
const MOST_OPTIMISATION: f64 = 10e-3;
/// Launches whose books and memory must not grow.
const LAUNCHES: usize = 100_000;

/// A decode step of a model, in BF16.
struct Model<'a> {
    engine: &'a Engine,
    block: crate::engine::Block<'a>,
    square: Handle<nvb_weight>,
    gated: Handle<nvb_weight>,
    cache: Handle<nvb_kv_cache>,
    attention: Handle<nvb_attention>,
}

impl<'a> Model<'a> {
    fn new(engine: &'a Engine) -> Result<Model<'a>, Failure> {
        let host = vec![0u16; (WIDTH * WIDTH) as usize];
        let part = || tensor(host.as_ptr().cast_mut().cast(), NVB_DTYPE_BF16, &[WIDTH, WIDTH]);
        let mut options: nvb_attention_options = versioned();
        (options.query_heads, options.kv_heads, options.head_dim) = (HEADS as u32, 1, HEAD_DIM as u32);
        let mut attention = Handle::new(nvb_attention_destroy);
        call!(nvb_attention_create(engine.backend.raw, &options, &mut attention.raw))?;
        Ok(Model {
            block: engine.block(1 << 16, null_mut())?,
            square: engine.weight(&[part()], NVB_WEIGHT_STACKED, NVB_SOURCE_HOST)?,
            gated: engine.weight(&[part(), part()], NVB_WEIGHT_GATED, NVB_SOURCE_HOST)?,
            cache: engine.kv_cache()?,
            attention,
            engine,
        })
    }

    fn at(&self, place: usize, dtype: u32, shape: &[i64]) -> nvb_tensor {
        tensor(self.block.pointer.wrapping_byte_add(4096 * place), dtype, shape)
    }

    fn row(&self, place: usize) -> nvb_tensor {
        self.at(place, NVB_DTYPE_BF16, &[1, WIDTH])
    }

    fn product(
        &self,
        weight: &Handle<nvb_weight>,
        (from, to): (usize, usize),
        stream: *mut nvb_stream,
    ) -> Result<(), Failure> {
        let mut args: nvb_linear_args = versioned();
        (args.input, args.output, args.weight) = (self.row(from), self.row(to), weight.raw);
        call!(nvb_linear(self.engine.backend.raw, &args, stream))
    }

    fn norm(&self, stream: *mut nvb_stream) -> Result<(), Failure> {
        let mut args: nvb_rms_norm_args = versioned();
        (args.input, args.residual, args.residual_output) = (self.row(5), self.row(0), self.row(0));
        (args.weight, args.output) = (self.at(6, NVB_DTYPE_BF16, &[WIDTH]), self.row(1));
        call!(nvb_rms_norm(self.engine.backend.raw, &args, stream))
    }

    /// Eight calls a layer.
    fn step(&self, stream: *mut nvb_stream) -> Result<(), Failure> {
        let heads = |place, count| self.at(place, NVB_DTYPE_BF16, &[1, count, HEAD_DIM]);
        for _ in 0..LAYERS {
            self.norm(stream)?;
            self.product(&self.square, (1, 2), stream)?;
            let mut rope: nvb_rope_args = versioned();
            (rope.query, rope.query_output) = (heads(2, HEADS), heads(2, HEADS));
            (rope.key, rope.value) = (heads(3, 1), heads(4, 1));
            (rope.positions, rope.cache) = (self.at(7, NVB_DTYPE_I32, &[1]), self.cache.raw);
            call!(nvb_rope(self.engine.backend.raw, &rope, stream))?;
            let mut decode: nvb_attention_decode_args = versioned();
            (decode.query, decode.output) = (heads(2, HEADS), heads(8, HEADS));
            (decode.cache, decode.positions) = (self.cache.raw, self.at(7, NVB_DTYPE_I32, &[1]));
            call!(nvb_attention_decode(self.attention.raw, &decode, stream))?;
            self.product(&self.square, (8, 5), stream)?;
            self.norm(stream)?;
            self.product(&self.gated, (1, 9), stream)?;
            self.product(&self.square, (9, 5), stream)?;
        }
        Ok(())
    }

    fn record(&self, stream: *mut nvb_stream) -> Result<(Handle<nvb_graph>, f64), Failure> {
        let mut graph = Handle::new(nvb_graph_destroy);
        call!(nvb_graph_create(self.engine.backend.raw, &mut graph.raw))?;
        let start = Instant::now();
        call!(nvb_graph_begin(graph.raw, stream))?;
        self.step(stream)?;
        call!(nvb_graph_end(graph.raw, stream))?;
        Ok((graph, start.elapsed().as_secs_f64()))
    }
}

/// The least of several rounds.
fn best(mut round: impl FnMut() -> Result<f64, Failure>) -> Result<f64, String> {
    let mut least = f64::INFINITY;
    for _ in 0..ROUNDS {
        least = least.min(works(round())?);
    }
    Ok(least)
}

fn timed(work: impl FnOnce() -> Result<(), Failure>) -> Result<f64, Failure> {
    let start = Instant::now();
    work().map(|()| start.elapsed().as_secs_f64())
}

pub fn host_times(file: &Path) -> Result<String, String> {
    passes(|| {
        let fake = Fake::open(file);
        let engine = works(Engine::new())?;
        let stream = works(engine.stream())?;
        let model = works(Model::new(&engine))?;
        let eager = best(|| timed(|| model.step(stream.raw)))? / NODES as f64;
        let recording = best(|| model.record(stream.raw).map(|(_, seconds)| seconds))? / NODES as f64;
        let (graph, _) = works(model.record(stream.raw))?;
        let mut info: nvb_graph_info = versioned();
        works(call!(nvb_graph_get_info(graph.raw, &mut info)))?;
        let optimisation = best(|| timed(|| call!(nvb_graph_optimize(graph.raw, NVB_OPTIMIZE_O2, std::ptr::null()))))?;
        let launch = || call!(nvb_graph_launch(graph.raw, stream.raw));
        works(launch())?;
        let replay = best(|| timed(launch))?;
        // What is not the library's: the fake driver does the list of a launch one by one.
        let queued = fake.books().launches;
        works(launch())?;
        let kernels = fake.books().launches - queued;
        println!(
            "    {} nodes, {kernels} kernels: {:.2} us an eager call, {:.2} us recorded; {:.2} ms to optimise; {:.2} us a replay",
            info.nodes,
            eager * 1e6,
            recording * 1e6,
            optimisation * 1e3,
            replay * 1e6
        );
        let bounds = [
            ("nodes", f64::from(info.nodes), NODES as f64),
            ("recording an operation", recording, eager + MOST_RECORDING),
            ("optimising", optimisation, MOST_OPTIMISATION),
            ("a replay", replay, MOST_REPLAY),
        ];
        match bounds.iter().find(|(_, found, most)| found > most) {
            None => Ok(()),
            Some((what, found, most)) => Err(format!("{what}: {found:e}, at most {most:e} are allowed")),
        }
    })?;
    Ok(format!("recording, optimising and replaying {LAYERS} layers stay within their times"))
}

fn resident_kilobytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4
}

/// Two graphs that share a workspace, on two streams.
pub fn many_launches(file: &Path) -> Result<String, String> {
    passes(|| {
        let fake = Fake::open(file);
        let engine = works(Engine::new())?;
        let streams = [works(engine.stream())?, works(engine.stream())?];
        let model = works(Model::new(&engine))?;
        let fill = |place: usize| -> Result<Handle<nvb_graph>, Failure> {
            let mut graph = Handle::new(nvb_graph_destroy);
            call!(nvb_graph_create(engine.backend.raw, &mut graph.raw))?;
            call!(nvb_graph_begin(graph.raw, null_mut()))?;
            model.product(&model.square, (1, place), null_mut())?;
            call!(nvb_graph_end(graph.raw, null_mut()))?;
            Ok(graph)
        };
        let graphs = [works(fill(2))?, works(fill(3))?];
        works(call!(nvb_graph_share_workspace(graphs[0].raw, graphs[1].raw)))?;
        let (mut before, mut resident) = (fake.books(), 0);
        for index in 0..LAUNCHES {
            if index == LAUNCHES / 10 {
                (before, resident) = (fake.books(), resident_kilobytes());
            }
            works(call!(nvb_graph_launch(graphs[index % 2].raw, streams[index / 3 % 2].raw)))?;
        }
        let (after, grown) = (fake.books(), resident_kilobytes().saturating_sub(resident));
        let counts =
            |books: &crate::fake::Books| (books.blocks, books.bytes, books.events, books.graphs, books.host_blocks);
        match (counts(&after) == counts(&before), grown < 1024 && resident > 0) {
            (true, true) => Ok(()),
            _ => Err(format!("{before:?} became {after:?}, and {grown} KiB more of host memory")),
        }
    })?;
    Ok(format!("{LAUNCHES} launches leave nothing behind"))
}

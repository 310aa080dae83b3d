//! What an optimised list does on the caller's memory, against the recorded one: its time, and how far its outputs are off.
//!
//! Both lists run for real. What they write is saved before and put back after, through host memory, so nobody else may use it
//! meanwhile.

use super::region::Ranges;
use super::report::{Errors, Times};
use super::workspace::Workspace;
use super::{Node, Recorded};
use crate::allocation::{filled, push};
use crate::device::CopyKind;
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::operation::access::{add_cache, Effect, Extent, Region, Visit};
use crate::operation::Operation;
use crate::stream::{Event, Stream};
use crate::tensor::{CacheLayer, DType, Element};
use half::{bf16, f16};
use std::ops::Range;
use std::sync::Arc;

const WHAT: &str = "a graph's measurement";

/// Memory that a list writes, and what was in it.
struct Saved {
    range: Range<usize>,
    on_host: bool,
    bytes: Vec<u8>,
}

/// A region that somebody may read after a launch.
struct Output {
    node: u32,
    name: &'static str,
    region: Region,
    on_host: bool,
    /// `None`: bytes of which nobody says what they are.
    dtype: Option<DType>,
}

pub struct Measured<'a> {
    recorded: &'a Arc<Recorded>,
    executor: &'a Arc<dyn Executor>,
    workspace: &'a Workspace,
    stream: &'a Stream,
    outputs: Vec<Output>,
    before: Vec<Saved>,
    /// What the recorded list leaves.
    expected: Vec<Saved>,
}

impl<'a> Measured<'a> {
    /// Saves what the list writes, runs it, and puts back what was there.
    pub fn begin(
        recorded: &'a Arc<Recorded>,
        internal: &Ranges,
        workspace: &'a Workspace,
        stream: &'a Stream,
    ) -> Result<Measured<'a>> {
        super::optimize::expect_measurable(stream)?;
        recorded.replay.expect_awake()?;
        stream.synchronize()?;
        let outputs = outputs(&recorded.nodes, internal)?;
        let (executor, before, expected) = (workspace.executor(), Vec::new(), Vec::new());
        let mut measured = Measured { recorded, executor, workspace, stream, outputs, before, expected };
        measured.before = measured.saved()?;
        measured.expected = measured.after(&recorded.nodes)?;
        Ok(measured)
    }

    /// Everything that was written is as it was.
    pub fn end(self) -> Result<()> {
        self.put_back()
    }

    fn saved(&self) -> Result<Vec<Saved>> {
        let mut saved = Vec::new();
        for on_host in [false, true] {
            let mut spans = Vec::new();
            for node in &self.recorded.nodes {
                if writes_host(&node.op) == on_host {
                    let written = node.accesses.iter().filter(|access| access.effect == Effect::Write);
                    for access in written.filter(|access| !access.region.is_empty()) {
                        push(&mut spans, access.region.span(), WHAT)?;
                    }
                }
            }
            for range in Ranges::of(spans).iter() {
                let mut bytes = filled(0u8, range.len(), WHAT)?;
                let (to, from) = (bytes.as_mut_ptr(), range.start as *const u8);
                if on_host {
                    // SAFETY: the recorded copy writes these bytes, which the caller keeps; the stream has been waited for.
                    unsafe { std::ptr::copy_nonoverlapping(from, to, range.len()) };
                } else {
                    let raw = self.stream.raw();
                    // SAFETY: recorded operations write between the first and the last of these bytes, which are the caller's.
                    unsafe { self.executor.copy(to.cast(), from.cast(), range.len(), CopyKind::DeviceToHost, raw)? };
                }
                push(&mut saved, Saved { range: range.clone(), on_host, bytes }, WHAT)?;
            }
        }
        self.stream.synchronize()?;
        Ok(saved)
    }

    /// What the list writes is as it was before.
    pub fn put_back(&self) -> Result<()> {
        for Saved { range, on_host, bytes } in &self.before {
            let (to, from) = (range.start as *mut u8, bytes.as_ptr());
            if *on_host {
                // SAFETY: as in `saved`.
                unsafe { std::ptr::copy_nonoverlapping(from, to, bytes.len()) };
            } else {
                let raw = self.stream.raw();
                // SAFETY: as in `saved`.
                unsafe { self.executor.copy(to.cast(), from.cast(), bytes.len(), CopyKind::HostToDevice, raw)? };
            }
        }
        self.stream.synchronize()
    }

    /// What the list leaves in the memory that the recorded one writes, where the same was before.
    fn after(&self, nodes: &[Node]) -> Result<Vec<Saved>> {
        let run = || {
            nodes.iter().enumerate().try_for_each(|(index, node)| {
                let named = |error: Error| error.context(format_args!("node {index}, {}", node.op.kind().name()));
                self.executor.run(&node.op, self.stream.raw()).map_err(named)
            })?;
            self.stream.synchronize()?;
            self.saved()
        };
        let after = run();
        self.put_back()?;
        after
    }

    pub fn errors_of(&self, nodes: &[Node]) -> Result<Errors> {
        let found = self.after(nodes)?;
        let mut errors =
            Errors { relative: 0.0, absolute: 0.0, outputs: self.outputs.len(), different: 0, worst: None };
        for output in &self.outputs {
            let place = |saved: &&Saved| {
                let holds = saved.range.start <= output.region.start && output.region.end() <= saved.range.end;
                saved.on_host == output.on_host && holds
            };
            let (Some(expected), Some(found)) = (self.expected.iter().find(place), found.iter().find(place)) else {
                continue;
            };
            let (relative, absolute, same) = difference(output, expected, found);
            errors.different += usize::from(!same);
            errors.absolute = errors.absolute.max(absolute);
            if relative > errors.relative {
                (errors.relative, errors.worst) = (relative, Some((output.node, output.name)));
            }
        }
        Ok(errors)
    }

    /// Seconds of one launch, between two events.
    pub fn time_of(&self, list: &Recorded, (start, end): (&Event, &Event)) -> Result<f64> {
        start.record(self.stream)?;
        list.replay.launch(&list.nodes, self.workspace, self.stream)?;
        end.record(self.stream)?;
        self.stream.synchronize()?;
        Ok(f64::from(end.milliseconds_since(start)?) / 1e3)
    }

    /// Medians of launches that take turns.
    pub fn times_of(&self, nodes: &[Node], launches: usize) -> Result<Times> {
        let optimized = Recorded::of(nodes.to_vec())?;
        let lists = [&**self.recorded, &optimized];
        let events = [Event::new(self.executor)?, Event::new(self.executor)?];
        let mut seconds = [Vec::new(), Vec::new()];
        // The first round prepares the lists and is not counted.
        for round in 0..=launches {
            for (list, seconds) in lists.iter().zip(&mut seconds) {
                let time = self.time_of(list, (&events[0], &events[1]))?;
                if round > 0 {
                    push(seconds, time, WHAT)?;
                }
            }
        }
        self.put_back()?;
        let [before, after] = seconds.map(|mut seconds| {
            seconds.sort_unstable_by(f64::total_cmp);
            seconds[seconds.len() / 2]
        });
        Ok(Times { launches, before, after })
    }
}

pub fn expect_not_captured(stream: &Stream) -> Result<()> {
    match stream.executor().stream_is_capturing(stream.raw())? {
        true => Err(Error::invalid("the stream is being captured by CUDA, and nothing can be measured on it")),
        false => Ok(()),
    }
}

fn writes_host(op: &Operation) -> bool {
    matches!(op, Operation::MemoryCopy(copy) if copy.kind == CopyKind::DeviceToHost)
}

/// What an operation reads or writes: the argument, where, how, and of what dtype.
type TypedAccess = (&'static str, Region, Effect, Option<DType>);

/// Takes everything that an operation reads or writes.
#[derive(Default)]
struct Typed {
    all: Vec<TypedAccess>,
    /// Of the cache that is told of.
    cached: Option<DType>,
}

impl Visit for Typed {
    fn add(&mut self, name: &'static str, of: &impl Extent, effect: Effect) {
        self.all.push((name, of.region(), effect, of.dtype().or(self.cached)));
    }

    fn cache(&mut self, layer: &CacheLayer, effect: Effect) {
        self.cached = Some(layer.dtype);
        add_cache(self, layer, effect);
        self.cached = None;
    }
}

/// What the list leaves that nobody of it overwrites and that is not internal.
fn outputs(nodes: &[Node], internal: &Ranges) -> Result<Vec<Output>> {
    let mut all = Vec::new();
    for node in nodes {
        let mut typed = Typed::default();
        node.op.accesses(&mut typed);
        push(&mut all, typed.all, WHAT)?;
    }
    let known: Vec<(Region, DType)> =
        all.iter().flatten().filter_map(|(_, region, _, dtype)| dtype.map(|dtype| (*region, dtype))).collect();
    let mut outputs: Vec<Output> = Vec::new();
    for (index, (node, accesses)) in nodes.iter().zip(&all).enumerate().rev() {
        for (name, region, effect, dtype) in accesses {
            let is_kept = |later: &Output| later.region.contains(region) || later.region == *region;
            if *effect != Effect::Write || region.is_empty() || internal.contain(region) || outputs.iter().any(is_kept)
            {
                continue;
            }
            // A copy has the dtype of what it copies.
            let copied = || {
                let Operation::MemoryCopy(copy) = &node.op else { return None };
                let source = Region { start: copy.source as usize, ..*region };
                known
                    .iter()
                    .find(|(typed, _)| typed.contains(&source) || typed.contains(region))
                    .map(|(_, dtype)| *dtype)
            };
            let (dtype, on_host) = (dtype.or_else(copied), writes_host(&node.op));
            push(&mut outputs, Output { node: index as u32, name, region: *region, on_host, dtype }, WHAT)?;
        }
    }
    outputs.reverse();
    Ok(outputs)
}

/// Relative error, largest difference, and whether all bits are the same.
fn difference(output: &Output, expected: &Saved, found: &Saved) -> (f64, f64, bool) {
    let Output { region, dtype, .. } = output;
    let (mut squares, mut reference, mut most, mut same) = (0f64, 0f64, 0f64, true);
    let last = if region.stride == 0 { 1 } else { region.rows };
    for row in 0..last {
        let at = region.start - expected.range.start + row * region.stride;
        let (expected, found) = (&expected.bytes[at..at + region.row_bytes], &found.bytes[at..at + region.row_bytes]);
        if expected == found {
            if let Some(values) = dtype.and_then(|dtype| floats(dtype, expected)) {
                reference += values.filter(|value| value.is_finite()).map(|value| value * value).sum::<f64>();
            }
            continue;
        }
        same = false;
        let Some(dtype) = *dtype else { return (f64::INFINITY, f64::INFINITY, false) };
        let (Some(expected), Some(found)) = (floats(dtype, expected), floats(dtype, found)) else { continue };
        for (expected, found) in expected.zip(found) {
            let off = match expected == found || (expected.is_nan() && found.is_nan()) {
                true => 0.0,
                // An infinity or NaN on one side alone is infinitely far off.
                false if !expected.is_finite() || !found.is_finite() => f64::INFINITY,
                false => (expected - found).abs(),
            };
            squares += off * off;
            most = most.max(off);
            if expected.is_finite() {
                reference += expected * expected;
            }
        }
    }
    let relative = if squares == 0.0 { 0.0 } else { (squares / reference.max(f64::MIN_POSITIVE)).sqrt() };
    (relative, most, same)
}

/// The bytes as floats; `None` for integers, of which alone is told whether they differ.
fn floats(dtype: DType, bytes: &[u8]) -> Option<Box<dyn Iterator<Item = f64> + '_>> {
    let two = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
    match dtype {
        DType::F32 => {
            let value = |bytes: &[u8]| f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
            Some(Box::new(bytes.chunks_exact(4).map(value)))
        }
        DType::F16 => Some(Box::new(bytes.chunks_exact(2).map(move |bytes| f16::from_bits(two(bytes)).to_f64()))),
        DType::Bf16 => {
            let value = move |bytes: &[u8]| f64::from(Element::to_f32(bf16::from_bits(two(bytes))));
            Some(Box::new(bytes.chunks_exact(2).map(value)))
        }
        // A byte of a scaled tensor says nothing of the value.
        DType::I32 | DType::F8E4m3 | DType::F8E5m2 | DType::KvInt8 | DType::KvQ8_0 | DType::KvQ4_0 => None,
    }
}

//! The product that candidates are measured on: random inputs, and copies of the weight that take turns, so that each launch
//! reads it from memory as it would in a model.

use super::case::{Case, CaseWeight};
use crate::allocation::{collected, filled, with_room};
use crate::device::CopyKind;
use crate::error::Result;
use crate::loading::{Source, Weight};
use crate::memory::{Allocation, MemoryManager};
use crate::operation::linear_product::LinearProduct;
use crate::stream::Stream;
use crate::tensor::{DType, Element, Matrix, Tensor};
use crate::weight::{Arrangement, Scales, WeightView};
use half::{bf16, f16};
use std::ops::Range;
use std::sync::Arc;

pub struct Workload {
    op: LinearProduct,
    /// Views of the weight's copies.
    weights: Vec<WeightView>,
    /// All that the views point into.
    _blocks: Vec<Allocation>,
    output: Allocation,
    /// F32, for the rows of one range.
    reference: Allocation,
}

/// Copies of the weight are as many as make so many times the last cache level.
const CACHES: u64 = 2;

/// A random weight repeats itself after so many elements, a prime, so that a large one does not fill the host's memory.
const PATTERN: usize = 4_194_301;

impl Workload {
    /// `cache_bytes`: of the last level; `rows`: those that will be compared.
    pub fn new(
        memory: &Arc<MemoryManager>,
        case: &Case,
        cache_bytes: u64,
        rows: &[Range<usize>],
        stream: &Stream,
    ) -> Result<Workload> {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let made;
        let (view, span) = match case.weight {
            CaseWeight::Given { view, span } => (view, span),
            CaseWeight::Described { geometry, gated } => {
                let (n, k) = (geometry.rows, geometry.columns);
                let values: Vec<f32> = random.values(PATTERN.min(n * k), 1.0 / (k as f32).sqrt())?;
                let block = upload(memory, &values, n * k, DType::Bf16, stream)?;
                let (parts, arrangement) = if gated { (2, Arrangement::Gated) } else { (1, Arrangement::Stacked) };
                let bytes = n / parts * k * DType::Bf16.size();
                let part = |part: usize| block.pointer().wrapping_byte_add(part * bytes);
                let parts: Vec<Tensor> =
                    (0..parts).map(|i| Tensor::new(part(i), DType::Bf16, &[n / parts, k])).collect();
                made = Weight::new(memory, &parts, arrangement, Source::Device, Some(geometry.format), stream)?;
                (made.view(), made.span())
            }
        };
        let (weights, copies) = copy_weight(memory, &view, span, cache_bytes, stream)?;
        let (m, k, output_columns) = (case.rows, view.columns, view.output_columns());
        let input = upload(memory, &random.values(m * k, 1.0)?, m * k, case.input, stream)?;
        let bias = match case.bias {
            true => Some(upload(memory, &random.values(view.rows, 1.0)?, view.rows, case.output, stream)?),
            false => None,
        };
        let elements = m * output_columns;
        let residual = match case.residual {
            true => Some(upload(memory, &random.values(PATTERN.min(elements), 1.0)?, elements, case.output, stream)?),
            false => None,
        };
        let output = memory.allocate_owned((m * output_columns * case.output.size()).max(1), stream.raw())?;
        let most = rows.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        let reference = memory.allocate_owned((most * output_columns * DType::F32.size()).max(1), stream.raw())?;
        let op = LinearProduct::new(
            Tensor::new(input.pointer(), case.input, &[m, k]),
            weights[0],
            bias.as_ref().map(|bias| Tensor::new(bias.pointer(), case.output, &[view.rows])),
            case.activation,
            Tensor::new(output.pointer(), case.output, &[m, output_columns]),
        )?;
        let added = |block: &Allocation| Tensor::new(block.pointer(), case.output, &[m, output_columns]);
        let op = op.with_residual(residual.as_ref().map(added))?;
        // What the copies were made of goes here; they have been waited for.
        stream.synchronize()?;
        let mut blocks = vec![input, copies];
        blocks.extend(bias);
        blocks.extend(residual);
        Ok(Workload { op, weights, _blocks: blocks, output, reference })
    }

    /// The product with the weight's copy of this number, counted round.
    pub fn op(&self, copy: usize) -> LinearProduct {
        LinearProduct { weight: self.weights[copy % self.weights.len()], ..self.op }
    }

    /// The reference's op for some of the rows.
    pub fn reference(&self, rows: &Range<usize>) -> LinearProduct {
        let output = Matrix { data: self.reference.pointer(), dtype: DType::F32, rows: rows.len(), ..self.op.output };
        self.op.part(rows.start, rows.len(), output)
    }

    /// Makes every element of the output NaN, so that one that nobody writes is seen.
    pub fn poison(&self, stream: &Stream) -> Result<()> {
        // SAFETY: the block has these bytes.
        unsafe { stream.executor().fill(self.output.pointer(), 0xff, self.output.bytes(), stream.raw()) }
    }

    /// The output's rows.
    pub fn read_output(&self, rows: &Range<usize>, stream: &Stream) -> Result<Vec<f32>> {
        let Matrix { columns, dtype, .. } = self.op.output;
        download(&self.output, dtype, rows.start * columns, rows.len() * columns, stream)
    }

    /// What `reference` wrote.
    pub fn read_reference(&self, rows: &Range<usize>, stream: &Stream) -> Result<Vec<f32>> {
        download(&self.reference, DType::F32, 0, rows.len() * self.op.output.columns, stream)
    }
}

/// Views of the copies, and the block that they lie in.
fn copy_weight(
    memory: &Arc<MemoryManager>,
    view: &WeightView,
    span: usize,
    cache_bytes: u64,
    stream: &Stream,
) -> Result<(Vec<WeightView>, Allocation)> {
    let pitch = span.next_multiple_of(256);
    let count = (CACHES * cache_bytes).div_ceil(pitch.max(1) as u64).max(1) as usize;
    let block = memory.allocate_owned((count * pitch).max(1), stream.raw())?;
    let mut views = with_room(count, "the copies of a weight to tune")?;
    for copy in 0..count {
        let to = block.pointer().wrapping_byte_add(copy * pitch);
        // SAFETY: the view's bytes, and as many of the block.
        unsafe { stream.executor().copy(to, view.data, span, CopyKind::DeviceToDevice, stream.raw())? };
        views.push(moved(view, to as usize));
    }
    Ok((views, block))
}

/// The view with its data at `to`, and scales and zero points as far from it as they were. The order of columns is
/// shared.
fn moved(view: &WeightView, to: usize) -> WeightView {
    let by = to.wrapping_sub(view.data as usize);
    let shift = |address: usize| address.wrapping_add(by);
    let scales = match view.scales {
        Scales::None => Scales::None,
        Scales::Rows(scales) => Scales::Rows(shift(scales as usize) as *const f32),
        Scales::Groups { size, data } => Scales::Groups { size, data: shift(data as usize) as *const f16 },
        Scales::Blocks(scales) => Scales::Blocks(shift(scales as usize) as *const f32),
    };
    let zero_points = match view.zero_points.is_null() {
        true => std::ptr::null(),
        false => shift(view.zero_points as usize) as *const f16,
    };
    // The copy may still be on its way.
    WeightView { data: to as *mut std::ffi::c_void, scales, zero_points, settled: false, ..*view }
}

/// What lists of values hold.
const VALUES: &str = "the values of a product to tune";

/// `count` elements, the values over and over.
fn upload(
    memory: &Arc<MemoryManager>,
    values: &[f32],
    count: usize,
    dtype: DType,
    stream: &Stream,
) -> Result<Allocation> {
    let mut bytes = with_room(values.len() * dtype.size(), VALUES)?;
    for &value in values {
        match dtype {
            DType::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
            DType::Bf16 => bytes.extend(<bf16 as Element>::from_f32(value).to_le_bytes()),
            _ => bytes.extend(value.to_le_bytes()),
        }
    }
    let total = count * dtype.size();
    let block = memory.allocate_owned(total.max(1), stream.raw())?;
    for at in (0..total).step_by(bytes.len().max(1)) {
        let (to, part) = (block.pointer().wrapping_byte_add(at), bytes.len().min(total - at));
        // SAFETY: the block has these bytes, and the source lives until the stream has passed the copy.
        unsafe { stream.executor().copy(to, bytes.as_ptr().cast(), part, CopyKind::HostToDevice, stream.raw())? };
    }
    stream.synchronize()?;
    Ok(block)
}

fn download(block: &Allocation, dtype: DType, first: usize, count: usize, stream: &Stream) -> Result<Vec<f32>> {
    let mut bytes = filled(0u8, count * dtype.size(), VALUES)?;
    let from = block.pointer().wrapping_byte_add(first * dtype.size());
    // SAFETY: the range lies in the block, and the target lives until the stream has passed the copy.
    unsafe {
        let to = bytes.as_mut_ptr().cast();
        stream.executor().copy(to, from, bytes.len(), CopyKind::DeviceToHost, stream.raw())?;
    }
    stream.synchronize()?;
    let pair = |pair: &[u8]| u16::from_le_bytes([pair[0], pair[1]]);
    match dtype {
        DType::F16 => collected(bytes.chunks_exact(2).map(|bits| f16::from_bits(pair(bits)).to_f32()), VALUES),
        DType::Bf16 => collected(bytes.chunks_exact(2).map(|bits| bf16::from_bits(pair(bits)).to_f32()), VALUES),
        _ => {
            let value = |bits: &[u8]| f32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]);
            collected(bytes.chunks_exact(4).map(value), VALUES)
        }
    }
}

/// Marsaglia's xorshift: the same inputs in every run.
struct Random(u64);

impl Random {
    /// Uniform in −scale … scale.
    fn values(&mut self, count: usize, scale: f32) -> Result<Vec<f32>> {
        let mut next = || {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 40) as f32 / (1u32 << 23) as f32 - 1.0
        };
        collected((0..count).map(|_| next() * scale), VALUES)
    }
}

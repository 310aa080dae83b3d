//! A weight's values, written to a float tensor: what quantising made of them.

use super::convert::{in_parallel, write_floats, zeros};
use super::staging::{Staging, STAGING_BYTES};
use super::Weight;
use crate::allocation::{collected, with_room};
use crate::error::Result;
use crate::memory::MemoryManager;
use crate::operation::dequantize::Dequantize;
use crate::stream::Stream;
use crate::tensor::Tensor;
use crate::weight::pack::Parts;
use crate::weight::rows::{FloatRows, RowSource};
use crate::weight::stripe::{SquaredError, STRIPE_ROWS};
use crate::weight::{Encoding, Scales};
use std::ops::Range;
use std::sync::Arc;

impl Weight {
    /// Writes [N, K] in any float dtype to device memory: the weight's rows (gated: gate and up alternate), its columns in
    /// the order of an input. Waits for the stream.
    pub fn dequantize(&self, memory: &Arc<MemoryManager>, output: &Tensor, stream: &Stream) -> Result<()> {
        output.expect_float("output")?;
        output.expect_shape("output", &[self.view.rows, self.view.columns])?;
        output.expect_writable("output")?;
        if !self.view.encoding.is_float() {
            let op = Dequantize::new(self.view, *output)?;
            if stream.executor().dequantize(&op, stream.raw())? {
                return stream.synchronize();
            }
        }
        self.dequantize_on_host(memory, output, stream)
    }

    /// Dequantises by way of the host, for any executor.
    pub fn dequantize_on_host(&self, memory: &Arc<MemoryManager>, output: &Tensor, stream: &Stream) -> Result<()> {
        let reader = Reader { weight: self, order: self.read_order(memory, stream)? };
        let (in_bytes, out_row) = (reader.bytes(STRIPE_ROWS), output.shape[1] * output.dtype.size());
        let stripes = self.view.rows.div_ceil(STRIPE_ROWS);
        let panel_stripes =
            (STAGING_BYTES / in_bytes.iter().sum::<usize>().max(STRIPE_ROWS * out_row)).clamp(1, stripes);
        let panel_rows = panel_stripes * STRIPE_ROWS;
        let mut input = Staging::new(memory.device(), panel_stripes * in_bytes.iter().sum::<usize>())?;
        let mut staged = Staging::new(memory.device(), panel_rows.min(self.view.rows) * out_row)?;
        for begin in (0..self.view.rows).step_by(panel_rows) {
            let rows = begin..(begin + panel_rows).min(self.view.rows);
            reader.download(&rows, &mut input, stream)?;
            stream.synchronize()?;
            let mut parts = reader.stripes(&rows, input.bytes())?;
            let outputs = staged.bytes()[..rows.len() * out_row].chunks_mut(STRIPE_ROWS * out_row);
            let items = collected(parts.iter_mut().zip(outputs), "the stripes of a weight")?;
            in_parallel(items, |_, (parts, output_rows)| {
                let count = output_rows.len() / out_row;
                reader.stripe_values(count, parts, |row, values| {
                    write_floats(output.dtype, values, &mut output_rows[row * out_row..][..out_row]);
                })?;
                Ok(SquaredError::default())
            })?;
            let pitch = output.strides[0] * output.dtype.size();
            let to = output.data.cast::<u8>().wrapping_add(rows.start * pitch);
            // SAFETY: the output has these rows, and the staging buffer holds them.
            unsafe {
                if pitch == out_row {
                    staged.upload(0, rows.len() * out_row, to, stream)?;
                } else {
                    for row in 0..rows.len() {
                        staged.upload(row * out_row, out_row, to.wrapping_add(row * pitch), stream)?;
                    }
                }
            }
            // Both buffers are refilled next.
            stream.synchronize()?;
        }
        Ok(())
    }

    fn read_order(&self, memory: &Arc<MemoryManager>, stream: &Stream) -> Result<Option<Vec<usize>>> {
        if self.view.order.is_null() {
            return Ok(None);
        }
        let bytes = self.view.columns * size_of::<i32>();
        let mut staging = Staging::new(memory.device(), bytes)?;
        // SAFETY: a weight with an order has one for each column.
        unsafe { staging.download(self.view.order.cast(), bytes, 0, stream)? };
        stream.synchronize()?;
        let index = |bytes: &[u8]| i32::from_le_bytes(bytes.try_into().expect("four bytes")) as usize;
        let order = staging.bytes().chunks_exact(size_of::<i32>()).map(index);
        collected(order, "the order of a weight's columns").map(Some)
    }
}

struct Reader<'a> {
    weight: &'a Weight,
    order: Option<Vec<usize>>,
}

impl Reader<'_> {
    /// Bytes of the data, scales and zero points of so many rows from the beginning of a stripe on.
    fn bytes(&self, rows: usize) -> [usize; 3] {
        let (view, geometry) = (&self.weight.view, &self.weight.geometry);
        match view.encoding {
            encoding if !encoding.has_scales() => [rows * encoding.bytes(view.columns), 0, 0],
            _ => [geometry.data_bytes(rows), geometry.scale_bytes(rows), geometry.zero_point_bytes(rows)],
        }
    }

    /// Queues the copies of a panel's data, then its scales, then its zero points.
    fn download(&self, rows: &Range<usize>, to: &mut Staging, stream: &Stream) -> Result<()> {
        let view = &self.weight.view;
        let [data, scales, zero_points] = self.bytes(rows.len());
        let before = self.bytes(rows.start);
        // SAFETY: the weight has these rows, and its parts these bytes before and in them.
        unsafe {
            if !view.encoding.has_scales() {
                let (row_bytes, pitch) = (view.encoding.bytes(view.columns), view.encoding.bytes(view.row_stride));
                let from = view.data.cast::<u8>().wrapping_add(rows.start * pitch);
                if row_bytes == pitch {
                    return to.download(from, data, 0, stream);
                }
                for row in 0..rows.len() {
                    to.download(from.wrapping_add(row * pitch), row_bytes, row * row_bytes, stream)?;
                }
                return Ok(());
            }
            let scale_data: *const u8 = match view.scales {
                Scales::None => std::ptr::null(),
                Scales::Rows(data) | Scales::Blocks(data) => data.cast(),
                Scales::Groups { data, .. } => data.cast(),
            };
            to.download(view.data.cast::<u8>().wrapping_add(before[0]), data, 0, stream)?;
            to.download(scale_data.wrapping_add(before[1]), scales, data, stream)?;
            to.download(view.zero_points.cast::<u8>().wrapping_add(before[2]), zero_points, data + scales, stream)
        }
    }

    /// A downloaded panel cut into stripes.
    fn stripes<'b>(&self, rows: &Range<usize>, bytes: &'b mut [u8]) -> Result<Vec<Parts<'b>>> {
        let [data, scales, zero_points] = self.bytes(rows.len());
        let (data_part, rest) = bytes.split_at_mut(data);
        let (scale_part, rest) = rest.split_at_mut(scales);
        let mut rest = [data_part, scale_part, &mut rest[..zero_points]];
        let mut parts = with_room(rows.len().div_ceil(STRIPE_ROWS), "the stripes of a weight")?;
        for begin in rows.clone().step_by(STRIPE_ROWS) {
            let bytes = self.bytes(STRIPE_ROWS.min(rows.end - begin));
            let mut cut = |i: usize| {
                let (first, after) = std::mem::take(&mut rest[i]).split_at_mut(bytes[i]);
                rest[i] = after;
                first
            };
            parts.push(Parts { data: cut(0), scales: cut(1), zero_points: cut(2) });
        }
        Ok(parts)
    }

    /// The values of a stripe, row by row.
    fn stripe_values(&self, rows: usize, parts: &mut Parts, mut store: impl FnMut(usize, &[f32])) -> Result<()> {
        let view = &self.weight.view;
        let mut values = zeros(view.columns)?;
        if let Encoding::Float(dtype) = view.encoding {
            let tensor = Tensor::new(parts.data.as_mut_ptr().cast(), dtype, &[rows, view.columns]);
            // SAFETY: the part holds the stripe's rows without gaps.
            let source = unsafe { FloatRows::new(tensor) };
            for row in 0..rows {
                source.values(row, &mut values)?;
                store(row, &values);
            }
            return Ok(());
        }
        if let Encoding::Blocks(format) = view.encoding {
            for (row, blocks) in parts.data.chunks_exact(format.bytes(view.columns)).enumerate() {
                format.decode(blocks, &mut values);
                store(row, &values);
            }
            return Ok(());
        }
        let stripe = self.weight.geometry.unpack(rows, parts)?;
        let mut natural = zeros(view.columns)?;
        for row in 0..rows {
            stripe.values(row, &mut values);
            match &self.order {
                None => store(row, &values),
                Some(order) => {
                    order.iter().zip(&values).for_each(|(&k, &value)| natural[k] = value);
                    store(row, &natural);
                }
            }
        }
        Ok(())
    }
}

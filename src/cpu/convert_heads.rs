//! Heads rotated, and rounded to FP8. Sums are f32 in the order of the kernel of csrc/convert_heads, so that both give the same bits.

use super::row::{for_rows, Row};
use super::threads::Threads;
use crate::operation::convert_heads::{ConvertHeads, HeadRotation};
use crate::tensor::{Tensor, MAX_HEAD_DIM};
use std::sync::atomic::{AtomicU32, Ordering};

/// Where a row of a head lies in a tensor.
fn line(tensor: &Tensor, row: usize) -> Row {
    let [_, second, heads, _] = tensor.shape;
    let places = [row / heads / second, row / heads % second, row % heads];
    let offset = (0..3).map(|axis| places[axis] * tensor.strides[axis]).sum();
    Row::raw(tensor.data, tensor.dtype).skip(offset)
}

/// Writes the rotated row of a head to `to`, which has its elements.
///
/// # Safety
/// The descriptor is validated, and the row is one of its own.
unsafe fn rotated(op: &ConvertHeads, row: usize, to: &mut [f32]) {
    let (input, stride) = (line(&op.input, row), op.input.strides[3]);
    for (column, element) in to.iter_mut().enumerate() {
        *element = input.element(column * stride);
    }
    if let Some(rotation) = &op.rotation {
        rotate(rotation, to);
    }
}

fn rotate(rotation: &HeadRotation, head: &mut [f32]) {
    for (column, element) in head.iter_mut().enumerate() {
        if rotation.is_negated(column) {
            *element = -*element;
        }
    }
    let mut distance = 1;
    while distance < rotation.block {
        for pair in head.chunks_exact_mut(2 * distance) {
            let (low, high) = pair.split_at_mut(distance);
            for (low, high) in low.iter_mut().zip(high) {
                (*low, *high) = (*low + *high, *low - *high);
            }
        }
        distance *= 2;
    }
    head.iter_mut().for_each(|element| *element *= rotation.factor);
}

pub fn convert_heads(threads: &Threads, op: &ConvertHeads) {
    let [.., heads, head_dim] = op.input.shape;
    let (rows, per_scale) = (op.rows(), op.heads_per_scale().max(1));
    let scales = op.scales.map(|scales| scales.tensor.data.cast::<u32>());
    // Addresses go to other threads as numbers.
    let place = scales.map(|scales| scales as usize);
    // SAFETY: as many aligned scales as the descriptor says, which nobody else touches during the call.
    let scale =
        |row: usize| place.map(|at| unsafe { AtomicU32::from_ptr((at as *mut u32).add(row % heads / per_scale)) });
    if let Some(scales) = op.scales.filter(|scales| scales.written) {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(scales.tensor.data.cast::<f32>(), scales.tensor.elements()).fill(0.0) };
        for_rows(threads, rows, head_dim, |rows, _| {
            let mut buffer = [0.0; MAX_HEAD_DIM];
            for row in rows {
                // SAFETY: the descriptor is validated.
                unsafe { rotated(op, row, &mut buffer[..head_dim]) };
                // Bits of magnitudes grow as the magnitudes do, and those of NaN are above all of them.
                let most = buffer[..head_dim].iter().map(|element| element.abs().to_bits()).max().unwrap_or(0);
                let scale = scale(row).expect("scales are written");
                scale.fetch_max((f32::from_bits(most) / op.largest()).abs().to_bits(), Ordering::Relaxed);
            }
        });
    }
    for_rows(threads, rows, head_dim, |rows, _| {
        let mut buffer = [0.0; MAX_HEAD_DIM];
        for row in rows {
            let buffer = &mut buffer[..head_dim];
            // SAFETY: the descriptor is validated.
            unsafe { rotated(op, row, buffer) };
            if let Some(scale) = scale(row) {
                let scale = f32::from_bits(scale.load(Ordering::Relaxed));
                buffer.iter_mut().for_each(|element| *element = if scale == 0.0 { 0.0 } else { *element / scale });
            }
            let (output, stride) = (line(&op.output, row), op.output.strides[3]);
            for (column, &element) in buffer.iter().enumerate() {
                // SAFETY: tasks write different rows.
                unsafe { output.set_kv_element(column * stride, element) };
            }
        }
    });
}

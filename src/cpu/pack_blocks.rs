//! `pack_blocks` on the CPU, whose layout of Int4 is that of Q4_0's and Q4_1's blocks without their scales.

use crate::operation::pack_blocks::PackBlocks;
use crate::weight::Scales;
use half::f16;
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// The parts of a packed weight, and the bytes of a block that each has.
struct Parts {
    blocks: usize,
    block_bytes: usize,
    data: *mut u8,
    scales: *mut u8,
    /// NULL without them.
    zero_points: *mut u8,
    /// Where in a block the quantised values begin.
    head: usize,
}

impl Parts {
    fn of(op: &PackBlocks) -> Parts {
        let Scales::Groups { data: scales, .. } = op.weight.scales else { unreachable!("checked by the descriptor") };
        let zero_points = op.weight.zero_points.cast_mut().cast::<u8>();
        Parts {
            blocks: op.weight.rows * op.weight.columns / op.format.elements(),
            block_bytes: op.format.block_bytes(),
            data: op.weight.data.cast(),
            scales: scales.cast_mut().cast(),
            zero_points,
            head: if zero_points.is_null() { 2 } else { 4 },
        }
    }
}

fn is_finite(half: &[u8]) -> bool {
    f16::from_le_bytes([half[0], half[1]]).is_finite()
}

/// `false`: a scale or a minimum is not finite.
pub fn pack_blocks(op: &PackBlocks) -> bool {
    let parts = Parts::of(op);
    let values = parts.block_bytes - parts.head;
    let mut finite = true;
    for i in 0..parts.blocks {
        // SAFETY: the descriptor's blocks and the weight's parts have this block, in memory that does not overlap.
        unsafe {
            let block = from_raw_parts(op.blocks.add(i * parts.block_bytes), parts.block_bytes);
            from_raw_parts_mut(parts.data.add(i * values), values).copy_from_slice(&block[parts.head..]);
            from_raw_parts_mut(parts.scales.add(2 * i), 2).copy_from_slice(&block[..2]);
            finite &= is_finite(block);
            if !parts.zero_points.is_null() {
                from_raw_parts_mut(parts.zero_points.add(2 * i), 2).copy_from_slice(&block[2..4]);
                finite &= is_finite(&block[2..]);
            }
        }
    }
    finite
}

pub fn unpack_blocks(op: &PackBlocks) {
    let parts = Parts::of(op);
    let values = parts.block_bytes - parts.head;
    for i in 0..parts.blocks {
        // SAFETY: as for packing.
        unsafe {
            let block = from_raw_parts_mut(op.blocks.add(i * parts.block_bytes), parts.block_bytes);
            block[..2].copy_from_slice(from_raw_parts(parts.scales.add(2 * i), 2));
            if !parts.zero_points.is_null() {
                block[2..4].copy_from_slice(from_raw_parts(parts.zero_points.add(2 * i), 2));
            }
            block[parts.head..].copy_from_slice(from_raw_parts(parts.data.add(i * values), values));
        }
    }
}

//! `rotary_embedding` on CUDA: the launcher of csrc/rotary_embedding.

use super::launch::{integers, vector_dtype_of};
use super::prelude::*;
use crate::operation::rotary_embedding::{RotaryEmbedding, MAX_ROTARY_PAIRS};
use crate::tensor::MAX_RANK;

mirror! {
    /// `nvb_rotary_embedding_params` of csrc/rotary_embedding/rotary_embedding.h.
    #[repr(C)]
    struct Params of(op: &RotaryEmbedding, frequencies: [f32; MAX_ROTARY_PAIRS], magnitude: f32) {
        input: *const c_void = op.input.data,
        output: *mut c_void = op.output.data,
        positions: *const i32 = op.positions.data.cast(),
        factors: *const f32 = vector_of(op.factors).cast(),
        norm: *const c_void = vector_of(op.norm.map(|norm| norm.weight)),
        rows: *const i32 = vector_of(op.rows).cast(),
        shape: [i64; MAX_RANK] = integers(op.input.shape),
        input_strides: [i64; MAX_RANK] = integers(op.input.strides),
        output_strides: [i64; MAX_RANK] = integers(op.output.strides),
        position_stride: i64 = op.positions.strides[op.positions.rank - 1] as i64,
        position_axis_stride: i64 = if op.positions.rank == 2 { op.positions.strides[0] as i64 } else { 0 },
        rows_stride: i64 = op.rows.map_or(0, |rows| rows.strides[0] as i64),
        output_rows: i64 = op.output.shape[1] as i64,
        pairs: u32 = op.angles.pairs as u32,
        rotary_dim: u32 = op.angles.rotary_dim as u32,
        first: u32 = op.angles.first as u32,
        input_dtype: u32 = op.input.dtype as u32,
        output_dtype: u32 = op.output.dtype as u32,
        norm_dtype: u32 = vector_dtype_of(op.norm.map(|norm| norm.weight)),
        epsilon: f32 = op.norm.map_or(0.0, |norm| norm.epsilon),
        magnitude: f32,
        frequencies: [f32; MAX_ROTARY_PAIRS],
        position_axes: [u32; AXIS_WORDS] = packed(op.angles.position_axes()),
    }
}

/// Pairs have two bits each.
const AXIS_WORDS: usize = 18;

fn packed(axes: [u8; MAX_ROTARY_PAIRS]) -> [u32; AXIS_WORDS] {
    let mut words = [0; AXIS_WORDS];
    for (pair, &axis) in axes.iter().enumerate() {
        words[pair / 16] |= u32::from(axis) << (pair % 16 * 2);
    }
    words
}

extern "C" {
    fn nvb_cuda_rotary_embedding(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &RotaryEmbedding, stream: RawHandle) -> Result<()> {
    if op.input.is_empty() {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let (frequencies, magnitude) = op.angles.frequencies();
    let params = Params::of(op, frequencies, magnitude);
    // SAFETY: the descriptor was validated, and the context is current.
    executor
        .check_launch(unsafe { nvb_cuda_rotary_embedding(&params, &executor.launch_on(stream)) }, "rotary_embedding")
}

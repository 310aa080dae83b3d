//! `rotary_embedding` on CUDA: the launcher of csrc/rotary_embedding.

use super::launch::{integers, vector_dtype_of};
use super::prelude::*;
use crate::operation::rotary_embedding::{RotaryEmbedding, MAX_ROTARY_PAIRS};
use crate::tensor::Tensor;

/// `nvb_rotary_heads` of csrc/rotary_embedding/rotary_embedding.h.
#[repr(C)]
#[derive(Clone, Copy)]
struct Heads {
    input: *const c_void,
    output: *mut c_void,
    norm: *const c_void,
    rows: *const i32,
    count: i64,
    input_strides: [i64; 3],
    output_strides: [i64; 3],
    rows_stride: i64,
    output_rows: i64,
    input_dtype: u32,
    output_dtype: u32,
    norm_dtype: u32,
    epsilon: f32,
    magnitude: f32,
    turn: u32,
}

impl Heads {
    fn of(op: &RotaryEmbedding) -> Heads {
        let strides = |tensor: &Tensor| {
            let [batch, token, head, _] = integers(tensor.strides);
            [batch, token, head]
        };
        let norm = op.norm.map(|norm| norm.weight);
        Heads {
            input: op.input.data,
            output: op.output.data,
            norm: vector_of(norm),
            rows: vector_of(op.rows).cast(),
            count: op.input.shape[2] as i64,
            input_strides: strides(&op.input),
            output_strides: strides(&op.output),
            rows_stride: op.rows.map_or(0, |rows| rows.strides[0] as i64),
            output_rows: op.output.shape[1] as i64,
            input_dtype: op.input.dtype as u32,
            output_dtype: op.output.dtype as u32,
            norm_dtype: vector_dtype_of(norm),
            epsilon: op.norm.map_or(0.0, |norm| norm.epsilon),
            magnitude: op.angles.factor(),
            turn: (op.angles.rotary_dim != 0).into(),
        }
    }
}

mirror! {
    /// `nvb_rotary_embedding_params` of csrc/rotary_embedding/rotary_embedding.h.
    #[repr(C)]
    struct Params of(op: &RotaryEmbedding, heads: [Heads; MAX_KINDS], kinds: u32, frequencies: [f32; MAX_ROTARY_PAIRS]) {
        heads: [Heads; MAX_KINDS],
        positions: *const i32 = op.positions.data.cast(),
        factors: *const f32 = vector_of(op.factors).cast(),
        batch: i64 = op.input.shape[0] as i64,
        tokens: i64 = op.input.shape[1] as i64,
        head_dim: i64 = op.input.shape[3] as i64,
        position_stride: i64 = op.positions.strides[op.positions.rank - 1] as i64,
        position_axis_stride: i64 = if op.positions.rank == 2 { op.positions.strides[0] as i64 } else { 0 },
        kinds: u32,
        pairs: u32 = op.angles.pairs as u32,
        rotary_dim: u32 = op.angles.rotary_dim as u32,
        first: u32 = op.angles.first as u32,
        frequencies: [f32; MAX_ROTARY_PAIRS],
        position_axes: [u32; AXIS_WORDS] = packed(op.angles.position_axes()),
    }
}

const MAX_KINDS: usize = 3;

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

/// Whether one launch does all kinds of heads: where the kernel that keeps heads in registers takes them.
fn joins(op: &RotaryEmbedding) -> bool {
    let [batch, tokens, _, head_dim] = op.input.shape;
    let whole = op.angles.first == 0 && op.angles.rotary_dim == head_dim && matches!(head_dim, 64 | 128 | 192 | 256);
    let alike = |part: &RotaryEmbedding| {
        let [other_batch, other_tokens, heads, other_dim] = part.input.shape;
        (other_batch, other_tokens, other_dim) == (batch, tokens, head_dim) && heads != 0
    };
    whole && op.parts().all(|(_, part)| alike(&part))
}

pub(super) fn run(executor: &CudaExecutor, op: &RotaryEmbedding, stream: RawHandle) -> Result<()> {
    if op.more == [None; 2] || joins(op) {
        return launch(executor, op, op.parts(), stream);
    }
    for part in op.parts() {
        launch(executor, &part.1, std::iter::once(part), stream)?;
    }
    Ok(())
}

fn launch(
    executor: &CudaExecutor,
    op: &RotaryEmbedding,
    parts: impl Iterator<Item = (usize, RotaryEmbedding)>,
    stream: RawHandle,
) -> Result<()> {
    if op.input.is_empty() {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let (frequencies, _) = op.angles.frequencies();
    let mut heads = [Heads::of(op); MAX_KINDS];
    let mut kinds = 0;
    for (place, (_, part)) in heads.iter_mut().zip(parts) {
        *place = Heads::of(&part);
        kinds += 1;
    }
    let params = Params::of(op, heads, kinds, frequencies);
    // SAFETY: the descriptor was validated, and the context is current.
    executor
        .check_launch(unsafe { nvb_cuda_rotary_embedding(&params, &executor.launch_on(stream)) }, "rotary_embedding")
}

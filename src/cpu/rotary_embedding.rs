//! Rotation of pairs of elements. Angles are found in f64, once for each token, so that far positions keep their digits.

use super::row::{for_rows, Row};
use super::threads::Threads;
use crate::error::{Error, Result};
use crate::operation::rotary_embedding::{Angles, HeadNorm, Pairs, RotaryEmbedding, MAX_ROTARY_PAIRS};
use crate::tensor::{Tensor, MAX_HEAD_DIM};

/// An error names the first row that is outside the output; nothing is written then.
pub fn rotary_embedding(threads: &Threads, op: &RotaryEmbedding) -> Result<()> {
    for (_, part) in op.parts().filter(|(_, part)| part.rows.is_some() && !part.input.is_empty()) {
        for token in 0..part.input.shape[1] {
            // SAFETY: a validated descriptor's row numbers.
            let (to, rows) = (unsafe { place(&part, token) }, part.output.shape[1]);
            if !(0..rows as i64).contains(&to) {
                return Err(Error::invalid(format!("token {token} goes to row {to}; the output has {rows} rows"))
                    .with_limit(to.max(0) as u64, rows as u64));
            }
        }
    }
    op.parts().for_each(|(_, part)| turn(threads, &part));
    Ok(())
}

/// Heads of one kind, whose rows are those of the output.
fn turn(threads: &Threads, op: &RotaryEmbedding) {
    if op.input.is_empty() {
        return;
    }
    let [batch, tokens, heads, head_dim] = op.input.shape;
    let (frequencies, magnitude) = op.angles.frequencies();
    let axes = op.angles.position_axes();
    for_rows(threads, batch * tokens, heads * head_dim, |rows, _| {
        for row in rows {
            // SAFETY: the descriptor is validated, and tasks write different tokens.
            unsafe { one_token(op, row / tokens, row % tokens, (&frequencies, &axes), magnitude) }
        }
    });
}

/// The token's place in the output.
///
/// # Safety
/// The descriptor is validated, and the token is within it.
unsafe fn place(op: &RotaryEmbedding, token: usize) -> i64 {
    op.rows.map_or(token as i64, |rows| rows.data.cast::<i32>().add(token * rows.strides[0]).read().into())
}

/// # Safety
/// The descriptor is validated, and batch and token are within it.
unsafe fn one_token(
    op: &RotaryEmbedding,
    batch: usize,
    token: usize,
    (frequencies, axes): (&[f32; MAX_ROTARY_PAIRS], &[u8; MAX_ROTARY_PAIRS]),
    magnitude: f32,
) {
    let Angles { pairs, rotary_dim, first, .. } = op.angles;
    let strides = &op.positions.strides[..op.positions.rank];
    let (axis_stride, token_stride) = if let [axis, token] = *strides { (axis, token) } else { (0, strides[0]) };
    let mut rotations = [(0.0f32, 0.0f32); MAX_ROTARY_PAIRS];
    for (i, rotation) in rotations[..rotary_dim / 2].iter_mut().enumerate() {
        let factor = op.factors.map_or(1.0, |factors| factors.data.cast::<f32>().add(i).read());
        let place = usize::from(axes[i]) * axis_stride + token * token_stride;
        let position = op.positions.data.cast::<i32>().add(place).read();
        let angle = f64::from(position) * f64::from(frequencies[i]) / f64::from(factor);
        *rotation = (angle.sin() as f32 * magnitude, angle.cos() as f32 * magnitude);
    }
    let [_, _, heads, head_dim] = op.input.shape;
    for head in 0..heads {
        let line = |tensor: &Tensor, row: usize| {
            let [outer, middle, inner, _] = tensor.strides;
            Row::raw(tensor.data, tensor.dtype).skip(batch * outer + row * middle + head * inner)
        };
        let (from, to) = (line(&op.input, token), line(&op.output, place(op, token) as usize));
        let mut factors = [1.0f64; MAX_HEAD_DIM];
        if let Some(HeadNorm { weight, epsilon }) = op.norm {
            let squares: f64 = (0..head_dim).map(|at| from.get(at).powi(2)).sum();
            let inverse = 1.0 / (squares / head_dim as f64 + f64::from(epsilon)).sqrt();
            let weight = Row::vector(&weight);
            factors[..head_dim].iter_mut().enumerate().for_each(|(at, factor)| *factor = inverse * weight.get(at));
        }
        for (i, &(sine, cosine)) in rotations[..rotary_dim / 2].iter().enumerate() {
            let (one, other) = match pairs {
                Pairs::Half => (first + i, first + i + rotary_dim / 2),
                Pairs::Interleaved => (first + 2 * i, first + 2 * i + 1),
            };
            let (x, y) = ((from.get(one) * factors[one]) as f32, (from.get(other) * factors[other]) as f32);
            to.set(one, f64::from(x * cosine - y * sine));
            to.set(other, f64::from(x * sine + y * cosine));
        }
        for at in (0..first).chain(first + rotary_dim..head_dim) {
            to.set(at, from.get(at) * factors[at]);
        }
    }
}

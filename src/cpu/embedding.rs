//! output[t] = table[tokens[t]] · scale, in batches from a part of the table each.

use super::dequantize::{unpack_blocks, with_encoding, Encoded, Slice, Unpack, SLICE};
use super::row::{for_rows, vectors, Row};
use super::threads::{Scratch, Threads};
use crate::error::{Error, Result};
use crate::operation::embedding::Embedding;
use crate::simd::{dispatch, Kernel, Simd, VectorElement};
use crate::tensor::DType;
use crate::weight::{Encoding, Scales};
use std::marker::PhantomData;
use std::ops::Range;

/// An error names the first token that is not in the table; nothing is written then.
pub fn embedding(threads: &Threads, op: &Embedding) -> Result<()> {
    check(op)?;
    for_rows(threads, op.output.rows, op.output.columns, |rows, scratch| {
        // SAFETY: the descriptor is validated, the tokens are in the table, and tasks write different rows.
        unsafe {
            match op.table.dtype() {
                Some(dtype) => dispatch(Gather { op, dtype, rows }),
                None => dispatch(GatherQuantized { op, rows, scratch }),
            }
        }
    });
    Ok(())
}

fn check(op: &Embedding) -> Result<()> {
    let vocabulary = op.vocabulary();
    for t in 0..op.output.rows {
        // SAFETY: a validated descriptor's tokens.
        let token = unsafe { number(op, t) };
        if token < 0 || token as usize >= vocabulary {
            return Err(Error::invalid(format!("tokens[{t}] is {token}; the table has {vocabulary} rows"))
                .with_limit(token.max(0) as u64, vocabulary as u64));
        }
    }
    Ok(())
}

/// The token of a row of the output.
///
/// # Safety
/// The descriptor is validated, and `t` a row.
#[inline(always)]
unsafe fn number(op: &Embedding, t: usize) -> i32 {
    op.tokens.data.cast::<i32>().add(op.place_of(t).0).read()
}

/// The row of the table that a row of the output is.
///
/// # Safety
/// As above, and the token is in the table.
#[inline(always)]
unsafe fn table_row(op: &Embedding, t: usize) -> usize {
    op.place_of(t).1 + number(op, t) as usize
}

struct Gather<'a> {
    op: &'a Embedding,
    /// The table's.
    dtype: DType,
    rows: Range<usize>,
}

impl Kernel for Gather<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Gather { op, dtype, rows } = self;
        let scale = S::splat(op.scale);
        for t in rows {
            let from = Row::raw(op.table.data, dtype).skip(table_row(op, t) * op.table.row_stride);
            let to = Row::of(&op.output, t);
            for (at, lanes) in vectors::<S>(op.output.columns) {
                let value = from.load::<S>(at, lanes);
                // A product quiets a signalling NaN, which a number of 32 bits may be.
                let value = if op.scale == 1.0 { value } else { S::mul(value, scale) };
                to.store::<S>(at, value, lanes);
            }
        }
    }
}

/// Rows of a quantised table go through f32 memory, a slice at a time.
struct GatherQuantized<'a> {
    op: &'a Embedding,
    rows: Range<usize>,
    scratch: &'a mut Scratch,
}

impl Kernel for GatherQuantized<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let GatherQuantized { op, rows, scratch } = self;
        let values = scratch.floats()[..SLICE].as_mut_ptr();
        if let Encoding::Blocks(format) = op.table.encoding {
            return gather::<S>(op, rows, values, |_| 1.0, |slice| unpack_blocks::<S>(format, slice, values));
        }
        with_encoding!(&op.table, E => {
            let factor = |token: usize| match op.table.scales {
                Scales::Rows(scales) => scales.add(token).read() * E::FACTOR,
                _ => 1.0,
            };
            let unpack = |slice: Slice| S::call(Unpack::<E> { slice, to: values, ahead: 0, encoded: PhantomData });
            gather::<S>(op, rows, values, factor, unpack);
        })
    }
}

/// `unpack` writes a slice to `values`; `factor` is what a row's values have still to be multiplied by.
#[inline(always)]
unsafe fn gather<S: Simd>(
    op: &Embedding,
    rows: Range<usize>,
    values: *const f32,
    factor: impl Fn(usize) -> f32,
    unpack: impl Fn(Slice),
) {
    for t in rows {
        let token = table_row(op, t);
        let scale = S::splat(factor(token) * op.scale);
        for k in (0..op.table.columns).step_by(SLICE) {
            let len = SLICE.min(op.table.columns - k);
            unpack(Slice { weight: &op.table, row: token, k, len });
            let to = Row::of(&op.output, t).skip(k);
            for (at, lanes) in vectors::<S>(len) {
                to.store::<S>(at, S::mul(f32::load_lanes::<S>(values.add(at), lanes), scale), lanes);
            }
        }
    }
}

/// The formula, for tensors in host memory and tokens within the table.
pub fn reference(op: &Embedding) {
    // SAFETY: a validated descriptor's tensors are readable and writable in their extents.
    unsafe {
        for t in 0..op.output.rows {
            for i in 0..op.output.columns {
                Row::of(&op.output, t).set(i, op.table.value(table_row(op, t), i) * f64::from(op.scale));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, at_every_level, threads, Buffer};
    use super::super::testing_quantized::{Quantized, FORMATS};
    use super::*;
    use crate::weight::WeightView;

    #[test]
    fn rows_are_gathered_and_a_stray_token_is_named() {
        at_every_level(|level| {
            let (vocabulary, width) = (11, 37);
            let mut table = Buffer::random(DType::Bf16, vocabulary * width, 1);
            let view = WeightView::float(
                table.tensor(&[vocabulary * width]).data,
                DType::Bf16,
                vocabulary,
                width,
                width,
                false,
            );
            let mut tokens = Buffer::from(DType::I32, &[10.0, 0.0, 3.0, 3.0]);
            let (mut output, mut expected) =
                (Buffer::poisoned(DType::F32, 4 * width), Buffer::poisoned(DType::F32, 4 * width));
            let mut op =
                |y: &mut Buffer| Embedding::new(tokens.tensor(&[4]), view, 25.25, y.tensor(&[4, width])).unwrap();
            embedding(threads(), &op(&mut output)).unwrap();
            reference(&op(&mut expected));
            assert_close(&output, &expected, &format!("{level:?}"));
            for stray in [-1.0, 11.0] {
                let mut tokens = Buffer::from(DType::I32, &[0.0, stray]);
                let mut output = Buffer::poisoned(DType::F32, 2 * width);
                let op = Embedding::new(tokens.tensor(&[2]), view, 1.0, output.tensor(&[2, width])).unwrap();
                let error = embedding(threads(), &op).unwrap_err();
                assert!(error.message.contains("tokens[1]") && error.message.contains("11 rows"), "{error}");
                assert!(output.values().iter().all(|x| x.is_nan()));
            }
        });
    }

    #[test]
    fn batches_need_floats_that_they_divide() {
        let mut tokens = Buffer::from(DType::I32, &[0.0; 6]);
        let mut output = Buffer::poisoned(DType::F32, 6 * 64);
        let floats = |rows, buffer: &mut Buffer| {
            WeightView::float(buffer.tensor(&[6 * 64]).data, DType::F32, rows, 64, 64, false)
        };
        let mut refused = |shape: &[usize], table| {
            Embedding::new(tokens.tensor(shape), table, 1.0, output.tensor(&[6, 64])).unwrap_err().message
        };
        let mut memory = Buffer::random(DType::F32, 6 * 64, 2);
        let quantized = Quantized::new(FORMATS[0], 6, 64, false);
        assert!(refused(&[2, 3], quantized.view).contains("2 batches"));
        assert!(refused(&[2, 3], floats(5, &mut memory)).contains("this one has 5 of f32"));
        assert!(refused(&[1, 2, 3], floats(6, &mut memory)).contains("rank"));
    }

    #[test]
    fn rows_of_every_format_are_gathered() {
        let (vocabulary, width) = (140, 1101);
        at_every_level(|level| {
            for (f, format) in FORMATS.into_iter().enumerate() {
                let table = Quantized::new(format, vocabulary, width, false);
                let mut tokens = Buffer::from(DType::I32, &[139.0, 0.0, 3.0, 3.0]);
                let mut output = Buffer::poisoned(DType::FLOATS[f % 3], 4 * width);
                let mut expected = Buffer::poisoned(DType::F32, 4 * width);
                let mut op = |y: &mut Buffer| {
                    Embedding::new(tokens.tensor(&[4]), table.view, 25.25, y.tensor(&[4, width])).unwrap()
                };
                embedding(threads(), &op(&mut output)).unwrap();
                reference(&op(&mut expected));
                assert_close(&output, &expected, &format!("{level:?} {format:?}"));
            }
        });
    }
}

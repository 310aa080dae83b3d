//! Group normalisation; the formula is in `ops/group_norm.rs`.

use super::activation::activate;
use super::row::{for_rows, vectors, Row};
use super::threads::Threads;
use crate::operation::group_norm::{GroupNorm, ImageLayout};
use crate::simd::{dispatch, Kernel, Simd};
use crate::tensor::{Heads, Tensor};
use std::ops::Range;

/// A task is some groups; a group is normalised by one thread, in the same order whichever it is.
pub fn group_norm(threads: &Threads, op: &GroupNorm) {
    let elements = op.channels() / op.groups * op.positions();
    if op.is_empty() {
        return;
    }
    for_rows(threads, op.input.tokens * op.groups, elements, |groups, _| {
        // SAFETY: the descriptor is validated, and groups share no element.
        unsafe { dispatch(Groups { op, groups }) }
    });
}

struct Groups<'a> {
    op: &'a GroupNorm,
    groups: Range<usize>,
}

impl Kernel for Groups<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for group in self.groups {
            normalise::<S>(self.op, &Group::of(self.op, group));
        }
    }
}

/// The part of an image that is normalised together: rows of contiguous elements.
struct Group {
    sample: usize,
    /// Rows and columns of the sample that come before those of the group.
    first_row: usize,
    first_column: usize,
    rows: usize,
    columns: usize,
    first_channel: usize,
}

impl Group {
    fn of(op: &GroupNorm, number: usize) -> Group {
        let (sample, channels) = (number / op.groups, op.channels() / op.groups);
        let first_channel = number % op.groups * channels;
        match op.layout {
            ImageLayout::Nchw => Group {
                sample,
                first_row: first_channel,
                first_column: 0,
                rows: channels,
                columns: op.positions(),
                first_channel,
            },
            ImageLayout::Nhwc => Group {
                sample,
                first_row: 0,
                first_column: first_channel,
                rows: op.positions(),
                columns: channels,
                first_channel,
            },
        }
    }

    fn row(&self, image: &Heads, row: usize) -> Row {
        Row::head(image, self.sample, self.first_row + row).skip(self.first_column)
    }
}

/// A sum of vectors, of which so many are added in f32 before they join the rest in f64: a group may have millions of
/// elements.
struct Sum<S: Simd> {
    lanes: S::Vector,
    added: usize,
    total: f64,
}

const VECTORS_IN_F32: usize = 128;

impl<S: Simd> Sum<S> {
    #[inline(always)]
    unsafe fn new() -> Sum<S> {
        Sum { lanes: S::zero(), added: 0, total: 0.0 }
    }

    #[inline(always)]
    unsafe fn add(&mut self, value: S::Vector) {
        self.lanes = S::add(self.lanes, value);
        self.added += 1;
        if self.added == VECTORS_IN_F32 {
            *self = Sum { total: self.total(), ..Sum::new() };
        }
    }

    #[inline(always)]
    unsafe fn total(&self) -> f64 {
        self.total + f64::from(S::sum(self.lanes))
    }
}

/// The variance is that of the differences, without the cancellation of E[x²] − mean².
#[inline(always)]
unsafe fn normalise<S: Simd>(op: &GroupNorm, group: &Group) {
    let count = (group.rows * group.columns) as f64;
    let mut sum = Sum::<S>::new();
    for row in 0..group.rows {
        let input = group.row(&op.input, row);
        for (at, lanes) in vectors::<S>(group.columns) {
            sum.add(input.load::<S>(at, lanes));
        }
    }
    let mean = S::splat((sum.total() / count) as f32);
    let mut squares = Sum::<S>::new();
    for row in 0..group.rows {
        let input = group.row(&op.input, row);
        for (at, lanes) in vectors::<S>(group.columns) {
            let difference = S::first(lanes, S::sub(input.load::<S>(at, lanes), mean), S::zero());
            squares.add(S::mul(difference, difference));
        }
    }
    let variance = (squares.total() / count) as f32;
    let inverse = S::splat(1.0 / (variance + op.epsilon).sqrt());

    for row in 0..group.rows {
        let (input, output) = (group.row(&op.input, row), group.row(&op.output, row));
        let weight = OfChannels::<S>::new(op, group, row, op.weight);
        let bias = OfChannels::<S>::new(op, group, row, op.bias);
        for (at, lanes) in vectors::<S>(group.columns) {
            let mut value = S::mul(S::sub(input.load::<S>(at, lanes), mean), inverse);
            if let Some(weight) = &weight {
                value = S::mul(value, weight.at(at, lanes));
            }
            if let Some(bias) = &bias {
                value = S::add(value, bias.at(at, lanes));
            }
            output.store::<S>(at, activate::<S>(op.activation, value), lanes);
        }
    }
}

/// The elements of weight or bias that belong to a row: one for all of it, or one for each column.
enum OfChannels<S: Simd> {
    One(S::Vector),
    Each(Row),
}

impl<S: Simd> OfChannels<S> {
    #[inline(always)]
    unsafe fn new(op: &GroupNorm, group: &Group, row: usize, vector: Option<Tensor>) -> Option<OfChannels<S>> {
        let vector = Row::vector(&vector?).skip(group.first_channel);
        Some(match op.layout {
            ImageLayout::Nchw => OfChannels::One(S::splat(vector.get(row) as f32)),
            ImageLayout::Nhwc => OfChannels::Each(vector),
        })
    }

    #[inline(always)]
    unsafe fn at(&self, at: usize, lanes: usize) -> S::Vector {
        match self {
            OfChannels::One(vector) => *vector,
            OfChannels::Each(vector) => vector.load::<S>(at, lanes),
        }
    }
}

//! A function of each element over four strided axes.

use super::row::{vectors, Row};
use super::threads::Threads;
use crate::operation::pointwise::{Function, Pointwise};
use crate::simd::{dispatch, math, Kernel, Simd};
use crate::tensor::{DType, Tensor};
use std::ops::Range;

/// Elements of a task.
const TASK_ELEMENTS: usize = 16 * 1024;
/// More lanes than any instruction set has.
const MOST_LANES: usize = 64;

pub fn pointwise(threads: &Threads, op: &Pointwise) {
    if op.output.is_empty() {
        return;
    }
    let [first, second, third, columns] = op.output.shape;
    let rows = first * second * third;
    let row_block = (TASK_ELEMENTS / columns).max(1);
    let column_block = columns.min(TASK_ELEMENTS);
    let column_blocks = columns.div_ceil(column_block);
    threads.run(rows.div_ceil(row_block) * column_blocks, |task, _| {
        let (row, column) = (task / column_blocks * row_block, task % column_blocks * column_block);
        let (rows, columns) = (row..(row + row_block).min(rows), column..(column + column_block).min(columns));
        // SAFETY: the descriptor is validated, and tasks write different elements.
        unsafe { dispatch(Block { op, rows, columns }) }
    });
}

struct Block<'a> {
    op: &'a Pointwise,
    rows: Range<usize>,
    columns: Range<usize>,
}

/// One row of an operand along the last axis.
#[derive(Clone, Copy)]
struct Line {
    row: Row,
    /// 0 where one element serves all.
    stride: usize,
    extent: usize,
}

impl Line {
    /// The line at place `row` of the output's first three axes.
    fn of(tensor: &Tensor, output: &Tensor, row: usize) -> Line {
        let places = [row / output.shape[2] / output.shape[1], row / output.shape[2] % output.shape[1]];
        let places = [places[0], places[1], row % output.shape[2]];
        let offset: usize = (0..3).map(|axis| places[axis] % tensor.shape[axis] * tensor.strides[axis]).sum();
        // What moves whole words does so as f32, whose loads and stores keep every bit.
        let dtype = if tensor.dtype == DType::I32 { DType::F32 } else { tensor.dtype };
        let stride = if tensor.shape[3] == 1 { 0 } else { tensor.strides[3] };
        Line { row: Row::raw(tensor.data, dtype).skip(offset), stride, extent: tensor.shape[3] }
    }

    /// # Safety
    /// The CPU has `S`, and the line belongs to a validated descriptor whose output has elements `at .. at + lanes`.
    #[inline(always)]
    unsafe fn load<S: Simd>(self, at: usize, lanes: usize) -> S::Vector {
        if self.stride == 1 && at + lanes <= self.extent {
            return self.row.load::<S>(at, lanes);
        }
        let mut values = [0.0f32; MOST_LANES];
        for (lane, value) in values.iter_mut().enumerate().take(lanes) {
            *value = self.row.element((at + lane) % self.extent * self.stride);
        }
        S::load(values.as_ptr())
    }

    /// # Safety
    /// As of `load`.
    #[inline(always)]
    unsafe fn store<S: Simd>(self, at: usize, vector: S::Vector, lanes: usize) {
        if self.stride == 1 || lanes == 1 {
            return self.row.skip(at * self.stride).store::<S>(0, vector, lanes);
        }
        let mut values = [0.0f32; MOST_LANES];
        S::store(values.as_mut_ptr(), vector);
        for (lane, value) in values.iter().enumerate().take(lanes) {
            self.row.set_element((at + lane) * self.stride, *value);
        }
    }
}

impl Kernel for Block<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Block { op, rows, columns } = self;
        for row in rows {
            let input = Line::of(&op.input, &op.output, row);
            let output = Line::of(&op.output, &op.output, row);
            let second = op.second.as_ref().map_or(input, |second| Line::of(second, &op.output, row));
            for (at, lanes) in vectors::<S>(columns.len()) {
                let at = columns.start + at;
                let x = input.load::<S>(at, lanes);
                let y = if op.second.is_some() { second.load::<S>(at, lanes) } else { x };
                output.store::<S>(at, value::<S>(op, x, y), lanes);
            }
        }
    }
}

/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn value<S: Simd>(op: &Pointwise, x: S::Vector, y: S::Vector) -> S::Vector {
    let (zero, one) = (S::zero(), S::splat(1.0));
    match op.function {
        Function::Copy => x,
        Function::Add => S::add(x, y),
        Function::Subtract => S::sub(x, y),
        Function::Multiply => S::mul(x, y),
        Function::Divide => S::div(x, y),
        Function::Scale => S::add(S::mul(x, S::splat(op.alpha)), S::splat(op.beta)),
        Function::Clamp => {
            let (low, high) = (S::splat(op.alpha), S::splat(op.beta));
            let raised = S::select_less(x, low, low, x);
            S::select_less(high, raised, high, raised)
        }
        Function::Negate => S::mul(x, S::splat(-1.0)),
        Function::Absolute => S::abs(x),
        Function::Square => S::mul(x, x),
        Function::SquareRoot => lane_by_lane::<S>(x, f32::sqrt),
        Function::Exponential => math::exp::<S>(x),
        Function::Tanh => math::tanh::<S>(x),
        Function::Sigmoid => S::div(one, S::add(one, math::exp::<S>(S::sub(zero, x)))),
        Function::Relu => S::select_less(x, zero, zero, x),
        Function::Silu => math::silu::<S>(x),
        Function::GeluTanh => math::gelu_tanh::<S>(x),
        Function::GeluErf => math::gelu_erf::<S>(x),
        Function::GeluSigmoid => {
            let weight = S::div(one, S::add(one, math::exp::<S>(S::mul(x, S::splat(-1.702)))));
            // x = −∞ would be −∞ · 0.
            S::mul(S::select_less(x, S::splat(f32::MIN), S::splat(f32::MIN), x), weight)
        }
    }
}

/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn lane_by_lane<S: Simd>(x: S::Vector, function: impl Fn(f32) -> f32) -> S::Vector {
    let mut values = [0.0f32; MOST_LANES];
    S::store(values.as_mut_ptr(), x);
    for value in values.iter_mut().take(S::LANES) {
        *value = function(*value);
    }
    S::load(values.as_ptr())
}

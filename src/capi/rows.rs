//! Operations on whole rows of plain tensors: their order, their sums, their lengths.

use super::backend::arguments;
use super::operations::or;
use super::prelude::*;
use super::tensor::{nvb_tensor, strided_device_tensor, Reading};
use crate::operation::l2_norm::L2Norm;
use crate::operation::sort_rows::SortRows;
use crate::operation::sum_rows::SumRows;

/// `order`: the smallest element first.
pub const NVB_ORDER_ASCENDING: u32 = 0;
/// `order`: the largest element first.
pub const NVB_ORDER_DESCENDING: u32 = 1;

/// output[.., i] = the column of the i-th element of the row in its order: a stable sort, in which of equal elements the lower
/// column comes first in either order. NaN comes after every number. With fewer columns in `output` than in `input` these are the
/// first of them: the largest k in descending order.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_sort_rows_args {
    pub struct_size: usize,
    /// [.., rows, n], any float dtype and strides, the innermost 1; up to two axes in front.
    pub input: nvb_tensor,
    /// I32 [.., rows, k] with k of at most n, any strides, the innermost 1. Must not overlap `input`.
    pub output: nvb_tensor,
    /// `NVB_ORDER_…`
    pub order: u32,
    /// Must be 0.
    pub reserved: u32,
}
versioned!(nvb_sort_rows_args);

/// output = scale · Σ input over the last axis. 1 / n makes it the mean.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_sum_rows_args {
    pub struct_size: usize,
    /// [.., rows, n], any float dtype and any strides; up to two axes in front. The sum of no elements is 0.
    pub input: nvb_tensor,
    /// [.., rows, 1], any float dtype and any strides. Must not overlap `input`.
    pub output: nvb_tensor,
    /// 0: 1.
    pub scale: f32,
    /// Must be 0.
    pub reserved: u32,
}
versioned!(nvb_sum_rows_args);

/// output = input / max(√(Σ input²), epsilon), each row by its own length.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_l2_norm_args {
    pub struct_size: usize,
    /// [.., rows, n], any float dtype and any strides; up to two axes in front.
    pub input: nvb_tensor,
    /// Any float dtype and any strides, of the shape of `input`, which it may be.
    pub output: nvb_tensor,
    /// 0: 1e-12.
    pub epsilon: f32,
    /// Must be 0.
    pub reserved: u32,
}
versioned!(nvb_l2_norm_args);

/// Queues a sort of each row. Does not synchronise. On CUDA rows of more than 4,096 elements take workspace, which the first call
/// with more of them may allocate: 16 bytes for each of the first k elements of every 4,096, of as many rows at a time as 32 MiB
/// hold. May be captured after that.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` for an order that is neither, for shapes, dtypes and strides that do not fit, and for an output
/// that overlaps the input; where one of them has gaps that is not found, and some columns are named.
#[no_mangle]
pub unsafe extern "C" fn nvb_sort_rows(
    backend: *const nvb_backend,
    args: *const nvb_sort_rows_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_sort_rows, {
        arguments!(backend, args, stream);
        backend.queue(sort_rows_of(Reading::Memory(&backend), args)?, &stream)
    })
}

pub(super) fn sort_rows_of(reading: Reading<'_>, args: &nvb_sort_rows_args) -> Result<SortRows> {
    expect_reserved(args.reserved)?;
    let descending = match args.order {
        NVB_ORDER_ASCENDING => false,
        NVB_ORDER_DESCENDING => true,
        other => return Err(Error::invalid(format!("order is {other}; NVB_ORDER_… (0 or 1) is needed"))),
    };
    SortRows::new(reading.tensor("input", &args.input)?, reading.tensor("output", &args.output)?, descending)
}

/// Queues a sum over each row, f32 or more inside with one rounding at the store. Does not allocate or synchronise; may be
/// captured.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` for shapes, dtypes and strides that do not fit, and for an output that overlaps the input.
#[no_mangle]
pub unsafe extern "C" fn nvb_sum_rows(
    backend: *const nvb_backend,
    args: *const nvb_sum_rows_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_sum_rows, {
        arguments!(backend, args, stream);
        expect_reserved(args.reserved)?;
        let input = strided_device_tensor(&backend, "input", &args.input)?;
        let output = strided_device_tensor(&backend, "output", &args.output)?;
        backend.queue(SumRows::new(input, output, or(args.scale, 1.0))?, &stream)
    })
}

/// Queues a division of each row by its length, f32 or more inside with one rounding at the store; no finite element overflows on
/// the way. Does not allocate or synchronise; may be captured.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` for shapes, dtypes and strides that do not fit, and for an output that overlaps the input
/// without being it.
#[no_mangle]
pub unsafe extern "C" fn nvb_l2_norm(
    backend: *const nvb_backend,
    args: *const nvb_l2_norm_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_l2_norm, {
        arguments!(backend, args, stream);
        expect_reserved(args.reserved)?;
        let input = strided_device_tensor(&backend, "input", &args.input)?;
        let output = strided_device_tensor(&backend, "output", &args.output)?;
        backend.queue(L2Norm::new(input, output, or(args.epsilon, 1e-12))?, &stream)
    })
}

//! A row of floats of any dtype, read and written as f32: the operations whose time is memory's go through it, so that
//! one loop serves every mix of dtypes. The choice of dtype in the loop is a branch that always goes the same way.

use super::threads::{Scratch, Threads};
use crate::simd::{with_float, with_kv, Simd, VectorElement};
use crate::tensor::{DType, Element, Heads, Matrix, Tensor};
use std::ops::Range;

#[derive(Clone, Copy)]
pub struct Row {
    data: *mut u8,
    dtype: DType,
}

impl Row {
    /// The row of a matrix.
    pub fn of(matrix: &Matrix, row: usize) -> Row {
        Row { data: matrix.data.cast(), dtype: matrix.dtype }.skip(row * matrix.row_stride)
    }

    /// A contiguous tensor as one row.
    pub fn vector(tensor: &Tensor) -> Row {
        Row { data: tensor.data.cast(), dtype: tensor.dtype }
    }

    pub fn head(heads: &Heads, token: usize, head: usize) -> Row {
        Row::raw(heads.data, heads.dtype).skip(token * heads.token_stride + head * heads.head_stride)
    }

    pub fn raw(data: *mut std::ffi::c_void, dtype: DType) -> Row {
        Row { data: data.cast(), dtype }
    }

    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// Of its first element.
    pub fn address(self) -> *const u8 {
        self.data
    }

    /// This row from the element `count` on.
    #[inline(always)]
    pub fn skip(self, count: usize) -> Row {
        Row { data: self.data.wrapping_add(count * self.dtype.size()), ..self }
    }

    /// The first `count` elements of a row of f32.
    ///
    /// # Safety
    /// They are readable, nobody writes them while the slice is in use, and the row's dtype is F32.
    pub unsafe fn floats<'a>(self, count: usize) -> &'a [f32] {
        debug_assert_eq!(self.dtype, DType::F32);
        std::slice::from_raw_parts(self.data.cast(), count)
    }

    /// Elements `at .. at + lanes`; lanes past that, up to `S::LANES`, are 0.
    ///
    /// # Safety
    /// The CPU has `S`, and the elements are readable.
    #[inline(always)]
    pub unsafe fn load<S: Simd>(self, at: usize, lanes: usize) -> S::Vector {
        with_float!(self.dtype, T => {
            T::load_lanes::<S>(self.data.cast::<T>().add(at), lanes)
        })
    }

    /// # Safety
    /// The CPU has `S`, and elements `at .. at + lanes` are writable.
    #[inline(always)]
    pub unsafe fn store<S: Simd>(self, at: usize, vector: S::Vector, lanes: usize) {
        with_float!(self.dtype, T => {
            T::store_lanes::<S>(self.data.cast::<T>().add(at), vector, lanes)
        })
    }

    /// Loads elements of any type that attention reads.
    ///
    /// # Safety
    /// As of `load`.
    #[inline(always)]
    pub unsafe fn load_kv<S: Simd>(self, at: usize, lanes: usize) -> S::Vector {
        with_kv!(self.dtype, T => {
            T::load_lanes::<S>(self.data.cast::<T>().add(at), lanes)
        })
    }

    /// Stores elements of any type that a cache may have.
    ///
    /// # Safety
    /// As of `store`.
    #[inline(always)]
    pub unsafe fn store_kv<S: Simd>(self, at: usize, vector: S::Vector, lanes: usize) {
        with_kv!(self.dtype, T => {
            T::store_lanes::<S>(self.data.cast::<T>().add(at), vector, lanes)
        })
    }

    /// # Safety
    /// The element is readable.
    pub unsafe fn get(self, at: usize) -> f64 {
        f64::from(self.element(at))
    }

    /// With every bit of an f32, which a wider type does not keep of a signalling NaN.
    ///
    /// # Safety
    /// The element is readable.
    pub unsafe fn element(self, at: usize) -> f32 {
        with_kv!(self.dtype, T => self.data.cast::<T>().add(at).read().to_f32())
    }

    /// # Safety
    /// The element is writable.
    pub unsafe fn set_element(self, at: usize, value: f32) {
        with_float!(self.dtype, T => self.data.cast::<T>().add(at).write(T::from_f32(value)))
    }

    /// Of any type that attention reads.
    ///
    /// # Safety
    /// The element is writable.
    pub unsafe fn set_kv_element(self, at: usize, value: f32) {
        with_kv!(self.dtype, T => self.data.cast::<T>().add(at).write(T::from_f32(value)))
    }

    /// # Safety
    /// The element is writable.
    pub unsafe fn set(self, at: usize, value: f64) {
        self.set_element(at, value as f32)
    }
}

/// Goes through `count` elements a vector at a time: (first element, lanes).
#[inline(always)]
pub fn vectors<S: Simd>(count: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..count).step_by(S::LANES).map(move |at| (at, S::LANES.min(count - at)))
}

/// Elements below which another thread costs more than it saves.
const TASK_ELEMENTS: usize = 16 * 1024;

/// Spreads rows over the threads in contiguous ranges, or keeps few elements on this one.
pub fn for_rows(threads: &Threads, rows: usize, columns: usize, body: impl Fn(Range<usize>, &mut Scratch) + Sync) {
    let fewest = TASK_ELEMENTS.div_ceil(columns.max(1));
    let block = rows.div_ceil(threads.count() * 4).max(fewest);
    threads.run(rows.div_ceil(block), |task, scratch| body(task * block..((task + 1) * block).min(rows), scratch));
}

/// A tensor of i32 values in host memory.
///
/// # Safety
/// The tensor is a validated rank-1 tensor of i32.
pub unsafe fn integers(tensor: &Tensor) -> &[i32] {
    if tensor.shape[0] == 0 {
        return &[];
    }
    std::slice::from_raw_parts(tensor.data.cast(), tensor.shape[0])
}

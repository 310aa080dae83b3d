//! Tensors: a dtype, a shape and strides over memory that somebody else owns.

mod cache_layer;
pub mod fp8;
pub mod kv_row;

use crate::error::{numbered, Error, Result};
use half::{bf16, f16};
use std::ffi::c_void;
use std::fmt;

pub use cache_layer::{CacheLayer, KvHead, KvView, PageTable, Placement, ValueStrides, MAX_HEAD_DIM, MAX_VALUE_DIM};

numbered! {
    /// `nvb_dtype_code` of csrc/common/launch.h, the types of elements; the numbers are `NVB_DTYPE_*` of the C ABI too.
    pub enum DType: u32 {
        F32 = 1,
        F16 = 2,
        Bf16 = 3,
        I32 = 4,
        /// Of attention's queries, keys and values alone, as is the next.
        F8E4m3 = 5,
        F8E5m2 = 6,
        /// Rows of a cache, as are the two below: bytes, whose values and scales [`kv_row`] tells.
        KvInt8 = 7,
        KvQ8_0 = 8,
        KvQ4_0 = 9,
    }
}

impl DType {
    pub const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

    pub fn size(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::Bf16 => 2,
            DType::F8E4m3 | DType::F8E5m2 | DType::KvInt8 | DType::KvQ8_0 | DType::KvQ4_0 => 1,
        }
    }

    /// Whether operations compute with it.
    pub fn is_float(self) -> bool {
        DType::FLOATS.contains(&self)
    }

    /// Whether it is a type of 8 bits, whose elements have scales.
    pub fn is_fp8(self) -> bool {
        matches!(self, DType::F8E4m3 | DType::F8E5m2)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::F8E4m3 => "fp8 e4m3",
            DType::F8E5m2 => "fp8 e5m2",
            DType::KvInt8 => "int8 rows",
            DType::KvQ8_0 => "q8_0 rows",
            DType::KvQ4_0 => "q4_0 rows",
        })
    }
}

/// A Rust type that stores one dtype's elements.
pub trait Element: Copy + Send + Sync + 'static {
    const DTYPE: DType;
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(value: f32) -> f32 {
        value
    }
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    fn from_f32(value: f32) -> f16 {
        f16::from_f32(value)
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    fn from_f32(value: f32) -> bf16 {
        bf16::from_f32(value)
    }
}

pub const MAX_RANK: usize = 4;

/// A view of a tensor in the memory of the backend's device. It owns nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tensor {
    pub data: *mut c_void,
    pub dtype: DType,
    pub rank: usize,
    /// Unused trailing entries are 1.
    pub shape: [usize; MAX_RANK],
    /// In elements; unused trailing entries are 1.
    pub strides: [usize; MAX_RANK],
}

// SAFETY: a view carries an address, and every dereference is an unsafe act of an executor that was handed the view.
unsafe impl Send for Tensor {}
// SAFETY: as above; the view itself is immutable.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// A contiguous (row-major) view.
    #[inline]
    pub fn new(data: *mut c_void, dtype: DType, shape: &[usize]) -> Tensor {
        assert!(shape.len() <= MAX_RANK, "rank {} exceeds {MAX_RANK}", shape.len());
        let mut tensor = Tensor { data, dtype, rank: shape.len(), shape: [1; MAX_RANK], strides: [1; MAX_RANK] };
        let mut stride = 1;
        for (axis, &extent) in shape.iter().enumerate().rev() {
            (tensor.shape[axis], tensor.strides[axis]) = (extent, stride);
            stride *= extent.max(1);
        }
        tensor
    }

    pub fn of<T: Element>(data: &mut [T], shape: &[usize]) -> Tensor {
        assert_eq!(data.len(), shape.iter().product::<usize>(), "slice length and shape disagree");
        Tensor::new(data.as_mut_ptr().cast(), T::DTYPE, shape)
    }

    pub fn with_strides(mut self, strides: &[usize]) -> Tensor {
        self.strides[..strides.len()].copy_from_slice(strides);
        self
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    // Unused axes have an extent of 1, so that all axes can be looked at without a loop to their number.
    #[inline]
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Bytes from the first element to one past the last, strides included.
    #[inline]
    pub fn span_bytes(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        let last: usize = self.shape.iter().zip(self.strides).map(|(extent, stride)| (extent - 1) * stride).sum();
        (last + 1) * self.dtype.size()
    }

    pub fn is_contiguous(&self) -> bool {
        if self.is_empty() {
            return true;
        }
        let mut stride = 1;
        for axis in (0..self.rank).rev() {
            if self.shape[axis] != 1 && self.strides[axis] != stride {
                return false;
            }
            stride *= self.shape[axis];
        }
        true
    }

    /// Views the data as `[rows, columns]`: the last axis stays, the axes before it must fold into one stride.
    #[inline]
    pub fn as_matrix(&self, name: &str) -> Result<Matrix> {
        // The usual tensor, without the loops of the others.
        if self.rank == 2 && !self.is_empty() {
            let ([rows, columns, ..], [row_stride, ..]) = (self.shape, self.strides);
            let row_stride = if rows == 1 { columns } else { row_stride };
            return Ok(Matrix { data: self.data, dtype: self.dtype, rows, columns, row_stride });
        }
        self.folded(name)
    }

    #[inline(never)]
    fn folded(&self, name: &str) -> Result<Matrix> {
        if self.rank == 0 {
            return Err(Error::invalid(format!("tensor `{name}` has rank 0; at least 1 is needed")));
        }
        let last = self.rank - 1;
        let columns = self.shape[last];
        let rows: usize = self.shape[..last].iter().product();
        if self.is_empty() {
            return Ok(Matrix { data: self.data, dtype: self.dtype, rows, columns, row_stride: columns.max(1) });
        }
        // Axes of extent 1 never step, so their strides say nothing.
        let mut row_stride = None;
        let mut expected = None;
        for axis in (0..last).rev().filter(|&axis| self.shape[axis] != 1) {
            match expected {
                None => row_stride = Some(self.strides[axis]),
                Some(stride) if stride != self.strides[axis] => {
                    return Err(Error::invalid(format!(
                        "tensor `{name}` {self}: its leading axes do not fold into one row stride \
                         (stride {} of axis {axis}, {stride} needed)",
                        self.strides[axis]
                    )))
                }
                Some(_) => {}
            }
            expected = Some(self.strides[axis] * self.shape[axis]);
        }
        Ok(Matrix { data: self.data, dtype: self.dtype, rows, columns, row_stride: row_stride.unwrap_or(columns) })
    }

    #[inline]
    pub fn expect_float(&self, name: &str) -> Result<()> {
        if self.dtype.is_float() {
            return Ok(());
        }
        Err(Error::invalid(format!("tensor `{name}` has dtype {}; f32, f16 or bf16 is needed", self.dtype)))
    }

    #[inline]
    pub fn expect_dtype(&self, name: &str, dtype: DType) -> Result<()> {
        if self.dtype == dtype {
            return Ok(());
        }
        Err(Error::invalid(format!("tensor `{name}` has dtype {}; {dtype} is needed", self.dtype)))
    }

    #[inline]
    pub fn expect_shape(&self, name: &str, shape: &[usize]) -> Result<()> {
        if self.shape() == shape {
            return Ok(());
        }
        Err(Error::invalid(format!("tensor `{name}` has shape {:?}; {shape:?} is needed", self.shape())))
    }

    #[inline]
    pub fn expect_rank(&self, name: &str, rank: usize) -> Result<()> {
        if self.rank == rank {
            return Ok(());
        }
        Err(Error::invalid(format!("tensor `{name}` has rank {}; {rank} is needed", self.rank)))
    }

    /// A non-null, element-aligned pointer and an innermost stride of 1, unless the tensor is empty.
    #[inline]
    pub fn expect_readable(&self, name: &str) -> Result<()> {
        let last = self.rank.saturating_sub(1).min(MAX_RANK - 1);
        // Sizes are powers of two, for which no division is needed.
        let aligned = self.data as usize & (self.dtype.size() - 1) == 0 && !self.data.is_null();
        if aligned && (self.strides[last] == 1 || self.shape[last] == 1) {
            return Ok(());
        }
        self.expect_readable_unless_empty(name)
    }

    #[cold]
    fn expect_readable_unless_empty(&self, name: &str) -> Result<()> {
        self.expect_address(name)?;
        if !self.is_empty() && self.rank > 0 && self.shape[self.rank - 1] > 1 && self.strides[self.rank - 1] != 1 {
            return Err(Error::invalid(format!(
                "tensor `{name}` {self}: the innermost stride is {}; 1 is needed",
                self.strides[self.rank - 1]
            )));
        }
        Ok(())
    }

    /// A non-null, element-aligned pointer, unless the tensor is empty; what takes any strides needs no more.
    pub fn expect_address(&self, name: &str) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        if self.data.is_null() {
            return Err(Error::invalid(format!("tensor `{name}` {self} has a NULL data pointer")));
        }
        if !(self.data as usize).is_multiple_of(self.dtype.size()) {
            return Err(Error::invalid(format!(
                "tensor `{name}` {self} is not aligned to its element size of {} bytes: {:p}",
                self.dtype.size(),
                self.data
            )));
        }
        Ok(())
    }

    /// Expects what [`Tensor::expect_readable`] does, and that no two elements share an address.
    #[inline]
    pub fn expect_writable(&self, name: &str) -> Result<()> {
        self.expect_readable(name)?;
        let rows_apart = self.shape[0] == 1 || self.strides[0] >= self.shape[1];
        if self.rank <= 1 || (self.rank == 2 && rows_apart) {
            return Ok(());
        }
        self.expect_strides_apart(name)
    }

    /// An address, and no two elements at one place, whatever the order of the strides.
    pub fn expect_elements_apart(&self, name: &str) -> Result<()> {
        self.expect_address(name)?;
        if self.is_empty() {
            return Ok(());
        }
        let mut axes = [(0, 1); MAX_RANK];
        for (axis, place) in axes.iter_mut().enumerate().take(self.rank) {
            *place = (self.strides[axis], self.shape[axis]);
        }
        axes.sort_unstable();
        let mut reach = 1;
        for (stride, extent) in axes.into_iter().filter(|axis| axis.1 > 1) {
            if stride < reach {
                return Err(Error::invalid(format!(
                    "tensor `{name}` {self} is written, but a stride of {stride} makes its elements overlap \
                     (at least {reach} is needed)"
                )));
            }
            reach += (extent - 1) * stride;
        }
        Ok(())
    }

    /// Expects what [`Tensor::expect_readable`] does, and that no two elements share an address, in whatever order the axes lie.
    pub fn expect_places_apart(&self, name: &str) -> Result<()> {
        self.expect_readable(name)?;
        self.expect_elements_apart(name)
    }

    /// The same elements with axes of extent 1 in front, so that there are four.
    pub fn with_four_axes(&self) -> Tensor {
        let mut tensor = Tensor { rank: MAX_RANK, shape: [1; MAX_RANK], strides: [0; MAX_RANK], ..*self };
        let first = MAX_RANK - self.rank;
        tensor.shape[first..].copy_from_slice(self.shape());
        tensor.strides[first..].copy_from_slice(&self.strides[..self.rank]);
        tensor
    }

    #[inline(never)]
    fn expect_strides_apart(&self, name: &str) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        for axis in 0..self.rank.saturating_sub(1) {
            let inner = 1 + (axis + 1..self.rank).map(|j| (self.shape[j] - 1) * self.strides[j]).sum::<usize>();
            if self.shape[axis] > 1 && self.strides[axis] < inner {
                return Err(Error::invalid(format!(
                    "tensor `{name}` {self} is written, but stride {} of axis {axis} makes its elements overlap \
                     (at least {inner} is needed)",
                    self.strides[axis]
                )));
            }
        }
        Ok(())
    }
}

/// Addresses below it are nobody's memory: of calls that ask about shapes alone.
const FIRST_MEMORY: usize = 4096;

impl Tensor {
    /// Whether the two share no byte, with what lies between the rows counted to them. What is read to find addresses (tokens,
    /// positions, sequences, offsets) has been checked when the work runs, so the work may not write it.
    pub fn expect_apart(&self, name: &str, written_name: &str, written: &Tensor) -> Result<()> {
        let (start, other) = (self.data as usize, written.data as usize);
        let apart =
            start.saturating_add(self.span_bytes()) <= other || other.saturating_add(written.span_bytes()) <= start;
        if apart || self.is_empty() || written.is_empty() || start.min(other) < FIRST_MEMORY {
            return Ok(());
        }
        Err(Error::invalid(format!("`{written_name}` overlaps `{name}`, which the work reads addresses from")))
    }
}

impl fmt::Display for Tensor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}{:?}", self.dtype, self.shape())
    }
}

/// A tensor seen as rows of contiguous elements, the form that executors work on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Matrix {
    pub data: *mut c_void,
    pub dtype: DType,
    pub rows: usize,
    pub columns: usize,
    /// In elements; 0 broadcasts one row.
    pub row_stride: usize,
}

// SAFETY: as for `Tensor`: an address and its description, dereferenced only by executors.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}

impl Matrix {
    /// The shape of contiguous rows that have no address.
    pub fn without_memory(dtype: DType, rows: usize, columns: usize) -> Matrix {
        Matrix { data: std::ptr::null_mut(), dtype, rows, columns, row_stride: columns }
    }

    /// `count` rows from `first` on.
    pub fn part(&self, first: usize, count: usize) -> Matrix {
        let skipped = first * self.row_stride * self.dtype.size();
        Matrix { data: self.data.wrapping_byte_add(skipped), rows: count, ..*self }
    }

    #[inline]
    pub fn expect_size(&self, name: &str, rows: usize, columns: usize) -> Result<()> {
        if self.rows == rows && self.columns == columns {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "tensor `{name}` is {} rows of {}; {rows} rows of {columns} are needed",
            self.rows, self.columns
        )))
    }
}

/// A tensor seen as vectors of contiguous elements, one for each token and head, the form that attention works on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Heads {
    pub data: *mut c_void,
    pub dtype: DType,
    pub tokens: usize,
    pub heads: usize,
    pub head_dim: usize,
    /// In elements.
    pub token_stride: usize,
    /// In elements.
    pub head_stride: usize,
}

// SAFETY: as for `Tensor`: an address and its description, dereferenced only by executors.
unsafe impl Send for Heads {}
// SAFETY: as above.
unsafe impl Sync for Heads {}

impl Heads {
    /// Views a tensor [tokens, heads, head_dim].
    pub fn new(name: &str, tensor: Tensor, tokens: usize, head_dim: usize) -> Result<Heads> {
        tensor.expect_float(name)?;
        Heads::of_any_dtype(name, tensor, tokens, head_dim)
    }

    /// Views a tensor as `new` does, of whatever dtype.
    pub fn of_any_dtype(name: &str, tensor: Tensor, tokens: usize, head_dim: usize) -> Result<Heads> {
        tensor.expect_rank(name, 3)?;
        tensor.expect_readable(name)?;
        let Tensor { data, dtype, shape, strides, .. } = tensor;
        if shape[0] != tokens || shape[2] != head_dim {
            return Err(Error::invalid(format!(
                "tensor `{name}` has shape {:?}; [{tokens}, heads, {head_dim}] is needed",
                tensor.shape()
            )));
        }
        Ok(Heads { data, dtype, tokens, heads: shape[1], head_dim, token_stride: strides[0], head_stride: strides[1] })
    }

    /// The same rows from an element on.
    #[inline(always)]
    pub fn skip(&self, elements: usize) -> Heads {
        Heads { data: self.data.wrapping_byte_add(elements * self.dtype.size()), ..*self }
    }

    /// [tokens, heads, head_dim]
    pub fn tensor(&self) -> Tensor {
        let shape = [self.tokens, self.heads, self.head_dim];
        Tensor::new(self.data, self.dtype, &shape).with_strides(&[self.token_stride, self.head_stride, 1])
    }
}

/// Kernels index rows and columns with 32 bits; a larger extent is refused here with its name.
pub(crate) fn expect_extent(name: &str, value: usize) -> Result<()> {
    if value <= i32::MAX as usize {
        return Ok(());
    }
    Err(Error::invalid(format!("{name} is {value}; the largest supported is {}", i32::MAX))
        .with_limit(value as u64, i32::MAX as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(shape: &[usize]) -> Tensor {
        Tensor::new(16 as *mut c_void, DType::F32, shape)
    }

    #[test]
    fn leading_axes_fold_into_rows() {
        let matrix = view(&[2, 3, 5]).as_matrix("x").unwrap();
        assert_eq!((matrix.rows, matrix.columns, matrix.row_stride), (6, 5, 5));
        let strided = view(&[2, 3, 5]).with_strides(&[24, 8, 1]).as_matrix("x").unwrap();
        assert_eq!(strided.row_stride, 8);
        assert!(view(&[2, 3, 5]).with_strides(&[40, 8, 1]).as_matrix("x").is_err());
        assert_eq!(view(&[7]).as_matrix("x").unwrap().rows, 1);
        assert_eq!(view(&[1, 1, 5]).with_strides(&[99, 77, 1]).as_matrix("x").unwrap().rows, 1);
    }

    #[test]
    fn the_strides_of_an_empty_tensor_do_not_matter() {
        for (shape, rows, columns) in [([0, 2, 8], 0, 8), ([2, 0, 8], 0, 8), ([0, 0, 8], 0, 8), ([2, 3, 0], 6, 0)] {
            for tensor in [view(&shape), view(&shape).with_strides(&[5, 77, 3])] {
                let matrix = tensor.as_matrix("x").unwrap();
                assert_eq!((matrix.rows, matrix.columns), (rows, columns), "{shape:?}");
                assert!(tensor.is_contiguous() && tensor.expect_writable("x").is_ok(), "{shape:?}");
            }
        }
    }

    #[test]
    fn overlapping_outputs_are_refused() {
        assert!(view(&[2, 4]).with_strides(&[0, 1]).expect_readable("x").is_ok());
        assert!(view(&[2, 4]).with_strides(&[0, 1]).expect_writable("x").is_err());
        assert!(view(&[2, 4]).with_strides(&[4, 2]).expect_readable("x").is_err());
    }

    #[test]
    fn spans_count_strides() {
        assert_eq!(view(&[2, 4]).with_strides(&[6, 1]).span_bytes(), 40);
        assert_eq!(view(&[0, 4]).span_bytes(), 0);
    }
}

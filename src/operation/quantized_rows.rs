//! Activations in 8 bits: the quantised values of a matrix and one scale a row, which a norm or a gated activation
//! leaves and products take.
//!
//! scale = max |x| / 448 (FP8 E4M3) or / 127 (INT8) of the row's unrounded f32 values, q = x / scale to nearest, ties
//! to even: what products with 8-bit activations make of an f32 input, bit by bit. A row of zeros has the scale 0; NaN in
//! a row makes its scale NaN, an infinity makes it infinite. With scales that are given the quantised values alone are
//! made, and what lies beyond their range gets the largest.

use super::expect_extent;
use crate::error::{Error, Result};
use crate::tensor::DType;
use crate::weight::{Encoding, Scales, WeightView};
use std::ffi::c_void;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QuantizedRows {
    /// One byte an element.
    pub data: *mut c_void,
    /// [rows]
    pub scales: *mut f32,
    /// The scales of quantised values to be written are there and stay as they are.
    pub given_scales: bool,
    /// Fp8E4m3 or Int8.
    pub encoding: Encoding,
    pub rows: usize,
    pub columns: usize,
    /// In bytes.
    pub row_stride: usize,
}

// SAFETY: addresses and their description, dereferenced only by executors.
unsafe impl Send for QuantizedRows {}
// SAFETY: as above.
unsafe impl Sync for QuantizedRows {}

impl QuantizedRows {
    /// An encoding of activations, addresses where there is something to address, and rows that do not overlap.
    pub(super) fn expect_valid(&self, name: &str) -> Result<()> {
        if !matches!(self.encoding, Encoding::Fp8E4m3 | Encoding::Int8) {
            return Err(Error::invalid(format!(
                "`{name}` holds {}; fp8 e4m3 or int8 is needed for activations",
                self.encoding
            )));
        }
        expect_extent(&format!("the number of rows of `{name}`"), self.rows)?;
        expect_extent(&format!("the number of columns of `{name}`"), self.columns)?;
        if self.rows > 1 && self.row_stride < self.columns {
            return Err(Error::invalid(format!(
                "`{name}` has a row stride of {}; at least its {} columns are needed",
                self.row_stride, self.columns
            )));
        }
        if self.rows == 0 || self.columns == 0 {
            return Ok(());
        }
        if self.data.is_null() {
            return Err(Error::invalid(format!("`{name}` has a NULL data pointer")));
        }
        if self.scales.is_null() {
            return Err(Error::invalid(format!("`{name}` has data and no scales: its scales pointer is NULL")));
        }
        if !self.scales.is_aligned() {
            return Err(Error::invalid(format!(
                "the scales of `{name}` are not aligned to 4 bytes: {:p}",
                self.scales
            )));
        }
        Ok(())
    }

    /// `count` rows from `first` on.
    pub fn part(&self, first: usize, count: usize) -> QuantizedRows {
        let data = self.data.wrapping_byte_add(first * self.row_stride);
        QuantizedRows { data, scales: self.scales.wrapping_add(first), rows: count, ..*self }
    }

    pub(super) fn expect_size(&self, name: &str, rows: usize, columns: usize) -> Result<()> {
        if self.rows == rows && self.columns == columns {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "`{name}` is {} rows of {}; {rows} rows of {columns} are needed",
            self.rows, self.columns
        )))
    }

    /// Bytes from the first quantised value to one past the last.
    pub fn span_bytes(&self) -> usize {
        match self.rows {
            0 => 0,
            rows => (rows - 1) * self.row_stride + self.columns,
        }
    }

    /// Bytes of quantised values and scales, gaps between rows not counted.
    pub(super) fn bytes(&self) -> f64 {
        (self.rows * self.columns + self.rows * size_of::<f32>()) as f64
    }

    /// The rows as a quantised matrix.
    pub fn view(&self) -> WeightView {
        WeightView {
            encoding: self.encoding,
            scales: Scales::Rows(self.scales),
            ..WeightView::float(self.data, DType::F32, self.rows, self.columns, self.row_stride, false)
        }
    }
}

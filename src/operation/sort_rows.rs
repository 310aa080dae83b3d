//! `sort_rows`: the columns of each row in the order of their elements, all of them or the first few.
//!
//! Ascending or descending; of equal elements the lower column comes first in either order (a stable sort), and NaN comes
//! after every number. −0 equals +0, as in comparisons.

use super::{expect_extent, Cost};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{DType, Tensor};

/// Four axes each, those in front of the tensors' own with an extent of 1: [.., rows, columns].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SortRows {
    pub input: Tensor,
    /// I32 [.., rows, count], with a count of at most the input's columns.
    pub output: Tensor,
    pub descending: bool,
}

impl SortRows {
    pub fn new(input: Tensor, output: Tensor, descending: bool) -> Result<SortRows> {
        input.expect_float("input")?;
        input.expect_readable("input")?;
        output.expect_dtype("output", DType::I32)?;
        output.expect_readable("output")?;
        output.expect_elements_apart("output")?;
        let (input, output) = (input.with_four_axes(), output.with_four_axes());
        if input.shape[..3] != output.shape[..3] || output.shape[3] > input.shape[3] {
            return Err(Error::invalid(format!(
                "tensor `output` has shape {:?}; the rows of {:?} with at most as many columns are needed",
                output.shape(),
                input.shape()
            )));
        }
        let [first, second, third, columns] = input.shape;
        expect_extent("the number of rows", first.saturating_mul(second).saturating_mul(third))?;
        expect_extent("the number of columns", columns)?;
        Ok(SortRows { input, output, descending })
    }

    /// How many columns of each row are named.
    pub fn count(&self) -> usize {
        self.output.shape[3]
    }

    /// What the smallest element of a row, in its order, is smallest by. Kernels use the same numbers.
    pub fn key(&self, value: f32) -> u32 {
        if value.is_nan() {
            return u32::MAX;
        }
        let bits = (value + 0.0).to_bits();
        // Negative numbers grow downwards in their bits.
        let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
        match self.descending {
            true => !ascending,
            false => ascending,
        }
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("input", Some(&self.input));
        visit.write("output", Some(&self.output));
    }

    pub fn cost(&self) -> Cost {
        let elements = self.input.elements() as f64;
        let comparisons = elements * (self.input.shape[3].max(2) as f64).log2();
        let bytes = elements * self.input.dtype.size() as f64 + (self.output.elements() * 4) as f64;
        Cost { operations: comparisons, bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_as_numbers_do_and_nan_comes_last() {
        let rising =
            [f32::NEG_INFINITY, f32::MIN, -1.0, -f32::from_bits(1), 0.0, f32::from_bits(1), 1.0, f32::INFINITY];
        let data = std::ptr::dangling_mut::<f32>().cast();
        let input = Tensor::new(data, DType::F32, &[1, 8]);
        let output = Tensor::new(data, DType::I32, &[1, 8]);
        for descending in [false, true] {
            let op = SortRows::new(input, output, descending).unwrap();
            let keys: Vec<u32> = rising.iter().map(|&value| op.key(value)).collect();
            assert!(keys.windows(2).all(|pair| (pair[0] < pair[1]) != descending), "{keys:x?}");
            assert!(keys.iter().all(|&key| key < op.key(f32::NAN) && key < op.key(-f32::NAN)));
            assert_eq!(op.key(-0.0), op.key(0.0));
        }
    }
}

//! Where a weight comes from: a matrix that is read row by row, as floats and perhaps as quantised values that can be
//! kept.

use super::format::Format;
use crate::error::{Error, Result};
use crate::tensor::{DType, Element, Tensor};
use half::{bf16, f16};

#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub rows: usize,
    pub columns: usize,
    /// The format that holds a source's elements as they are, or as nearly as one does.
    pub format: Format,
}

/// A source matrix [rows, columns]. Its bytes may come from anywhere: what they say is checked as it is read, and an
/// error names the place.
pub trait RowSource: Sync {
    fn shape(&self) -> Shape;
    fn rows(&self) -> usize {
        self.shape().rows
    }
    fn columns(&self) -> usize {
        self.shape().columns
    }
    fn format(&self) -> Format {
        self.shape().format
    }
    /// A row as f32, its columns in the order in which an input has them.
    fn values(&self, row: usize, values: &mut [f32]) -> Result<()>;
    /// Its quantised values, if `format` keeps them.
    fn quantized(&self) -> Option<&dyn QuantizedSource> {
        None
    }
}

pub trait QuantizedSource {
    /// A row's quantised values, and its scales and zero points as `format` counts them, rounded to f16 where that
    /// stores f16.
    fn quantized_row(
        &self,
        row: usize,
        quantized: &mut [u8],
        scales: &mut [f32],
        zero_points: &mut [f32],
    ) -> Result<()>;
    /// The input element that each column of the quantised row multiplies; `None`: its own.
    fn order(&self) -> Option<&[i32]> {
        None
    }
    /// Whether quantised values and scales together are exactly the values.
    fn is_exact(&self) -> bool {
        true
    }
}

/// A float tensor in host memory.
pub struct FloatRows {
    tensor: Tensor,
}

impl FloatRows {
    /// # Safety
    /// The tensor is a validated matrix whose rows, as far as they are asked for, are readable on the host for as long as
    /// this lives.
    pub unsafe fn new(tensor: Tensor) -> FloatRows {
        FloatRows { tensor }
    }

    /// # Safety
    /// `T` is the tensor's element type, and the row is one of its rows.
    unsafe fn read<T: Element>(&self, row: usize, values: &mut [f32]) {
        let from = self.tensor.data.cast::<T>().wrapping_add(row * self.tensor.strides[0]);
        for (i, value) in values.iter_mut().enumerate() {
            *value = from.add(i).read().to_f32();
        }
    }
}

impl RowSource for FloatRows {
    fn shape(&self) -> Shape {
        Shape { rows: self.tensor.shape[0], columns: self.tensor.shape[1], format: Format::float(self.tensor.dtype) }
    }

    fn values(&self, row: usize, values: &mut [f32]) -> Result<()> {
        assert!(row < self.rows() && values.len() == self.columns());
        // SAFETY: the constructor's contract, and the row is inside.
        unsafe {
            match self.tensor.dtype {
                DType::F32 => self.read::<f32>(row, values),
                DType::F16 => self.read::<f16>(row, values),
                _ => self.read::<bf16>(row, values),
            }
        }
        Ok(())
    }
}

/// A scale of an import as f16, which must hold it.
pub(super) fn f16_scale(value: f32, what: &str, row: usize, column: usize) -> Result<f32> {
    let stored = f16::from_f32(value).to_f32();
    if stored.is_finite() {
        return Ok(stored);
    }
    Err(Error::invalid(format!("the {what} of row {row}, column {column} is {value}; a finite f16 is needed")))
}

pub fn expect_bytes(what: &str, bytes: usize, needed: Option<usize>, rows: usize, columns: usize) -> Result<()> {
    match needed {
        Some(needed) if bytes >= needed => Ok(()),
        Some(needed) => {
            Err(Error::invalid(format!("{what} of [{rows}, {columns}] has {bytes} bytes; {needed} are needed"))
                .with_limit(bytes as u64, needed as u64))
        }
        None => Err(Error::invalid(format!("the size of {what} of [{rows}, {columns}] overflows"))),
    }
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;
    use crate::weight::stripe::Stripe;

    /// A row by its values, and by its quantised values and scales in the order of an input.
    pub fn both(source: &dyn RowSource, row: usize) -> Result<(Vec<f32>, Vec<f32>)> {
        let columns = source.columns();
        let mut values = vec![0.0; columns];
        source.values(row, &mut values)?;
        let quantized = source.quantized().expect("a source of quantised values");
        let mut stripe = Stripe::new(source.format(), 1, columns).unwrap();
        quantized.quantized_row(row, &mut stripe.quantized, &mut stripe.scales, &mut stripe.zero_points)?;
        let mut packed = vec![0.0; columns];
        stripe.values(0, &mut packed);
        let natural = match quantized.order() {
            None => packed,
            Some(order) => {
                let mut natural = vec![f32::NAN; columns];
                for (&to, value) in order.iter().zip(packed) {
                    natural[to as usize] = value;
                }
                natural
            }
        };
        Ok((values, natural))
    }

    pub fn bytes(count: usize, seed: u64) -> Vec<u8> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as u8
        };
        (0..count).map(|_| next()).collect()
    }
}

//! `quantize`: float matrices in device memory become a quantised weight.

use crate::allocation::with_room;
use crate::error::{Error, Result};
use crate::tensor::{Matrix, Tensor};
use crate::weight::stripe::SquaredError;
use crate::weight::{Arrangement, Format, WeightView};

#[derive(Debug, Clone)]
pub struct Quantize {
    /// [Nᵢ, K] of one float dtype
    pub parts: Vec<Matrix>,
    pub arrangement: Arrangement,
    pub format: Format,
    /// Its data, scales and zero points are written, in the executor's layout.
    pub weight: WeightView,
}

/// How an executor has quantised.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Quantized {
    Done(SquaredError),
    /// The parts hold values that no quantised value stands for. What was written is worthless.
    Refused,
}

impl Quantize {
    pub fn new(parts: &[Tensor], arrangement: Arrangement, format: Format, weight: WeightView) -> Result<Quantize> {
        let mut matrices = with_room(parts.len(), "the parts of a weight")?;
        for (i, part) in parts.iter().enumerate() {
            let name = format!("parts[{i}]");
            part.expect_float(&name)?;
            part.expect_readable(&name)?;
            part.expect_dtype(&name, parts[0].dtype)?;
            let matrix = part.as_matrix(&name)?;
            if matrix.columns != weight.columns {
                return Err(Error::invalid(format!(
                    "`{name}` has {} columns; the weight has {}",
                    matrix.columns, weight.columns
                )));
            }
            matrices.push(matrix);
        }
        let rows: usize = matrices.iter().map(|part| part.rows).sum();
        if rows != weight.rows || weight.encoding != format.encoding || !weight.order.is_null() {
            return Err(Error::invalid(format!(
                "{rows} rows of {format} do not make a weight [{}, {}] of {}",
                weight.rows, weight.columns, weight.encoding
            )));
        }
        Ok(Quantize { parts: matrices, arrangement, format, weight })
    }
}

//! `gated_activation`: output = activation(gate) · up, elementwise (GeGLU, SwiGLU; Shazeer 2020).

use super::{expect_extent, Activation, Cost};
use crate::error::Result;
use crate::tensor::{Matrix, Tensor};

#[derive(Debug, Clone, Copy)]
pub struct GatedActivation {
    pub gate: Matrix,
    pub up: Matrix,
    pub activation: Activation,
    pub output: Matrix,
}

impl GatedActivation {
    pub fn new(gate: Tensor, up: Tensor, activation: Activation, output: Tensor) -> Result<GatedActivation> {
        for (name, tensor) in [("gate", &gate), ("up", &up)] {
            tensor.expect_float(name)?;
            tensor.expect_readable(name)?;
        }
        up.expect_dtype("up", gate.dtype)?;
        output.expect_float("output")?;
        output.expect_writable("output")?;
        let (gate, up, output) = (gate.as_matrix("gate")?, up.as_matrix("up")?, output.as_matrix("output")?);
        up.expect_size("up", gate.rows, gate.columns)?;
        output.expect_size("output", gate.rows, gate.columns)?;
        expect_extent("the number of rows", gate.rows)?;
        expect_extent("the number of columns", gate.columns)?;
        Ok(GatedActivation { gate, up, activation, output })
    }

    pub fn cost(&self) -> Cost {
        let elements = (self.gate.rows * self.gate.columns) as f64;
        Cost {
            operations: elements * 8.0,
            bytes: elements * (2 * self.gate.dtype.size() + self.output.dtype.size()) as f64,
        }
    }
}

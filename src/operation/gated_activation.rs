//! `gated_activation`: output = activation(gate) · up, elementwise (GeGLU, SwiGLU; Shazeer 2020).

use super::quantized_rows::QuantizedRows;
use super::{expect_extent, Activation, Cost};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{Matrix, Tensor};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GatedActivation {
    pub gate: Matrix,
    pub up: Matrix,
    pub activation: Activation,
    /// It or `quantized_output` is there.
    pub output: Option<Matrix>,
    /// The unrounded values that `output` rounds, quantised.
    pub quantized_output: Option<QuantizedRows>,
}

impl GatedActivation {
    pub fn new(
        gate: Tensor,
        up: Tensor,
        activation: Activation,
        output: Option<Tensor>,
        quantized_output: Option<QuantizedRows>,
    ) -> Result<GatedActivation> {
        if output.is_none() && quantized_output.is_none() {
            return Err(Error::invalid("gated_activation needs `output`, `quantized_output` or both"));
        }
        for (name, tensor) in [("gate", &gate), ("up", &up)] {
            tensor.expect_float(name)?;
            tensor.expect_readable(name)?;
        }
        up.expect_dtype("up", gate.dtype)?;
        let (gate, up) = (gate.as_matrix("gate")?, up.as_matrix("up")?);
        up.expect_size("up", gate.rows, gate.columns)?;
        let written = |output: Tensor| {
            output.expect_float("output")?;
            output.expect_writable("output")?;
            let output = output.as_matrix("output")?;
            output.expect_size("output", gate.rows, gate.columns)?;
            Ok(output)
        };
        let output = output.map(written).transpose()?;
        if let Some(rows) = quantized_output {
            rows.expect_valid("quantized_output")?;
            rows.expect_size("quantized_output", gate.rows, gate.columns)?;
        }
        expect_extent("the number of rows", gate.rows)?;
        expect_extent("the number of columns", gate.columns)?;
        Ok(GatedActivation { gate, up, activation, output, quantized_output })
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read_before("gate", Some(&self.gate), &["output"]);
        visit.read_before("up", Some(&self.up), &["output"]);
        visit.write("output", self.output.as_ref());
        visit.write_quantized("quantized_output", self.quantized_output.as_ref());
    }

    pub fn cost(&self) -> Cost {
        let elements = (self.gate.rows * self.gate.columns) as f64;
        let floats = self.output.map_or(0.0, |output| elements * output.dtype.size() as f64);
        let written = floats + self.quantized_output.map_or(0.0, |rows| rows.bytes());
        Cost { operations: elements * 8.0, bytes: elements * (2 * self.gate.dtype.size()) as f64 + written }
    }
}

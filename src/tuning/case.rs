//! What is tuned, or asked about: a product by its shape, dtypes and weight.

use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::operation::linear_product::LinearProduct;
use crate::operation::Activation;
use crate::tensor::{DType, Tensor};
use crate::weight::pack::Geometry;
use crate::weight::{Arrangement, Format, WeightView};
use std::ffi::c_void;

#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// M
    pub rows: usize,
    pub input: DType,
    pub output: DType,
    pub activation: Activation,
    pub bias: bool,
    pub residual: bool,
    pub weight: CaseWeight,
}

#[derive(Debug, Clone, Copy)]
pub enum CaseWeight {
    /// One that lives as long as the case, `span` bytes from its data on.
    Given { view: WeightView, span: usize },
    /// One that tuning makes of random values.
    Described { geometry: Geometry, gated: bool },
}

impl CaseWeight {
    /// A weight [rows, columns] as the executor would have it.
    pub fn described(
        executor: &dyn Executor,
        format: Format,
        arrangement: Arrangement,
        rows: usize,
        columns: usize,
    ) -> Result<CaseWeight> {
        let gated = arrangement == Arrangement::Gated;
        if rows == 0 || columns == 0 || gated && !rows.is_multiple_of(2) {
            return Err(Error::invalid(format!(
                "a weight of {rows} rows of {columns}; rows and columns are needed, of a gated weight an even number of rows"
            )));
        }
        let geometry = Geometry::new(format, executor.weight_layout(), rows, columns)?;
        Ok(CaseWeight::Described { geometry, gated })
    }
}

/// An address that nobody reads, with the alignment of every allocation.
const NOWHERE: usize = 256;

impl Case {
    /// The product with addresses that must not be read, contiguous and aligned: what can be asked of the registry and of
    /// `Executor::linear_default`.
    pub fn shape(&self) -> Result<LinearProduct> {
        let nowhere = NOWHERE as *mut c_void;
        let weight = match self.weight {
            CaseWeight::Given { view, .. } => view,
            CaseWeight::Described { geometry, gated } => WeightView::at(&geometry, gated, nowhere.cast(), false),
        };
        let output = Tensor::new(nowhere, self.output, &[self.rows, weight.output_columns()]);
        LinearProduct::new(
            Tensor::new(nowhere, self.input, &[self.rows, weight.columns]),
            weight,
            self.bias.then(|| Tensor::new(nowhere, self.output, &[weight.rows])),
            self.activation,
            output,
        )?
        .with_residual(self.residual.then_some(output))
    }
}

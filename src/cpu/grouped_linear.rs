//! y = activation(x · W[expert]ᵀ + bias[expert]): a product for each expert that has tokens.

use super::linear::linear;
use super::row::integers;
use super::threads::Threads;
use crate::error::{Error, Result};
use crate::operation::grouped_linear::GroupedLinear;
use crate::operation::linear_product::LinearProduct;
use crate::tensor::{Matrix, Tensor};

pub fn grouped_linear(threads: &Threads, op: &GroupedLinear) -> Result<()> {
    // SAFETY: a validated rank-1 tensor of i32.
    let expert_offsets = unsafe { integers(&op.expert_offsets) };
    let (mut last, rows) = (0, op.input.rows);
    for (place, &offset) in expert_offsets.iter().enumerate() {
        if offset < last || offset as usize > rows || (place == 0 && offset != 0) {
            return Err(Error::invalid(format!(
                "expert_offsets[{place}] is {offset}; they ascend from 0 to at most the {rows} rows of `input`"
            ))
            .with_limit(offset.max(0) as u64, rows as u64));
        }
        last = offset;
    }
    for (expert, range) in expert_offsets.windows(2).enumerate() {
        let (first, end) = (range[0] as usize, range[1] as usize);
        let part = |matrix: Matrix| matrix.part(first, end - first);
        let bias = op.bias.map(|bias| {
            let skipped = expert * op.expert_rows() * bias.dtype.size();
            Tensor::new(bias.data.wrapping_byte_add(skipped), bias.dtype, &[op.expert_rows()])
        });
        linear(
            threads,
            &LinearProduct {
                input: part(op.input),
                weight: op.expert_weight(expert),
                bias,
                activation: op.activation,
                residual: None,
                output: part(op.output),
            },
        );
    }
    Ok(())
}

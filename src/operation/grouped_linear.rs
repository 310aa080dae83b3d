//! `grouped_linear`: y = activation(x · W[expert]ᵀ + bias[expert]) for tokens that lie sorted by expert, as a mixture of
//! experts has them after routing (Shazeer et al. 2017). The expert offsets are device memory: a captured graph serves
//! every routing.

use super::linear_product::expect_product;
use super::{expect_extent, Activation, Cost};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{DType, Matrix, Tensor};
use crate::weight::{Scales, WeightView, BLOCK};

#[derive(Debug, Clone, Copy)]
pub struct GroupedLinear {
    /// [T, K], the tokens of expert 0 first
    pub input: Matrix,
    /// i32 [experts + 1], ascending from 0: expert e has the rows expert_offsets[e] .. expert_offsets[e + 1]. Rows from
    /// the last offset on are not computed.
    pub expert_offsets: Tensor,
    /// [experts · N, K] of any encoding, expert after expert; gated: rows 2i and 2i+1 are row i of gate and of up.
    pub weight: WeightView,
    pub experts: usize,
    /// [experts · N]
    pub bias: Option<Tensor>,
    pub activation: Activation,
    /// [T, N], gated [T, N/2]
    pub output: Matrix,
}

impl GroupedLinear {
    pub fn new(
        input: Tensor,
        expert_offsets: Tensor,
        weight: WeightView,
        bias: Option<Tensor>,
        activation: Activation,
        output: Tensor,
    ) -> Result<GroupedLinear> {
        let input = expect_product(input, &weight, bias, output)?;
        expert_offsets.expect_dtype("expert_offsets", DType::I32)?;
        expert_offsets.expect_rank("expert_offsets", 1)?;
        expert_offsets.expect_readable("expert_offsets")?;
        let experts = expert_offsets.shape[0].saturating_sub(1);
        if experts == 0 {
            return Err(Error::invalid(format!(
                "tensor `expert_offsets` has {} elements; at least 2 are needed, one more than experts",
                expert_offsets.shape[0]
            )));
        }
        if !weight.rows.is_multiple_of(experts) {
            return Err(Error::invalid(format!(
                "the weight has {} rows, which {experts} experts do not share evenly",
                weight.rows
            )));
        }
        let rows = weight.rows / experts;
        if weight.gated && !rows.is_multiple_of(2) {
            return Err(Error::invalid(format!(
                "an expert has {rows} rows of a gated weight; an even number is needed"
            )));
        }
        if experts > 1 && matches!(weight.scales, Scales::Blocks(_)) && !rows.is_multiple_of(BLOCK) {
            return Err(Error::unsupported(format!(
                "an expert has {rows} rows of a weight with scales of {BLOCK}×{BLOCK} blocks, which two experts would share"
            )));
        }
        if !weight.order.is_null() {
            return Err(Error::unsupported("a grouped product with a weight in activation order (GPTQ's g_idx)"));
        }
        expert_offsets.expect_apart("expert_offsets", "output", &output)?;
        let output = output.as_matrix("output")?;
        output.expect_size("output", input.rows, weight.output_columns() / experts)?;
        expect_extent("the number of experts", experts)?;
        Ok(GroupedLinear { input, expert_offsets, weight, experts, bias, activation, output })
    }

    /// Rows of the weight that an expert has.
    pub fn expert_rows(&self) -> usize {
        self.weight.rows / self.experts
    }

    /// The weight of one expert, where rows are what the layout consists of.
    pub fn expert_weight(&self, expert: usize) -> WeightView {
        let (weight, rows) = (self.weight, self.expert_rows());
        let first = expert * rows;
        let groups = |size: usize| first * weight.columns.div_ceil(size);
        let scales = match weight.scales {
            Scales::None => Scales::None,
            Scales::Rows(data) => Scales::Rows(data.wrapping_add(first)),
            Scales::Groups { size, data } => Scales::Groups { size, data: data.wrapping_add(groups(size)) },
            Scales::Blocks(data) => Scales::Blocks(data.wrapping_add(first / BLOCK * weight.columns.div_ceil(BLOCK))),
        };
        let zero_points = match weight.scales {
            Scales::Groups { size, .. } if !weight.zero_points.is_null() => {
                weight.zero_points.wrapping_add(groups(size))
            }
            _ => weight.zero_points,
        };
        let data = weight.data.wrapping_byte_add(first * weight.row_stride * weight.encoding.bits() / 8);
        WeightView { data, rows, scales, zero_points, ..weight }
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("input", Some(&self.input));
        visit.read("expert_offsets", Some(&self.expert_offsets));
        visit.read_weight("weight", &self.weight);
        visit.read("bias", self.bias.as_ref());
        visit.write("output", Some(&self.output));
    }

    /// Each token meets one expert, and every expert's weight is read once.
    pub fn cost(&self) -> Cost {
        let &GroupedLinear { input, output, .. } = self;
        let bytes = |matrix: Matrix| (matrix.rows * matrix.columns * matrix.dtype.size()) as f64;
        Cost {
            operations: 2.0 * (input.rows * input.columns) as f64 * self.expert_rows() as f64,
            bytes: bytes(input) + self.weight.read_bytes() as f64 + bytes(output),
        }
    }
}

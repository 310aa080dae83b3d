//! `grouped_linear`: y = activation(x · W[expert]ᵀ + bias[expert]) for tokens that lie sorted by expert, as a mixture of
//! experts has them after routing (Shazeer et al. 2017), or that name their experts. Offsets and numbers of experts are device
//! memory: a captured graph serves every routing.

use super::linear_product::expect_product;
use super::{expect_extent, Activation, Cost};
use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{DType, Matrix, Tensor};
use crate::weight::{Scales, WeightView, BLOCK};

/// Which expert a row of the output is of.
#[derive(Debug, Clone, Copy)]
pub enum Routing {
    /// i32 [experts + 1], ascending from 0: expert e has the rows offsets[e] .. offsets[e + 1]. Rows from the last offset on
    /// are not computed.
    Offsets(Tensor),
    /// i32 [T, U], any strides: row t · U + u of the output is of expert ids[t, u].
    Ids(Tensor),
}

impl Routing {
    pub fn tensor(&self) -> &Tensor {
        match self {
            Routing::Offsets(tensor) | Routing::Ids(tensor) => tensor,
        }
    }

    pub fn tensor_mut(&mut self) -> &mut Tensor {
        match self {
            Routing::Offsets(tensor) | Routing::Ids(tensor) => tensor,
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Routing::Offsets(_) => "expert_offsets",
            Routing::Ids(_) => "expert_ids",
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct GroupedLinear {
    /// [T, K], with offsets the tokens of expert 0 first; with ids also [T · U, K], a row for each of a token's experts
    pub input: Matrix,
    pub routing: Routing,
    /// [experts · N, K] of any encoding, expert after expert; gated: rows 2i and 2i+1 are row i of gate and of up.
    pub weight: WeightView,
    pub experts: usize,
    /// [experts · N]
    pub bias: Option<Tensor>,
    pub activation: Activation,
    /// [T, N], gated [T, N/2]; with ids [T · U, …]
    pub output: Matrix,
}

impl GroupedLinear {
    pub fn new(
        input: Tensor,
        (routing, experts): (Routing, usize),
        weight: WeightView,
        bias: Option<Tensor>,
        activation: Activation,
        output: Tensor,
    ) -> Result<GroupedLinear> {
        let input = expect_product(input, &weight, bias, output)?;
        let (name, numbers) = (routing.name(), *routing.tensor());
        numbers.expect_dtype(name, DType::I32)?;
        let (experts, rows) = match routing {
            Routing::Offsets(offsets) => {
                offsets.expect_rank(name, 1)?;
                offsets.expect_readable(name)?;
                if experts != 0 && experts + 1 != offsets.shape[0] {
                    return Err(Error::invalid(format!(
                        "experts is {experts}, and tensor `expert_offsets` has {} elements, one more than experts",
                        offsets.shape[0]
                    )));
                }
                (offsets.shape[0].saturating_sub(1), input.rows)
            }
            Routing::Ids(ids) => {
                ids.expect_rank(name, 2)?;
                let [tokens, used, ..] = ids.shape;
                let rows = tokens.saturating_mul(used);
                if input.rows != tokens && input.rows != rows {
                    return Err(Error::invalid(format!(
                        "tensor `input` has {} rows; {tokens}, or {rows} with one for each of {used} experts, are needed",
                        input.rows
                    )));
                }
                (experts, rows)
            }
        };
        if experts == 0 {
            return Err(Error::invalid(match routing {
                Routing::Offsets(_) => format!(
                    "tensor `expert_offsets` has {} elements; at least 2 are needed, one more than experts",
                    numbers.shape[0]
                ),
                Routing::Ids(_) => "experts is 0; their number is needed beside `expert_ids`".to_string(),
            }));
        }
        if !weight.rows.is_multiple_of(experts) {
            return Err(Error::invalid(format!(
                "the weight has {} rows, which {experts} experts do not share evenly",
                weight.rows
            )));
        }
        let expert_rows = weight.rows / experts;
        if weight.gated && !expert_rows.is_multiple_of(2) {
            return Err(Error::invalid(format!(
                "an expert has {expert_rows} rows of a gated weight; an even number is needed"
            )));
        }
        if experts > 1 && matches!(weight.scales, Scales::Blocks(_)) && !expert_rows.is_multiple_of(BLOCK) {
            return Err(Error::unsupported(format!(
                "an expert has {expert_rows} rows of a weight with scales of {BLOCK}×{BLOCK} blocks, which two experts would share"
            )));
        }
        if !weight.order.is_null() {
            return Err(Error::unsupported("a grouped product with a weight in activation order (GPTQ's g_idx)"));
        }
        numbers.expect_apart(name, "output", &output)?;
        let output = output.as_matrix("output")?;
        output.expect_size("output", rows, weight.output_columns() / experts)?;
        expect_extent("the number of experts", experts)?;
        expect_extent("the number of rows", rows)?;
        Ok(GroupedLinear { input, routing, weight, experts, bias, activation, output })
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
        let data = weight.data.wrapping_byte_add(weight.encoding.bytes(first * weight.row_stride));
        WeightView { data, rows, scales, zero_points, ..weight }
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("input", Some(&self.input));
        visit.read(self.routing.name(), Some(self.routing.tensor()));
        visit.read_weight("weight", &self.weight);
        visit.read("bias", self.bias.as_ref());
        visit.write("output", Some(&self.output));
    }

    /// Each row of the output meets one expert, and every expert's weight is read once.
    pub fn cost(&self) -> Cost {
        let &GroupedLinear { input, output, .. } = self;
        let bytes = |matrix: Matrix| (matrix.rows * matrix.columns * matrix.dtype.size()) as f64;
        Cost {
            operations: 2.0 * (output.rows * input.columns) as f64 * self.expert_rows() as f64,
            bytes: bytes(input) + self.weight.read_bytes() as f64 + bytes(output),
        }
    }
}

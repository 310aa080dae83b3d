//! `group_norm`: normalisation of the channels of an image in groups, with an activation behind it in the same pass.
//!
//! y = (x − mean) · rsqrt(variance + ε) · weight[c] + bias[c];  output = activation(y)
//!
//! Mean and variance are those of all positions of the channels of x's group and sample (Wu and He 2018, with the variance
//! over all elements, as PyTorch's `GroupNorm` has it). All of it is f32 inside, with one rounding at the store.

use super::{expect_extent, expect_finite_positive, Activation, Cost};
use crate::error::{numbered, Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{Heads, Tensor};

numbered! {
    /// Where the channels' axis is; the numbers are `NVB_LAYOUT_*` of the C ABI.
    pub enum ImageLayout: u32 {
        /// [N, C, …]
        Nchw = 0,
        /// [N, …, C]
        Nhwc = 1,
    }
}

/// `GroupNorm<Tensor>` is a call before validation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupNorm<T = Heads> {
    /// A "token" is a sample. A "head" is a channel with all its positions in NCHW, a position with all its channels in
    /// NHWC.
    pub input: T,
    pub output: T,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
    pub groups: usize,
    pub layout: ImageLayout,
    pub activation: Activation,
    pub epsilon: f32,
}

impl GroupNorm<Tensor> {
    pub fn validated(self) -> Result<GroupNorm> {
        let GroupNorm { input, weight, bias, output, groups, layout, activation, epsilon } = self;
        expect_finite_positive("epsilon", epsilon)?;
        input.expect_readable("input")?;
        let rows = image("input", &input, layout)?;
        output.expect_shape("output", input.shape())?;
        output.expect_writable("output")?;
        let (input, output) = (rows, image("output", &output, layout)?);
        let op = GroupNorm { input, output, weight, bias, groups, layout, activation, epsilon };
        let channels = op.channels();
        if groups == 0 || !channels.is_multiple_of(groups) {
            return Err(Error::invalid(format!("groups is {groups}; a divisor of the {channels} channels is needed")));
        }
        for (name, extent) in [
            ("the number of channels", channels),
            ("the number of positions", op.positions()),
            ("the number of samples times groups", input.tokens.saturating_mul(groups)),
        ] {
            expect_extent(name, extent)?;
        }
        for (name, vector) in [("weight", weight), ("bias", bias)] {
            let Some(vector) = vector else { continue };
            vector.expect_float(name)?;
            vector.expect_shape(name, &[channels])?;
            vector.expect_readable(name)?;
        }
        if let (Some(weight), Some(bias)) = (weight, bias) {
            bias.expect_dtype("bias", weight.dtype)?;
        }
        Ok(op)
    }
}

impl GroupNorm {
    pub fn channels(&self) -> usize {
        match self.layout {
            ImageLayout::Nchw => self.input.heads,
            ImageLayout::Nhwc => self.input.head_dim,
        }
    }

    /// Of one channel of one sample.
    pub fn positions(&self) -> usize {
        match self.layout {
            ImageLayout::Nchw => self.input.head_dim,
            ImageLayout::Nhwc => self.input.heads,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.input.tokens == 0 || self.input.heads == 0 || self.input.head_dim == 0
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        let strides = |image: &Heads| (image.token_stride, image.head_stride);
        // An output with other strides may span the same bytes and yet have other elements at them.
        match strides(&self.input) == strides(&self.output) {
            true => visit.read_before("input", Some(&self.input), &["output"]),
            false => visit.read("input", Some(&self.input)),
        }
        visit.read("weight", self.weight.as_ref());
        visit.read("bias", self.bias.as_ref());
        visit.write("output", Some(&self.output));
    }

    pub fn cost(&self) -> Cost {
        let elements = (self.input.tokens * self.input.heads * self.input.head_dim) as f64;
        let activation = if self.activation == Activation::None { 0.0 } else { 4.0 };
        let width = self.input.dtype.size() + self.output.dtype.size();
        Cost { operations: elements * (8.0 + activation), bytes: elements * width as f64 }
    }
}

/// The tensor with its positions as one axis.
fn image(name: &str, tensor: &Tensor, layout: ImageLayout) -> Result<Heads> {
    tensor.expect_float(name)?;
    let &Tensor { data, dtype, rank, shape, strides } = tensor;
    if rank < 2 {
        return Err(Error::invalid(format!("tensor `{name}` has rank {rank}; at least 2 is needed")));
    }
    let (channel_axis, positions) = match layout {
        ImageLayout::Nchw => (1, 2..rank),
        ImageLayout::Nhwc => (rank - 1, 1..rank - 1),
    };
    let (channels, extent) = (shape[channel_axis], shape[positions.clone()].iter().product());
    let (heads, head_dim) = match layout {
        ImageLayout::Nchw => (channels, extent),
        ImageLayout::Nhwc => (extent, channels),
    };
    // Strides of axes that never step say nothing.
    let mut image =
        Heads { data, dtype, tokens: shape[0], heads, head_dim, token_stride: heads * head_dim, head_stride: head_dim };
    if tensor.is_empty() {
        return Ok(image);
    }
    let mut stride = None;
    let mut expected = None;
    for axis in positions.rev().filter(|&axis| shape[axis] != 1) {
        if expected.is_some_and(|expected| expected != strides[axis]) {
            return Err(Error::invalid(format!(
                "tensor `{name}` {tensor}: its positions do not fold into one stride (stride {} of axis {axis})",
                strides[axis]
            )));
        }
        stride = stride.or(Some(strides[axis]));
        expected = Some(strides[axis] * shape[axis]);
    }
    if shape[0] != 1 {
        image.token_stride = strides[0];
    }
    match (layout, stride) {
        (ImageLayout::Nchw, Some(stride)) if stride != 1 => {
            return Err(Error::invalid(format!(
                "tensor `{name}` {tensor}: the stride of its positions is {stride}; 1 is needed"
            )));
        }
        (ImageLayout::Nchw, _) if channels != 1 => image.head_stride = strides[channel_axis],
        (ImageLayout::Nhwc, Some(stride)) => image.head_stride = stride,
        _ => {}
    }
    Ok(image)
}

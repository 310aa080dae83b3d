//! `group_norm`: output = activation((x − mean) · rsqrt(variance + ε) · weight[c] + bias[c]) by groups of channels, called as
//! an engine calls it.

use crate::activation::activate;
use crate::compare::FLOATS;
use crate::random::Random;
use crate::run::{c_tensor, check, expect_error, Layout, Outcome, Run, LAYOUTS, PITCHED, PLAIN, UNALIGNED};
use nvbackend::capi::operations::*;
use nvbackend::capi::structs::init;
use nvbackend::error::{Result, Status};
use nvbackend::operation::Activation;
use nvbackend::tensor::{DType, Tensor};

#[derive(Debug, Clone, Copy)]
struct Case {
    samples: usize,
    channels: usize,
    groups: usize,
    /// Height and width; the rank is 4 only where the height is not 0, and 2 where the width is 0 too.
    positions: [usize; 2],
    channels_last: bool,
    /// Of input, weight and output.
    dtypes: [DType; 3],
    layout: Layout,
    /// Elements after each row of contiguous ones.
    row_padding: usize,
    weight: bool,
    bias: bool,
    activation: Activation,
    in_place: bool,
    epsilon: f32,
    magnitude: f64,
    /// What all elements have in common.
    mean: f64,
    /// Put into one place.
    special: Option<f64>,
}

/// Everything at once.
const CASE: Case = Case {
    samples: 2,
    channels: 12,
    groups: 3,
    positions: [5, 8],
    channels_last: false,
    dtypes: [DType::F32; 3],
    layout: PLAIN,
    row_padding: 0,
    weight: true,
    bias: true,
    activation: Activation::Silu,
    in_place: false,
    epsilon: 1e-5,
    magnitude: 1.0,
    mean: 0.0,
    special: None,
};

impl Case {
    fn shape(&self) -> Vec<usize> {
        let positions = self.positions.iter().skip_while(|&&extent| extent == 0);
        let positions: Vec<usize> = positions.copied().collect();
        match self.channels_last {
            false => [&[self.samples, self.channels], &positions[..]].concat(),
            true => [&[self.samples], &positions[..], &[self.channels]].concat(),
        }
    }

    /// Sample and channel of the element `index` in row-major order.
    fn place(&self, index: usize) -> (usize, usize) {
        let positions = self.shape().iter().product::<usize>() / (self.samples * self.channels);
        let sample = index / (self.channels * positions);
        let rest = index % (self.channels * positions);
        (sample, if self.channels_last { rest % self.channels } else { rest / positions })
    }
}

/// An image of these values, or of poison.
fn image(run: &mut Run, case: &Case, dtype: DType, values: Option<&[f64]>) -> Result<Tensor> {
    let shape = case.shape();
    let rank = shape.len();
    // The axis whose steps are rows, the last of those where there are several.
    let row_axis = if case.channels_last { rank - 2 } else { 1 };
    let mut strides = vec![1; rank];
    for axis in (0..rank - 1).rev() {
        strides[axis] = strides[axis + 1] * shape[axis + 1] + if axis == row_axis { case.row_padding } else { 0 };
    }
    strides[0] += case.layout.padding;
    run.strided(dtype, &shape, &strides, case.layout.offset, shape[0] * strides[0], values)
}

fn in_both_layouts(case: Case) -> [Case; 2] {
    [case, Case { channels_last: true, ..case }]
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let &Case { channels, groups, dtypes: [input_dtype, weight_dtype, output_dtype], layout, .. } = case;
    let shape = case.shape();
    let count = shape.iter().product();
    let normals = run.random.normals(count, case.magnitude);
    let mut x = crate::run::rounded(input_dtype, &normals.iter().map(|x| x + case.mean).collect::<Vec<f64>>());
    if let Some(special) = case.special {
        x[count / 2] = special;
    }
    let input = image(run, case, input_dtype, Some(&x))?;
    let weight = if case.weight { Some(run.normal(weight_dtype, &[channels], layout, 1.0)?) } else { None };
    let bias = if case.bias { Some(run.normal(weight_dtype, &[channels], layout, 1.0)?) } else { None };
    let output = if case.in_place { input } else { image(run, case, output_dtype, None)? };
    run.allow_write(&output);

    let group_of = |index: usize| {
        let (sample, channel) = case.place(index);
        sample * groups + channel / (channels / groups)
    };
    let mut sums = vec![(0.0, 0.0); case.samples * groups];
    for (index, x) in x.iter().enumerate() {
        let (count, sum) = &mut sums[group_of(index)];
        (*count, *sum) = (*count + 1.0, *sum + x);
    }
    let mut squares = vec![0.0; sums.len()];
    for (index, x) in x.iter().enumerate() {
        let (count, sum): (f64, f64) = sums[group_of(index)];
        squares[group_of(index)] += (x - sum / count).powi(2);
    }
    let (mut reference, mut slack) = (Vec::new(), Vec::new());
    for (index, x) in x.iter().enumerate() {
        let (count, sum) = sums[group_of(index)];
        let inverse = 1.0 / (squares[group_of(index)] / count + f64::from(case.epsilon)).sqrt();
        let (_, channel) = case.place(index);
        let weight = weight.as_ref().map_or(1.0, |(_, weight)| weight[channel]);
        let bias = bias.as_ref().map_or(0.0, |(_, bias)| bias[channel]);
        let y = (x - sum / count) * inverse * weight + bias;
        reference.push(activate(case.activation, y));
        // x and its mean cancel, and so do the norm and the bias; no activation is steeper than 1.13.
        let of_norm = 10.0 * (x.abs() + (sum / count).abs()) * inverse * weight.abs();
        let of_activation = if case.activation == Activation::None { 0.0 } else { 8.0 * y.abs() };
        slack.push(if of_norm.is_finite() { of_norm + 3.0 * bias.abs() + of_activation } else { 0.0 });
    }

    let mut args: nvb_group_norm_args = init();
    args.input = c_tensor(&input);
    args.output = c_tensor(&output);
    if let Some((weight, _)) = &weight {
        args.weight = c_tensor(weight);
    }
    if let Some((bias, _)) = &bias {
        args.bias = c_tensor(bias);
    }
    args.groups = groups as u32;
    args.layout = if case.channels_last { NVB_LAYOUT_NHWC } else { NVB_LAYOUT_NCHW };
    args.activation = case.activation as u32;
    args.epsilon = case.epsilon;
    // SAFETY: a struct with its size set, and tensors of the case's device.
    run.call(|backend, stream| unsafe { nvb_group_norm(backend, &args, stream) })?;
    run.expect_summed("output", &output, &reference, &slack)
}

#[test]
fn sizes() {
    let mut random = Random::new("group norm cases");
    let mut cases = Vec::new();
    for (channels, groups) in [(1, 1), (2, 1), (6, 6), (32, 32), (40, 4), (64, 2), (96, 32), (320, 32), (1001, 7)] {
        for positions in [[0, 0], [0, 1], [0, 7], [0, 64], [1, 1], [3, 5], [8, 8], [16, 33], [64, 64]] {
            for samples in [1, 3] {
                if samples * channels * positions[0].max(1) * positions[1].max(1) > 1 << 17 {
                    continue;
                }
                let case = Case { samples, channels, groups, positions, ..CASE };
                let dtypes = [(); 3].map(|()| random.choose(&FLOATS));
                let (layout, mean) = (random.choose(&LAYOUTS), random.choose(&[0.0, 0.0, 30.0]));
                let (weight, bias) = (random.flip(), random.flip());
                let activation = random.choose(&[Activation::None, Activation::Silu]);
                cases.extend(in_both_layouts(Case { dtypes, layout, mean, weight, bias, activation, ..case }));
            }
        }
    }
    check("group_norm", &cases, test);
}

/// Blocks that take several groups of narrow channels, which many samples ask for; one group as wide as the image; groups
/// that a block walks over many times.
#[test]
fn large() {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        let case = Case { dtypes: [dtype; 3], ..CASE };
        for (samples, channels, groups, positions) in [
            (300, 64, 32, [2, 3]),
            (70, 320, 32, [4, 4]),
            (257, 30, 15, [0, 9]),
            (1, 4096, 1, [4, 5]),
            (1, 8, 2, [256, 300]),
        ] {
            cases.extend(in_both_layouts(Case { samples, channels, groups, positions, ..case }));
        }
    }
    check("group_norm", &cases, test);
}

#[test]
fn every_form() {
    let mut cases = Vec::new();
    for bits in 0..8 {
        let bit = |i: u32| bits >> i & 1 == 1;
        for activation in [Activation::None, Activation::Silu, Activation::GeluTanh, Activation::GeluErf] {
            for layout in LAYOUTS {
                let case = Case { weight: bit(0), bias: bit(1), in_place: bit(2), activation, layout, ..CASE };
                cases.extend(in_both_layouts(case));
            }
        }
    }
    check("group_norm", &cases, test);
}

#[test]
fn dtypes() {
    let mut cases = Vec::new();
    for input in FLOATS {
        for output in FLOATS {
            for weight in FLOATS {
                for (channels, layout) in [(48, PLAIN), (48, PITCHED), (9, UNALIGNED)] {
                    cases.extend(in_both_layouts(Case { dtypes: [input, weight, output], channels, layout, ..CASE }));
                }
            }
        }
    }
    check("group_norm", &cases, test);
}

#[test]
fn rows_that_lie_apart() {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        for row_padding in [1, 4, 8] {
            for layout in LAYOUTS {
                let case = Case { dtypes: [dtype; 3], row_padding, layout, channels: 24, ..CASE };
                cases.extend(in_both_layouts(case));
                cases.extend(in_both_layouts(Case { in_place: true, samples: 1, positions: [0, 40], ..case }));
            }
        }
    }
    check("group_norm", &cases, test);
}

#[test]
fn empty() {
    let mut cases = Vec::new();
    for (samples, channels, positions) in [(0, 12, [5, 8]), (2, 0, [5, 8]), (2, 12, [1, 0]), (0, 0, [1, 0])] {
        cases.extend(in_both_layouts(Case { samples, channels, positions, ..CASE }));
    }
    check("group_norm", &cases, |run, case| {
        let shape = case.shape();
        let input = run.tensor(DType::F32, &shape, PLAIN, &[])?;
        let output = run.output(DType::F32, &shape, PLAIN)?;
        let mut args: nvb_group_norm_args = init();
        (args.input, args.output, args.groups) = (c_tensor(&input), c_tensor(&output), 3);
        args.layout = case.channels_last.into();
        // SAFETY: as in `test`.
        Ok(run.call(|backend, stream| unsafe { nvb_group_norm(backend, &args, stream) })?)
    });
}

#[test]
fn magnitudes() {
    let mut cases = Vec::new();
    for magnitude in [0.0, 1e-30, 1e-12, 1e-3, 1e3, 1e15] {
        for epsilon in [1e-6, 1e-20] {
            cases.extend(in_both_layouts(Case { magnitude, epsilon, activation: Activation::None, ..CASE }));
        }
    }
    for mean in [1e3, -1e5] {
        cases.extend(in_both_layouts(Case { mean, positions: [40, 50], ..CASE }));
    }
    for special in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for positions in [[0, 3], [5, 8], [100, 100]] {
            cases.extend(in_both_layouts(Case { special: Some(special), positions, ..CASE }));
        }
    }
    check("group_norm", &cases, test);
}

#[test]
fn what_is_refused() {
    check("group_norm", &in_both_layouts(CASE), |run, case| {
        let shape = case.shape();
        let count = shape.iter().product();
        let input = run.tensor(DType::F32, &shape, PLAIN, &vec![1.0; count])?;
        let output = run.output(DType::F32, &shape, PLAIN)?;
        let weight = run.tensor(DType::F32, &[12], PLAIN, &[1.0; 12])?;
        let mut good: nvb_group_norm_args = init();
        (good.input, good.output, good.groups) = (c_tensor(&input), c_tensor(&output), 3);
        (good.weight, good.bias) = (c_tensor(&weight), c_tensor(&weight));
        good.layout = case.channels_last.into();
        let refused = |change: &dyn Fn(&mut nvb_group_norm_args), words: &[&str]| {
            let mut args = good;
            change(&mut args);
            // SAFETY: as in `test`.
            let result = run.call(|backend, stream| unsafe { nvb_group_norm(backend, &args, stream) });
            expect_error(result, Status::InvalidArgument, words)
        };
        refused(&|args| args.groups = 0, &["groups is 0", "12 channels"])?;
        refused(&|args| args.groups = 5, &["groups is 5", "12 channels"])?;
        refused(&|args| args.groups = 24, &["groups is 24", "12 channels"])?;
        refused(&|args| args.layout = 2, &["layout is 2"])?;
        refused(&|args| args.activation = 4, &["activation is 4"])?;
        refused(&|args| args.epsilon = -1.0, &["epsilon is -1"])?;
        refused(&|args| args.epsilon = f32::NAN, &["epsilon is NaN"])?;
        refused(&|args| args.input.dtype = DType::I32 as u32, &["`input`", "i32"])?;
        refused(&|args| args.output.dtype = DType::I32 as u32, &["`output`", "i32"])?;
        refused(&|args| args.weight.dtype = DType::I32 as u32, &["`weight`", "i32"])?;
        refused(&|args| args.bias.dtype = DType::Bf16 as u32, &["bias", "bf16", "f32"])?;
        refused(&|args| args.bias.shape[0] = 11, &["bias", "[11]", "[12]"])?;
        refused(&|args| args.input = c_tensor(&Tensor::new(input.data, DType::F32, &[12])), &["`input`", "rank 1"])?;
        refused(&|args| args.output.shape[0] = 1, &["output", "shape"])?;
        refused(&|args| args.output.strides[0] = 0, &["output", "overlap"])?;
        // Rows of an image that lie apart fold into no stride.
        let apart = if case.channels_last { [960, 100, 12, 1] } else { [720, 60, 12, 1] };
        refused(&|args| args.input.strides = apart, &["`input`", "fold"])?;
        // What the work reads may not be what it writes, but for the same elements.
        refused(&|args| args.output.data = input.data.wrapping_byte_add(4), &["output", "input"])?;
        refused(&|args| args.weight.data = output.data, &["output", "weight"])?;
        // The same bytes by other strides are other elements.
        refused(
            &|args| {
                let (outer, inner, columns) = if case.channels_last { (2, 2, 12) } else { (12, 12, 3) };
                let tensor = Tensor::new(input.data, DType::F32, &[outer, inner, columns]);
                args.output = c_tensor(&tensor);
                args.input = c_tensor(&tensor.with_strides(&[columns, outer * columns, 1]));
            },
            &["output", "input"],
        )
    });
}

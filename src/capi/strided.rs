//! Operations over four axes, from tensor to tensor: what engines whose graphs speak of plain tensors are made of.

use super::backend::arguments;
use super::operations::or;
use super::prelude::*;
use super::tensor::{
    device_tensor, nvb_tensor, optional_device_tensor, optional_strided_device_tensor, strided_device_tensor,
};
use crate::operation::masked_softmax::MaskedSoftmax;
use crate::operation::pointwise::{Function, Pointwise};
use crate::operation::rotary_embedding::{
    Angles, HeadNorm, MoreHeads, Pairs, RotaryEmbedding, SectionOrder, Sections, Yarn,
};
use crate::operation::scatter_rows::ScatterRows;

/// `function`: x, rounded to the output's dtype. I32 goes to I32 as well.
pub const NVB_POINTWISE_COPY: u32 = 1;
/// `function`: x + y
pub const NVB_POINTWISE_ADD: u32 = 2;
/// `function`: x − y
pub const NVB_POINTWISE_SUBTRACT: u32 = 3;
/// `function`: x · y
pub const NVB_POINTWISE_MULTIPLY: u32 = 4;
/// `function`: x / y
pub const NVB_POINTWISE_DIVIDE: u32 = 5;
/// `function`: x · alpha + beta
pub const NVB_POINTWISE_SCALE: u32 = 6;
/// `function`: min(max(x, alpha), beta)
pub const NVB_POINTWISE_CLAMP: u32 = 7;
/// `function`: −x
pub const NVB_POINTWISE_NEGATE: u32 = 8;
/// `function`: |x|
pub const NVB_POINTWISE_ABSOLUTE: u32 = 9;
/// `function`: x²
pub const NVB_POINTWISE_SQUARE: u32 = 10;
/// `function`: √x
pub const NVB_POINTWISE_SQUARE_ROOT: u32 = 11;
/// `function`: exp(x)
pub const NVB_POINTWISE_EXPONENTIAL: u32 = 12;
/// `function`: tanh(x)
pub const NVB_POINTWISE_TANH: u32 = 13;
/// `function`: 1 / (1 + exp(−x))
pub const NVB_POINTWISE_SIGMOID: u32 = 14;
/// `function`: max(x, 0)
pub const NVB_POINTWISE_RELU: u32 = 15;
/// `function`: x / (1 + exp(−x))
pub const NVB_POINTWISE_SILU: u32 = 16;
/// `function`: `NVB_ACTIVATION_GELU_TANH`
pub const NVB_POINTWISE_GELU_TANH: u32 = 17;
/// `function`: `NVB_ACTIVATION_GELU_ERF`
pub const NVB_POINTWISE_GELU_ERF: u32 = 18;
/// `function`: x / (1 + exp(−1.702 · x))
pub const NVB_POINTWISE_GELU_SIGMOID: u32 = 19;

/// `pairs`: x[i] and x[i + rotary_dim / 2] turn together (GPT-NeoX, HF transformers).
pub const NVB_ROTARY_HALF: u32 = 0;
/// `pairs`: x[2i] and x[2i + 1] turn together (GPT-J, the original paper).
pub const NVB_ROTARY_INTERLEAVED: u32 = 1;

/// `section_order`: the pairs of a section stand one behind the other (Qwen2-VL).
pub const NVB_SECTIONS_CONSECUTIVE: u32 = 0;
/// `section_order`: pairs of time, height and width alternate while each has some left, and the rest is of the fourth (Qwen3-VL).
pub const NVB_SECTIONS_INTERLEAVED: u32 = 1;
/// `section_order`: as consecutive, and each section has all frequencies from the first on: its pair i turns by position ·
/// base^(−4i / rotary_dim) / frequency_factors · position_scale (vision towers, as of Qwen2-VL). Factors and YaRN's pairs are those
/// of the whole head.
pub const NVB_SECTIONS_INDEPENDENT: u32 = 2;

/// output = f(input, second), element by element. Tensors have rank 1 to 4 and any strides, the innermost too; of a smaller
/// rank the missing axes are in front with an extent of 1. An operand whose extent divides the output's repeats along that
/// axis.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_pointwise_args {
    pub struct_size: usize,
    /// x, [.., rows, n], any float dtype.
    pub input: nvb_tensor,
    /// Optional, [.., rows, n], any float dtype: y of add, subtract, multiply and divide, and only of them.
    pub second: nvb_tensor,
    /// Any float dtype, of the shape of `input` or of one that both operands repeat to; may be the same memory as an operand of
    /// the same dtype, extents and strides.
    pub output: nvb_tensor,
    /// `NVB_POINTWISE_…`
    pub function: u32,
    /// Of scale and clamp; else ignored.
    pub alpha: f32,
    /// Of scale and clamp; else ignored. A clamp's bounds may be infinite.
    pub beta: f32,
    /// Must be 0.
    pub reserved: u32,
}
versioned!(nvb_pointwise_args);

/// output[.., rows[.., t]] = input[.., t] for rows of `width` elements, as keys and values go into a cache that is a plain
/// tensor; up to two axes in front. Rows that are not named stay as they are.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_scatter_rows_args {
    pub struct_size: usize,
    /// [.., T, width], any float dtype and strides, the innermost 1.
    pub input: nvb_tensor,
    /// I32 [.., T] in device memory, any strides: the low halves of 64-bit numbers are a tensor with a stride of 2. An
    /// extent in front that divides the input's repeats. A row whose number lies outside the output is not written on CUDA and is
    /// an error on the CPU. Where a number stands twice, either row is written, or some elements of each.
    pub rows: nvb_tensor,
    /// [.., R, width], any float dtype and strides, the innermost 1. Must not overlap `input` or `rows`.
    pub output: nvb_tensor,
}
versioned!(nvb_scatter_rows_args);

/// Rotary embedding from tensor to tensor. Pair i of `rotary_dim` elements turns by position · frequency[i], with
/// frequency[i] = base^(−2i / rotary_dim) / frequency_factors[i] · position_scale. With `extension` (YaRN) position_scale counts
/// for low frequencies alone: in its place stands position_scale · (1 − m) + m, m = extension · (1 − clamp((i − low) / max(0.001,
/// high − low), 0, 1)), low and high being the pairs that turn `beta_fast` and `beta_slow` times in `original_positions` positions,
/// rounded outwards; and the rotated elements are multiplied by 1 + 0.1 · ln(1 / position_scale). With `norm_weight` the elements of
/// a head are x · rsqrt(mean(x²) + epsilon) · norm_weight before they turn.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_rotary_embedding_args {
    pub struct_size: usize,
    /// [.., T, heads, head_dim], any float dtype and strides, the innermost 1; up to one axis in front. head_dim is at most 512.
    pub input: nvb_tensor,
    /// Any float dtype and strides, the innermost 1, of the shape of `input`, which it may be. With `rows` [R, heads, head_dim], and
    /// it must not overlap `input`.
    pub output: nvb_tensor,
    /// I32 [T] in device memory; with sections each token's four, [4, T].
    pub positions: nvb_tensor,
    /// Optional, F32 [head_dim / 2] in device memory, or as many as there are pairs (Llama 3): what each frequency is divided by.
    pub frequency_factors: nvb_tensor,
    /// Optional [head_dim], any float dtype: the norm of a head (Gemma 3, Qwen 3).
    pub norm_weight: nvb_tensor,
    /// Optional, I32 [T] in device memory, of any stride: token t goes to row rows[t] of the output, as keys go into a cache that is
    /// a plain tensor. Rows that are not named stay as they are; of numbers outside the output and of one that stands twice,
    /// `nvb_scatter_rows_args` speaks.
    pub rows: nvb_tensor,
    /// `NVB_ROTARY_…`
    pub pairs: u32,
    /// Even; the elements beside the rotated ones pass through. 0: head_dim − `first`.
    pub rotary_dim: u32,
    /// The first rotated element of a head.
    pub first: u32,
    /// 0: 10,000.
    pub base: f32,
    /// 0: 1.
    pub position_scale: f32,
    /// Multiplies the rotated elements; 0: 1.
    pub magnitude: f32,
    /// YaRN's share of extrapolation; 0: no YaRN.
    pub extension: f32,
    /// YaRN: positions that the model was trained for; 0: pair 0 alone extrapolates, the formula's limit.
    pub original_positions: u32,
    /// YaRN; 0: 32.
    pub beta_fast: f32,
    /// YaRN; 0: 1.
    pub beta_slow: f32,
    /// Sections (M-RoPE): so many pairs turn by the first of four positions of a token, and the next ones by the others; from
    /// the last section on it begins anew. All four 0: one position a token.
    pub time_pairs: u32,
    pub height_pairs: u32,
    pub width_pairs: u32,
    pub extra_pairs: u32,
    /// `NVB_SECTIONS_…`
    pub section_order: u32,
    /// The norms'; 0: 1e-6.
    pub epsilon: f32,
    /// Multiplies the rotated elements of `key_input`; 0: 1.
    pub key_magnitude: f32,
    /// Optional, [.., T, heads, head_dim]: the keys beside the queries, which turn by the same positions, with a norm and rows of
    /// their own. Without rows `key_output` may be `key_input`; nothing else that is written overlaps what is read or written. On a
    /// GPU queries, keys and values are one launch where all of a head turns and it has 64, 128, 192 or 256 elements.
    pub key_input: nvb_tensor,
    pub key_output: nvb_tensor,
    pub key_norm_weight: nvb_tensor,
    pub key_rows: nvb_tensor,
    /// Optional, [.., T, heads, head_dim]: values of the same tokens, which do not turn. They are rounded to the dtype of
    /// `value_output` and go to its rows `value_rows`, or to its tokens without these.
    pub value_input: nvb_tensor,
    pub value_output: nvb_tensor,
    pub value_rows: nvb_tensor,
}
versioned!(nvb_rotary_embedding_args);

/// s = scale · input + slope · mask; output = exp(s − max) / (Σ exp(s − max) + exp(sink − max)), over the last axis.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_masked_softmax_args {
    pub struct_size: usize,
    /// [.., rows, n], any float dtype and strides, the innermost 1; up to two axes in front, heads and outside them the batch.
    pub input: nvb_tensor,
    /// Any float dtype and strides, the innermost 1, of the shape of `input`, which it may be.
    pub output: nvb_tensor,
    /// Optional, [.., rows, n], any float dtype: is added, −inf to hide a column. An extent that divides that of `input` repeats, of
    /// all axes but the last.
    pub mask: nvb_tensor,
    /// Optional, F32 [heads]: takes part in maximum and sum as a column that is not written.
    pub sinks: nvb_tensor,
    /// 0: 1.
    pub scale: f32,
    /// ALiBi: the mask of head h is multiplied by 2^(−alibi_bias · (h + 1) / n) for h < n, the largest power of two that is at
    /// most the number of heads, and by 2^(−alibi_bias · (2 · (h − n) + 1) / 2n) from there on. 0: 1.
    pub alibi_bias: f32,
}
versioned!(nvb_masked_softmax_args);

/// Queues a function of elements, f32 inside with one rounding at the store; a copy of I32 or F32 to its own dtype keeps every
/// bit. Does not allocate or synchronise; may be captured.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` for a function that is none, for extents that do not repeat to the output's, strides
/// by which elements of the output overlap, and `alpha` and `beta` that are no numbers the function takes.
#[no_mangle]
pub unsafe extern "C" fn nvb_pointwise(
    backend: *const nvb_backend,
    args: *const nvb_pointwise_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_pointwise, {
        arguments!(backend, args, stream);
        expect_reserved(args.reserved)?;
        let function = Function::from_code(args.function).ok_or_else(|| {
            Error::invalid(format!("function is {}; NVB_POINTWISE_… (1 to 19) is needed", args.function))
        })?;
        let input = strided_device_tensor(&backend, "input", &args.input)?;
        let second = optional_strided_device_tensor(&backend, "second", &args.second)?;
        let output = strided_device_tensor(&backend, "output", &args.output)?;
        backend.queue(Pointwise::new((function, args.alpha, args.beta), input, second, output)?, &stream)
    })
}

/// Queues a scatter of rows, each element rounded once. Does not allocate or synchronise; may be captured: the numbers are
/// read when the work runs.
#[no_mangle]
pub unsafe extern "C" fn nvb_scatter_rows(
    backend: *const nvb_backend,
    args: *const nvb_scatter_rows_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_scatter_rows, {
        arguments!(backend, args, stream);
        let input = device_tensor(&backend, "input", &args.input)?;
        let rows = strided_device_tensor(&backend, "rows", &args.rows)?;
        let output = device_tensor(&backend, "output", &args.output)?;
        backend.queue(ScatterRows::new(input, rows, output)?, &stream)
    })
}

/// Queues a rotary embedding (Su et al. 2021; YaRN: Peng et al. 2023), f32 inside with one rounding at the store. Frequencies
/// are found in f64 and rounded to f32 before the frequency factors divide. Does not allocate or synchronise; may be
/// captured: positions and factors are read when the work runs. `nvb_rope` is faster where it does what is asked.
#[no_mangle]
pub unsafe extern "C" fn nvb_rotary_embedding(
    backend: *const nvb_backend,
    args: *const nvb_rotary_embedding_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_rotary_embedding, {
        arguments!(backend, args, stream);
        let order = SectionOrder::from_code(args.section_order).ok_or_else(|| {
            Error::invalid(format!("section_order is {}; NVB_SECTIONS_… (0 to 2) is needed", args.section_order))
        })?;
        let sections = [args.time_pairs, args.height_pairs, args.width_pairs, args.extra_pairs];
        let pairs = Pairs::from_code(args.pairs)
            .ok_or_else(|| Error::invalid(format!("pairs is {}; NVB_ROTARY_… (0 or 1) is needed", args.pairs)))?;
        let input = device_tensor(&backend, "input", &args.input)?;
        let output = device_tensor(&backend, "output", &args.output)?;
        let positions = strided_device_tensor(&backend, "positions", &args.positions)?;
        let factors = optional_device_tensor(&backend, "frequency_factors", &args.frequency_factors)?;
        let weight = optional_device_tensor(&backend, "norm_weight", &args.norm_weight)?;
        let norm = weight.map(|weight| HeadNorm { weight, epsilon: or(args.epsilon, 1e-6) });
        let rows = optional_strided_device_tensor(&backend, "rows", &args.rows)?;
        let (first, head_dim) = (args.first as usize, input.shape[input.rank - 1]);
        let rotary_dim = if args.rotary_dim == 0 { head_dim.saturating_sub(first) } else { args.rotary_dim as usize };
        let yarn = Yarn {
            extension: args.extension,
            original_positions: args.original_positions,
            beta_fast: or(args.beta_fast, 32.0),
            beta_slow: or(args.beta_slow, 1.0),
        };
        let angles = Angles {
            pairs,
            rotary_dim,
            first,
            base: or(args.base, 10_000.0),
            position_scale: or(args.position_scale, 1.0),
            magnitude: or(args.magnitude, 1.0),
            yarn: (args.extension != 0.0).then_some(yarn),
            sections: (sections != [0; 4]).then_some(Sections { pairs: sections, order }),
        };
        let more = |names: [&str; 3], tensors: [&nvb_tensor; 3], norm: Option<HeadNorm>, turn: bool| {
            let [input, output, rows] = tensors;
            let Some(input) = optional_device_tensor(&backend, names[0], input)? else {
                let given = |(tensor, _): &(&&nvb_tensor, &&str)| !tensor.data.is_null();
                return match tensors[1..].iter().zip(&names[1..]).find(given) {
                    None if norm.is_none() => Ok(None),
                    found => Err(Error::invalid(format!(
                        "`{}` is given without `{}`",
                        found.map_or("key_norm_weight", |(_, name)| name),
                        names[0]
                    ))),
                };
            };
            let output = device_tensor(&backend, names[1], output)?;
            let rows = optional_strided_device_tensor(&backend, names[2], rows)?;
            let magnitude = if turn { or(args.key_magnitude, 1.0) } else { 1.0 };
            Ok(Some(MoreHeads { input, output, rows, norm, magnitude, turn }))
        };
        let weight = optional_device_tensor(&backend, "key_norm_weight", &args.key_norm_weight)?;
        let key_norm = weight.map(|weight| HeadNorm { weight, epsilon: or(args.epsilon, 1e-6) });
        let key_tensors = [&args.key_input, &args.key_output, &args.key_rows];
        let keys = more(["key_input", "key_output", "key_rows"], key_tensors, key_norm, true)?;
        let value_tensors = [&args.value_input, &args.value_output, &args.value_rows];
        let values = more(["value_input", "value_output", "value_rows"], value_tensors, None, false)?;
        let op = RotaryEmbedding::new(input, output, positions, factors, rows, angles)?
            .with_norm(norm)?
            .with_more(keys, values)?;
        backend.queue(op, &stream)
    })
}

/// Queues a softmax over rows with a mask, ALiBi (Press, Smith and Lewis 2022) and sinks, f32 inside. A row without weight gives
/// zeros. Does not allocate or synchronise; may be captured.
#[no_mangle]
pub unsafe extern "C" fn nvb_masked_softmax(
    backend: *const nvb_backend,
    args: *const nvb_masked_softmax_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_masked_softmax, {
        arguments!(backend, args, stream);
        let input = device_tensor(&backend, "input", &args.input)?;
        let output = device_tensor(&backend, "output", &args.output)?;
        let mask = optional_device_tensor(&backend, "mask", &args.mask)?;
        let sinks = optional_device_tensor(&backend, "sinks", &args.sinks)?;
        let numbers = (or(args.scale, 1.0), args.alibi_bias);
        backend.queue(MaskedSoftmax::new((input, output), mask, sinks, numbers)?, &stream)
    })
}

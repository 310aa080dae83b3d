//! The operations of a transformer layer.

use super::backend::arguments;
use super::kv_cache::{layer_of, nvb_kv_cache};
use super::prelude::*;
use super::tensor::{
    device_tensor, nvb_quantized_rows, nvb_tensor, optional_device_tensor, optional_quantized_rows, Reading,
};
use super::weight::{nvb_weight, weight_to_read};
use crate::operation::embedding::Embedding;
use crate::operation::gated_activation::GatedActivation;
use crate::operation::group_norm::{GroupNorm, ImageLayout};
use crate::operation::layer_norm::LayerNorm;
use crate::operation::linear::{Linear, LinearTensors};
use crate::operation::rms_norm::RmsNorm;
use crate::operation::rope::{Append, Rope, RopeArguments, Rotation};
use crate::operation::Activation;
use crate::stream::Owner;
use crate::weight::WeightView;

/// `activation`: x
pub const NVB_ACTIVATION_NONE: u32 = 0;
/// `activation`: 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))
pub const NVB_ACTIVATION_GELU_TANH: u32 = 1;
/// `activation`: 0.5·x·(1 + erf(x/√2))
pub const NVB_ACTIVATION_GELU_ERF: u32 = 2;
/// `activation`: x / (1 + exp(−x))
pub const NVB_ACTIVATION_SILU: u32 = 3;

/// `operation`, of profiling and of kernels: what `nvb_embedding` queues, and so on.
pub const NVB_OPERATION_EMBEDDING: u32 = 0;
pub const NVB_OPERATION_RMS_NORM: u32 = 1;
pub const NVB_OPERATION_LINEAR: u32 = 2;
pub const NVB_OPERATION_GATED_ACTIVATION: u32 = 3;
/// Of `nvb_rope` and `nvb_kv_cache_append`.
pub const NVB_OPERATION_ROPE: u32 = 4;
pub const NVB_OPERATION_ATTENTION_PREFILL: u32 = 5;
pub const NVB_OPERATION_ATTENTION_DECODE: u32 = 6;
pub const NVB_OPERATION_SOFTMAX: u32 = 7;
/// Of `nvb_add`, `nvb_multiply`, `nvb_scale`, `nvb_soft_cap`, `nvb_convert` and `nvb_activate`.
pub const NVB_OPERATION_ELEMENTWISE: u32 = 8;
pub const NVB_OPERATION_ARGMAX: u32 = 9;
pub const NVB_OPERATION_SAMPLE: u32 = 10;
pub const NVB_OPERATION_LAYER_NORM: u32 = 11;
pub const NVB_OPERATION_MATMUL: u32 = 12;
pub const NVB_OPERATION_GROUPED_LINEAR: u32 = 13;
pub const NVB_OPERATION_GROUP_NORM: u32 = 14;
pub const NVB_OPERATION_MEMORY_COPY: u32 = 15;
pub const NVB_OPERATION_MEMORY_FILL: u32 = 16;
pub const NVB_OPERATION_ATTENTION_MERGE: u32 = 17;
pub const NVB_OPERATION_POINTWISE: u32 = 18;
pub const NVB_OPERATION_SCATTER_ROWS: u32 = 19;
pub const NVB_OPERATION_ROTARY_EMBEDDING: u32 = 20;
pub const NVB_OPERATION_MASKED_SOFTMAX: u32 = 21;
pub const NVB_OPERATION_BLOCK_ROWS: u32 = 22;
pub const NVB_OPERATION_SORT_ROWS: u32 = 23;
pub const NVB_OPERATION_SUM_ROWS: u32 = 24;
pub const NVB_OPERATION_L2_NORM: u32 = 25;
pub const NVB_OPERATION_CONVERT_HEADS: u32 = 26;
/// The operations of this header; a later library may have more.
pub const NVB_OPERATION_COUNT: u32 = 27;

/// `layout`: [N, C, …], as PyTorch has images.
pub const NVB_LAYOUT_NCHW: u32 = 0;
/// `layout`: [N, …, C], channels last.
pub const NVB_LAYOUT_NHWC: u32 = 1;

pub(super) fn activation(code: u32) -> Result<Activation> {
    Activation::from_code(code)
        .ok_or_else(|| Error::invalid(format!("activation is {code}; NVB_ACTIVATION_… (0 to 3) is needed")))
}

/// `value`, or `default` where the caller left the field 0.
pub(super) fn or(value: f32, default: f32) -> f32 {
    if value == 0.0 {
        default
    } else {
        value
    }
}

/// output[t] = table[tokens[t]] · scale
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_embedding_args {
    pub struct_size: usize,
    /// I32 [T], or [batches, T / batches], whose rows may lie apart.
    pub tokens: nvb_tensor,
    /// [vocabulary, width], not gated. With batches [batches · vocabulary, width] of floats: the tokens of batch b are numbers of
    /// rows from b · vocabulary on.
    pub table: *const nvb_weight,
    /// [T, width], any float dtype.
    pub output: nvb_tensor,
    /// 0: 1. Gemma: √width rounded to BF16.
    pub scale: f32,
    /// Must be 0.
    pub reserved: u32,
}
versioned!(nvb_embedding_args);

/// RMS normalisation with the additions around it:
/// b = post_weight ? norm(input, post_weight) : input; s = residual ? residual + b : b; residual_output = s;
/// output = norm(s, weight). norm(x, w) = x · rsqrt(mean(x²) + epsilon) · (weight_offset + w).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_rms_norm_args {
    pub struct_size: usize,
    /// [T, width], any float dtype; up to 65,536 wide.
    pub input: nvb_tensor,
    /// Optional [width], of one dtype with `weight`: normalises the input before the addition (Gemma 2 and 3).
    pub post_weight: nvb_tensor,
    /// Optional [T, width], any float dtype.
    pub residual: nvb_tensor,
    /// Optional [T, width], the residual's dtype; may be the same memory as `residual` or `input`. It, `output` or
    /// `quantized_output` must be given.
    pub residual_output: nvb_tensor,
    /// Optional [width]; absent: s is scaled to unit root mean square only.
    pub weight: nvb_tensor,
    /// Optional [T, width]; may be the same memory as `input` or `residual`.
    pub output: nvb_tensor,
    /// 0: 1e-6.
    pub epsilon: f32,
    /// 0, or 1 for weights stored as w − 1 (Gemma).
    pub weight_offset: f32,
    /// Optional [T, width]: the output in 8 bits, beside `output` or instead of it. Must not overlap any other tensor.
    pub quantized_output: nvb_quantized_rows,
}
versioned!(nvb_rms_norm_args);

/// Layer normalisation with the addition in front of it: s = residual ? residual + input : input; residual_output = s;
/// output = (s − mean(s)) · rsqrt(variance(s) + epsilon) · weight + bias.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_layer_norm_args {
    pub struct_size: usize,
    /// [T, width], any float dtype; up to 65,536 wide.
    pub input: nvb_tensor,
    /// Optional [T, width], any float dtype.
    pub residual: nvb_tensor,
    /// Optional [T, width], the residual's dtype; may be the same memory as `residual`. It or `output` must be given.
    pub residual_output: nvb_tensor,
    /// Optional [width]; absent: 1.
    pub weight: nvb_tensor,
    /// Optional [width], of one dtype with `weight`; absent: 0.
    pub bias: nvb_tensor,
    /// Optional [T, width]; may be the same memory as `input`.
    pub output: nvb_tensor,
    /// 0: 1e-5.
    pub epsilon: f32,
    /// Must be 0.
    pub reserved: u32,
}
versioned!(nvb_layer_norm_args);

/// Group normalisation of images with an activation behind it: output = activation((x − mean) · rsqrt(variance + epsilon) ·
/// weight[c] + bias[c]), with mean and variance of all positions of the channels of x's group and sample. The channels are
/// divided into `groups` of neighbours.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_group_norm_args {
    pub struct_size: usize,
    /// [N, C, L] in NCHW, [N, L, C] in NHWC, any float dtype. L may be absent, or two axes such as height and width, which fold
    /// into one stride; in NCHW it is 1. Samples may lie apart, and channels in NCHW, positions in NHWC.
    pub input: nvb_tensor,
    /// Optional [C]; absent: 1.
    pub weight: nvb_tensor,
    /// Optional [C], of one dtype with `weight`; absent: 0.
    pub bias: nvb_tensor,
    /// Any float dtype, of the shape of `input`; may be the same memory.
    pub output: nvb_tensor,
    /// A divisor of C. C: instance normalisation; 1: layer normalisation over a whole sample.
    pub groups: u32,
    /// `NVB_LAYOUT_…`
    pub layout: u32,
    /// `NVB_ACTIVATION_…`
    pub activation: u32,
    /// 0: 1e-5.
    pub epsilon: f32,
}
versioned!(nvb_group_norm_args);

/// output = activation(input · weightᵀ + bias) + residual; with a gated weight activation(gate) · up + residual. All of it
/// is added up in f32 and rounded once.
///
/// An input that is in 8 bits already goes in `quantized_input`: with an FP8 or INT8 weight with scales of rows and many
/// rows of input the quantised values are multiplied as they are, whether or not the backend's configuration has
/// `quantized_activations`; otherwise scale · q is, on CUDA rounded to the weight's float dtype or to BF16.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_linear_args {
    pub struct_size: usize,
    /// [M, K] (leading axes are folded). F32, or with a float weight the weight's dtype; a quantised weight takes F32, F16
    /// and BF16.
    pub input: nvb_tensor,
    /// [N, K]
    pub weight: *const nvb_weight,
    /// Optional [N], any float dtype. For a gated weight in the order of its rows, in which gate and up alternate: element
    /// 2i is the bias of row i of gate, element 2i + 1 that of row i of up.
    pub bias: nvb_tensor,
    /// [M, N], gated [M, N / 2]; any float dtype. Must not overlap `input`. May be absent with `quantized_output`.
    pub output: nvb_tensor,
    /// `NVB_ACTIVATION_…`
    pub activation: u32,
    /// Must be 0.
    pub reserved: u32,
    /// [M, K], in the place of `input`, which then must be absent.
    pub quantized_input: nvb_quantized_rows,
    /// Optional, of the shape of `output`; any float dtype. May be the same memory as `output` if it has its dtype and
    /// strides, and must not overlap it otherwise.
    pub residual: nvb_tensor,
    /// Optional, of the shape of `output`: the result in 8 bits, beside `output` or instead of it. Must not overlap any
    /// other tensor. The product is then made in f32 in workspace and its rows quantised from there.
    pub quantized_output: nvb_quantized_rows,
}
versioned!(nvb_linear_args);

/// output = activation(gate) · up, elementwise.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_gated_activation_args {
    pub struct_size: usize,
    /// [T, F], any float dtype.
    pub gate: nvb_tensor,
    /// [T, F], the gate's dtype.
    pub up: nvb_tensor,
    /// Optional [T, F], any float dtype; may be the same memory as `gate` or `up`. It or `quantized_output` must be given.
    pub output: nvb_tensor,
    /// `NVB_ACTIVATION_…`
    pub activation: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Optional [T, F]: the output in 8 bits, beside `output` or instead of it. Must not overlap any other tensor.
    pub quantized_output: nvb_quantized_rows,
}
versioned!(nvb_gated_activation_args);

/// Per head: RMS norm (optional), rotation, scale; keys and values optionally appended to a cache layer. The pair
/// (x[i], x[i + rotary_dim / 2]) turns by position · position_scale · base^(−2i / rotary_dim).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_rope_args {
    pub struct_size: usize,
    /// Optional [T, query_heads, head_dim]; any float dtype. Slices of one fused QKV row are fine.
    pub query: nvb_tensor,
    /// The shape of `query`, which it may be.
    pub query_output: nvb_tensor,
    /// Optional [head_dim]: RMS norm of each query head before the rotation.
    pub query_norm: nvb_tensor,
    /// Optional [T, kv_heads, head_dim].
    pub key: nvb_tensor,
    /// The shape of `key`, which it may be; optional when a cache is given.
    pub key_output: nvb_tensor,
    /// Optional [head_dim].
    pub key_norm: nvb_tensor,
    /// [T, kv_heads, head_dim], with a cache only: stored as it is.
    pub value: nvb_tensor,
    /// I32 [T] in device memory. A token at −1 is not stored, as of a row that `nvb_attention_decode` leaves empty. Nor is one
    /// whose sequence or position lies outside the cache on CUDA; on the CPU that is an error.
    pub positions: nvb_tensor,
    /// Optional, I32 [T] in device memory: the sequence of each token; absent: sequence 0 for all of them, a prompt's tokens, where
    /// `nvb_attention_decode` takes 0, 1, 2, … Two tokens of one call with one place in the cache are a race; on the CPU they are
    /// an error where they follow each other.
    pub sequences: nvb_tensor,
    /// Optional: where keys and values are appended, at [sequence, head, position].
    pub cache: *const nvb_kv_cache,
    /// The cache's layer.
    pub layer: u32,
    /// Even, at most head_dim; the elements from it on pass through. 0: head_dim.
    pub rotary_dim: u32,
    /// 0: 10,000.
    pub base: f32,
    /// 0: 1. 1/8 for the global layers of Gemma 3 from 4B on.
    pub position_scale: f32,
    /// Multiplies the rotated queries; 0: 1.
    pub query_scale: f32,
    /// The norms' epsilon; 0: 1e-6.
    pub epsilon: f32,
    /// What the norms add to their weights: 0, or 1 for weights stored as w − 1.
    pub weight_offset: f32,
    /// Must be 0.
    pub reserved: u32,
    /// Optional, I32 [sequences, entries] in device memory: given where the engine owns the cache's pages, and only there.
    /// Entry i of a row is the page of the sequence's tokens from i · page_tokens on. A token whose entry is no page of the
    /// pool is treated as one outside the cache.
    pub page_table: nvb_tensor,
}
versioned!(nvb_rope_args);

/// Keys and values as they are into a cache layer, at [sequence, head, position].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_kv_cache_append_args {
    pub struct_size: usize,
    /// [T, kv_heads, head_dim], any float dtype.
    pub key: nvb_tensor,
    /// The shape of `key`, and its dtype.
    pub value: nvb_tensor,
    /// I32 [T] in device memory, as in `nvb_rope_args`.
    pub positions: nvb_tensor,
    /// Optional, as in `nvb_rope_args`.
    pub sequences: nvb_tensor,
    pub cache: *const nvb_kv_cache,
    pub layer: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Optional, I32 [sequences, entries], as in `nvb_rope_args`.
    pub page_table: nvb_tensor,
}
versioned!(nvb_kv_cache_append_args);

/// Queues an embedding gather. A token outside the table, or its batch's part of it, gives a row of zeros on CUDA and is an error on
/// the CPU, which names it. Batches that do not divide the rows of a table of floats are `NVB_ERROR_INVALID_ARGUMENT`. F32 rows with a scale of 1 keep every bit in an F32 output, so numbers of 32 bits may lie there. Does not allocate or
/// synchronise; may be captured.
#[no_mangle]
pub unsafe extern "C" fn nvb_embedding(
    backend: *const nvb_backend,
    args: *const nvb_embedding_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_embedding, {
        arguments!(backend, args, stream);
        expect_reserved(args.reserved)?;
        let (owner, table) = weight_to_read(&backend, args.table)?;
        let tokens = device_tensor(&backend, "tokens", &args.tokens)?;
        let output = device_tensor(&backend, "output", &args.output)?;
        backend.queue_with(Embedding::new(tokens, table, or(args.scale, 1.0), output)?, Some(owner), &stream)
    })
}

/// Queues an RMS normalisation (Zhang and Sennrich 2019), f32 inside with one rounding at each store. Does not allocate
/// or synchronise; may be captured.
#[no_mangle]
pub unsafe extern "C" fn nvb_rms_norm(
    backend: *const nvb_backend,
    args: *const nvb_rms_norm_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_rms_norm, {
        arguments!(backend, args, stream);
        let call = RmsNorm {
            input: device_tensor(&backend, "input", &args.input)?,
            post_weight: optional_device_tensor(&backend, "post_weight", &args.post_weight)?,
            residual: optional_device_tensor(&backend, "residual", &args.residual)?,
            residual_output: optional_device_tensor(&backend, "residual_output", &args.residual_output)?,
            weight: optional_device_tensor(&backend, "weight", &args.weight)?,
            output: optional_device_tensor(&backend, "output", &args.output)?,
            quantized_output: optional_quantized_rows(&backend, "quantized_output", &args.quantized_output)?,
            epsilon: or(args.epsilon, 1e-6),
            weight_offset: args.weight_offset,
        };
        backend.queue(call.validated()?, &stream)
    })
}

/// Queues a layer normalisation (Ba, Kiros and Hinton 2016), f32 inside with one rounding at each store. Does not allocate
/// or synchronise; may be captured.
#[no_mangle]
pub unsafe extern "C" fn nvb_layer_norm(
    backend: *const nvb_backend,
    args: *const nvb_layer_norm_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_layer_norm, {
        arguments!(backend, args, stream);
        expect_reserved(args.reserved)?;
        let call = LayerNorm {
            input: device_tensor(&backend, "input", &args.input)?,
            residual: optional_device_tensor(&backend, "residual", &args.residual)?,
            residual_output: optional_device_tensor(&backend, "residual_output", &args.residual_output)?,
            weight: optional_device_tensor(&backend, "weight", &args.weight)?,
            bias: optional_device_tensor(&backend, "bias", &args.bias)?,
            output: optional_device_tensor(&backend, "output", &args.output)?,
            epsilon: or(args.epsilon, 1e-5),
        };
        backend.queue(call.validated()?, &stream)
    })
}

/// Queues a group normalisation (Wu and He 2018; the variance over all elements, as PyTorch's `GroupNorm` has it), f32 inside
/// with one rounding at the store. Does not allocate or synchronise; may be captured.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` if `groups` does not divide C, for a layout or an activation that is none, and for
/// shapes, dtypes and strides that do not fit.
#[no_mangle]
pub unsafe extern "C" fn nvb_group_norm(
    backend: *const nvb_backend,
    args: *const nvb_group_norm_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_group_norm, {
        arguments!(backend, args, stream);
        let layout = ImageLayout::from_code(args.layout)
            .ok_or_else(|| Error::invalid(format!("layout is {}; NVB_LAYOUT_… (0 or 1) is needed", args.layout)))?;
        let call = GroupNorm {
            input: device_tensor(&backend, "input", &args.input)?,
            weight: optional_device_tensor(&backend, "weight", &args.weight)?,
            bias: optional_device_tensor(&backend, "bias", &args.bias)?,
            output: device_tensor(&backend, "output", &args.output)?,
            groups: args.groups as usize,
            layout,
            activation: activation(args.activation)?,
            epsilon: or(args.epsilon, 1e-5),
        };
        backend.queue(call.validated()?, &stream)
    })
}

pub(super) fn linear_of(reading: Reading<'_>, args: &nvb_linear_args, weight: WeightView) -> Result<Linear> {
    expect_reserved(args.reserved)?;
    let tensors = LinearTensors {
        input: reading.optional("input", &args.input)?,
        quantized_input: reading.quantized_rows("quantized_input", &args.quantized_input)?,
        bias: reading.optional("bias", &args.bias)?,
        residual: reading.optional_apart("residual", &args.residual)?,
        output: reading.optional("output", &args.output)?,
        quantized_output: reading.quantized_rows("quantized_output", &args.quantized_output)?,
    };
    Linear::new(tensors, weight, activation(args.activation)?)
}

/// Queues a product, summed in f32 with one rounding at the store. On a GPU a quantised weight may cost a second one: its
/// elements are rounded to the dtype of a 16-bit input for more than 64 rows, or 16 where K is no multiple of 64 or rows
/// are not 16-byte aligned; for fewer with input and output in BF16 elements, or sums of 128 products, are rounded to about
/// an eighth of the output's last place.
/// M from 0 on; any N and K. Does not synchronise. The first call of a stream with arguments like these may allocate
/// workspace: for a large product, more than 8 rows with a quantised weight, `quantized_input` or `quantized_output`, a
/// weight in activation order, and with `batch_invariant` for input that is not aligned. It may be captured after that.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` if neither `output` nor `quantized_output` is given, or both `input` and
/// `quantized_input`; for shapes, dtypes and strides that do not fit; and for a `residual` that starts where `output`
/// does with another dtype or stride.
#[no_mangle]
pub unsafe extern "C" fn nvb_linear(
    backend: *const nvb_backend,
    args: *const nvb_linear_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_linear, {
        arguments!(backend, args, stream);
        let (owner, weight) = weight_to_read(&backend, args.weight)?;
        backend.queue_with(linear_of(Reading::Memory(&backend), args, weight)?, Some(owner), &stream)
    })
}

/// Queues a gated activation (GeGLU, SwiGLU; Shazeer 2020). Does not allocate or synchronise; may be captured.
#[no_mangle]
pub unsafe extern "C" fn nvb_gated_activation(
    backend: *const nvb_backend,
    args: *const nvb_gated_activation_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_gated_activation, {
        arguments!(backend, args, stream);
        expect_reserved(args.reserved)?;
        let op = GatedActivation::new(
            device_tensor(&backend, "gate", &args.gate)?,
            device_tensor(&backend, "up", &args.up)?,
            activation(args.activation)?,
            optional_device_tensor(&backend, "output", &args.output)?,
            optional_quantized_rows(&backend, "quantized_output", &args.quantized_output)?,
        )?;
        backend.queue(op, &stream)
    })
}

/// Queues q/k norm, rotary embedding (Su et al. 2021, half layout) and cache append in one pass; inverse frequencies and
/// angles are f32, as in HF transformers. Does not allocate or synchronise; may be captured.
#[no_mangle]
pub unsafe extern "C" fn nvb_rope(
    backend: *const nvb_backend,
    args: *const nvb_rope_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_rope, {
        arguments!(backend, args, stream);
        expect_reserved(args.reserved)?;
        let found = match args.cache.is_null() {
            true => None,
            false => Some(layer_of(Reading::Memory(&backend), &backend, (args.cache, args.layer), &args.page_table)?),
        };
        let query = optional_device_tensor(&backend, "query", &args.query)?;
        let key = optional_device_tensor(&backend, "key", &args.key)?;
        let head_dim = query.as_ref().or(key.as_ref()).map_or(0, |tensor| tensor.shape[2]);
        let sequences = optional_device_tensor(&backend, "sequences", &args.sequences)?;
        let (owner, append) = match found {
            Some((owner, cache)) => (Some(owner as Owner), Some(Append { cache, sequences })),
            None => (None, None),
        };
        let op = Rope::new(RopeArguments {
            query,
            query_output: optional_device_tensor(&backend, "query_output", &args.query_output)?,
            query_norm: optional_device_tensor(&backend, "query_norm", &args.query_norm)?,
            query_scale: or(args.query_scale, 1.0),
            key,
            key_output: optional_device_tensor(&backend, "key_output", &args.key_output)?,
            key_norm: optional_device_tensor(&backend, "key_norm", &args.key_norm)?,
            value: optional_device_tensor(&backend, "value", &args.value)?,
            epsilon: or(args.epsilon, 1e-6),
            weight_offset: args.weight_offset,
            positions: device_tensor(&backend, "positions", &args.positions)?,
            rotation: Some(Rotation {
                base: or(args.base, 10_000.0),
                position_scale: or(args.position_scale, 1.0),
                rotary_dim: if args.rotary_dim == 0 { head_dim & !1 } else { args.rotary_dim as usize },
            }),
            append,
        })?;
        backend.queue_with(op, owner, &stream)
    })
}

/// Queues an append to the cache. Does not allocate or synchronise; may be captured.
#[no_mangle]
pub unsafe extern "C" fn nvb_kv_cache_append(
    backend: *const nvb_backend,
    args: *const nvb_kv_cache_append_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_kv_cache_append, {
        arguments!(backend, args, stream);
        expect_reserved(args.reserved)?;
        let (owner, cache) = layer_of(Reading::Memory(&backend), &backend, (args.cache, args.layer), &args.page_table)?;
        let sequences = optional_device_tensor(&backend, "sequences", &args.sequences)?;
        let op = Rope::new(RopeArguments {
            query: None,
            query_output: None,
            query_norm: None,
            query_scale: 1.0,
            key: Some(device_tensor(&backend, "key", &args.key)?),
            key_output: None,
            key_norm: None,
            value: Some(device_tensor(&backend, "value", &args.value)?),
            epsilon: 1e-6,
            weight_offset: 0.0,
            positions: device_tensor(&backend, "positions", &args.positions)?,
            rotation: None,
            append: Some(Append { cache, sequences }),
        })?;
        backend.queue_with(op, Some(owner), &stream)
    })
}

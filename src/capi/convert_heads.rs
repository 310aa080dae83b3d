//! Heads of queries, keys and values, rotated and rounded to FP8.

use super::backend::arguments;
use super::prelude::*;
use super::products::flag;
use super::tensor::{nvb_tensor, optional_device_tensor, strided_device_tensor};
use crate::operation::convert_heads::{ConvertHeads, HeadScales};

/// output = round(rotate(x) / scale) for each head of queries, keys or values: what attention over FP8 tensors, or over a cache in
/// FP8, wants them to be.
///
/// **Rotation** (`rotate`): a head's elements change their signs by `seed`, and each block of b elements is multiplied by the
/// Hadamard matrix of size b over √b, where b is the largest power of two that divides head_dim (64 of 64, 192 and 576, 32 of 96). That
/// is orthogonal: q · k stays what it is where queries and keys are rotated by one seed, and an outlier becomes b elements of 1/√b of its
/// size before they are rounded (FlashAttention 3's incoherent processing, Shah et al. 2024). It comes after norm and rotary embedding.
/// Values are not to be rotated: the output would be.
///
/// How it goes with the other calls:
/// - FP8 attention over tensors: `nvb_rope` without a cache; this call for queries (`scales` of kv_heads entries) and for keys, both
///   with `rotate` and one seed, and for values without; then `nvb_attention_prefill` with the scales as `query_scale`, `key_scale`
///   and `value_scale`.
/// - A cache in FP8: `nvb_rope` without a cache; this call in place for queries and for keys, with float outputs and without scales;
///   then `nvb_kv_cache_append`, which divides by the cache's `key_scales` and rounds; then attention. All calls that write or read
///   the cache rotate by one seed. The cache's scales are made from rotated keys: this call writes them with `write_scales`
///   over the keys of a calibration text.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_convert_heads_args {
    pub struct_size: usize,
    /// [.., heads, head_dim] of rank 2 to 4, any float dtype and any strides; head_dim a multiple of 8 up to 576. Strides of 1 along
    /// head_dim with heads on 16-byte boundaries run fastest.
    pub input: nvb_tensor,
    /// The shape of `input`; a float dtype, `NVB_DTYPE_FP8_E4M3` or `_FP8_E5M2`, any strides. It may be `input`.
    pub output: nvb_tensor,
    /// Optional, with an FP8 output: F32 [n] in device memory, n a divisor of heads; entry i is the scale of heads / n neighbouring heads.
    /// Read when the stream gets there, or written with `write_scales`. Absent: 1.
    pub scales: nvb_tensor,
    /// Where bit i mod 64 of number ⌊i / 64⌋ that SplitMix64 (Steele et al. 2014) makes from `seed` is 1, element i changes its sign.
    pub seed: u64,
    /// 1: heads are rotated. 0: they are not.
    pub rotate: u32,
    /// 1: the call computes `scales` first: max |rotate(x)| over all elements of a scale's heads, / 448 (E4M3) or / 57344 (E5M2). Without
    /// tokens they become 0. 0: `scales` are read.
    pub write_scales: u32,
}
versioned!(nvb_convert_heads_args);

/// Queues a conversion of heads. Sums, products and the division are f32, with one rounding at the store, to nearest even; FP8
/// saturates. With a scale of 0 the quotients are 0. NaN makes its block NaN where heads are rotated, and the scales that are
/// written from it. Equal inputs give equal bits on every device. Does not allocate or synchronise; may be captured.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` for shapes, dtypes and strides that do not fit, for scales of a float output, and for an
/// output that overlaps the input without being it.
#[no_mangle]
pub unsafe extern "C" fn nvb_convert_heads(
    backend: *const nvb_backend,
    args: *const nvb_convert_heads_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_convert_heads, {
        arguments!(backend, args, stream);
        let written = flag("write_scales", args.write_scales)?;
        let scales = optional_device_tensor(&backend, "scales", &args.scales)?;
        if written && scales.is_none() {
            return Err(Error::invalid("write_scales is 1, and `scales` is missing"));
        }
        let scales = scales.map(|tensor| HeadScales { tensor, written });
        let seed = flag("rotate", args.rotate)?.then_some(args.seed);
        let input = strided_device_tensor(&backend, "input", &args.input)?;
        let output = strided_device_tensor(&backend, "output", &args.output)?;
        backend.queue(ConvertHeads::new(input, output, scales, seed)?, &stream)
    })
}

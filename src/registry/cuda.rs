//! CUDA's kernels: the rows of the two tables in csrc/linear (a test holds the names and limits against them), and the
//! strategies around cuBLASLt.

use super::{
    Family, Kernel, Limits, BLOCK_ENCODINGS, FLOATS, FLOAT_ENCODINGS, HALF_ENCODINGS, HALVES, QUANTIZED,
    QUANTIZED_AND_BLOCKS,
};
use crate::device::DeviceKind;
use crate::operation::OperationKind;
use crate::tensor::DType;
use crate::weight::Encoding;

/// Tensor cores want an input of 16 bits in rows of whole 16-byte vectors.
const VECTORS: Limits = Limits { capability: 80, exact: false, rows: 0, depth_multiple: 8, alignment: 16 };
/// Quantised weights are read in chunks of 64 elements besides.
const CHUNKS: Limits = Limits { depth_multiple: 64, ..VECTORS };
/// Kernels of compute capability 9.0 alone.
const HOPPER: Limits = Limits { capability: 90, exact: true, ..CHUNKS };

const FP8: &[DType] = &[DType::F8E4m3, DType::F8E5m2];
const FP8_ENCODINGS: &[Encoding] = &[Encoding::Fp8E4m3, Encoding::Fp8E5m2];
const NARROW_ENCODINGS: &[Encoding] =
    &[Encoding::Float(DType::F16), Encoding::Float(DType::Bf16), Encoding::Fp8E4m3, Encoding::Fp8E5m2];
/// Rows with scales of their own.
const ROW_ENCODINGS: &[Encoding] = &[Encoding::Int8, Encoding::Int4];
/// What keys and values may be kept in.
const KV_ENCODINGS: &[Encoding] = &[
    Encoding::Float(DType::F32),
    Encoding::Float(DType::F16),
    Encoding::Float(DType::Bf16),
    Encoding::Fp8E4m3,
    Encoding::Fp8E5m2,
    Encoding::Int8,
    Encoding::Int4,
];

const fn kernel(
    name: &'static str,
    family: Family,
    inputs: &'static [DType],
    encodings: &'static [Encoding],
    limits: Limits,
    summary: &'static str,
) -> Kernel {
    Kernel {
        name,
        operation: OperationKind::Linear,
        device: DeviceKind::Cuda,
        family,
        inputs,
        encodings,
        limits,
        summary,
    }
}

const fn float(name: &'static str, inputs: &'static [DType], limits: Limits, summary: &'static str) -> Kernel {
    let encodings = if limits.capability == 0 { FLOAT_ENCODINGS } else { HALF_ENCODINGS };
    kernel(name, Family::FloatKernel, inputs, encodings, limits, summary)
}

/// Each takes every quantised encoding.
const fn quantized(name: &'static str, limits: Limits, summary: &'static str) -> Kernel {
    let inputs = if limits.capability == 0 { FLOATS } else { HALVES };
    kernel(name, Family::QuantizedKernel, inputs, QUANTIZED, limits, summary)
}

const fn attention(name: &'static str, family: Family, limits: Limits, summary: &'static str) -> Kernel {
    let operation = match family {
        Family::AttentionPrefill => OperationKind::AttentionPrefill,
        _ => OperationKind::AttentionDecode,
    };
    let encodings = if limits.capability == 0 { KV_ENCODINGS } else { HALF_ENCODINGS };
    let inputs = if limits.exact { HALVES } else { FLOATS };
    Kernel { operation, ..kernel(name, family, inputs, encodings, limits, summary) }
}

pub const KERNELS: &[Kernel] = &[
    float(
        "linear_skinny_ring",
        HALVES,
        Limits { capability: 90, rows: 8, ..VECTORS },
        "From compute capability 9.0 on: tensor cores for up to 8 tokens, K from 256 to 10,240; bulk copies stream the weight through shared memory.",
    ),
    float(
        "linear_skinny",
        HALVES,
        Limits { rows: 8, ..VECTORS },
        "Tensor cores for few tokens; the weight goes from memory to registers.",
    ),
    float(
        "linear_gemv_ring",
        HALVES,
        Limits { capability: 90, rows: 1, ..VECTORS },
        "From compute capability 9.0 on: one token, K up to 20,480; bulk copies stream the weight through shared memory.",
    ),
    float(
        "linear_gemv",
        FLOATS,
        Limits { rows: 8, depth_multiple: 4, alignment: 16, ..Limits::NONE },
        "A dot product a row of the weight, in 16-byte vectors.",
    ),
    float(
        "linear_gemv_unaligned",
        FLOATS,
        Limits { rows: 8, ..Limits::NONE },
        "A dot product a row of the weight, element by element where addresses are not aligned.",
    ),
    float("linear_mma_16x32", HALVES, VECTORS, "Tensor cores, tiles of 16 tokens and 32 rows of the weight."),
    float(
        "linear_mma_16x32_ordered",
        HALVES,
        VECTORS,
        "The same, added along K in the order of the two tiles that follow: for batch_invariant, or if named or tuned.",
    ),
    float("linear_mma_128x128", HALVES, VECTORS, "Tensor cores, tiles of 128 tokens and 128 rows of the weight."),
    float("linear_mma_64x64", HALVES, VECTORS, "Tensor cores, tiles of 64 tokens and 64 rows of the weight."),
    float("linear_mma_32x32", HALVES, VECTORS, "Tensor cores, tiles of 32 tokens and 32 rows of the weight."),
    float("linear_simt", FLOATS, Limits::NONE, "Plain f32 arithmetic, for everything that the others do not take."),
    kernel(
        "linear_cublaslt",
        Family::Vendor,
        FLOATS,
        FLOAT_ENCODINGS,
        Limits::NONE,
        "A product of cuBLASLt in the weight's dtype, and an epilogue kernel where there is one.",
    ),
    kernel(
        "linear_wgmma",
        Family::Wgmma,
        HALVES,
        HALF_ENCODINGS,
        Limits { capability: 90, exact: true, alignment: 16, ..Limits::NONE },
        "On compute capability 9.0: tiles of 256 tokens and 256 rows of the weight by warpgroups' tensor cores, the \
                  epilogue included; output in 16 bits, not the erf form of GELU.",
    ),
    quantized(
        "linear_quantized_wgmma",
        Limits { rows: 64, ..HOPPER },
        "On compute capability 9.0: up to 64 tokens by warpgroups' tensor cores, the rows of the weight cut along K; with zero points from 17 tokens on.",
    ),
    quantized(
        "linear_quantized_decode",
        Limits { rows: 16, ..HOPPER },
        "On compute capability 9.0: up to 16 tokens; bulk copies stream the weight through shared memory.",
    ),
    quantized(
        "linear_quantized_skinny8",
        Limits { rows: 8, ..CHUNKS },
        "Up to 8 tokens; the weight goes from memory to registers.",
    ),
    quantized(
        "linear_quantized_skinny16",
        Limits { rows: 16, ..CHUNKS },
        "Up to 16 tokens; the weight goes from memory to registers.",
    ),
    quantized(
        "linear_quantized_mma16",
        Limits { rows: 16, ..CHUNKS },
        "Up to 16 tokens, added in the order of the two that follow: for batch_invariant, or if named or tuned.",
    ),
    quantized(
        "linear_quantized_mma32",
        Limits { rows: 32, ..CHUNKS },
        "Up to 32 tokens; weight and tokens pass through shared memory.",
    ),
    quantized(
        "linear_quantized_mma64",
        CHUNKS,
        "Tiles of 64 tokens; weight and tokens pass through shared memory.",
    ),
    Kernel {
        inputs: FLOATS,
        encodings: BLOCK_ENCODINGS,
        ..quantized(
            "linear_quantized_blocks",
            Limits { capability: 80, depth_multiple: 32, ..Limits::NONE },
            "Blocks of GGUF on tensor cores, a number of the input as three bytes or, of more than two tokens, in F16; up to 16 tokens it leads.",
        )
    },
    Kernel {
        encodings: QUANTIZED_AND_BLOCKS,
        ..quantized("linear_quantized_plain", Limits::NONE, "Plain f32 arithmetic, eight tokens a pass.")
    },
    kernel(
        "linear_dequantized",
        Family::Dequantized,
        FLOATS,
        QUANTIZED_AND_BLOCKS,
        Limits::NONE,
        "Slices of the weight become floats, each multiplied by cuBLASLt or an own kernel.",
    ),
    kernel(
        "linear_rounded_input",
        Family::RoundedInput,
        FLOATS,
        &[Encoding::Fp8E4m3, Encoding::Fp8E5m2, Encoding::Int8],
        Limits { capability: 75, ..Limits::NONE },
        "The input in 8 bits, a scale a row, times the quantised values of a weight with scales of rows, by cuBLASLt; \
                  only where quantized_activations is set.",
    ),
    kernel(
        "linear_rounded_wgmma",
        Family::RoundedWgmma,
        FLOATS,
        &[Encoding::Fp8E4m3, Encoding::Fp8E5m2, Encoding::Int8],
        Limits { capability: 90, exact: true, ..Limits::NONE },
        "The same on compute capability 9.0 by linear_wgmma, scales and epilogue included.",
    ),
    attention(
        "attention_prefill_wgmma",
        Family::AttentionPrefill,
        Limits { capability: 90, exact: true, ..VECTORS },
        "On compute capability 9.0: warpgroups' tensor cores in turns, fed by bulk tensor copies; head_dim up to 256, keys and values contiguous or in pages of a multiple of 8 tokens.",
    ),
    Kernel {
        inputs: FP8,
        encodings: FP8_ENCODINGS,
        ..attention(
            "attention_prefill_fp8",
            Family::AttentionPrefill,
            Limits { capability: 90, exact: true, depth_multiple: 16, ..VECTORS },
            "On compute capability 9.0, queries, keys and values of FP8: as attention_prefill_wgmma by the tensor cores' products of FP8, with the values transposed as they come.",
        )
    },
    attention(
        "attention_prefill_mma",
        Family::AttentionPrefill,
        VECTORS,
        "Tensor cores: FlashAttention-2's online softmax over tiles of keys, queries of the keys' dtype or rounded to it.",
    ),
    attention(
        "attention_prefill_masked",
        Family::AttentionPrefill,
        VECTORS,
        "Tensor cores for scores under an additive mask, keys divided among the blocks of a cluster; head_dim 64, 128 or 256.",
    ),
    attention(
        "attention_prefill_simt",
        Family::AttentionPrefill,
        Limits::NONE,
        "Plain f32 arithmetic, 64 query rows a block.",
    ),
    attention(
        "attention_decode_short",
        Family::AttentionDecode,
        VECTORS,
        "Few keys: a warp has all of a pass on their way at once, and a cluster of blocks merges without workspace.",
    ),
    Kernel {
        inputs: FLOATS,
        encodings: NARROW_ENCODINGS,
        ..attention(
            "attention_decode_ring",
            Family::AttentionDecode,
            Limits { capability: 90, exact: true, depth_multiple: 64, ..VECTORS },
            "On compute capability 9.0, up to 48 sequences of head_dim 64, 128 or 256, and FP8 of 128 or 256: one warp copies keys and values in bulk, the others multiply; the keys of all sequences are divided evenly among the multiprocessors.",
        )
    },
    attention(
        "attention_decode_mma",
        Family::AttentionDecode,
        VECTORS,
        "Tensor cores, all query heads of a key/value head in one block; the keys are split over blocks, the last of which merges.",
    ),
    Kernel {
        inputs: FLOATS,
        encodings: ROW_ENCODINGS,
        ..attention(
            "attention_decode_rows",
            Family::AttentionDecode,
            Limits { capability: 90, exact: true, depth_multiple: 64, ..VECTORS },
            "On compute capability 9.0, keys and values of head_dim 128 in INT8, Q8_0 or Q4_0: one warp copies rows with their scales in bulk, the others widen and multiply them; the keys are split as attention_decode_mma splits them.",
        )
    },
    attention(
        "attention_decode_simt",
        Family::AttentionDecode,
        Limits::NONE,
        "Plain f32 arithmetic, up to eight query heads a block; the keys are split as attention_decode_mma splits them.",
    ),
    attention(
        "attention_decode_rope",
        Family::AttentionDecode,
        Limits { capability: 90, exact: true, depth_multiple: 64, ..VECTORS },
        "On compute capability 9.0, norm, rotation and append of one new token a sequence within its attention over few keys: a cluster of blocks divides the keys and merges without workspace.",
    ),
];

/// The names of the kernels' tables, and that what a kernel supports lies within its limits.
#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;
    use crate::cuda::kernel_tables;

    #[test]
    fn the_tables_in_csrc_hold_these_kernels() {
        for (family, names) in kernel_tables() {
            let listed: Vec<&str> =
                KERNELS.iter().filter(|kernel| kernel.family == family).map(|kernel| kernel.name).collect();
            for name in &names {
                assert!(listed.contains(&name.as_str()), "csrc/ has {name}, src/registry/cuda.rs does not");
            }
            for name in listed {
                assert!(names.iter().any(|known| known == name), "src/registry/cuda.rs has {name}, csrc/ does not");
            }
        }
    }
}

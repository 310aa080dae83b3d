//! The units that only instantiate a template of csrc/ or give it a name, one for each kind of element, so that they compile
//! in parallel. build.rs writes them into its own folder and compiles them as it does the .cu files.

/// Units `<stem>_<encoding>_<element>` with the same text but for names.
struct Family {
    stem: &'static str,
    includes: &'static [&'static str],
    /// Of the weight, or tiles; a family without either has one that is empty.
    encodings: &'static [&'static str],
    /// What stands in the unit's name, and for `{element}`.
    elements: &'static [&'static [Element]],
    /// With `{encoding}`, `{ENCODING}`, `{name}` (the element's) and `{element}`.
    text: &'static str,
}

type Element = (&'static str, &'static str);

const HALVES: &[Element] = &[("f16", "__half"), ("bf16", "__nv_bfloat16")];
const BF16: &[Element] = &[("bf16", "__nv_bfloat16")];
const F32: &[Element] = &[("f32", "float")];
/// BF16 that meets FP8 weights as the sum of two FP8 numbers (linear_quantized_wgmma_input.cuh).
const TWO_FP8: &[Element] = &[("bf16_as_two_fp8", "nvb::quantized::Bf16AsTwoFp8")];
/// BF16 that meets Int4 weights as F16 times a power of two for each token.
const SCALED_F16: &[Element] = &[("bf16_as_scaled_f16", "nvb::quantized::Bf16AsScaledF16")];
const ONE: &[&str] = &[""];

const WGMMA_ENCODING: &str = "template cudaError_t nvb::quantized::launch_wgmma_encoding<NVB_{ENCODING}, {element}>(
    const nvb_linear_quantized_params&, const nvb_launch&, const WgmmaPlan&);";
const QUANTIZED: &str = "template cudaError_t nvb::quantized::launch_{encoding}<{element}>(
    const nvb_linear_quantized_params&, const nvb_launch&, Tokens);";
const WGMMA: &str = "namespace nvb {
namespace linear_wgmma {
template cudaError_t launch_kind<Operands::{element}>(const nvb_linear_wgmma_params&, const nvb_launch&);
}
}";

const FAMILIES: &[Family] = &[
    Family {
        stem: "linear_quantized_plain",
        includes: &["linear/linear_quantized_plain.cuh"],
        encodings: &[
            "fp8_e4m3", "fp8_e5m2", "int8", "int4", "sfp",
        ],
        elements: &[&[("", "")]],
        text: "template cudaError_t nvb::quantized::launch_plain_encoding<NVB_{ENCODING}>(
    const nvb_linear_quantized_params&, const nvb_launch&);",
    },
    Family {
        stem: "linear_quantized",
        includes: &["linear/linear_quantized_plain.cuh", "linear/sm80/linear_quantized_blocks.cuh"],
        encodings: &[
            "blocks_q4_0", "blocks_q4_1", "blocks_q5_0", "blocks_q5_1", "blocks_q8_0", "blocks_q2_k", "blocks_q3_k", "blocks_q4_k",
            "blocks_q5_k", "blocks_q6_k", "blocks_iq4_nl", "blocks_iq4_xs", "blocks_mxfp4",
        ],
        elements: &[&[("", "")]],
        text: "template cudaError_t nvb::quantized::launch_plain_encoding<NVB_{ENCODING}>(
    const nvb_linear_quantized_params&, const nvb_launch&);
template cudaError_t nvb::quantized::launch_blocks_format<NVB_{ENCODING}>(
    const nvb_linear_quantized_params&, const nvb_launch&);
template bool nvb::quantized::supports_blocks_format<NVB_{ENCODING}>(const nvb_linear_quantized_params&, const nvb_launch&);",
    },
    Family {
        stem: "grouped_linear_sorted",
        includes: &["grouped_linear/sm90/grouped_linear_sorted_blocks.cuh"],
        encodings: &["blocks_q2_k", "blocks_q3_k", "blocks_q4_k", "blocks_q5_k", "blocks_q6_k", "blocks_iq4_xs"],
        elements: &[&[("", "")]],
        text: "template cudaError_t nvb::grouped::launch_sorted_blocks_format<NVB_{ENCODING}>(
    const nvb_grouped_linear_params&, const nvb_launch&);",
    },
    Family {
        stem: "attention_prefill_masked",
        includes: &["attention/sm80/attention_prefill_masked.cuh"],
        encodings: ONE,
        elements: &[HALVES],
        text: "namespace nvb {
cudaError_t launch_prefill_masked_{name}(const PrefillArguments& arguments, const nvb_launch& launch) {
  return launch_prefill_masked<{element}>(arguments, launch);
}
}",
    },
    Family {
        stem: "attention_prefill_mma",
        includes: &["attention/sm80/attention_prefill_mma.cuh"],
        encodings: ONE,
        elements: &[HALVES],
        text: "namespace nvb {
cudaError_t launch_prefill_mma_{name}(const PrefillArguments& arguments, SharedClass shared, int blocks,
                                      cudaStream_t stream) {
  return launch_prefill_mma<{element}>(arguments, shared, blocks, stream);
}
}",
    },
    // A tile of attention_prefill_wgmma_work.cuh a unit.
    Family {
        stem: "attention_prefill_wgmma",
        includes: &["attention/sm90/attention_prefill_wgmma.cuh"],
        encodings: &[
            "d64",
            "d64_short",
            "d96",
            "d128",
            "d128_full",
            "d192",
            "d192_128",
            "d256",
            "d64_scores",
            "d128_scores",
            "d256_scores",
        ],
        elements: &[HALVES],
        text: "template cudaError_t nvb::prefill_wgmma::launch_tile<{element}, nvb::prefill_wgmma::tiles::{ENCODING}>(
    const nvb::prefill_wgmma::Arguments&, int, const nvb_launch&);",
    },
    Family {
        stem: "attention_prefill_fp8",
        includes: &["attention/sm90/attention_prefill_fp8.cuh"],
        encodings: &["d64", "d128", "d128_long", "d256"],
        elements: &[&[("e4m3", "__nv_fp8_e4m3"), ("e5m2", "__nv_fp8_e5m2")]],
        text: "template cudaError_t nvb::prefill_fp8::launch_tile<{element}, nvb::prefill_fp8::tiles::{ENCODING}>(
    const nvb::prefill_wgmma::Arguments&, int, const nvb_launch&);",
    },
    Family {
        stem: "grouped_linear_mma",
        includes: &["grouped_linear/sm80/grouped_linear_mma.cuh"],
        encodings: ONE,
        elements: &[HALVES],
        text: "cudaError_t nvb::grouped::launch_mma_{name}(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  return launch_mma<{element}>(p, launch);
}",
    },
    Family {
        stem: "grouped_linear",
        includes: &["grouped_linear/sm80/grouped_linear_blocks.cuh"],
        encodings: &[
            "blocks_q4_0", "blocks_q4_1", "blocks_q5_0", "blocks_q5_1", "blocks_q8_0", "blocks_q2_k", "blocks_q3_k", "blocks_q4_k",
            "blocks_q5_k", "blocks_q6_k", "blocks_iq4_nl", "blocks_iq4_xs", "blocks_mxfp4",
        ],
        elements: &[&[("", "")]],
        text: "template cudaError_t nvb::grouped::launch_blocks_format<NVB_{ENCODING}>(
    const nvb_grouped_linear_params&, const nvb_launch&);
template bool nvb::grouped::supports_blocks_format<NVB_{ENCODING}>(const nvb_grouped_linear_params&, const nvb_launch&);",
    },
    Family {
        stem: "grouped_linear_quantized",
        includes: &["grouped_linear/sm80/grouped_linear_quantized.cuh"],
        encodings: &["fp8_e4m3", "fp8_e5m2"],
        elements: &[&[("", "")]],
        text: "namespace nvb {
namespace grouped {
namespace {
using quantized::ByteWeight;
using quantized::Scales;
template <typename T>
cudaError_t launch(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  if (p.scale_kind == NVB_SCALES_ROWS) return launch_weight<ByteWeight<NVB_{ENCODING}, Scales::kRows>, T>(p, launch);
  return launch_weight<ByteWeight<NVB_{ENCODING}, Scales::kBlocks>, T>(p, launch);
}
}
cudaError_t launch_{encoding}(const nvb_grouped_linear_params& p, const nvb_launch& l) {
  return p.input_dtype == NVB_BF16 ? launch<__nv_bfloat16>(p, l) : launch<__half>(p, l);
}
}
}",
    },
    Family {
        stem: "grouped_linear_wgmma",
        includes: &["grouped_linear/sm90/grouped_linear_wgmma.cuh"],
        encodings: ONE,
        elements: &[&[("f16", "kF16"), ("bf16", "kBf16")]],
        text: "cudaError_t nvb::grouped::launch_wgmma_{name}(const nvb_grouped_linear_params& p, const nvb_launch& launch) {
  return launch_wgmma<Operands::{element}>(p, launch);
}",
    },
    Family {
        stem: "linear_gemv",
        includes: &["linear/linear_gemv.cuh"],
        encodings: ONE,
        elements: &[HALVES, F32],
        text: "template cudaError_t nvb::launch_linear_gemv<{element}>(const nvb_linear_params&, const nvb_launch&);",
    },
    Family {
        stem: "linear_mma",
        includes: &["linear/sm80/linear_mma.cuh", "linear/sm80/linear_skinny.cuh"],
        encodings: ONE,
        elements: &[HALVES],
        text: "template cudaError_t nvb::launch_linear_mma<{element}>(const nvb_linear_params&, const nvb_launch&, nvb::MmaTile);
template cudaError_t nvb::launch_linear_skinny<{element}>(const nvb_linear_params&, const nvb_launch&);",
    },
    Family {
        stem: "linear_wgmma",
        includes: &["linear/sm90/linear_wgmma.cuh"],
        encodings: ONE,
        elements: &[&[("f16", "kF16"), ("bf16", "kBf16"), ("int8", "kInt8")]],
        text: WGMMA,
    },
    // FP8 inputs are E4M3 whatever the weight is.
    Family {
        stem: "linear_wgmma",
        includes: &["linear/sm90/linear_wgmma.cuh"],
        encodings: ONE,
        elements: &[&[("fp8", "")]],
        text: "namespace nvb {
namespace linear_wgmma {
template cudaError_t launch_kind<Operands::kE4m3E4m3>(const nvb_linear_wgmma_params&, const nvb_launch&);
template cudaError_t launch_kind<Operands::kE4m3E5m2>(const nvb_linear_wgmma_params&, const nvb_launch&);
}
}",
    },
    Family {
        stem: "linear_quantized",
        includes: &["linear/sm80/linear_quantized_int4.cuh"],
        encodings: &["int4", "int4_zero_points"],
        elements: &[HALVES],
        text: QUANTIZED,
    },
    Family {
        stem: "linear_quantized",
        includes: &["linear/sm80/linear_quantized_bytes.cuh"],
        encodings: &["int8", "fp8_e4m3", "fp8_e5m2"],
        elements: &[HALVES],
        text: QUANTIZED,
    },
    Family {
        stem: "linear_quantized",
        includes: &["linear/sm80/linear_quantized_bytes.cuh"],
        encodings: &["sfp"],
        elements: &[BF16],
        text: QUANTIZED,
    },
    Family {
        stem: "linear_quantized_decode",
        includes: &["linear/sm90/linear_quantized_decode.cuh"],
        encodings: &["sfp"],
        elements: &[BF16],
        text: "template cudaError_t nvb::quantized::launch_decode_{encoding}<{element}>(
    const nvb_linear_quantized_params&, const nvb_launch&);",
    },
    Family {
        stem: "linear_quantized_wgmma",
        includes: &["linear/sm90/linear_quantized_wgmma_launch.cuh"],
        encodings: &["sfp"],
        elements: &[BF16],
        text: WGMMA_ENCODING,
    },
    Family {
        stem: "linear_quantized_decode",
        includes: &["linear/sm90/linear_quantized_decode.cuh"],
        encodings: &["int4", "int8", "fp8"],
        elements: &[HALVES],
        text: "template cudaError_t nvb::quantized::launch_decode_{encoding}<{element}>(
    const nvb_linear_quantized_params&, const nvb_launch&);",
    },
    Family {
        stem: "linear_quantized_wgmma",
        includes: &["linear/sm90/linear_quantized_wgmma_launch.cuh"],
        encodings: &["fp8_e4m3", "fp8_e5m2"],
        elements: &[HALVES, TWO_FP8],
        text: WGMMA_ENCODING,
    },
    Family {
        stem: "linear_quantized_wgmma",
        includes: &["linear/sm90/linear_quantized_wgmma_launch.cuh"],
        encodings: &["int4"],
        elements: &[HALVES, SCALED_F16],
        text: WGMMA_ENCODING,
    },
    Family {
        stem: "linear_quantized_wgmma",
        includes: &["linear/sm90/linear_quantized_wgmma_launch.cuh"],
        encodings: &["int8"],
        elements: &[HALVES],
        text: WGMMA_ENCODING,
    },
    Family {
        stem: "linear_quantized_wgmma",
        includes: &["linear/sm90/linear_quantized_wgmma_launch.cuh"],
        encodings: &["int4_zero_points"],
        elements: &[HALVES, SCALED_F16],
        text: "template cudaError_t nvb::quantized::launch_wgmma_int4_zero_points<{element}>(
    const nvb_linear_quantized_params&, const nvb_launch&, const WgmmaPlan&);",
    },
];

/// Name and text of each unit.
pub fn instances() -> impl Iterator<Item = (String, String)> {
    FAMILIES.iter().flat_map(|family| {
        let elements = family.elements.iter().copied().flatten();
        elements.flat_map(move |element| family.encodings.iter().map(move |encoding| family.unit(encoding, *element)))
    })
}

impl Family {
    fn unit(&self, encoding: &str, (name, element): Element) -> (String, String) {
        let includes: String = self.includes.iter().map(|include| format!("#include \"{include}\"\n")).collect();
        let text = self.text.replace("{encoding}", encoding).replace("{ENCODING}", &encoding.to_uppercase());
        let text = text.replace("{name}", name).replace("{element}", element);
        let parts: Vec<&str> = [self.stem, encoding, name].into_iter().filter(|part| !part.is_empty()).collect();
        (parts.join("_"), format!("{includes}\n{text}\n"))
    }
}

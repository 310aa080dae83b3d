"""Figures of peers that a benchmark run does not build, measured on one H200 (driver 580, CUDA 13.0) and quoted as rows of
their own, labelled as another run: FlashAttention 3, BF16, its repository's commit 0251105, on 2026-11-20; llama.cpp built
with CMAKE_BUILD_TYPE=Release, `llama-bench -fa 1 -p 4096 -n 256`, on 2026-11-23.
"""
# TFLOP/s for these sequence lengths, 16,384 tokens in all, 32/16/8 heads for head_dim 64/128/256.
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PREFILL = {
    (64, "full"): (237, 319, 439, 485, 516, 523),
    (64, "causal"): (137, 204, 312, 405, 489, 498),
    (128, "full"): (323, 406, 568, 648, 658, 663),
    (128, "causal"): (177, 288, 412, 539, 622, 630),
    (256, "full"): (296, 426, 562, 665, 715, 722),
    (256, "causal"): (178, 292, 421, 568, 680, 709),
}
# TB/s of keys and values read, for these (batch, cached tokens); by (head_dim, query heads, key/value heads).
BATCHES = ((1, 4096), (1, 32768), (1, 131072), (8, 8192), (64, 4096), (128, 1024))
DECODE = {
    (128, 32, 8): (1.174, 3.316, 4.130, 3.798, 4.151, 3.759),
    (256, 8, 4): (1.140, 3.208, 4.076, 3.813, 4.203, 3.931),
    (256, 16, 8): (1.876, 3.770, 4.293, 4.140, 4.281, 3.848),
    (64, 32, 8): (0.501, 1.413, 2.309, 2.254, 2.466, 1.995),
}
# Tokens/s of llama.cpp: prefill of 4,096 tokens, decode. Figures of 2026-11-20 were lower (prefill 41,099 and 29,195, decode
# 458 and 252); rows of the record h200-model that are older than 2026-11-23 quote those.
LLAMA_CPP = {
    ("gemma3-1b", "bf16"): {"prefill": 67500, "decode": 472},
    ("gemma3-4b", "bf16"): {"prefill": 40200, "decode": 258},
    ("gemma3-12b", "bf16"): {"prefill": 17050, "decode": 115.1},
    ("gemma3-4b", "int8"): {"prefill": 18050, "decode": 275},
    ("gemma3-4b", "int4"): {"prefill": 17960, "decode": 351},
}
# What llama.cpp keeps weights in beside ours.
LLAMA_CPP_FORMATS = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}


def applies(context):
    return context.name_of(context.dtype) == "bf16" and b"H200" in context.backend.device_info().name


def flash_attention_3_prefill(context, head_dim, mask, length):
    """None where nothing was published for this case and device."""
    if not applies(context) or length not in LENGTHS:
        return None
    figures = PREFILL.get((head_dim, mask))
    return figures and figures[LENGTHS.index(length)]


def flash_attention_3_decode(context, head_dim, query_heads, kv_heads, batch, length):
    if not applies(context) or (batch, length) not in BATCHES:
        return None
    figures = DECODE.get((head_dim, query_heads, kv_heads))
    return figures and figures[BATCHES.index((batch, length))]

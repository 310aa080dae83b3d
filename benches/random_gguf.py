#!/usr/bin/env python3
"""Writes a GGUF file of a published model's shape with random weights: `random_gguf.py gemma3-270m FILE`.

Gemma 3 is written in BF16. `llama3-8b-q4_k_m` and `qwen3moe-a3b-q4_k` have blocks of random codes: the former in
llama-quantize's mix of Q4_K and Q6_K, the latter, Qwen 3 30B-A3B with 24 of its 48 layers, in Q4_K alone. Speed does not depend
on the values, so one stretch of random numbers fills all matrices; the norms are ones. There is no tokenizer, only the size of
the vocabulary: llama-bench feeds token numbers.
"""
import dataclasses
import pathlib
import sys

import gguf
import numpy
from gemma_shapes import HEAD_DIM, SHAPES, VOCABULARY

CONTEXT = 32768
BF16 = gguf.GGMLQuantizationType.BF16
Q4_K, Q6_K = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K
# Columns and bytes of a row's smallest piece, and where its f16 scales stand.
PIECES = {BF16: (1, 2, {}), Q4_K: (256, 144, {0: 1e-4, 2: 7.5e-4}), Q6_K: (256, 210, {208: 1.5e-5})}
RANDOM_BYTES = 1 << 23


@dataclasses.dataclass
class Model:
    architecture: str
    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    rope_base: float
    experts: int = 0
    used_experts: int = 0
    window: int = 0


MODELS = {
    **{name: Model("gemma3", layers, width, feed_forward, heads, kv_heads, HEAD_DIM, VOCABULARY, 1e6, window=window)
       for name, (layers, width, feed_forward, heads, kv_heads, window) in SHAPES.items()},
    "llama3-8b-q4_k_m": Model("llama", 32, 4096, 14336, 32, 8, 128, 128256, 5e5),
    "qwen3moe-a3b-q4_k": Model("qwen3moe", 24, 2048, 768, 32, 4, 128, 151936, 1e6, experts=128, used_experts=8),
}


def has_more_bits(layer, layers):
    """Where llama-quantize's Q4_K_M has values and down projections in Q6_K."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def random_pieces(kind):
    """Bytes of random weights: normal numbers of deviation 0.02 as the upper halves of their f32 patterns, or codes."""
    generator = numpy.random.default_rng(1)
    if kind == BF16:
        values = generator.standard_normal(RANDOM_BYTES // 2, dtype=numpy.float32) * 0.02
        return (values.view(numpy.uint32) >> 16).astype(numpy.uint16).view(numpy.uint8)
    _, piece_bytes, scales = PIECES[kind]
    pieces = generator.integers(0, 256, (RANDOM_BYTES // piece_bytes, piece_bytes), dtype=numpy.uint8)
    for at, scale in scales.items():
        pieces[:, at:at + 2] = numpy.frombuffer(numpy.float16(scale).tobytes(), numpy.uint8)
    return pieces.reshape(-1)


class Writer:
    def __init__(self, name, model, path):
        self.model = model
        self.random = {}
        self.file = gguf.GGUFWriter(path, model.architecture)
        self.file.add_name(name)
        self.file.add_context_length(CONTEXT)
        self.file.add_embedding_length(model.width)
        self.file.add_block_count(model.layers)
        self.file.add_feed_forward_length(model.feed_forward)
        self.file.add_head_count(model.heads)
        self.file.add_head_count_kv(model.kv_heads)
        self.file.add_key_length(model.head_dim)
        self.file.add_value_length(model.head_dim)
        self.file.add_rope_dimension_count(model.head_dim)
        self.file.add_layer_norm_rms_eps(1e-6)
        self.file.add_rope_freq_base(model.rope_base)
        self.file.add_vocab_size(model.vocabulary)
        self.file.add_tokenizer_model("none")
        if model.window:
            self.file.add_sliding_window(model.window)
        if model.experts:
            self.file.add_expert_count(model.experts)
            self.file.add_expert_used_count(model.used_experts)
            self.file.add_expert_feed_forward_length(model.feed_forward)

    def matrix(self, tensor, *shape, kind):
        columns, piece_bytes, _ = PIECES[kind]
        if kind not in self.random:
            self.random[kind] = random_pieces(kind)
        data = numpy.resize(self.random[kind], (*shape[:-1], shape[-1] // columns * piece_bytes))
        self.file.add_tensor(f"{tensor}.weight", data, raw_dtype=kind)

    def ones(self, tensor, length):
        self.file.add_tensor(f"{tensor}.weight", numpy.ones(length, dtype=numpy.float32))

    def finish(self):
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def add_tensors(writer, model):
    gemma, mixed = model.architecture == "gemma3", model.architecture == "llama"
    kind = BF16 if gemma else Q4_K
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    writer.file.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if gemma else gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.matrix("token_embd", model.vocabulary, model.width, kind=kind)
    writer.ones("output_norm", model.width)
    if not gemma:
        writer.matrix("output", model.vocabulary, model.width, kind=Q6_K if mixed else kind)
    if mixed:
        # Llama 3.1's factors of frequencies.
        writer.ones("rope_freqs", model.head_dim // 2)
    for layer in range(model.layers):
        better = Q6_K if mixed and has_more_bits(layer, model.layers) else kind
        at = f"blk.{layer}."
        writer.matrix(at + "attn_q", queries, model.width, kind=kind)
        writer.matrix(at + "attn_k", keys, model.width, kind=kind)
        writer.matrix(at + "attn_v", keys, model.width, kind=better)
        writer.matrix(at + "attn_output", model.width, queries, kind=kind)
        experts = (model.experts,) if model.experts else ()
        suffix = "_exps" if model.experts else ""
        writer.matrix(at + "ffn_gate" + suffix, *experts, model.feed_forward, model.width, kind=kind)
        writer.matrix(at + "ffn_up" + suffix, *experts, model.feed_forward, model.width, kind=kind)
        writer.matrix(at + "ffn_down" + suffix, *experts, model.width, model.feed_forward, kind=better)
        if model.experts:
            router = numpy.random.default_rng(layer).standard_normal((model.experts, model.width), dtype=numpy.float32)
            writer.file.add_tensor(at + "ffn_gate_inp.weight", router * numpy.float32(0.02))
        for norm in ("attn_norm", "ffn_norm", *(("post_attention_norm", "post_ffw_norm") if gemma else ())):
            writer.ones(at + norm, model.width)
        if not mixed:
            writer.ones(at + "attn_q_norm", model.head_dim)
            writer.ones(at + "attn_k_norm", model.head_dim)


def write(name, path):
    # The file appears under its name when it is complete.
    unfinished = pathlib.Path(f"{path}.part")
    writer = Writer(name, MODELS[name], unfinished)
    add_tensors(writer, MODELS[name])
    writer.finish()
    unfinished.rename(path)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in MODELS:
        raise SystemExit(f"usage: random_gguf.py {'|'.join(MODELS)} FILE")
    write(sys.argv[1], pathlib.Path(sys.argv[2]))

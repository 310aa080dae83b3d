#!/usr/bin/env python3
"""Writes a GGUF file of Gemma 3's shape with random BF16 weights: `random_gguf.py gemma3-270m FILE`.

Speed does not depend on the values, so one block of random numbers fills all matrices; the norms are ones. There is no
tokenizer, only the size of the vocabulary: llama-bench feeds token numbers.
"""
import pathlib
import sys

import gguf
import numpy
from gemma_shapes import HEAD_DIM, SHAPES, VOCABULARY

CONTEXT = 32768
NORMS = {"attn_norm": None, "post_attention_norm": None, "ffn_norm": None, "post_ffw_norm": None, "attn_q_norm": HEAD_DIM,
         "attn_k_norm": HEAD_DIM}


def bf16_block(elements):
    """Normal numbers of deviation 0.02 as the upper halves of their f32 patterns."""
    values = numpy.random.default_rng(1).standard_normal(elements, dtype=numpy.float32) * 0.02
    return (values.view(numpy.uint32) >> 16).astype(numpy.uint16)


def write(name, path):
    layers, width, feed_forward, heads, kv_heads, window = SHAPES[name]
    matrices = {"attn_q": (heads * HEAD_DIM, width), "attn_k": (kv_heads * HEAD_DIM, width), "attn_v": (kv_heads * HEAD_DIM, width),
                "attn_output": (width, heads * HEAD_DIM), "ffn_gate": (feed_forward, width), "ffn_up": (feed_forward, width),
                "ffn_down": (width, feed_forward)}
    block = bf16_block(1 << 22)
    # The file appears under its name when it is complete.
    unfinished = pathlib.Path(f"{path}.part")
    writer = gguf.GGUFWriter(unfinished, "gemma3")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(window)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("none")

    def matrix(tensor, rows, columns):
        data = numpy.resize(block, (rows, columns)).view(numpy.uint8)
        writer.add_tensor(f"{tensor}.weight", data, raw_dtype=gguf.GGMLQuantizationType.BF16)

    def norm(tensor, length):
        writer.add_tensor(f"{tensor}.weight", numpy.ones(length, dtype=numpy.float32))

    matrix("token_embd", VOCABULARY, width)
    norm("output_norm", width)
    for layer in range(layers):
        for tensor, shape in matrices.items():
            matrix(f"blk.{layer}.{tensor}", *shape)
        for tensor, length in NORMS.items():
            norm(f"blk.{layer}.{tensor}", length or width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        raise SystemExit(f"usage: random_gguf.py {'|'.join(SHAPES)} FILE")
    write(sys.argv[1], pathlib.Path(sys.argv[2]))

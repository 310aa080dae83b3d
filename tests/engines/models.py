#!/usr/bin/env python3
"""Writes small models with random weights as GGUF files: Llama 3 with frequency factors, and Gemma 3 with its windows.

    models.py FOLDER     writes FOLDER/{llama,gemma3}-{f32,f16,bf16}.gguf, and the weights of the 16-bit ones as F32
                         in FOLDER/{llama,gemma3}-{f16,bf16}-as-f32.gguf
"""

import array
import pathlib
import random
import struct
import sys

ALIGNMENT = 32
TYPES = {"f32": 0, "f16": 1, "bf16": 30}
UINT32, FLOAT, STRING = 4, 6, 8

VOCABULARY, EMBEDDING, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 512, 128, 6, 4, 2, 64, 256


def encoded(kind, values):
    if kind == "f32":
        return array.array("f", values).tobytes()
    if kind == "f16":
        return struct.pack(f"<{len(values)}e", *values)
    words = array.array("I", array.array("f", values).tobytes())
    # To nearest, ties to even; no value is NaN.
    return array.array("H", ((word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words)).tobytes()


def decoded(kind, data):
    if kind == "f32":
        return array.array("f", data)
    if kind == "f16":
        return struct.unpack(f"<{len(data) // 2}e", data)
    return array.array("f", array.array("I", (word << 16 for word in array.array("H", data))).tobytes())


class Writer:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.metadata, self.tensors = [], []

    def value(self, key, kind, value):
        packed = {UINT32: "<I", FLOAT: "<f"}
        data = struct.pack("<Q", len(value)) + value.encode() if kind == STRING else struct.pack(packed[kind], value)
        self.metadata.append(struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + data)

    def tensor(self, name, kind, shape, values):
        """`shape` is innermost first."""
        self.tensors.append((name, TYPES[kind], shape, encoded(kind, values)))

    def matrix(self, name, kind, columns, rows, gain=1.0):
        scale = gain * columns ** -0.5
        self.tensor(name, kind, [columns, rows], [self.random.gauss(0.0, scale) for _ in range(columns * rows)])

    def norm(self, name, width):
        self.tensor(name, "f32", [width], [self.random.uniform(0.7, 1.3) for _ in range(width)])

    def as_f32(self):
        """The same model, every weight as the F32 of its value."""
        names = {number: kind for kind, number in TYPES.items()}
        self.tensors = [(name, TYPES["f32"], shape, encoded("f32", decoded(names[kind], content)))
                        for name, kind, shape, content in self.tensors]
        return self

    def write(self, path):
        head = struct.pack("<IIQQ", 0x46554747, 3, len(self.tensors), len(self.metadata)) + b"".join(self.metadata)
        place, data = 0, b""
        for name, kind, shape, content in self.tensors:
            head += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
            head += struct.pack(f"<{len(shape)}QIQ", *shape, kind, place)
            padding = -len(content) % ALIGNMENT
            data += content + bytes(padding)
            place += len(content) + padding
        path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)


def model(architecture, kind):
    writer = Writer(f"{architecture}")
    gemma = architecture == "gemma3"
    writer.value("general.architecture", STRING, architecture)
    for key, value in {
        "context_length": 2048, "embedding_length": EMBEDDING, "block_count": LAYERS,
        "feed_forward_length": FEED_FORWARD, "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM, "vocab_size": VOCABULARY,
        "rope.dimension_count": HEAD_DIM,
    }.items():
        writer.value(f"{architecture}.{key}", UINT32, value)
    writer.value(f"{architecture}.attention.layer_norm_rms_epsilon", FLOAT, 1e-6)
    writer.value(f"{architecture}.rope.freq_base", FLOAT, 1e6 if gemma else 5e5)
    if gemma:
        writer.value("gemma3.attention.sliding_window", UINT32, 16)
    writer.value("tokenizer.ggml.model", STRING, "none")

    writer.matrix("token_embd.weight", kind, EMBEDDING, VOCABULARY, 1.0 if gemma else EMBEDDING ** 0.5)
    writer.norm("output_norm.weight", EMBEDDING)
    # Not tied to the embedding, which would make every token follow itself.
    writer.matrix("output.weight", kind, EMBEDDING, VOCABULARY, 2.0)
    if not gemma:
        writer.tensor("rope_freqs.weight", "f32", [HEAD_DIM // 2],
                      [1.0 if i < 8 else 8.0 if i > 24 else 1.0 + (i - 8) * 7 / 16 for i in range(HEAD_DIM // 2)])
    for layer in range(LAYERS):
        name = f"blk.{layer}."
        writer.norm(name + "attn_norm.weight", EMBEDDING)
        writer.matrix(name + "attn_q.weight", kind, EMBEDDING, HEADS * HEAD_DIM, 1.5)
        writer.matrix(name + "attn_k.weight", kind, EMBEDDING, KV_HEADS * HEAD_DIM, 1.5)
        writer.matrix(name + "attn_v.weight", kind, EMBEDDING, KV_HEADS * HEAD_DIM)
        writer.matrix(name + "attn_output.weight", kind, HEADS * HEAD_DIM, EMBEDDING)
        if gemma:
            for norm, width in [("attn_q_norm", HEAD_DIM), ("attn_k_norm", HEAD_DIM),
                                ("post_attention_norm", EMBEDDING), ("post_ffw_norm", EMBEDDING)]:
                writer.norm(f"{name}{norm}.weight", width)
        writer.norm(name + "ffn_norm.weight", EMBEDDING)
        writer.matrix(name + "ffn_gate.weight", kind, EMBEDDING, FEED_FORWARD)
        writer.matrix(name + "ffn_up.weight", kind, EMBEDDING, FEED_FORWARD)
        writer.matrix(name + "ffn_down.weight", kind, FEED_FORWARD, EMBEDDING)
    return writer


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for architecture in ("llama", "gemma3"):
        for kind in TYPES:
            made = model(architecture, kind)
            made.write(folder / f"{architecture}-{kind}.gguf")
            if kind != "f32":
                made.as_f32().write(folder / f"{architecture}-{kind}-as-f32.gguf")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes small models with random weights as GGUF files: Llama 3 with frequency factors, Gemma 3 with its windows, Qwen 3 with norms
of heads, and Qwen 3 with experts.

    models.py FOLDER     writes FOLDER/ARCHITECTURE-TYPE.gguf for each of MODELS, and the weights of those that are not F32
                         as F32 in FOLDER/ARCHITECTURE-TYPE-as-f32.gguf
"""

import array
import math
import pathlib
import random
import struct
import sys

ALIGNMENT = 32
TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q4_0": 2, "q8_0": 8, "q4_k": 12, "q5_k": 13, "q6_k": 14}
# The elements of a block, its bytes, and the deviation of its values where all codes are random and its scale is 1.
BLOCKS = {"q4_0": (32, 18, 4.6), "q8_0": (32, 34, 74.0), "q4_k": (256, 144, 258.0), "q5_k": (256, 176, 527.0), "q6_k": (256, 210, 1366.0)}
UINT32, FLOAT, STRING = 4, 6, 8

MODELS = {"llama": ("f32", "f16", "bf16", "q4_0", "q4_k"), "gemma3": ("f32", "f16", "bf16", "q8_0"), "qwen3": ("f16", "q5_k"),
          "qwen3moe": ("bf16", "q6_k")}
VOCABULARY, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, EXPERTS, USED_EXPERTS = 512, 6, 4, 2, 64, 256, 8, 3


def encoded(kind, values):
    if kind == "f32":
        return array.array("f", values).tobytes()
    if kind == "f16":
        return struct.pack(f"<{len(values)}e", *values)
    words = array.array("I", array.array("f", values).tobytes())
    # To nearest, ties to even; no value is NaN.
    return array.array("H", ((word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words)).tobytes()


def random_blocks(kind, count, deviation, random):
    """Blocks of random codes whose values have a mean of 0."""
    _, size, of_codes = BLOCKS[kind]
    scale = struct.pack("<e", deviation / of_codes)
    blocks = bytearray(random.randbytes(count * size))
    # What q4_k and q5_k take off again is the mean of a code times that of the sub-block's scale.
    least = {"q4_k": struct.pack("<e", 7.5 * deviation / of_codes), "q5_k": struct.pack("<e", 15.5 * deviation / of_codes)}.get(kind, b"")
    place = size - 2 if kind == "q6_k" else 0
    for first in range(place, count * size, size):
        blocks[first : first + 2 + len(least)] = scale + least
    return bytes(blocks)


def sub_scales(packed):
    """The eight scales and minima of 6 bits in 12 bytes (q4_k, q5_k)."""
    low = [(packed[j] & 63, packed[j + 4] & 63) for j in range(4)]
    return low + [(packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4) for j in range(4, 8)]


def decoded_block(kind, block):
    half = lambda place: struct.unpack_from("<e", block, place)[0]
    if kind == "q4_0":
        codes = block[2:]
        return [half(0) * ((code & 15) - 8) for code in codes] + [half(0) * ((code >> 4) - 8) for code in codes]
    if kind == "q8_0":
        return [half(0) * code for code in struct.unpack_from("<32b", block, 2)]
    if kind in ("q4_k", "q5_k"):
        scales, values = sub_scales(block[4:16]), []
        high, codes = (block[16:48], block[48:]) if kind == "q5_k" else (bytes(32), block[16:])
        for j, (scale, least) in enumerate(scales):
            part = codes[j // 2 * 32 : j // 2 * 32 + 32]
            values += [half(0) * scale * ((code >> 4 * (j % 2) & 15) + 16 * (bits >> j & 1)) - half(2) * least
                       for code, bits in zip(part, high)]
        return values
    values, scales = [0.0] * 256, struct.unpack_from("<16b", block, 192)
    for part in range(2):
        low, high = block[64 * part : 64 * part + 64], block[128 + 32 * part : 160 + 32 * part]
        for i in range(128):
            row, place = divmod(i, 32)
            code = low[place + 32 * (row % 2)] >> 4 * (row // 2) & 15 | (high[place] >> 2 * row & 3) << 4
            values[128 * part + i] = half(208) * scales[8 * part + 2 * row + place // 16] * (code - 32)
    return values


def decoded(kind, data):
    if kind in BLOCKS:
        size = BLOCKS[kind][1]
        return [value for first in range(0, len(data), size) for value in decoded_block(kind, data[first : first + size])]
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

    def matrix(self, name, kind, columns, *rows, gain=1.0):
        """`rows` have more than one number where there are several matrices."""
        deviation, elements = gain * columns ** -0.5, columns * math.prod(rows)
        if kind in BLOCKS:
            content = random_blocks(kind, elements // BLOCKS[kind][0], deviation, self.random)
            self.tensors.append((name, TYPES[kind], [columns, *rows], content))
        else:
            self.tensor(name, kind, [columns, *rows], [self.random.gauss(0.0, deviation) for _ in range(elements)])

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
    gemma, qwen, experts = architecture == "gemma3", architecture.startswith("qwen3"), architecture == "qwen3moe"
    # Blocks of 256 want rows of as many.
    embedding = 256 if kind in BLOCKS else 128
    writer.value("general.architecture", STRING, architecture)
    for key, value in {
        "context_length": 2048, "embedding_length": embedding, "block_count": LAYERS,
        "feed_forward_length": FEED_FORWARD, "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM, "vocab_size": VOCABULARY,
        "rope.dimension_count": HEAD_DIM,
    }.items():
        writer.value(f"{architecture}.{key}", UINT32, value)
    writer.value(f"{architecture}.attention.layer_norm_rms_epsilon", FLOAT, 1e-6)
    writer.value(f"{architecture}.rope.freq_base", FLOAT, 5e5 if architecture == "llama" else 1e6)
    if gemma:
        writer.value("gemma3.attention.sliding_window", UINT32, 16)
    if experts:
        for key, value in {"expert_count": EXPERTS, "expert_used_count": USED_EXPERTS, "expert_feed_forward_length": FEED_FORWARD}.items():
            writer.value(f"{architecture}.{key}", UINT32, value)
    writer.value("tokenizer.ggml.model", STRING, "none")

    writer.matrix("token_embd.weight", kind, embedding, VOCABULARY, gain=1.0 if gemma else embedding ** 0.5)
    writer.norm("output_norm.weight", embedding)
    # Not tied to the embedding, which would make every token follow itself.
    writer.matrix("output.weight", kind, embedding, VOCABULARY, gain=2.0)
    if architecture == "llama":
        writer.tensor("rope_freqs.weight", "f32", [HEAD_DIM // 2],
                      [1.0 if i < 8 else 8.0 if i > 24 else 1.0 + (i - 8) * 7 / 16 for i in range(HEAD_DIM // 2)])
    for layer in range(LAYERS):
        name = f"blk.{layer}."
        writer.norm(name + "attn_norm.weight", embedding)
        writer.matrix(name + "attn_q.weight", kind, embedding, HEADS * HEAD_DIM, gain=1.5)
        writer.matrix(name + "attn_k.weight", kind, embedding, KV_HEADS * HEAD_DIM, gain=1.5)
        writer.matrix(name + "attn_v.weight", kind, embedding, KV_HEADS * HEAD_DIM)
        writer.matrix(name + "attn_output.weight", kind, HEADS * HEAD_DIM, embedding)
        if gemma or qwen:
            writer.norm(f"{name}attn_q_norm.weight", HEAD_DIM)
            writer.norm(f"{name}attn_k_norm.weight", HEAD_DIM)
        if gemma:
            writer.norm(f"{name}post_attention_norm.weight", embedding)
            writer.norm(f"{name}post_ffw_norm.weight", embedding)
        writer.norm(name + "ffn_norm.weight", embedding)
        if experts:
            writer.matrix(name + "ffn_gate_inp.weight", "f32", embedding, EXPERTS)
        ending, number = ("_exps.weight", (EXPERTS,)) if experts else (".weight", ())
        writer.matrix(name + "ffn_gate" + ending, kind, embedding, FEED_FORWARD, *number)
        writer.matrix(name + "ffn_up" + ending, kind, embedding, FEED_FORWARD, *number)
        writer.matrix(name + "ffn_down" + ending, kind, FEED_FORWARD, embedding, *number)
    return writer


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for architecture, kinds in MODELS.items():
        for kind in kinds:
            made = model(architecture, kind)
            made.write(folder / f"{architecture}-{kind}.gguf")
            if kind != "f32":
                made.as_f32().write(folder / f"{architecture}-{kind}-as-f32.gguf")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes tests/data/weights.gguf: matrices in the formats of files, and the values that other programs read in them.

GGUF's blocks are quantised and read by the public Python package `gguf` (tested: 0.19.0, with numpy 2.4.6). Its package
quantises no Q4_K and Q6_K; those are random codes with ordinary scales, which it reads. AWQ and GPTQ are packed here, by
the formats' definitions. Each matrix NAME has its values as NAME.values, F32.

    pip install --target build/python gguf==0.19.0
    PYTHONPATH=build/python tests/tools/make_weight_data.py tests/data/weights.gguf
"""

import sys

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, quants

ROWS, COLUMNS = 8, 512
random = np.random.default_rng(4)


def add_blocks(writer, name, kind):
    values = random.normal(0, 0.05, (ROWS, COLUMNS)).astype(np.float32)
    if kind in (Type.Q4_K, Type.Q6_K):
        size = {Type.Q4_K: 144, Type.Q6_K: 210}[kind]
        blocks = random.integers(0, 256, (ROWS, COLUMNS // 256, size)).astype(np.uint8)
        scales = random.uniform(0.001, 0.01, (ROWS, COLUMNS // 256, 2)).astype(np.float16).view(np.uint8)
        if kind == Type.Q4_K:
            blocks[..., :4] = scales
        else:
            blocks[..., 208:] = scales[..., :2]
        data = blocks.reshape(ROWS, -1)
    else:
        data = quants.quantize(values, kind)
    writer.add_tensor(name, data, raw_dtype=kind)
    writer.add_tensor(name + ".values", quants.dequantize(data, kind).astype(np.float32))


def pack(nibbles, order):
    """Eight neighbours of the last axis in a word, nibble i holding number order[i]."""
    nibbles = nibbles.astype(np.uint32).reshape(*nibbles.shape[:-1], -1, 8)
    words = np.zeros(nibbles.shape[:-1], dtype=np.uint32)
    for i, j in enumerate(order):
        words |= nibbles[..., j] << np.uint32(4 * i)
    return words.view(np.int32)


def layer(group, symmetric, index=None):
    """Codes [K, N], zeros and scales [groups, N], and the values [N, K]."""
    index = np.arange(COLUMNS) // group if index is None else index
    codes = random.integers(0, 16, (COLUMNS, ROWS))
    zeros = np.full((COLUMNS // group, ROWS), 8) if symmetric else random.integers(0, 16, (COLUMNS // group, ROWS))
    scales = random.uniform(0.002, 0.02, zeros.shape).astype(np.float16)
    values = scales.astype(np.float32)[index] * (codes - zeros[index]).astype(np.float32)
    return codes, zeros, scales, np.ascontiguousarray(values.T)


def add_awq(writer, name, group, symmetric):
    codes, zeros, scales, values = layer(group, symmetric)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    for part, data in (("qweight", pack(codes, order)), ("qzeros", pack(zeros, order)), ("scales", scales)):
        writer.add_tensor(f"{name}.{part}", data)
    writer.add_tensor(f"{name}.values", values)


def add_gptq(writer, name, group, symmetric, version, reordered):
    index = np.arange(COLUMNS) // group
    if reordered:
        index = random.permutation(index)
    codes, zeros, scales, values = layer(group, symmetric, index)
    in_order = range(8)
    weights = pack(np.ascontiguousarray(codes.T), in_order).T
    stored = (zeros - 1) % 16 if version == 1 else zeros
    parts = {"qweight": np.ascontiguousarray(weights), "qzeros": pack(stored, in_order), "scales": scales}
    for part, data in {**parts, "g_idx": index.astype(np.int32)}.items():
        writer.add_tensor(f"{name}.{part}", data)
    writer.add_tensor(f"{name}.values", values)


def main():
    writer = GGUFWriter(sys.argv[1], "test")
    writer.add_uint32("test.count", 26)
    writer.add_int8("test.negative", -7)
    writer.add_float32("test.real", 1e-6)
    writer.add_float64("test.double", 0.1)
    writer.add_bool("test.yes", True)
    writer.add_string("test.text", "Grüße")
    writer.add_array("test.numbers", [1, -2, 300])
    writer.add_array("test.texts", ["<pad>", "", "▁the"])
    for kind in (Type.Q4_0, Type.Q8_0, Type.Q4_K, Type.Q6_K, Type.F16, Type.BF16):
        add_blocks(writer, kind.name.lower(), kind)
    add_awq(writer, "awq.symmetric", 128, True)
    add_awq(writer, "awq.zeros", 64, False)
    add_gptq(writer, "gptq.v1", 128, False, 1, False)
    add_gptq(writer, "gptq.v2", 32, False, 2, False)
    add_gptq(writer, "gptq.symmetric", 128, True, 1, False)
    add_gptq(writer, "gptq.reordered", 64, False, 2, True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()

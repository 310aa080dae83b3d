#!/usr/bin/env python3
"""Writes a Gemma 3 folder as a GGUF file, as llama.cpp's convert_hf_to_gguf.py and llama-quantize do.

    pip install --target build/python gguf==0.19.0
    PYTHONPATH=build/python tests/tools/make_gemma_gguf.py models/tiny-gemma3 q8_0 tests/data/tiny-gemma3-q8_0.gguf

Keys, tensor names and blocks come from the public Python package `gguf` (tested: 0.19.0, with numpy 2.4.6). It quantises no
K blocks, so those are packed here by the format's definition and read back by the package.

Types of the matrices: f32, f16, bf16, q8_0, q4_0, and q4_k_m, which is Q4_K with Q6_K for the token table and, in every
second layer, for the values and the down projection. Norms are F32, with the 1 in them that Gemma adds.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter, RopeScalingType, TokenType, get_tensor_name_map, quants
from gguf import GGMLQuantizationType as Type


def read_safetensors(path):
    """Names and values, F32, of a BF16 file."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
            words = np.frombuffer(data[begin:end], dtype="<u2").astype(np.uint32) << 16
            yield name, words.view(np.float32).reshape(entry["shape"])


def fields(message):
    """Field numbers and values of a protocol-buffer message."""

    def varint(at):
        value = shift = 0
        while True:
            value |= (message[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if message[at - 1] < 128:
                return value, at

    at = 0
    while at < len(message):
        key, at = varint(at)
        if key & 7 == 0:
            value, at = varint(at)
        elif key & 7 == 5:
            value, at = struct.unpack_from("<f", message, at)[0], at + 4
        else:
            assert key & 7 == 2, f"wire type {key & 7}"
            size, at = varint(at)
            value, at = message[at : at + size], at + size
        yield key >> 3, value


def add_tokenizer(writer, path, config):
    pieces = [dict(fields(piece)) for field, piece in fields(path.read_bytes()) if field == 1]
    types = [TokenType(piece.get(3, TokenType.NORMAL)) for piece in pieces]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece[1] for piece in pieces])
    writer.add_token_scores([piece.get(2, 0.0) for piece in pieces])
    writer.add_token_types(types)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_unk_token_id(types.index(TokenType.UNKNOWN))
    writer.add_add_space_prefix(False)


def add_config(writer, config):
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_sliding_window(config["sliding_window"])
    rope = config["rope_parameters"]["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def divide(a, b):
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0)


def q4_k(values):
    """144 bytes for 256 numbers: f16 d and dmin, 8 scales and 8 minima of 6 bits, 256 codes of 4; d · scale · code −
    dmin · minimum. Codes of two groups of 32 share bytes."""
    groups = values.reshape(-1, 8, 32)
    minima = np.maximum(-groups.min(-1), 0)
    scales = (groups.max(-1) + minima) / 15
    d, dmin = ((part.max(-1, keepdims=True) / 63).astype(np.float16) for part in (scales, minima))
    scale, minimum = (
        np.clip(np.rint(divide(part, unit.astype(np.float32))), 0, 63).astype(np.uint8)
        for part, unit in ((scales, d), (minima, dmin))
    )
    step = d.astype(np.float32) * scale
    codes = divide(groups + (dmin.astype(np.float32) * minimum)[..., None], np.broadcast_to(step[..., None], groups.shape))
    codes = np.clip(np.rint(codes), 0, 15).astype(np.uint8)
    low = [scale[:, :4] | (scale[:, 4:] >> 4) << 6, minimum[:, :4] | (minimum[:, 4:] >> 4) << 6]
    high = (scale[:, 4:] & 15) | (minimum[:, 4:] & 15) << 4
    nibbles = (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(-1, 128)
    return np.concatenate([d.view(np.uint8), dmin.view(np.uint8), *low, high, nibbles], axis=1)


def q6_k(values):
    """210 bytes for 256 numbers: 256 codes of 4 + 2 bits, 16 signed scales, f16 d; d · scale · (code − 32). Codes of
    four groups of 32 share bytes."""
    groups = values.reshape(-1, 16, 16)
    scales = np.abs(groups).max(-1) / 31
    d = (scales.max(-1, keepdims=True) / 127).astype(np.float16)
    scale = np.clip(np.rint(divide(scales, d.astype(np.float32))), 0, 127).astype(np.int8)
    step = d.astype(np.float32) * scale
    codes = np.rint(divide(groups, np.broadcast_to(step[..., None], groups.shape)))
    codes = (np.clip(codes, -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.concatenate([codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4], axis=2).reshape(-1, 128)
    high = sum((codes[:, :, i] >> 4) << 2 * i for i in range(4)).astype(np.uint8).reshape(-1, 64)
    return np.concatenate([low, high, scale.view(np.uint8), d.view(np.uint8)], axis=1)


def quantize(values, kind):
    if kind not in (Type.Q4_K, Type.Q6_K):
        return quants.quantize(values, kind)
    data = (q4_k if kind == Type.Q4_K else q6_k)(values).reshape(len(values), -1)
    error = np.linalg.norm(quants.dequantize(data, kind) - values) / np.linalg.norm(values)
    assert error < (0.12 if kind == Type.Q4_K else 0.03), f"{kind.name} read back with the error {error}"
    return data


def kind_of(name, kind):
    if kind != "q4_k_m":
        return Type[kind.upper()]
    finer = name == "token_embd.weight" or (
        name.split(".")[2] in ("attn_v", "ffn_down") and int(name.split(".")[1]) % 2 == 0
    )
    return Type.Q6_K if finer else Type.Q4_K


def main(folder, kind, output):
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    names = get_tensor_name_map(MODEL_ARCH.GEMMA3, config["num_hidden_layers"])
    writer = GGUFWriter(output, "gemma3")
    add_config(writer, config)
    add_tokenizer(writer, folder / "tokenizer.model", config)
    for hugging_face_name, values in read_safetensors(folder / "model.safetensors"):
        name = names.get_name(hugging_face_name, try_suffixes=(".weight",))
        if values.ndim == 1:
            writer.add_tensor(name, values + 1)
        else:
            writer.add_tensor(name, quantize(values, kind_of(name, kind)), raw_dtype=kind_of(name, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: make_gemma_gguf.py FOLDER f32|f16|bf16|q8_0|q4_0|q4_k_m OUTPUT.gguf")
    main(*sys.argv[1:])

#!/usr/bin/env python3
"""Writes a Gemma 3 folder as a model file of gemma.cpp, by the description of the format in docs/engines.md.

    tests/tools/make_gemma_sbs.py models/tiny-gemma3 sfp last tiny.sbs [DECODED]

Types of the matrices: f32, bf16, sfp, sfp_scaled (a scale for each tensor that uses the whole range), i8 (with zeros, as
gemma.cpp writes it), i8_symmetric (zeros of 0), mixed (another type for each matrix, some scaled), nuq (noise: to be
refused). Norms are BF16, in f32 files F32.

Layouts: `first` has header and directory in front, a configuration that ends where those of early 2025 did, and joins what
may be joined (qkv_ein, gating_ein, att_ein); `last` has them behind the blobs, all fields, and what may be split is split.

DECODED is a folder that gets the values as a Hugging Face model: BF16 where they fit, else F32. "small" instead of a
folder stands for a random model of two small layers. Needs nothing but Python.
"""

import array
import bisect
import json
import random
import shutil
import struct
import sys
from pathlib import Path

TYPES = {"f32": 1, "bf16": 2, "sfp": 3, "nuq": 4, "i8": 8}
ALIGNMENT, END_ALIGNMENT = 256, 65536
SMALL_CONFIG = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "sliding_window": 4, "vocab_size": 64, "max_position_embeddings": 32, "eos_token_id": 1,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


# Values -----------------------------------------------------------------------------------------------------------------


def f32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def f32_bits(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def bf16_bits(value):
    """The nearest BF16, ties to even."""
    bits = f32_bits(value)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bf16_value(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def sfp_magnitude(code):
    if code < 64:
        return (1 + (code & 3) / 4) * 2.0 ** ((code >> 2) - 23) if code else 0.0
    return (1 + (code & 7) / 8) * 2.0 ** ((code >> 3 & 7) - 7)


SFP = [sfp_magnitude(code) for code in range(128)]


def sfp_code(value):
    """The nearest, ties to the even code; 0x80 is never used."""
    size = min(abs(value), SFP[-1])
    above = min(bisect.bisect_left(SFP, size), 127)
    below = max(above - 1, 0)
    low, high = size - SFP[below], SFP[above] - size
    code = below if low < high or (low == high and below % 2 == 0) else above
    return code | 128 if value < 0 and code else code


class Matrix:
    """Rows of numbers. `words` are BF16 bits; what the file holds is made of them."""

    def __init__(self, rows, columns, words):
        assert len(words) == rows * columns
        self.rows, self.columns, self.words = rows, columns, words

    def row(self, row):
        return self.words[row * self.columns : (row + 1) * self.columns]

    def of_rows(self, order):
        return Matrix(len(order), self.columns, array.array("H", b"".join(self.row(row).tobytes() for row in order)))


def stack(matrices):
    columns = matrices[0].columns
    words = array.array("H", b"".join(matrix.words.tobytes() for matrix in matrices))
    return Matrix(len(words) // columns, columns, words)


class Stored:
    """A matrix as a file holds it, and what it stands for: `decoded` is (dtype, bytes)."""

    def __init__(self, kind, data, elements, size, scale, decoded):
        self.kind, self.data, self.elements, self.size, self.scale, self.decoded = kind, data, elements, size, scale, decoded


def f32_bytes(values):
    return array.array("f", values).tobytes()


def bf16_bytes(values):
    """As bf16_bits, of many."""
    words = array.array("I", f32_bytes(values))
    return array.array("H", [(word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words]).tobytes()


def widened(matrix):
    return array.array("I", [word << 16 for word in matrix.words]).tobytes()


def store_f32(matrix):
    data = widened(matrix)
    return Stored("f32", data, len(matrix.words), 4, 1.0, ("F32", data))


def store_bf16(matrix):
    data = matrix.words.tobytes()
    return Stored("bf16", data, len(matrix.words), 2, 1.0, ("BF16", data))


def store_sfp(matrix, scaled):
    values = {word: bf16_value(word) for word in set(matrix.words)}
    largest = max(map(abs, values.values()))
    scale = f32(largest / SFP[-1]) if scaled or largest > SFP[-1] else 1.0
    codes = {word: sfp_code(value / scale) for word, value in values.items()}
    data = bytes(map(codes.__getitem__, matrix.words))
    signed = [-SFP[code & 127] if code & 128 else SFP[code] for code in range(256)]
    if scale == 1:
        table = [bf16_bits(value) for value in signed]
        decoded = ("BF16", array.array("H", map(table.__getitem__, data)).tobytes())
    else:
        table = [f32(value * scale) for value in signed]
        decoded = ("F32", f32_bytes(map(table.__getitem__, data)))
    return Stored("sfp", data, len(data), 1, scale, decoded)


def store_i8(matrix, symmetric):
    data, values = bytearray(), []
    floats = array.array("f", widened(matrix))
    for begin in range(0, len(floats), 128):
        group = floats[begin : begin + 128]
        low, high = min(group), max(group)
        span = 2 * max(-low, high) if symmetric else high - low
        step = bf16_value(bf16_bits((span or 1.0) / (254 if symmetric else 255)))
        zero = 0.0 if symmetric else bf16_value(bf16_bits(float(int(-low / step - 128))))
        codes = [max(-128, min(127, round(value / step + zero))) for value in group]
        data += struct.pack("<HH", bf16_bits(step), bf16_bits(zero)) + struct.pack(f"{len(codes)}b", *codes)
        shift = f32(zero * step)
        values += [step * code - shift for code in codes]  # exact, until it is rounded to F32
    # With zeros gemma.cpp multiplies by the values rounded to BF16, and so does the engine.
    if symmetric:
        decoded = ("F32", f32_bytes(values))
    else:
        decoded = ("BF16", bf16_bytes(values))
    return Stored("i8", bytes(data), len(data), 1, 1.0, decoded)


def store(matrix, kind, index):
    if kind == "mixed":
        kind = ("f32", "bf16", "sfp", "sfp_scaled", "i8")[index % 5]
    if kind == "nuq":
        groups = -(-len(matrix.words) // 256)
        data = bytes(16 * groups + -(-len(matrix.words) // 2))
        return Stored("nuq", data, len(data), 1, 1.0, ("F32", b""))
    if kind.startswith("sfp"):
        return store_sfp(matrix, kind == "sfp_scaled")
    if kind.startswith("i8"):
        return store_i8(matrix, kind == "i8_symmetric")
    return store_f32(matrix) if kind == "f32" else store_bf16(matrix)


# The model --------------------------------------------------------------------------------------------------------------


def read_folder(folder):
    data = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        *rows, columns = entry["shape"]
        tensors[name] = Matrix(rows[0] if rows else 1, columns, array.array("H", data[begin:end]))
    return json.loads((folder / "config.json").read_text()), tensors


def make_small():
    config, tensors = SMALL_CONFIG, {}
    numbers = random.Random(1)

    def add(name, rows, columns):
        tensors[name + ".weight"] = Matrix(rows, columns, array.array("H", (bf16_bits(numbers.gauss(0, 0.3)) for _ in range(rows * columns))))

    width, hidden = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    add("model.embed_tokens", config["vocab_size"], width)
    add("model.norm", 1, width)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"):
            add(layer + name, 1, width)
        for name in ("q_norm", "k_norm"):
            add(layer + "self_attn." + name, 1, config["head_dim"])
        for name, rows, columns in (("self_attn.q_proj", heads, width), ("self_attn.k_proj", kv_heads, width),
                                    ("self_attn.v_proj", kv_heads, width), ("self_attn.o_proj", width, heads),
                                    ("mlp.gate_proj", hidden, width), ("mlp.up_proj", hidden, width),
                                    ("mlp.down_proj", width, hidden)):  # fmt: skip
            add(layer + name, rows, columns)
    return config, tensors


NORMS = {
    "pre_att_ns": "input_layernorm", "post_att_ns": "post_attention_layernorm", "pre_ff_ns": "pre_feedforward_layernorm",
    "post_ff_ns": "post_feedforward_layernorm", "query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm",
}  # fmt: skip


def arrange(config, tensors, joined):
    """gemma.cpp's matrices by name. Beside each one, the tensors that it is made of: their names and which elements of it
    they are, as a list of (row, first column, columns), or None for all of it."""
    heads, kv_heads, size = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    width, hidden = config["hidden_size"], config["intermediate_size"]
    result = {"c_embedding": (tensors["model.embed_tokens.weight"], {"model.embed_tokens.weight": None})}
    result["c_final_norm"] = (tensors["model.norm.weight"], {"model.norm.weight": None})

    def whole(first, rows, columns):
        return [(first + row, 0, columns) for row in range(rows)]

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, source in NORMS.items():
            full = f"{layer}{source}.weight"
            result[f"{name}_{i}"] = (tensors[full], {full: None})
        q, k, v, o = (f"{layer}self_attn.{name}_proj.weight" for name in "qkvo")
        gate, up, down = (f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
        pairs = []  # head by head its keys, then its values
        for head in range(kv_heads):
            order = range(head * size, (head + 1) * size)
            pairs += [tensors[k].of_rows(order), tensors[v].of_rows(order)]

        def key_rows(before, offset):
            return [entry for head in range(kv_heads) for entry in whole(before + (2 * head + offset) * size, size, width)]

        if joined:
            before = heads * size
            result[f"qkv_ein_{i}"] = (stack([tensors[q], *pairs]),
                                      {q: whole(0, before, width), k: key_rows(before, 0), v: key_rows(before, 1)})  # fmt: skip
            result[f"gating_ein_{i}"] = (stack([tensors[gate], tensors[up]]),
                                         {gate: whole(0, hidden, width), up: whole(hidden, hidden, width)})  # fmt: skip
            # [heads, width, head_dim]
            parts = [tensors[o].row(row)[head * size : (head + 1) * size] for head in range(heads) for row in range(width)]
            places = [(head * width + row, 0, size) for row in range(width) for head in range(heads)]
            result[f"att_ein_{i}"] = (Matrix(heads * width, size, array.array("H", b"".join(p.tobytes() for p in parts))), {o: places})
        else:
            result[f"qkv1_w_{i}"] = (tensors[q], {q: None})
            result[f"qkv2_w_{i}"] = (stack(pairs), {k: key_rows(0, 0), v: key_rows(0, 1)})
            result[f"gating1_w_{i}"] = (tensors[gate], {gate: None})
            result[f"gating2_w_{i}"] = (tensors[up], {up: None})
            result[f"att_w_{i}"] = (tensors[o], {o: None})
        result[f"linear_w_{i}"] = (tensors[down], {down: None})
    return result


# The file ---------------------------------------------------------------------------------------------------------------


def text_words(text):
    data = text.encode()
    data += bytes(-len(data) % 4)
    return [len(data) // 4, *struct.unpack(f"<{len(data) // 4}I", data)]


def structure(words):
    return [len(words), *words]


def layer_words(config, complete):
    words = [config["hidden_size"], 0, config["intermediate_size"], config["num_attention_heads"], config["num_key_value_heads"],
             config["head_dim"], 0, 0, 0, 1, 1, 0, 0, 0, 1]  # fmt: skip
    if complete:
        # norm_v, experts and how many of them, ple_dim, kv_share_layer_idx, then latent attention and experts
        words += [0, 0, 0, 0, 0xFFFFFFFF, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, f32_bits(1.0), 0, 0]
    return structure(words)


def config_words(config, kind, complete):
    layers, longest = config["num_hidden_layers"], config["max_position_embeddings"]
    words = [1, *text_words("A small one"), 19, 1, TYPES.get(kind.split("_")[0], 1)]
    words += [layers, config["hidden_size"], config["vocab_size"], longest, 0, 0, 0, 0, 0, 0]
    words += [layers, *(word for _ in range(layers) for word in layer_words(config, complete))]
    words += [layers, *(config["sliding_window"] if name == "sliding_attention" else longest for name in config["layer_types"])]
    words += [1, *structure([0, 0, 0, 14, 224, 0, 1]), 1, config["eos_token_id"], config["eos_token_id"]]
    words += [2, *text_words("att_ein"), *text_words("linear_w")]
    if complete:
        words += [1, f32_bits(1.0), 0, 0, f32_bits(1e4), 0, 0, f32_bits(1.0), f32_bits(32.0), f32_bits(1.0), 20, f32_bits(1e-6)]
        words += [0, 0, 0, f32_bits(1e6)]
    return structure(words)


def align(value, to=ALIGNMENT):
    return -(-value // to) * to


def write_blobs(path, blobs, first):
    names = b"".join(name.encode().ljust(16, b"\0") for name in blobs)
    assert all(0 < len(name) <= 16 for name in blobs)
    directory_bytes = 32 * len(blobs)
    begin = align(16 + directory_bytes) if first else ALIGNMENT
    offset, ranges, payload = begin, b"", bytearray()
    for data in blobs.values():
        ranges += struct.pack("<QQ", offset, len(data))
        payload += data + bytes(align(len(data)) - len(data))
        offset = align(offset + len(data))
    size = align(offset if first else offset + directory_bytes + 16, END_ALIGNMENT)
    header = struct.pack("<4sIQ", b"SBS\n", len(blobs), size)
    if first:
        data = (header + names + ranges).ljust(begin, b"\0") + payload
        data = data.ljust(size, b"\0")
    else:
        data = struct.pack("<4sIQ", b"SBS\n", 0, END_ALIGNMENT).ljust(begin, b"\0") + payload
        data = data.ljust(size - 16 - directory_bytes, b"\0") + names + ranges + header
    assert len(data) == size
    path.write_bytes(data)


def pick(stored, matrix, places):
    """The decoded bytes of a tensor that lies in a matrix."""
    dtype, data = stored.decoded
    if places is None:
        return dtype, data
    size = 4 if dtype == "F32" else 2
    spans = ((row * matrix.columns + column, columns) for row, column, columns in places)
    return dtype, b"".join(data[size * first : size * (first + count)] for first, count in spans)


def write_decoded(folder, source, tensors, decoded):
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.model"):
        shutil.copy(source / name, folder / name)
    header, offset = {}, 0
    for name, (dtype, data) in decoded.items():
        matrix = tensors[name]
        shape = [matrix.columns] if name.endswith("norm.weight") else [matrix.rows, matrix.columns]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(data for _, data in decoded.values())


def main(source, kind, layout, output, decoded_folder=None):
    first = {"first": True, "last": False}[layout]
    folder = Path(source)
    config, tensors = make_small() if source == "small" else read_folder(folder)
    blobs, entries, decoded = {}, [], {}
    for index, (name, (matrix, made_of)) in enumerate(arrange(config, tensors, joined=first).items()):
        norm = matrix.rows == 1
        # The engine joins what is split, which then has to be of one type.
        second = name.startswith(("qkv2", "gating2"))
        stored = store(matrix, ("f32" if kind == "f32" else "bf16") if norm else kind, index - second)
        blobs[name] = stored.data
        entries += structure([*text_words(name), TYPES[stored.kind], stored.size, stored.elements, matrix.rows, matrix.columns,
                              f32_bits(stored.scale), matrix.columns])  # fmt: skip
        for full_name, places in made_of.items():
            decoded[full_name] = pick(stored, matrix, places)
    if decoded_folder:
        write_decoded(Path(decoded_folder), folder, tensors, decoded)
    tokenizer = b"not a model" if source == "small" else (folder / "tokenizer.model").read_bytes()
    for name, words in (("config", config_words(config, kind, not first)), ("toc", entries)):
        blobs[name] = struct.pack(f"<{len(words)}I", *words)
        if name == "config":
            blobs["tokenizer"] = tokenizer
    write_blobs(Path(output), blobs, first)


if __name__ == "__main__":
    if len(sys.argv) not in (5, 6):
        sys.exit("usage: make_gemma_sbs.py FOLDER|small TYPE first|last OUTPUT.sbs [DECODED]")
    main(*sys.argv[1:])

#!/usr/bin/env python3
"""Loads the plug-in into a copy of ggml and computes with it, or sees that it is refused.

    load.py LIBGGML PLUGIN                  opens the library privately, as Python does, and computes a small graph on NVB0
    load.py LIBGGML PLUGIN --refused TEXT   the plug-in is not registered, and its line has this text

LIBGGML is the library that exports ggml_backend_load.
"""

import ctypes
import os
import sys

POINTER, SIZE, INT64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64


class InitParameters(ctypes.Structure):
    _fields_ = [("bytes", SIZE), ("buffer", POINTER), ("no_alloc", ctypes.c_bool)]


def functions(library):
    """The functions of ggml that are used below, each with its types."""
    types = {
        "ggml_version": (ctypes.c_char_p,),
        "ggml_backend_load": (POINTER, ctypes.c_char_p),
        "ggml_backend_reg_by_name": (POINTER, ctypes.c_char_p),
        "ggml_backend_init_by_name": (POINTER, ctypes.c_char_p, ctypes.c_char_p),
        "ggml_backend_free": (None, POINTER),
        "ggml_backend_supports_op": (ctypes.c_bool, POINTER, POINTER),
        "ggml_backend_alloc_ctx_tensors": (POINTER, POINTER, POINTER),
        "ggml_backend_buffer_free": (None, POINTER),
        "ggml_backend_tensor_set": (None, POINTER, POINTER, SIZE, SIZE),
        "ggml_backend_tensor_get": (None, POINTER, POINTER, SIZE, SIZE),
        "ggml_backend_graph_compute": (ctypes.c_int, POINTER, POINTER),
        "ggml_init": (POINTER, InitParameters),
        "ggml_free": (None, POINTER),
        "ggml_new_tensor_2d": (POINTER, POINTER, ctypes.c_int, INT64, INT64),
        "ggml_mul_mat": (POINTER, POINTER, POINTER, POINTER),
        "ggml_add": (POINTER, POINTER, POINTER, POINTER),
        "ggml_rms_norm": (POINTER, POINTER, POINTER, ctypes.c_float),
        "ggml_new_graph": (POINTER, POINTER),
        "ggml_build_forward_expand": (None, POINTER, POINTER),
    }
    found = {}
    for name, (result, *arguments) in types.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        found[name.removeprefix("ggml_")] = function
    return type("Ggml", (), {name: staticmethod(function) for name, function in found.items()})


def floats(values):
    return (ctypes.c_float * len(values))(*values)


def compute(ggml):
    """rms_norm(weight · x) + bias on NVB0, beside the same in Python."""
    columns, rows, tokens = 8, 3, 2
    backend = ggml.backend_init_by_name(b"NVB0", None)
    assert backend, "NVB0 makes no stream"
    context = ggml.init(InitParameters(1 << 20, None, True))
    weight = ggml.new_tensor_2d(context, 0, columns, rows)
    x = ggml.new_tensor_2d(context, 0, columns, tokens)
    bias = ggml.new_tensor_2d(context, 0, rows, 1)
    result = ggml.add(context, ggml.rms_norm(context, ggml.mul_mat(context, weight, x), 1e-5), bias)
    assert ggml.backend_supports_op(backend, result), "the addition is not supported"
    graph = ggml.new_graph(context)
    ggml.build_forward_expand(graph, result)
    buffer = ggml.backend_alloc_ctx_tensors(context, backend)
    assert buffer, "no memory"
    values = {weight: [0.25 * (i % 7) - 0.5 for i in range(columns * rows)],
              x: [0.5 - 0.125 * (i % 5) for i in range(columns * tokens)], bias: [1.0, -2.0, 3.0]}
    for tensor, numbers in values.items():
        ggml.backend_tensor_set(tensor, floats(numbers), 0, 4 * len(numbers))
    for _ in range(3):
        assert ggml.backend_graph_compute(backend, graph) == 0, "the graph failed"
    out = floats([0.0] * (rows * tokens))
    ggml.backend_tensor_get(result, out, 0, 4 * len(out))
    for token in range(tokens):
        products = [sum(values[weight][row * columns + k] * values[x][token * columns + k] for k in range(columns))
                    for row in range(rows)]
        scale = (sum(value * value for value in products) / rows + 1e-5) ** -0.5
        for row in range(rows):
            expected = products[row] * scale + values[bias][row]
            assert abs(out[token * rows + row] - expected) < 1e-5, (token, row, out[token * rows + row], expected)
    ggml.backend_buffer_free(buffer)
    ggml.free(context)
    ggml.backend_free(backend)


def captured(call):
    """What `call` returns, and what is written to standard error meanwhile."""
    reading, writing = os.pipe()
    kept = os.dup(2)
    os.dup2(writing, 2)
    try:
        result = call()
    finally:
        os.dup2(kept, 2)
        os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        return result, pipe.read().decode(errors="replace")


def main():
    library, plugin = sys.argv[1:3]
    ggml = functions(ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_LOCAL))
    version = ggml.version().decode()
    registration, text = captured(lambda: ggml.backend_load(plugin.encode()))
    if "--refused" in sys.argv:
        wanted = sys.argv[sys.argv.index("--refused") + 1]
        assert not registration, f"ggml {version} was accepted"
        assert wanted in text and "this plug-in knows ggml" in text, text
        print(f"ggml {version}: refused: {text.strip().splitlines()[0]}")
        return
    assert registration, f"ggml {version}: not loaded: {text}"
    assert ggml.backend_reg_by_name(b"NVB") == registration, "it is not registered by its name"
    compute(ggml)
    # Loaded, used and freed again and again, it is the same one.
    for _ in range(20):
        assert ggml.backend_load(plugin.encode()) == registration, "the second load is another registration"
        compute(ggml)
    print(f"ggml {version}: loaded and computed")


if __name__ == "__main__":
    main()

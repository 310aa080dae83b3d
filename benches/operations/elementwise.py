"""Softmax, the gated activation and the addition, beside PyTorch's kernels."""
from functools import partial

import torch
import torch.nn.functional as F
from case import BOUNDS, Case, relative_error


def rotated(context, rows, columns, how_many):
    size = rows * columns * context.dtype.itemsize
    rotation = context.rotation(size) if rows > 64 else 1
    return [[context.randn(rows, columns) for _ in range(how_many)] for _ in range(rotation)]


def rate(context, rows, columns, passes):
    """Many rows: the bytes read and written a second. Few: the time."""
    if rows <= 64:
        return "µs", 0
    return ("TB/s" if context.device.type == "cuda" else "GB/s"), passes * rows * columns * context.dtype.itemsize


def elementwise_case(context, name, arguments, rows, columns, peer_name, peer, reference, **settings):
    """An operation with the input tensors `arguments`; `peer` and `reference` take them as they are and in f64."""
    inputs = rotated(context, rows, columns, len(arguments))
    output = context.empty(rows, columns)
    calls = [context.backend.operation(name, **dict(zip(arguments, tensors)), output=output, **settings) for tensors in inputs]
    unit, amount = rate(context, rows, columns, len(arguments) + 1)
    return Case(
        f"{name} {context.name_of(context.dtype)}", f"rows={rows} n={columns}", unit, ours=lambda i: calls[i](),
        peers=[{peer_name: lambda i: peer(*inputs[i])}],
        check=lambda i: relative_error([(output, reference(*(x.double() for x in inputs[i])))], [output]),
        bound=BOUNDS[context.dtype], outputs=[output], amount=amount, rotation=len(inputs))


def geglu(gate, up):
    return F.gelu(gate, approximate="tanh") * up


def softmax_of_rows(x):
    return x.softmax(-1)


def softmax(context, shapes):
    for rows, columns in shapes:
        yield partial(elementwise_case, context, "softmax", ["input"], rows, columns, "PyTorch softmax", softmax_of_rows, softmax_of_rows)


def gated_activation(context, rows):
    for count in rows:
        yield partial(elementwise_case, context, "gated_activation", ["gate", "up"], count, context.model.feed_forward,
                      "PyTorch F.gelu, mul", geglu, geglu, activation=1)


def add(context, rows):
    for count in rows:
        yield partial(elementwise_case, context, "add", ["input", "second"], count, context.model.width, "PyTorch add", torch.add,
                      torch.add)

"""Products with a model's matrices, and gated ones, beside PyTorch's F.linear (cuBLASLt on a GPU, oneDNN or MKL on a CPU).

A product of few rows is bounded by reading the weights, so they are rotated past the last cache and the rate counts their
bytes. On a CPU the activations are F32 as in the engine, whatever the weights are; PyTorch wants both alike, so its peer
gets activations of the weights' dtype.
"""
from functools import partial

import torch
import torch.nn.functional as F
from case import BOUNDS, Case, relative_error, sample_indices

# Up to this many rows the rate counts bytes of weights, beyond it operations.
FEW_ROWS = 64


def error_of(output, reference, rows, columns):
    """Of the sampled rows and columns; `reference(rows, columns)` gives them in f64."""
    return relative_error([(output[rows][:, columns], reference(rows, columns))], [output])


def rate(context, m, n, k, dtype):
    """The unit and the amount of a product of m rows."""
    if m <= FEW_ROWS:
        return ("TB/s" if context.device.type == "cuda" else "GB/s"), n * k * dtype.itemsize
    return ("TFLOP/s" if context.device.type == "cuda" else "GFLOP/s"), 2 * m * n * k


def activation_dtype(context, dtype):
    return dtype if context.device.type == "cuda" else torch.float32


def linear_case(context, m, n, k, dtype, extra_peers=(), amounts=None):
    """y = x · Wᵀ; `extra_peers` are further groups of peers, of other amounts."""
    rotation = context.rotation(n * k * dtype.itemsize) if m <= FEW_ROWS else 1
    weights = [context.randn(n, k, dtype=dtype) for _ in range(rotation)]
    handles = [context.backend.weight(weight) for weight in weights]
    x = context.randn(m, k, dtype=activation_dtype(context, dtype))
    x_of_peer = x.to(dtype)
    output = context.empty(m, n, dtype=x.dtype)
    calls = [context.backend.operation("linear", input=x, weight=handle, output=output) for handle in handles]
    rows, columns = sample_indices(m, 16, context.device), sample_indices(n, 512, context.device)
    unit, amount = rate(context, m, n, k, dtype)
    return Case(
        f"linear {context.name_of(dtype)}", f"m={m} n={n} k={k}", unit,
        ours=lambda i: calls[i](),
        peers=[{"PyTorch F.linear": lambda i: F.linear(x_of_peer, weights[i])}, *extra_peers],
        check=lambda i: error_of(output, lambda r, c: x[r].double() @ weights[i][c].double().T, rows, columns),
        bound=BOUNDS[output.dtype], outputs=[output], amount=amount, amounts=amounts or {}, rotation=rotation)


def gated_case(context, m, features, k, dtype):
    """y = gelu_tanh(x · gateᵀ) · (x · upᵀ); the peer holds gate and up as one matrix, its quickest way."""
    rotation = context.rotation(2 * features * k * dtype.itemsize) if m <= FEW_ROWS else 1
    weights = [context.randn(2 * features, k, dtype=dtype) * k**-0.5 for _ in range(rotation)]
    handles = [context.backend.weight(*weight.chunk(2), gated=True) for weight in weights]
    x = context.randn(m, k, dtype=activation_dtype(context, dtype))
    x_of_peer = x.to(dtype)
    output = context.empty(m, features, dtype=x.dtype)
    calls = [context.backend.operation("linear", input=x, weight=handle, output=output, activation=1) for handle in handles]
    rows, columns = sample_indices(m, 16, context.device), sample_indices(features, 512, context.device)

    def peer(i):
        gate, up = F.linear(x_of_peer, weights[i]).chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def reference(r, c, i):
        gate, up = (x[r].double() @ part[c].double().T for part in weights[i].chunk(2))
        return F.gelu(gate, approximate="tanh") * up

    unit, amount = rate(context, m, 2 * features, k, dtype)
    return Case(
        f"linear gated {context.name_of(dtype)}", f"m={m} n={2 * features} k={k}", unit,
        ours=lambda i: calls[i](),
        peers=[{"PyTorch F.linear, F.gelu, mul": peer}],
        check=lambda i: error_of(output, lambda r, c: reference(r, c, i), rows, columns),
        bound=BOUNDS[output.dtype], outputs=[output], amount=amount, rotation=rotation)


def model_shapes(model):
    """(n, k) of the products of a layer that are not gated, and of the logits."""
    query, both = model.query_heads * model.head_dim, (model.query_heads + 2 * model.kv_heads) * model.head_dim
    return [(both, model.width), (model.width, query), (model.width, model.feed_forward), (model.vocabulary, model.width)]


def linear(context, rows, shapes, dtype):
    """All `shapes` (n, k) and those of the model's layer, each with all numbers of rows."""
    model = context.model
    for n, k in [*shapes, *model_shapes(model)]:
        for m in rows:
            yield partial(linear_case, context, m, n, k, dtype)
    for m in rows:
        yield partial(gated_case, context, m, model.feed_forward, model.width, dtype)

"""Products of many rows, as in prefill, beside PyTorch's: plain, with 8 bits on both sides, and with an activation.

What bounds them is arithmetic, so the rate counts operations. With BF16 weights each is measured with the kernel that the
library takes by default, and again (`tuned`) with the one that its tuner finds for it. With FP8 and INT8 weights the library may
round its input to 8 bits (`quantized_activations`), which is in its time; peers that are handed codes have that for nothing, as
the library has in the rows `of codes`.
"""
from functools import partial

import torch
import torch.nn.functional as F
from case import BOUNDS, Case, sample_indices
from nvb import ACTIVATIONS, GATED, quantized_rows
from operations.elementwise import geglu
from operations.linear import activation_dtype, error_of, rate

DTYPE = torch.bfloat16
GELU = ACTIVATIONS["gelu_tanh"]
# How FP8 products add up.
SUMS = {"": False, ", fast accumulation": True}
# Codes, the largest magnitude that one stands for, and what the library calls them.
BYTES = {"int8": (torch.int8, 127, "int8"), "fp8": (torch.float8_e4m3fn, 448, "fp8_e4m3")}


def operands(context, m, n, k):
    """The input, and weights that are rotated."""
    weights = [context.randn(n, k, dtype=DTYPE) * k**-0.5 for _ in range(context.rotation(n * k * DTYPE.itemsize))]
    return context.randn(m, k, dtype=activation_dtype(context, DTYPE)), weights


def product(backend, x, handles, output, **epilogue):
    """The library's product with the i-th weight."""
    calls = [backend.operation("linear", input=x, weight=handle, output=output, **epilogue) for handle in handles]
    return lambda i: calls[i]()


def chosen(context, backends, choice, shape, *epilogues):
    """The backend of this choice; the tuned one after it has tuned the product with each of the epilogues."""
    backend = backends[choice]
    if choice == "tuned":
        m, n, k = shape
        for epilogue in epilogues:
            backend.tune_linear(activation_dtype(context, DTYPE), "bf16", rows=m, columns=n, depth=k, **epilogue)
    return backend


def large_case(context, operation, choice, shape, ours, peers, output, references, rotation):
    """`references(rows, columns, i)` gives, in f64, every result that is right: the nearest of them counts."""
    m, n, k = shape
    rows, columns = sample_indices(m, 16, context.device), sample_indices(output.shape[1], 512, context.device)
    unit, amount = rate(context, m, n, k, DTYPE)
    return Case(
        operation, f"m={m} n={n} k={k}{' tuned' if choice == 'tuned' else ''}", unit, ours=ours, peers=peers,
        check=lambda i: min(error_of(output, lambda r, c: right, rows, columns) for right in references(rows, columns, i)),
        bound=BOUNDS[output.dtype], outputs=[output], amount=amount, rotation=rotation)


def bf16_case(context, m, n, k, choice, backends):
    """y = x · Wᵀ"""
    backend = chosen(context, backends, choice, (m, n, k), {})
    x, weights = operands(context, m, n, k)
    x_of_peer, output = x.to(DTYPE), context.empty(m, n, dtype=x.dtype)
    return large_case(
        context, "linear large bf16", choice, (m, n, k),
        ours=product(backend, x, [backend.weight(weight) for weight in weights], output),
        peers=[{"PyTorch F.linear": lambda i: F.linear(x_of_peer, weights[i])}], output=output,
        references=lambda r, c, i: [x[r].double() @ weights[i][c].double().T], rotation=len(weights))


def gelu_case(context, m, n, k, choice, backends):
    """y = gelu_tanh(x · Wᵀ + b)"""
    backend = chosen(context, backends, choice, (m, n, k), {}, {"bias": 1, "activation": GELU})
    x, weights = operands(context, m, n, k)
    bias = context.randn(n, dtype=x.dtype)
    x_of_peer, bias_of_peer, output = x.to(DTYPE), bias.to(DTYPE), context.empty(m, n, dtype=x.dtype)
    handles = [backend.weight(weight) for weight in weights]

    def pair(i):
        return F.gelu(F.linear(x_of_peer, weights[i], bias_of_peer), approximate="tanh")

    def fused(i):
        return torch._addmm_activation(bias_of_peer, x_of_peer, weights[i].t(), use_gelu=True)

    def references(r, c, i):
        return [F.gelu(x[r].double() @ weights[i][c].double().T + bias[c].double(), approximate="tanh")]

    return large_case(
        context, "linear bias gelu bf16", choice, (m, n, k),
        ours=product(backend, x, handles, output, bias=bias, activation=GELU),
        peers=[{"nvbackend, plain product": product(backend, x, handles, output)},
               {"PyTorch F.linear, plain product": lambda i: F.linear(x_of_peer, weights[i])},
               {"PyTorch F.linear, F.gelu": pair}, {"PyTorch _addmm_activation": fused}],
        output=output, references=references, rotation=len(weights))


def geglu_case(context, m, n, k, choice, backends):
    """y = gelu_tanh(x · gateᵀ) · (x · upᵀ), n rows of gate and up together."""
    backend = chosen(context, backends, choice, (m, n, k), {}, {"arrangement": GATED, "activation": GELU})
    x, weights = operands(context, m, n, k)
    x_of_peer, output, both = x.to(DTYPE), context.empty(m, n // 2, dtype=x.dtype), context.empty(m, n, dtype=x.dtype)
    gate, up = both.chunk(2, dim=-1)
    plain = product(backend, x, [backend.weight(weight) for weight in weights], both)
    activate = backend.operation("gated_activation", gate=gate, up=up, output=output, activation=GELU)

    def two_calls(i):
        plain(i)
        activate()

    def references(r, c, i):
        return [geglu(*(x[r].double() @ part[c].double().T for part in weights[i].chunk(2)))]

    return large_case(
        context, "linear geglu bf16", choice, (m, n, k),
        ours=product(backend, x, [backend.weight(*weight.chunk(2), gated=True) for weight in weights], output, activation=GELU),
        peers=[{"PyTorch F.linear, F.gelu, mul": lambda i: geglu(*F.linear(x_of_peer, weights[i]).chunk(2, dim=-1))},
               {"nvbackend, product and gated activation": two_calls}],
        output=output, references=references, rotation=len(weights))


def quantised(values, name):
    """Codes and the scales of their rows, [rows, 1]; the library's formula."""
    dtype, largest, _ = BYTES[name]
    scales = values.abs().amax(1, keepdim=True).float() / largest
    scaled = values / scales
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales


def peers_of_codes(name, codes, scales, matrices):
    """PyTorch's products of codes, for INT8 without the scales, which it has no product for."""
    if name == "int8":
        return {"PyTorch _int_mm of codes": lambda i: torch._int_mm(codes, matrices[i][0])}

    def ready(fast, i):
        return torch._scaled_mm(codes, matrices[i][0], scales, matrices[i][1], out_dtype=DTYPE, use_fast_accum=fast)

    return {f"PyTorch _scaled_mm of codes{how}": partial(ready, fast) for how, fast in SUMS.items()}


def quantising_peers(x, name, matrices):
    def quantising(fast, i):
        codes, scales = quantised(x, name)
        return torch._scaled_mm(codes, matrices[i][0], scales, matrices[i][1], out_dtype=DTYPE, use_fast_accum=fast)

    return {f"PyTorch quantise, _scaled_mm{how}": partial(quantising, fast) for how, fast in SUMS.items()}


def bytes_case(context, m, n, k, name, of_codes, backend):
    """y = x · Wᵀ with codes of 8 bits and a scale a row on both sides. The input is rounded by the library, or has been."""
    x, weights = operands(context, m, n, k)
    output = context.empty(m, n, dtype=x.dtype)
    codes, scales = quantised(x.to(DTYPE), name)
    matrices = [(of_weight.t(), factors.t().contiguous()) for of_weight, factors in (quantised(weight, name) for weight in weights)]
    handles = [backend.weight(weight, format=BYTES[name][2]) for weight in weights]
    peers = [peers_of_codes(name, codes, scales, matrices)]
    if of_codes:
        rows = quantized_rows(codes, scales, BYTES[name][2])
        calls = [backend.operation("linear", quantized_input=rows, weight=handle, output=output) for handle in handles]
    else:
        calls = [backend.operation("linear", input=x, weight=handle, output=output) for handle in handles]
        peers += [] if name == "int8" else [quantising_peers(x.to(DTYPE), name, matrices)]

    def references(r, c, i):
        dequantised = context.empty(n, k, dtype=torch.float32)
        backend.dequantize(handles[i], dequantised)
        inputs = [codes[r].double() * scales[r].double()] + ([] if of_codes else [x[r].double()])
        return [values @ dequantised[c].double().T for values in inputs]

    return large_case(
        context, f"linear large {name}{' of codes' if of_codes else ''}", "default", (m, n, k), ours=lambda i: calls[i](),
        peers=peers, output=output, references=references, rotation=len(weights))


def linear_large(context, shapes, gated_shapes):
    """All `shapes` (m, n, k), and GeGLU with `gated_shapes`. The tuner takes seconds for a product, so those with 8 bits,
    whose defaults it kept on an H200, are left to them.
    """
    backends = {"default": context.backend, "tuned": context.backend.another()}
    rounding = context.backend.another(quantized_activations="true")
    for shape in shapes:
        for choice in backends:
            yield partial(bf16_case, context, *shape, choice, backends=backends)
    for name in BYTES:
        for of_codes in (False, True):
            for shape in shapes:
                yield partial(bytes_case, context, *shape, name, of_codes, backend=rounding)
    for make, of_make in ((gelu_case, shapes), (geglu_case, gated_shapes)):
        for shape in of_make:
            for choice in backends:
                yield partial(make, context, *shape, choice, backends=backends)

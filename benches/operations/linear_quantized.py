"""Products with weights in FP8, INT8 and INT4, beside PyTorch's own.

On a CPU the rate counts the bytes that are read of a weight: codes and scales. On a GPU, where PyTorch's kernels for such weights
are slower than its product with BF16 weights, the peer is the latter and what counts is the time. The result is checked against
the dequantised weights times the input, in f64.
"""
from functools import partial

import torch
import torch.nn.functional as F
from case import BOUNDS, Case, sample_indices
from operations.linear import activation_dtype, error_of

# Elements that share a scale; 0: a row does.
GROUPS = {"int4": 32, "int8": 0, "fp8_e4m3": 0}
BITS = {"int4": 4, "int8": 8, "fp8_e4m3": 8}
# The dtype of the inputs and scales that PyTorch's kernels take.
PEER_DTYPE = torch.bfloat16


def weight_bytes(n, k, name, group, zero_points=False):
    scales = n * 4 if group == 0 else n * (k // group) * (4 if zero_points else 2)
    return n * k * BITS[name] // 8 + scales


def peer_of(name, weight, group):
    """PyTorch's product with its own rounding of the weight, as a function of the input; None where it has none."""
    n, k = weight.shape
    if name == "int8":
        scales = weight.float().abs().amax(1) / 127
        codes, factors = (weight.float() / scales[:, None]).round().to(torch.int8), scales.to(PEER_DTYPE)
        return lambda x: torch._weight_int8pack_mm(x, codes, factors)
    if name == "int4":
        grouped = weight.float().view(n, k // group, group)
        scales = grouped.abs().amax(2).clamp(min=1e-9) / 7
        codes = ((grouped / scales[..., None]).round() + 8).view(n, k).to(torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        factors = torch.stack([scales, torch.zeros_like(scales)], 2).transpose(0, 1).contiguous().to(PEER_DTYPE)
        return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, factors)
    return None


def linear_quantized_case(context, m, n, k, name, extra_peers=(), amounts=None, group=None, zero_points=False):
    """y = x · Wᵀ; `extra_peers` are further groups of peers, of other amounts. `group`: not the format's usual one. `zero_points`:
    on a GPU alone, where the peer has BF16 weights.
    """
    on_gpu = context.device.type == "cuda"
    size = GROUPS[name] if group is None else group
    amount = weight_bytes(n, k, name, size, zero_points)
    rotation = context.rotation(amount)
    weights = [context.randn(n, k, dtype=torch.bfloat16) for _ in range(rotation)]
    handles = [context.backend.weight(weight, format=name, group_size=size, zero_points=zero_points) for weight in weights]
    peers = [] if on_gpu else [peer_of(name, weight, size) for weight in weights]
    if not on_gpu:
        del weights
    x = context.randn(m, k, dtype=activation_dtype(context, torch.bfloat16))
    x_of_peer = x.to(PEER_DTYPE)
    output = context.empty(m, n, dtype=x.dtype)
    calls = [context.backend.operation("linear", input=x, weight=handle, output=output) for handle in handles]
    rows, columns = sample_indices(m, 16, context.device), sample_indices(n, 512, context.device)

    def reference(r, c, i):
        dequantised = context.empty(n, k, dtype=torch.float32)
        context.backend.dequantize(handles[i], dequantised)
        return x[r].double() @ dequantised[c].double().T

    if on_gpu:
        groups = [{"PyTorch F.linear, BF16 weights": lambda i: F.linear(x_of_peer, weights[i])}]
    else:
        groups = [{f"PyTorch {name} product": lambda i: peers[i](x_of_peer)}] if peers[0] else []
    of_group = ("" if group is None else f" group={group}") + (" zero points" if zero_points else "")
    return Case(
        f"linear {name}", f"m={m} n={n} k={k}{of_group}", "µs" if on_gpu else "GB/s", ours=lambda i: calls[i](), peers=[*groups, *extra_peers],
        check=lambda i: error_of(output, lambda r, c: reference(r, c, i), rows, columns),
        bound=BOUNDS[output.dtype], outputs=[output], amount=amount, amounts=amounts or {}, rotation=rotation)


def linear_quantized(context, rows, shapes, names, reader, read_bytes):
    """All `shapes` (n, k) with all numbers of rows, INT4 in groups of 32 and of 128; those of one row beside the memory's read
    bandwidth."""
    for name in names:
        for n, k in shapes:
            for m in rows:
                extra = ([reader], {peer: read_bytes for peer in reader}) if m == 1 else ((), None)
                for group in (None, 128) if name == "int4" else (None,):
                    yield partial(linear_quantized_case, context, m, n, k, name, *extra, group=group)


def linear_quantized_gpu(context, rows, shapes):
    """All `shapes` (n, k) with all numbers of rows, INT4 in groups of 32, also with zero points, and of 128."""
    for n, k in shapes:
        for m in rows:
            for name in GROUPS:
                yield partial(linear_quantized_case, context, m, n, k, name)
            yield partial(linear_quantized_case, context, m, n, k, "int4", zero_points=True)
            if k % 128 == 0:
                yield partial(linear_quantized_case, context, m, n, k, "int4", group=128)

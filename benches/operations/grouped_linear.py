"""Products of mixtures of experts, beside PyTorch's grouped product of BF16 weights.

Each call has another routing, so that few tokens find no expert's weights in a cache. The result is checked against the dequantised
weights times the input, in f64.
"""
from functools import partial

import torch
from case import BOUNDS, Case, sample_indices
from operations.linear import activation_dtype, error_of
from operations.linear_quantized import weight_bytes

# Experts that a token goes to.
CHOSEN = 8


def routing(context, tokens, experts):
    """Offsets of the experts' rows when each token goes to `CHOSEN` of them at random."""
    picks = torch.stack([torch.randperm(experts)[:CHOSEN] for _ in range(tokens)]).flatten()
    ends = torch.bincount(picks, minlength=experts).cumsum(0)
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32).to(context.device)


def grouped_linear_case(context, tokens, experts, n, k, name):
    """`name`: the weights' format. A token's rows are those of its experts."""
    rows = tokens * min(CHOSEN, experts)
    weights = context.randn(experts * n, k, dtype=torch.bfloat16) / k ** 0.5
    handle = context.backend.weight(weights, format=name, **({"group_size": 32} if name == "int4" else {}))
    bytes_of_one = n * k * 2 if name == "bf16" else weight_bytes(n, k, name, 32 if name == "int4" else 0)
    rotation = context.rotation(min(rows, experts) * bytes_of_one)
    offsets = [routing(context, tokens, experts) for _ in range(rotation)]
    x = context.randn(rows, k, dtype=activation_dtype(context, torch.bfloat16))
    x_of_peer = x.to(torch.bfloat16)
    output = context.empty(rows, n, dtype=x.dtype)
    calls = [context.backend.operation("grouped_linear", input=x, expert_offsets=each, weight=handle, output=output) for each in offsets]
    stacked = weights.view(experts, n, k).transpose(1, 2)
    ends = [each[1:].contiguous() for each in offsets]
    some_rows, columns = sample_indices(rows, 16, context.device), sample_indices(n, 64, context.device)

    def reference(r, c, i):
        if name == "bf16":
            dequantised = weights
        else:
            dequantised = context.empty(experts * n, k, dtype=torch.float32)
            context.backend.dequantize(handle, dequantised)
        owners = torch.searchsorted(ends[i].long(), r, right=True)
        chosen = dequantised.view(experts, n, k)[owners][:, c]
        return torch.einsum("rk,rck->rc", x[r].double(), chosen.double())

    return Case(
        f"grouped linear {name}", f"tokens={tokens} of {experts} experts n={n} k={k}", "µs", ours=lambda i: calls[i](),
        peers=[{"PyTorch _grouped_mm, BF16 weights": lambda i: torch._grouped_mm(x_of_peer, stacked, offs=ends[i])}],
        check=lambda i: error_of(output, lambda r, c: reference(r, c, i), some_rows, columns),
        bound=BOUNDS[output.dtype], outputs=[output], rotation=rotation)


def grouped_linear(context, token_counts, shapes, names):
    """All `shapes` (experts, n, k) with all numbers of tokens and formats."""
    for experts, n, k in shapes:
        for tokens in token_counts:
            for name in names:
                yield partial(grouped_linear_case, context, tokens, experts, n, k, name)

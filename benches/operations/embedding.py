"""The embedding gather with Gemma's scale, beside F.embedding and a multiplication."""
from functools import partial

import torch
import torch.nn.functional as F
from case import BOUNDS, Case, relative_error


def embedding(context, tokens):
    for count in tokens:
        yield partial(embedding_case, context, count)


def embedding_case(context, count):
    model = context.model
    table = context.randn(model.vocabulary, model.width, dtype=torch.bfloat16)
    handle = context.backend.weight(table)
    scale = float(torch.tensor(model.width**0.5).to(torch.bfloat16))
    # Each call gathers other rows, so that they come from memory.
    tokens = [context.integers(model.vocabulary, count) for _ in range(16)]
    output = context.empty(count, model.width)
    calls = [context.backend.operation("embedding", tokens=t, table=handle, output=output, scale=scale) for t in tokens]
    return Case(
        "embedding bf16", f"tokens={count} width={model.width} vocabulary={model.vocabulary}", "µs", ours=lambda i: calls[i](),
        peers=[{"PyTorch F.embedding, mul": lambda i: F.embedding(tokens[i], table) * scale}],
        check=lambda i: relative_error([(output, table[tokens[i].long()].double() * scale)], [output]),
        bound=BOUNDS[output.dtype], outputs=[output], rotation=len(tokens))

"""The choice of the next token from the logits of a vocabulary: argmax and sampling, beside PyTorch's operations.

PyTorch's sampler is the one of its own examples of fast generation: softmax, sort or top-k, and the largest of
probability / exponential variate as the draw, which needs no synchronisation.
"""
import math
from functools import partial

import torch
from case import Case

TEMPERATURE, TOP_K, TOP_P = 0.8, 64, 0.95


def logits_of(context, batch):
    """F32 logits, in the cache as they are when a model has just computed them."""
    return context.randn(batch, context.model.vocabulary, dtype=torch.float32) * 4


def argmax(context, batches):
    for batch in batches:
        yield partial(argmax_case, context, batch)


def argmax_case(context, batch):
    logits = logits_of(context, batch)
    tokens = context.integers(1, batch)
    call = context.backend.operation("argmax", logits=logits, tokens=tokens)
    return Case(
        "argmax f32", f"b={batch} vocabulary={context.model.vocabulary}", "µs", ours=lambda i: call(),
        peers=[{"PyTorch argmax": lambda i: logits.argmax(-1)}],
        check=lambda i: (tokens != logits.argmax(-1)).double().mean().item(), bound=0.0, outputs=[tokens])


def sample(context, batches):
    for batch in batches:
        for top_k, top_p in ((0, 1.0), (TOP_K, TOP_P), (0, TOP_P)):
            yield partial(sample_case, context, batch, top_k, top_p)


def draw(probabilities):
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)


def peer_sample(logits, top_k, top_p):
    logits = logits / TEMPERATURE
    if not top_k and top_p >= 1:
        return draw(logits.softmax(-1))
    if top_k:
        values, indices = logits.topk(top_k)
    else:
        values, indices = logits.sort(descending=True)
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= top_p, 0)
    return indices.gather(-1, draw(probabilities)[:, None])


def outside(logits, tokens, top_k, top_p):
    """The share of tokens that top-k and top-p would not have kept, by the formula in f64."""
    if tokens.min() < 0 or tokens.max() >= logits.shape[1]:
        return math.inf
    scaled = logits.double() / TEMPERATURE
    chosen = scaled.gather(-1, tokens.long()[:, None])
    larger = scaled > chosen
    wrong = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    if top_k:
        wrong |= larger.sum(-1) >= top_k
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        # A sum of probabilities in f32 may cross the limit one token off.
        wrong |= (scaled.softmax(-1) * larger).sum(-1) >= top_p + 1e-4
    return wrong.double().mean().item()


def sample_case(context, batch, top_k, top_p):
    logits = logits_of(context, batch)
    tokens = context.integers(1, batch)
    settings = dict(temperature=TEMPERATURE, top_k=top_k, top_p=top_p, seed=1)
    call = context.backend.operation("sample", logits=logits, tokens=tokens, **settings)
    return Case(
        "sample f32", f"b={batch} vocabulary={context.model.vocabulary} top_k={top_k} top_p={top_p}", "µs", ours=lambda i: call(),
        peers=[{"PyTorch softmax, top-k or sort, draw": lambda i: peer_sample(logits, top_k, top_p)}],
        check=lambda i: outside(logits, tokens, top_k, top_p), bound=0.0, outputs=[tokens])

"""Rotary embedding of queries and keys, and the whole step between the QKV product and attention: norm of each head,
rotation, append to the cache. The peer is the same in PyTorch as Hugging Face writes it, its tables ready.
"""
from functools import partial

import torch
import torch.nn.functional as F
from case import Case, copy_peer, relative_error

EPSILON = 1e-6
BASE = 10000.0
# Positions stay below this, where an angle in f32 is still exact to about 1e-4.
CAPACITY = 4096
# Rounding to BF16, or the angles' own rounding in f32.
BOUNDS = {torch.float32: 2e-4, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def angles(context, positions, head_dim):
    """f64 [tokens, head_dim] of angles, the second half a copy of the first."""
    exponents = torch.arange(0, head_dim, 2, device=context.device).double() / head_dim
    half = positions.double()[:, None] * BASE**-exponents
    return torch.cat([half, half], -1)


def rotate(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], -1) * sin


def head_norm(x, weight):
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * (1 + weight.double())


def rope(context, tokens, wide=()):
    """Of the model's heads, and of the shapes `wide` (tokens, query heads, KV heads), where a copy of as many bytes is the
    other peer.
    """
    for shape in [(count, context.model.query_heads, context.model.kv_heads) for count in tokens] + list(wide):
        for whole_step in (False, True):
            yield partial(rope_case, context, *shape, whole_step)


def rope_case(context, count, query_heads, kv_heads, whole_step):
    d, dtype = context.model.head_dim, context.dtype
    qkv = context.randn(count, query_heads + 2 * kv_heads, d)
    q, k, v = qkv.split([query_heads, kv_heads, kv_heads], dim=1)
    tokens = torch.arange(max(CAPACITY - count, 0), max(CAPACITY, count), device=context.device, dtype=torch.int32)
    positions, sequences = tokens % CAPACITY, tokens // CAPACITY
    query_output, key_output = context.empty(count, query_heads, d), context.empty(count, kv_heads, d)
    arguments = dict(query=q, key=k, query_output=query_output, key_output=key_output, positions=positions, base=BASE)
    query_norm, key_norm = (context.randn(d) * 0.1 for _ in range(2))
    if whole_step:
        cache = context.backend.kv_cache(dtype, layers=1, sequences=int(sequences[-1]) + 1, kv_heads=kv_heads, head_dim=d, capacity=CAPACITY)
        arguments |= dict(query_norm=query_norm, key_norm=key_norm, epsilon=EPSILON, weight_offset=1.0, value=v, cache=cache, sequences=sequences)
    call = context.backend.operation("rope", **arguments)

    theta = angles(context, positions, d)[:, None]
    cos, sin = theta.cos().to(dtype), theta.sin().to(dtype)
    folded = 1 + query_norm, 1 + key_norm
    caches = [context.empty(kv_heads, max(CAPACITY, count), d) for _ in range(2)] if whole_step else []
    rows = tokens.long()

    def peer(_):
        if not whole_step:
            return rotate(q, cos, sin), rotate(k, cos, sin)
        queries, keys = (rotate(F.rms_norm(x, (d,), w, EPSILON), cos, sin) for x, w in zip((q, k), folded))
        for store, x in zip(caches, (keys, v)):
            store.index_copy_(1, rows, x.transpose(0, 1))
        return queries

    def check(_):
        pairs = []
        for x, weight, out in ((q, query_norm, query_output), (k, key_norm, key_output)):
            x = head_norm(x, weight) if whole_step else x.double()
            pairs.append((out, rotate(x, theta.cos(), theta.sin())))
        return relative_error(pairs, [query_output, key_output])

    name = "rope norm append" if whole_step else "rope"
    # What is read, and the same written; of the keys twice, to their output and to the cache.
    heads = 2 * (query_heads + kv_heads) + (3 * kv_heads if whole_step else 0)
    unit, amount = ("TB/s", count * heads * d * dtype.itemsize) if count > CAPACITY else ("µs", 0)
    return Case(
        f"{name} {context.name_of(dtype)}", f"tokens={count} h={query_heads}/{kv_heads} d={d}", unit, ours=lambda i: call(),
        peers=[{"PyTorch F.rms_norm, rotate, index_copy_" if whole_step else "PyTorch rotate": peer}, *copy_peer(context, amount)],
        check=check, bound=BOUNDS[dtype], outputs=[query_output, key_output], amount=amount)

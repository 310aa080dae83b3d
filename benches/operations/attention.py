"""Attention, prefill and decode, beside PyTorch's scaled_dot_product_attention and the published FlashAttention 3."""
import dataclasses
from functools import partial

import published
import torch
import torch.nn.functional as F
from case import BOUNDS, Case, relative_error, sample_indices
from torch.nn.attention import SDPBackend, sdpa_kernel

BACK_ENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
# Above this many tokens the CPU's peer gets one layout alone: a call takes most of a second.
LONG_ON_CPU = 4096
OURS_IN_F32 = "nvbackend, F32"
FLASH_ATTENTION_3 = "FlashAttention 3 (published figure, another run)"


def sdpa(q, k, v, back_end, **options):
    """A call of PyTorch's attention on [batch, heads, tokens, head_dim], by one back end or its own choice."""
    def call(_):
        if back_end is None:
            return F.scaled_dot_product_attention(q, k, v, **options)
        with sdpa_kernel(back_end):
            return F.scaled_dot_product_attention(q, k, v, **options)
    return call


def prefill_reference(q, k, v, rows, causal):
    """f64 attention of the queries `rows` of one head: [rows, head_dim] of q, k, v [tokens, head_dim]. The last query stands at the
    last key."""
    scores = q[rows].double() @ k.double().T * q.shape[-1] ** -0.5
    if causal:
        positions = rows + k.shape[0] - q.shape[0]
        scores.masked_fill_(torch.arange(k.shape[0], device=k.device) > positions[:, None], -torch.inf)
    return scores.softmax(-1) @ v.double()


def in_f32(context, make):
    """Our own call on F32 as a peer of another dtype's; `make` makes a case of a context."""
    if context.dtype == torch.float32:
        return []
    case = make(dataclasses.replace(context, dtype=torch.float32))
    return [{OURS_IN_F32: lambda i: case.ours(i % case.rotation)}]


def prefill_case(context, batch, length, query_heads, kv_heads, head_dim, causal, beside_f32=False):
    dtype, tokens = context.dtype, batch * length
    q = context.randn(tokens, query_heads, head_dim)
    k, v = (context.randn(tokens, kv_heads, head_dim) for _ in range(2))
    output = torch.empty_like(q)
    starts = list(range(0, tokens + 1, length))
    attention = context.backend.attention(query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim, bidirectional=not causal)
    call = context.backend.attention_prefill(attention, starts, starts, query=q, key=k, value=v, output=output)

    # PyTorch's back ends differ in the layout that they like: each gets both, heads before tokens and after.
    views = [x.view(batch, length, -1, head_dim).transpose(1, 2) for x in (q, k, v)]
    settings = {"is_causal": causal, "enable_gqa": query_heads != kv_heads}
    peers = {}
    layouts = {"": [x.contiguous() for x in views], ", tokens before heads": views}
    if context.device.type == "cpu" and length > LONG_ON_CPU:
        del layouts[", tokens before heads"]
    for layout, (a, b, c) in layouts.items():
        if context.device.type == "cuda":
            peers |= {f"PyTorch SDPA {name}{layout}": sdpa(a, b, c, back_end, **settings) for name, back_end in BACK_ENDS.items()}
        else:
            peers[f"PyTorch SDPA{layout}"] = sdpa(a, b, c, None, **settings)

    rows = sample_indices(length, 32, context.device)

    def check(_):
        pairs = []
        for b in {0, batch - 1}:
            for head in {0, query_heads - 1}:
                part = slice(b * length, (b + 1) * length)
                kv_head = head * kv_heads // query_heads
                reference = prefill_reference(q[part, head], k[part, kv_head], v[part, kv_head], rows, causal)
                pairs.append((output[part, head][rows], reference))
        return relative_error(pairs, [output])

    heads = str(query_heads) if query_heads == kv_heads else f"{query_heads}/{kv_heads}"
    mask = "causal" if causal else "full"
    quoted = published.flash_attention_3_prefill(context, head_dim, mask, length) if query_heads == kv_heads else None
    twin = in_f32(context, lambda f32: prefill_case(f32, batch, length, query_heads, kv_heads, head_dim, causal)) if beside_f32 else []
    return Case(
        f"attention prefill {context.name_of(dtype)}", f"d={head_dim} {mask} s={length} b={batch} h={heads}",
        "TFLOP/s" if context.device.type == "cuda" else "GFLOP/s",
        ours=lambda i: call(), peers=[peers, *twin], check=check, bound=BOUNDS[dtype], outputs=[output],
        amount=4 * batch * query_heads * length**2 * head_dim * (0.5 if causal else 1),
        quoted={FLASH_ATTENTION_3: quoted} if quoted else {})


def filled_cache(context, batch, length, kv_heads, head_dim, layers):
    """A cache full of random tokens, and of each layer its keys and values as [batch, kv_heads, length, head_dim]."""
    cache = context.backend.kv_cache(
        context.dtype, layers=layers, sequences=batch, kv_heads=kv_heads, head_dim=head_dim, capacity=length)
    positions = torch.arange(length, device=context.device, dtype=torch.int32).repeat(batch)
    sequences = torch.arange(batch, device=context.device, dtype=torch.int32).repeat_interleave(length)
    keys, values = [], []
    for layer in range(layers):
        k, v = (context.randn(batch * length, kv_heads, head_dim) for _ in range(2))
        context.backend.operation("kv_cache_append", key=k, value=v, positions=positions, sequences=sequences, cache=cache, layer=layer)()
        for store, x in ((keys, k), (values, v)):
            store.append(x.view(batch, length, kv_heads, head_dim).transpose(1, 2).contiguous())
    return cache, keys, values


def chunk_case(context, rows, length, query_heads, kv_heads, head_dim, beside_f32=False):
    """The last `rows` tokens of a sequence of `length`, whose keys are in a cache."""
    dtype = context.dtype
    cache, (keys,), (values,) = filled_cache(context, 1, length, kv_heads, head_dim, 1)
    q = context.randn(rows, query_heads, head_dim)
    output = torch.empty_like(q)
    attention = context.backend.attention(query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim)
    call = context.backend.attention_chunk(attention, cache, [0, rows], [0], [length], query=q, output=output)

    # PyTorch's own causal mask is aligned to the first key; the mask of a chunk is a tensor.
    seen = torch.ones(rows, length, dtype=torch.bool, device=context.device).tril(length - rows)
    added = torch.zeros(rows, length, dtype=dtype, device=context.device).masked_fill_(~seen, -torch.inf)
    q_of_peer = q.transpose(0, 1).unsqueeze(0).contiguous()
    settings = {"enable_gqa": query_heads != kv_heads}
    peers = {f"PyTorch SDPA{name}": sdpa(q_of_peer, keys, values, None, attn_mask=mask, **settings)
             for name, mask in ((", boolean mask", seen), (", added mask", added))}
    sampled = sample_indices(rows, 32, context.device)

    def check(_):
        group = query_heads // kv_heads
        return relative_error(
            [(output[sampled, head], prefill_reference(q[:, head], keys[0, head // group], values[0, head // group], sampled, True))
             for head in {0, query_heads - 1}], [output])

    twin = in_f32(context, lambda f32: chunk_case(f32, rows, length, query_heads, kv_heads, head_dim)) if beside_f32 else []
    return Case(
        f"attention prefill {context.name_of(dtype)}", f"d={head_dim} causal s={rows} of {length} b=1 h={query_heads}/{kv_heads}",
        "TFLOP/s" if context.device.type == "cuda" else "GFLOP/s",
        ours=lambda i: call(), peers=[peers, *twin], check=check, bound=BOUNDS[dtype], outputs=[output],
        amount=4 * query_heads * head_dim * rows * (length - (rows - 1) / 2))


def decode_case(context, batch, length, query_heads, kv_heads, head_dim, beside_f32=False, recorded=False):
    """One query token a sequence over `length` cached tokens. Caches are rotated as layers of one cache. `recorded`: as a graph of
    the library, which knows that no node writes the cache, so that a call reads keys while the one before it ends."""
    dtype = context.dtype
    layer_bytes = 2 * batch * length * kv_heads * head_dim * dtype.itemsize
    rotation = context.rotation(layer_bytes)
    cache, keys, values = filled_cache(context, batch, length, kv_heads, head_dim, rotation)
    q = context.randn(batch, query_heads, head_dim)
    output = torch.empty_like(q)
    last = torch.full((batch,), length - 1, device=context.device, dtype=torch.int32)
    attention = context.backend.attention(query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim)
    calls = [
        context.backend.attention_decode(attention, cache, query=q, output=output, positions=last, layer=layer, max_kv_length=length)
        for layer in range(rotation)]

    q_of_peer = q.unsqueeze(2)

    def peer(back_end):
        settings = {"enable_gqa": query_heads != kv_heads}
        layers = [sdpa(q_of_peer, k, v, back_end, **settings) for k, v in zip(keys, values)]
        return lambda i: layers[i](i)

    peers = {"PyTorch SDPA": peer(None)}
    if context.device.type == "cuda":
        peers |= {f"PyTorch SDPA {name}": peer(back_end) for name, back_end in BACK_ENDS.items()}

    def check(layer):
        pairs, group = [], query_heads // kv_heads
        for b in {0, batch - 1}:
            for head in range(kv_heads):
                k, v = keys[layer][b, head].double(), values[layer][b, head].double()
                part = slice(head * group, (head + 1) * group)
                pairs.append((output[b, part], (q[b, part].double() @ k.T * head_dim**-0.5).softmax(-1) @ v))
        return relative_error(pairs, [output])

    quoted = published.flash_attention_3_decode(context, head_dim, query_heads, kv_heads, batch, length)
    twin = in_f32(context, lambda f32: decode_case(f32, batch, length, query_heads, kv_heads, head_dim)) if beside_f32 else []
    return Case(
        f"attention decode {context.name_of(dtype)}{', recorded' if recorded else ''}", f"d={head_dim} h={query_heads}/{kv_heads} b={batch} kv={length}",
        "TB/s" if context.device.type == "cuda" else "GB/s",
        ours=lambda i: calls[i](), peers=[peers, *twin], check=check, bound=BOUNDS[dtype], outputs=[output],
        amount=layer_bytes, rotation=rotation, quoted={FLASH_ATTENTION_3: quoted} if quoted else {},
        record=context.backend.record if recorded else None)


def prefill(context, dimensions, lengths, tokens):
    """`dimensions` are (head_dim, heads); `tokens` in all, in sequences of each of `lengths`."""
    for head_dim, heads in dimensions:
        for causal in (False, True):
            for length in lengths:
                yield partial(prefill_case, context, tokens // length, length, heads, heads, head_dim, causal)


def decode(context, dimensions, batches, recorded=False):
    """`dimensions` are (head_dim, query heads, key/value heads), `batches` (sequences, cached tokens of each)."""
    for head_dim, query_heads, kv_heads in dimensions:
        for batch, length in batches:
            yield partial(decode_case, context, batch, length, query_heads, kv_heads, head_dim, recorded=recorded)


def prefill_model(context, lengths):
    """One causal sequence with the model's grouped heads."""
    model = context.model
    for length in lengths:
        yield partial(prefill_case, context, 1, length, model.query_heads, model.kv_heads, model.head_dim, True)


def grouped(context, dimensions, lengths, rows, query_heads, kv_heads):
    """One sequence with grouped heads in F32 and BF16: prefill, a chunk of `rows` over the cache, decode. The rates of our own F32
    stand beside those of BF16, of decode too: bytes of BF16 in the time of the call."""
    for dtype in (torch.float32, torch.bfloat16):
        of_dtype = dataclasses.replace(context, dtype=dtype)
        for head_dim in dimensions:
            shape = (query_heads, kv_heads, head_dim)
            for length in lengths:
                yield partial(decode_case, of_dtype, 1, length, *shape, beside_f32=True)
                yield partial(prefill_case, of_dtype, 1, length, *shape, True, beside_f32=True)
            yield partial(chunk_case, of_dtype, rows, max(lengths), *shape, beside_f32=True)

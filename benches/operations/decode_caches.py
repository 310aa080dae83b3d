"""Decode over caches in FP8 and in pages, of unequal sequences and with several queries a sequence. The peer of each is our own
decode over the contiguous cache of BF16, equal sequences or one query that it is judged against."""
from functools import partial

import torch
from case import BOUNDS, Case, relative_error

FP8 = torch.float8_e4m3fn


class Filled:
    """A cache whose sequences hold `lengths` random tokens in each layer. `keys` and `values` are of each layer what the cache
    holds, but for the rounding of rows with scales of their own: [tokens of all sequences, kv_heads, head_dim]."""

    def __init__(self, context, lengths, kv_heads, head_dim, layers, dtype, page_tokens=0):
        self.context, self.lengths, self.layers = context, lengths, layers
        self.shape = (kv_heads, head_dim)
        self.cache = context.backend.kv_cache(
            dtype, layers=layers, sequences=len(lengths), kv_heads=kv_heads, head_dim=head_dim, capacity=max(lengths),
            page_tokens=page_tokens)
        if page_tokens:
            # A page of each sequence in turn, so that those of one sequence lie apart.
            for held in range(page_tokens, max(lengths) + page_tokens, page_tokens):
                for sequence, length in enumerate(lengths):
                    context.backend.reserve(self.cache, sequence, min(held, length))
        device = context.device
        positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths]).to(device)
        counts = torch.tensor(lengths)
        sequences = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(counts).to(device)
        self.keys, self.values = [], []
        for layer in range(layers):
            k, v = (context.randn(len(positions), kv_heads, head_dim) for _ in range(2))
            context.backend.operation(
                "kv_cache_append", key=k, value=v, positions=positions, sequences=sequences, cache=self.cache, layer=layer)()
            stored = dtype if isinstance(dtype, torch.dtype) else context.dtype
            self.keys.append(k.to(stored))
            self.values.append(v.to(stored))

    def decode(self, query_heads, rows=1):
        """Calls of the layers with the last `rows` tokens of each sequence as queries, the output, and a check of a layer."""
        context, (kv_heads, head_dim) = self.context, self.shape
        q = context.randn(len(self.lengths) * rows, query_heads, head_dim)
        output = torch.empty_like(q)
        last = torch.tensor([length - rows + row for length in self.lengths for row in range(rows)], dtype=torch.int32)
        last = last.to(context.device)
        attention = context.backend.attention(query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim)
        calls = [
            context.backend.attention_decode(
                attention, self.cache, query=q, output=output, positions=last, layer=layer, max_kv_length=max(self.lengths),
                rows_per_sequence=rows)
            for layer in range(self.layers)]

        def check(layer):
            pairs, group = [], query_heads // kv_heads
            for b in {0, len(self.lengths) // 2, len(self.lengths) - 1}:
                first = sum(self.lengths[:b])
                for row in range(rows):
                    seen = slice(first, first + self.lengths[b] - rows + row + 1)
                    for head in {0, kv_heads - 1}:
                        k, v = (x[layer][seen, head].double() for x in (self.keys, self.values))
                        part = slice(head * group, (head + 1) * group)
                        scores = q[b * rows + row, part].double() @ k.T * head_dim**-0.5
                        pairs.append((output[b * rows + row, part], scores.softmax(-1) @ v))
            return relative_error(pairs, [output])

        return calls, output, check


def case(context, operation, name, unit, ours, peer, peer_name, rotation, **amounts):
    """`ours` and `peer` are what `Filled.decode` gives."""
    calls, output, check = ours
    return Case(
        operation, name, unit, ours=lambda i: calls[i](), peers=[{f"nvbackend, {peer_name}": lambda i: peer[0][i]()}], check=check,
        bound=BOUNDS[context.dtype], outputs=[output], rotation=rotation, **amounts)


def rotation_of(context, lengths, kv_heads, head_dim, bytes_of_element):
    return context.rotation(2 * sum(lengths) * kv_heads * head_dim * bytes_of_element)


def fp8_case(context, batch, length, query_heads, kv_heads, head_dim):
    """Queries of 16 bits over E4M3, in tokens, so that the rate does not count bytes that FP8 need not read."""
    lengths = [length] * batch
    rotation = rotation_of(context, lengths, kv_heads, head_dim, 1)
    fp8, wide = (Filled(context, lengths, kv_heads, head_dim, rotation, dtype) for dtype in (FP8, context.dtype))
    return case(
        context, "attention decode fp8 cache", f"d={head_dim} h={query_heads}/{kv_heads} b={batch} kv={length}", "Gtoken/s",
        fp8.decode(query_heads), wide.decode(query_heads), "cache of 16 bits", rotation, amount=sum(lengths))


def unequal_case(context, batch, shortest, longest, query_heads, kv_heads, head_dim):
    """Lengths in equal ratios from the shortest to the longest, in a fixed order that is not theirs, beside as many tokens in equal
    sequences."""
    lengths = [round(shortest * (longest / shortest) ** (i / (batch - 1))) for i in range(batch)]
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(5)).tolist()
    lengths = [lengths[i] for i in order]
    equal = [sum(lengths) // batch] * batch
    rotation = rotation_of(context, lengths, kv_heads, head_dim, context.dtype.itemsize)
    unequal, same = (Filled(context, some, kv_heads, head_dim, rotation, context.dtype) for some in (lengths, equal))
    peer_name = "sequences of equal length"
    return case(
        context, "attention decode unequal", f"d={head_dim} h={query_heads}/{kv_heads} b={batch} kv={shortest} to {longest}", "Gtoken/s",
        unequal.decode(query_heads), same.decode(query_heads), peer_name, rotation, amount=sum(lengths),
        amounts={f"nvbackend, {peer_name}": sum(equal)})


def rows_case(context, rows, batch, length, query_heads, kv_heads, head_dim):
    lengths = [length] * batch
    rotation = rotation_of(context, lengths, kv_heads, head_dim, context.dtype.itemsize)
    filled = Filled(context, lengths, kv_heads, head_dim, rotation, context.dtype)
    return case(
        context, f"attention decode of {rows} queries", f"d={head_dim} h={query_heads}/{kv_heads} b={batch} kv={length}", "µs",
        filled.decode(query_heads, rows), filled.decode(query_heads), "one query a sequence", rotation)


def pages_case(context, page_tokens, batch, length, query_heads, kv_heads, head_dim):
    lengths = [length] * batch
    rotation = rotation_of(context, lengths, kv_heads, head_dim, context.dtype.itemsize)
    pages, whole = (Filled(context, lengths, kv_heads, head_dim, rotation, context.dtype, page_tokens=tokens) for tokens in (page_tokens, 0))
    return case(
        context, f"attention decode, pages of {page_tokens}", f"d={head_dim} h={query_heads}/{kv_heads} b={batch} kv={length}", "TB/s",
        pages.decode(query_heads), whole.decode(query_heads), "contiguous cache", rotation,
        amount=2 * sum(lengths) * kv_heads * head_dim * context.dtype.itemsize)


def fp8(context, dimensions, batches):
    """`dimensions` are (head_dim, query heads, key/value heads), `batches` (sequences, cached tokens of each)."""
    for head_dim, query_heads, kv_heads in dimensions:
        for batch, length in batches:
            yield partial(fp8_case, context, batch, length, query_heads, kv_heads, head_dim)


def unequal(context, dimensions, batch, shortest, longest):
    for head_dim, query_heads, kv_heads in dimensions:
        yield partial(unequal_case, context, batch, shortest, longest, query_heads, kv_heads, head_dim)


def rows(context, dimensions, counts, batches):
    for head_dim, query_heads, kv_heads in dimensions:
        for batch, length in batches:
            for count in counts:
                yield partial(rows_case, context, count, batch, length, query_heads, kv_heads, head_dim)


def pages(context, dimensions, page_tokens, batches):
    for head_dim, query_heads, kv_heads in dimensions:
        for batch, length in batches:
            yield partial(pages_case, context, page_tokens, batch, length, query_heads, kv_heads, head_dim)

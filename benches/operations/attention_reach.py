"""What masks, terms of heads, dropout and other caches cost. The peer of each is our own call that it is judged against: without
it, or over a cache of 16 bits."""
import dataclasses
from functools import partial

import torch
from case import BOUNDS, Case, relative_error, sample_indices
from operations import decode_caches

WORD = 32
# Rows and keys of the areas of a mask of bits that have all of them set or none.
AREA = 128


@dataclasses.dataclass
class Option:
    """A prefill with one thing more: fields of the attention and of the call, which keys a row sees, and what is added to scores."""
    name: str
    settings: dict = dataclasses.field(default_factory=dict)
    arguments: dict = dataclasses.field(default_factory=dict)
    # Of [rows] positions and [keys] numbers what is seen, a boolean [rows, keys], or what is added to scores, f64; None: as causal.
    seen: object = None
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    # The share of pairs that is computed, of those of the peer.
    share: float = 1.0
    bidirectional: bool = False
    # Dropout has no reference here: tests/conformance/attention_dropout.rs has.
    checked: bool = True


def bits_option(context, length, empty):
    """Areas of which a share is empty and the others are full, but for the diagonal's, which have every other key."""
    areas = -(-length // AREA)
    generator = torch.Generator().manual_seed(3)
    full = torch.rand(areas, areas, generator=generator) >= empty
    full.fill_diagonal_(True)
    number = torch.arange(length)
    seen = full[number[:, None] // AREA, number[None, :] // AREA]
    same = number[:, None] // AREA == number[None, :] // AREA
    seen = (seen & ~(same & (number[None, :] % 2 == 1))).to(context.device)
    words = -(-length // WORD)
    padded = torch.zeros(length, words * WORD, dtype=torch.int64, device=context.device)
    padded[:, :length] = seen
    packed = (padded.view(length, words, WORD) << torch.arange(WORD, device=context.device)).sum(-1)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    return Option(f"bits, {empty:.0%} of tiles empty", arguments={"mask": packed}, seen=lambda rows, keys: seen[rows],
                  share=full.double().mean().item(), bidirectional=True)


def options_of(context, length, heads):
    """Each beside the causal or full attention without it, with the share of its pairs."""
    device = context.device
    chunk, prefix, window = length // 8, length // 4, length // 16
    sinks = torch.randn(heads, device=device)
    slopes = 2.0 ** -torch.linspace(1, 8, heads, device=device)
    pairs = length * length / 2
    yield Option("chunked window", settings={"chunk": chunk}, seen=lambda rows, keys: (keys <= rows[:, None]) & (keys // chunk == rows[:, None] // chunk),
                 share=length * chunk / 2 / pairs)
    yield Option("prefix", arguments={"prefix_lengths": [prefix]},
                 seen=lambda rows, keys: (keys <= rows[:, None]) | (keys < prefix), share=(pairs + prefix * prefix / 2) / pairs)
    yield Option("sinks", arguments={"sinks": sinks}, sinks=sinks)
    yield Option("sinks, window", settings={"window": window}, arguments={"sinks": sinks}, sinks=sinks,
                 seen=lambda rows, keys: (keys <= rows[:, None]) & (rows[:, None] - keys < window),
                 share=(window * (length - window / 2)) / pairs)
    yield Option("ALiBi", arguments={"alibi_slopes": slopes}, slopes=slopes)
    yield Option("dropout", arguments={"dropout": 0.1, "dropout_seed": 7}, checked=False)
    for empty in (0.0, 0.9):
        yield bits_option(context, length, empty)
    added = torch.randn(1, 1, length, length, device=device, dtype=context.dtype)
    yield Option("added mask", arguments={"mask": added}, bidirectional=True, seen=lambda rows, keys: added[0, 0, rows].double())


def option_case(context, option, length, heads, head_dim):
    q, k, v = (context.randn(length, heads, head_dim) for _ in range(3))
    output, plain_output = torch.empty_like(q), torch.empty_like(q)
    shape = {"query_heads": heads, "kv_heads": heads, "head_dim": head_dim, "bidirectional": option.bidirectional}
    starts = [0, length]
    attention = context.backend.attention(**shape, **option.settings)
    plain = context.backend.attention(**shape)
    call = context.backend.attention_prefill(attention, starts, starts, query=q, key=k, value=v, output=output, **option.arguments)
    without = context.backend.attention_prefill(plain, starts, starts, query=q, key=k, value=v, output=plain_output)
    rows = sample_indices(length, 32, context.device)

    def reference(head):
        keys = torch.arange(length, device=context.device)
        scores = q[rows, head].double() @ k[:, head].double().T * head_dim**-0.5
        if option.slopes is not None:
            scores -= option.slopes[head].double() * (rows[:, None] - keys).abs()
        seen = option.seen(rows, keys) if option.seen else keys <= rows[:, None]
        scores = scores + seen if seen.is_floating_point() else scores.masked_fill(~seen, -torch.inf)
        if option.sinks is not None:
            sink = option.sinks[head].double().expand(len(rows), 1)
            return torch.cat([scores, sink], 1).softmax(-1)[:, :-1] @ v[:, head].double()
        return scores.softmax(-1) @ v[:, head].double()

    def check(_):
        if not option.checked:
            return 0.0 if torch.isfinite(output).all() else float("inf")
        return relative_error([(output[rows, head], reference(head)) for head in {0, heads - 1}], [output])

    operations = 4 * heads * length**2 * head_dim * (1 if option.bidirectional else 0.5)
    name = "nvbackend, without"
    return Case(
        f"attention prefill {option.name}", f"d={head_dim} s={length} h={heads}", "TFLOP/s" if context.device.type == "cuda" else "GFLOP/s",
        ours=lambda i: call(), peers=[{name: lambda i: without()}], check=check, bound=BOUNDS[context.dtype],
        outputs=[output], amount=operations * option.share, amounts={name: operations})


def rows_of_scales_case(context, form, batch, length, query_heads, kv_heads, head_dim):
    """A cache in 8 or 4 bits, in tokens, beside one in 16 bits. What it holds is not read back: tests/conformance/kv_cache_rows.rs
    compares it, so the bound is that of the rounding."""
    lengths = [length] * batch
    rotation = decode_caches.rotation_of(context, lengths, kv_heads, head_dim, 1)
    packed, wide = (decode_caches.Filled(context, lengths, kv_heads, head_dim, rotation, dtype) for dtype in (form, context.dtype))
    case = decode_caches.case(
        context, f"attention decode {form} cache", f"d={head_dim} h={query_heads}/{kv_heads} b={batch} kv={length}", "Gtoken/s",
        packed.decode(query_heads), wide.decode(query_heads), "cache of 16 bits", rotation, amount=sum(lengths))
    return dataclasses.replace(case, bound={"int8": 0.02, "q8_0": 0.02, "q4_0": 0.2}[form])


def masks(context, length, shapes):
    """`shapes` are (head_dim, heads)."""
    for head_dim, heads in shapes:
        for option in options_of(context, length, heads):
            yield partial(option_case, context, option, length, heads, head_dim)


def caches(context, forms, dimensions, batches):
    for form in forms:
        for head_dim, query_heads, kv_heads in dimensions:
            for batch, length in batches:
                yield partial(rows_of_scales_case, context, form, batch, length, query_heads, kv_heads, head_dim)

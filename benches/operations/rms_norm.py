"""RMSNorm, alone and with the addition of the residual that Gemma puts before it, beside PyTorch's F.rms_norm."""
from functools import partial

import torch.nn.functional as F
from case import BOUNDS, Case, copy_peer, relative_error

EPSILON = 1e-6


def reference_norm(x, weight):
    """f64, with Gemma's weights w − 1."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * (1 + weight.double())


def rms_norm(context, tokens, wide=()):
    """Of the model's width, and of the shapes `wide` (tokens, width), where a copy of as many bytes is the other peer."""
    for count, width in [(count, context.model.width) for count in tokens] + list(wide):
        yield partial(plain_case, context, count, width)
        yield partial(residual_case, context, count, width)


def buffers(context, count, width, how_many):
    """Inputs [rotation][how_many] of [count, width]."""
    rotation = context.rotation(count * width * context.dtype.itemsize) if count > 64 else 1
    return [[context.randn(count, width) for _ in range(how_many)] for _ in range(rotation)]


def rate(context, count, width, passes):
    """Many tokens: the bytes read and written a second. Few: the time."""
    if count <= 64:
        return "µs", 0
    return ("TB/s" if context.device.type == "cuda" else "GB/s"), passes * count * width * context.dtype.itemsize


def plain_case(context, count, width):
    inputs = buffers(context, count, width, 1)
    weight = context.randn(width) * 0.1
    folded = 1 + weight
    output = context.empty(count, width)
    calls = [context.backend.operation("rms_norm", input=x, weight=weight, output=output, epsilon=EPSILON, weight_offset=1.0)
             for (x,) in inputs]
    unit, amount = rate(context, count, width, 2)
    copy = copy_peer(context, amount)
    return Case(
        f"rms_norm {context.name_of(context.dtype)}", f"tokens={count} width={width}", unit, ours=lambda i: calls[i](),
        peers=[{"PyTorch F.rms_norm": lambda i: F.rms_norm(inputs[i][0], (width,), folded, EPSILON)}, *copy],
        check=lambda i: relative_error([(output, reference_norm(inputs[i][0], weight))], [output]),
        bound=BOUNDS[context.dtype], outputs=[output], amount=amount, rotation=len(inputs))


def residual_case(context, count, width):
    """s = residual + norm(input); output = norm(s): Gemma 2 and 3 between attention and feed-forward."""
    inputs = buffers(context, count, width, 2)
    post_weight, weight = (context.randn(width) * 0.1 for _ in range(2))
    folded_post, folded = 1 + post_weight, 1 + weight
    output, residual_output = context.empty(count, width), context.empty(count, width)
    calls = [
        context.backend.operation(
            "rms_norm", input=x, post_weight=post_weight, residual=residual, residual_output=residual_output, weight=weight,
            output=output, epsilon=EPSILON, weight_offset=1.0)
        for x, residual in inputs]

    def peer(i):
        x, residual = inputs[i]
        summed = residual + F.rms_norm(x, (width,), folded_post, EPSILON)
        return summed, F.rms_norm(summed, (width,), folded, EPSILON)

    def check(i):
        x, residual = inputs[i]
        summed = residual.double() + reference_norm(x, post_weight)
        pairs = [(residual_output, summed), (output, reference_norm(summed, weight))]
        return relative_error(pairs, [output, residual_output])

    unit, amount = rate(context, count, width, 4)
    copy = copy_peer(context, amount)
    return Case(
        f"rms_norm add {context.name_of(context.dtype)}", f"tokens={count} width={width}", unit, ours=lambda i: calls[i](),
        peers=[{"PyTorch F.rms_norm, add, F.rms_norm": peer}, *copy], check=check, bound=BOUNDS[context.dtype],
        outputs=[output, residual_output], amount=amount, rotation=len(inputs))

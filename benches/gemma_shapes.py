"""Shapes of Gemma 3's text models, and the least work of a token that follows from them."""

# Layers, width, feed-forward width, query heads, key/value heads, window; heads are 256 wide.
SHAPES = {
    "gemma3-270m": (18, 640, 2048, 4, 1, 512),
    "gemma3-1b": (26, 1152, 6912, 4, 1, 512),
    "gemma3-4b": (34, 2560, 10240, 8, 4, 1024),
    "gemma3-12b": (48, 3840, 15360, 16, 8, 1024),
}
HEAD_DIM, VOCABULARY = 256, 262144


def parameters(name):
    """Weights of the layers, and of the token table, which is multiplied with once for each token that is chosen."""
    layers, width, feed_forward, heads, kv_heads, _ = SHAPES[name]
    return layers * width * (HEAD_DIM * 2 * (heads + kv_heads) + 3 * feed_forward), VOCABULARY * width


def decode_bytes(name, weight_bits=16, table_bits=16):
    """Bytes of weights that one token of one sequence reads; keys and values are not counted."""
    weights, table = parameters(name)
    return round(weights * weight_bits / 8 + table * table_bits / 8)


def prefill_operations(name):
    """Two operations of a token for each weight of the layers; attention is not counted."""
    return 2 * parameters(name)[0]

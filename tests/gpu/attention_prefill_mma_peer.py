"""TFLOP/s of PyTorch's FlashAttention 2 on the shapes of attention_prefill_mma.cu, replayed from graphs as there. A file of that
program's `bench` output as argument adds what each tile reaches beside it."""

import math
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS = 16384
LENGTHS = [512 << i for i in range(6)]


def measure(head_dim: int, causal: bool, length: int) -> float:
    heads, batch = 2048 // head_dim, TOKENS // length
    query, key, value = (
        torch.randn(batch, length, heads, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(3)
    )
    operations = 4 * batch * heads * length * length * head_dim / (2 if causal else 1)
    launches = max(2, min(100, int(4e-3 * 500e12 / operations)))

    def attention():
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

    times = []
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with torch.cuda.stream(torch.cuda.Stream()):
            attention()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(launches):
                attention()
        for turn in range(8):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 2:
                times.append(begin.elapsed_time(end))
    return operations * launches / (sorted(times)[len(times) // 2] * 1e-3) / 1e12


def main():
    peers = {}
    for head_dim in (64, 128, 256):
        rates = [measure(head_dim, causal, length) for causal in (False, True) for length in LENGTHS]
        peers[head_dim] = rates
        print(f"FlashAttention 2, head_dim {head_dim:<16}", " ".join(f"{rate:4.0f}" for rate in rates), flush=True)
    best = {}
    for line in open(sys.argv[1]) if len(sys.argv) > 1 else []:
        tile, *numbers = line.split()
        if "," not in tile or len(numbers) != 2 * len(LENGTHS):
            continue
        head_dim = int(tile.split(",")[0])
        shares = [float(number) / peer for number, peer in zip(numbers, peers[head_dim])]
        mean = math.exp(sum(map(math.log, shares)) / len(shares))
        best[head_dim] = max(best.get(head_dim, 0), mean)
        print(f"{tile:<34} {mean:.3f}:", " ".join(f"{share:.2f}" for share in shares))
    if len(best) == 3:
        print(f"geometric mean of the best tiles: {math.prod(best.values()) ** (1 / 3):.3f}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Times every operation on one NVIDIA GPU beside PyTorch in the same process and run; benches/README.md says how to read it.

Both sides run on one stream, which the library wraps, as captured graphs. `--device cpu --quick` runs tiny cases of every
section on the CPU, to see that the program itself works.
"""
import argparse
import contextlib

import nvb
import record
import timing
import torch
from case import GEMMA_3_4B, QUICK, Context, run
from operations import attention, attention_reach, decode_caches, elementwise, embedding, grouped_linear, linear, linear_large, linear_quantized, memory, rms_norm, rope, sampling

ROWS = (1, 4, 8, 16, 64, 512, 4096)
TOKENS = (1, 64, 4096)
PREFILL_DIMENSIONS = ((64, 32), (128, 16), (256, 8))
PREFILL_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
DECODE_DIMENSIONS = ((128, 32, 8), (256, 8, 4), (256, 16, 8), (64, 32, 8))
DECODE_BATCHES = ((1, 4096), (1, 32768), (1, 131072), (8, 8192), (64, 4096), (128, 1024))
QUANTIZED_SHAPES = ((14336, 4096), (2560, 2048), (4096, 2560), (20480, 2560), (2560, 10240))
# QKV, output, gate and up, down of Llama 3 8B and 70B.
LLAMA_SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336),
                (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))
LARGE_SHAPES = ((512, 14336, 4096), (2048, 14336, 4096), (8192, 14336, 4096))
# Gate and up, and down, of a Qwen3-30B-A3B.
EXPERT_SHAPES = ((128, 1536, 2048), (128, 2048, 768))
GATED_SHAPES = ((512, 20480, 2560), (4096, 20480, 2560), (2048, 28672, 4096))
# Twice the 60 MB that the largest second-level caches of today's GPUs hold.
COLD_BYTES = 120_000_000

SECTIONS = {
    "memory": memory.memory,
    "linear": lambda c: linear.linear(c, ROWS, [(14336, 4096)], c.dtype),
    "linear_quantized": lambda c: linear_quantized.linear_quantized_gpu(c, (1, 16, 64), QUANTIZED_SHAPES),
    "linear_quantized_llama": lambda c: linear_quantized.linear_quantized_gpu(c, (1, 8, 16, 64), LLAMA_SHAPES),
    "linear_large": lambda c: linear_large.linear_large(c, LARGE_SHAPES, GATED_SHAPES),
    "grouped_linear": lambda c: grouped_linear.grouped_linear(c, (1, 16, 512), EXPERT_SHAPES, ("bf16", "int8", "int4")),
    "decode": lambda c: attention.decode(c, DECODE_DIMENSIONS, DECODE_BATCHES),
    "decode_recorded": lambda c: attention.decode(c, DECODE_DIMENSIONS, DECODE_BATCHES, recorded=True),
    "decode_fp8": lambda c: decode_caches.fp8(c, DECODE_DIMENSIONS[:2], DECODE_BATCHES),
    "decode_unequal": lambda c: decode_caches.unequal(c, DECODE_DIMENSIONS, 32, 128, 16384),
    "decode_rows": lambda c: decode_caches.rows(c, DECODE_DIMENSIONS, (4,), ((1, 4096), (64, 4096))),
    "decode_pages": lambda c: decode_caches.pages(c, DECODE_DIMENSIONS, 16, DECODE_BATCHES),
    "decode_rows_of_scales": lambda c: attention_reach.caches(c, ("int8", "q8_0", "q4_0"), DECODE_DIMENSIONS[:1], ((1, 4096), (8, 8192), (64, 4096))),
    "prefill": lambda c: attention.prefill(c, PREFILL_DIMENSIONS, PREFILL_LENGTHS, 16384),
    "prefill_masks": lambda c: attention_reach.masks(c, 16384, PREFILL_DIMENSIONS),
    "prefill_model": lambda c: attention.prefill_model(c, (512, 4096)),
    "rms_norm": lambda c: rms_norm.rms_norm(c, TOKENS, [(16384, 4096)]),
    "rope": lambda c: rope.rope(c, (1, 64, 4096), [(16384, 12, 4)]),
    "embedding": lambda c: embedding.embedding(c, TOKENS),
    "elementwise": lambda c: elementwise.add(c, TOKENS),
    "gated_activation": lambda c: elementwise.gated_activation(c, TOKENS),
    "softmax": lambda c: elementwise.softmax(c, ((1, 262144), (4096, 4096))),
    "argmax": lambda c: sampling.argmax(c, (1, 64)),
    "sample": lambda c: sampling.sample(c, (1, 64)),
}
QUICK_SECTIONS = SECTIONS | {
    "linear": lambda c: linear.linear(c, (1, 3, 65), [(130, 64)], c.dtype),
    "linear_quantized": lambda c: linear_quantized.linear_quantized_gpu(c, (1, 3), [(144, 64)]),
    "linear_quantized_llama": lambda c: linear_quantized.linear_quantized_gpu(c, (5,), [(160, 128)]),
    "linear_large": lambda c: linear_large.linear_large(c, ((200, 256, 128),), ((200, 192, 64),)),
    "grouped_linear": lambda c: grouped_linear.grouped_linear(c, (1, 3), [(4, 32, 64)], ("bf16", "int8", "int4")),
    "rms_norm": lambda c: rms_norm.rms_norm(c, TOKENS[:2], [(70, 48)]),
    "rope": lambda c: rope.rope(c, (1, 64), [(4099, 3, 1)]),
    "decode": lambda c: attention.decode(c, ((16, 4, 2),), ((1, 40), (3, 17))),
    "decode_recorded": lambda c: attention.decode(c, ((16, 4, 2),), ((1, 40), (3, 17)), recorded=True),
    "decode_fp8": lambda c: decode_caches.fp8(c, ((16, 4, 2),), ((1, 40), (3, 17))),
    "decode_unequal": lambda c: decode_caches.unequal(c, ((16, 4, 2),), 4, 5, 60),
    "decode_rows": lambda c: decode_caches.rows(c, ((16, 4, 2),), (4,), ((1, 40), (3, 17))),
    "decode_pages": lambda c: decode_caches.pages(c, ((16, 4, 2),), 16, ((1, 40), (3, 17))),
    "decode_rows_of_scales": lambda c: attention_reach.caches(c, ("int8", "q8_0", "q4_0"), ((32, 4, 2),), ((1, 40), (3, 17))),
    "prefill": lambda c: attention.prefill(c, ((16, 2), (64, 1)), (32, 64), 64),
    "prefill_masks": lambda c: attention_reach.masks(c, 320, ((32, 2),)),
    "prefill_model": lambda c: attention.prefill_model(c, (33,)),
    "softmax": lambda c: elementwise.softmax(c, ((1, 1000), (70, 64))),
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}; all if none is named")
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu with --quick")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and no record")
    parser.add_argument("--seconds", type=float, default=540, help="start no case after this time (%(default)s)")
    parser.add_argument("--library", help="libnvbackend.so; else NVB_LIBRARY, else the newest build")
    parser.add_argument("--output", default=str(record.RESULTS), help="folder of the record (%(default)s)")
    parsed = parser.parse_args()
    if unknown := set(parsed.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}")
    if parsed.device == "cpu" and not parsed.quick:
        parser.error("--device cpu needs --quick: bench_cpu.py measures the CPU")
    return parsed


def versions(backend):
    info = backend.build_info()
    found = {"nvbackend": backend.version(), "kernels": info.architectures.decode() or "none", "PyTorch": torch.__version__}
    if torch.cuda.is_available():
        found |= {"CUDA": torch.version.cuda, "cuDNN": str(torch.backends.cudnn.version())}
    return found


def main():
    options = arguments()
    device = torch.device(options.device)
    torch.manual_seed(1)
    stream, on_stream = None, contextlib.nullcontext()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream(device)
        on_stream = torch.cuda.stream(stream)
    else:
        torch.set_num_threads(1)
    with on_stream:
        backend = nvb.Backend(options.device, library=options.library, torch_stream=stream)
        timer = timing.CudaTimer(stream) if stream else timing.HostTimer()
        context = Context(backend, timer, device, torch.bfloat16, QUICK if options.quick else GEMMA_3_4B, options.quick, COLD_BYTES)
        name = backend.device_info().name.decode() if stream else "cpu"
        log = record.Record("operations", name, versions(backend), None if options.quick else options.output)
        sections = QUICK_SECTIONS if options.quick else SECTIONS
        chosen = {name: section for name, section in sections.items() if name in options.sections or not options.sections}
        return run(chosen, context, log, options.seconds, whole=not options.sections)


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""Times every operation on the CPU beside PyTorch in the same process and run; benches/README.md says how to read it.

Both sides use the same number of threads and take turns, call by call. A product of one row is also set beside the memory's
read bandwidth, measured in the same turns.
"""
import argparse
import concurrent.futures
import ctypes
import os
from functools import partial

import nvb
import record
import timing
import torch
from case import GEMMA_3_270M, Context, run
from operations import attention, elementwise, embedding, linear, linear_quantized, memory, rms_norm, rope, sampling

READ_BYTES = 1 << 30
# Beyond the share of a large last-level cache that one machine of a few cores gets.
COLD_BYTES = 256_000_000


class MemoryReader:
    """Reads READ_BYTES of memory by several threads, in ways that differ in what they do with the data. The fastest of
    them is the ceiling that a product of one row can reach.
    """

    def __init__(self, threads):
        self.threads = threads
        # Written once: pages that never were would all be the same page of zeros, in the cache.
        self.words = torch.full((READ_BYTES // 8,), 0x0202020202020202, dtype=torch.int64)
        self.floats = self.words.view(torch.float32)
        self.pool = concurrent.futures.ThreadPoolExecutor(threads)
        self.find = ctypes.CDLL(None).memchr
        self.find.argtypes, self.find.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p

    def search(self, _):
        """The C library's search for a byte that is not there, on an equal share for each thread."""
        share = READ_BYTES // self.threads
        parts = [self.pool.submit(self.find, self.words.data_ptr() + part * share, 1, share) for part in range(self.threads)]
        return [part.result() for part in parts]

    def peers(self):
        return {"memory read, PyTorch sum of i64": lambda i: self.words.sum(),
                "memory read, PyTorch sum of f32": lambda i: self.floats.sum(),
                "memory read, memchr": self.search}


def one_row_case(context, threads):
    """A BF16 weight of 14336 × 4096 read once, beside the read bandwidth and beside PyTorch."""
    reader = MemoryReader(threads).peers()
    return linear.linear_case(context, 1, 14336, 4096, torch.bfloat16, [reader], {name: READ_BYTES for name in reader})


def weights(context, threads):
    """Weights of 14336 × 4096 in every format; one row beside the read bandwidth, too."""
    yield partial(one_row_case, context, threads)
    reader = MemoryReader(threads).peers()
    formats = ("int8", "int4", "fp8_e4m3")
    yield from linear_quantized.linear_quantized(context, (1, 4, 16), [(14336, 4096)], formats, reader, READ_BYTES)


def required(context, threads):
    """The comparisons that the project sets itself as targets."""
    yield partial(linear.linear_case, context, 1024, 1024, 1024, torch.float32)
    yield partial(attention.prefill_case, context, 1, 1024, 8, 8, 64, True)


def sections(threads):
    return {
        "required": lambda c: required(c, threads),
        "linear": lambda c: linear.linear(c, (1, 4, 16, 128), [], torch.bfloat16),
        "weights": lambda c: weights(c, threads),
        "linear_f32": lambda c: (partial(linear.linear_case, c, m, 4096, 4096, torch.float32) for m in (1, 16, 128)),
        "prefill": lambda c: (partial(attention.prefill_case, c, 1, length, heads, kv_heads, d, True)
                              for length, heads, kv_heads, d in ((128, 4, 1, 256), (1024, 4, 1, 256), (1024, 8, 2, 128))),
        "decode": lambda c: attention.decode(c, ((256, 4, 1), (64, 8, 8)), ((1, 1024), (4, 4096))),
        "attention": lambda c: attention.grouped(c, (64, 128), (1024, 8192), 512, 8, 2),
        "rms_norm": lambda c: rms_norm.rms_norm(c, (1, 128)),
        "rope": lambda c: rope.rope(c, (1, 128)),
        "embedding": lambda c: embedding.embedding(c, (1, 128)),
        "elementwise": lambda c: elementwise.add(c, (1, 128)),
        "gated_activation": lambda c: elementwise.gated_activation(c, (1, 128)),
        "softmax": lambda c: elementwise.softmax(c, ((1, 262144), (1024, 1024))),
        "argmax": lambda c: sampling.argmax(c, (1,)),
        "sample": lambda c: sampling.sample(c, (1,)),
        "memory": memory.memory,
    }


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(sections(1))
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(names)}; all if none is named")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count()), help="of both sides (%(default)s)")
    parser.add_argument("--seconds", type=float, default=540, help="start no case after this time (%(default)s)")
    parser.add_argument("--samples", type=int, default=timing.SAMPLES, help="of each side (%(default)s)")
    parser.add_argument("--library", help="libnvbackend.so; else NVB_LIBRARY, else the newest build")
    parser.add_argument("--output", default=str(record.RESULTS), help="folder of the record (%(default)s)")
    parsed = parser.parse_args()
    if unknown := set(parsed.sections) - set(names):
        parser.error(f"no section {', '.join(sorted(unknown))}")
    return parsed


def main():
    options = arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    backend = nvb.Backend("cpu", threads=options.threads, library=options.library)
    context = Context(backend, timing.HostTimer(), torch.device("cpu"), torch.float32, GEMMA_3_270M, False, COLD_BYTES)
    versions = {"nvbackend": backend.version(), "PyTorch": torch.__version__, "processor": record.cpu_name(),
                "threads": str(options.threads)}
    log = record.Record("operations", "cpu", versions, options.output)
    if options.samples != timing.SAMPLES:
        log.note(f"Medians of {options.samples} samples.")
        timing.SAMPLES = options.samples
    if os.sched_getscheduler(0) == os.SCHED_RR:
        log.note("Other programs ran meanwhile; this one had real-time priority (SCHED_RR).")
    chosen = {name: section for name, section in sections(options.threads).items() if name in options.sections or not options.sections}
    return run(chosen, context, log, options.seconds, whole=not options.sections)


if __name__ == "__main__":
    raise SystemExit(main())

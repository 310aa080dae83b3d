"""How contenders are timed beside each other: samples that alternate between them, so that a change of the machine's
speed meets all of them alike, and their medians.
"""
import itertools
import math
import time
from functools import partial

import torch

SAMPLES = 21
QUICK_SAMPLES = 2
# A captured graph holds enough calls to last this long, which leaves the launches of the host out.
GRAPH_SECONDS = 400e-6
GRAPH_CALLS = 200
# A sample of calls on the CPU lasts at least this long.
HOST_SAMPLE_SECONDS = 4e-3
# OpenMP's threads spin for some milliseconds after their work and would take the other contender's cores.
HOST_PAUSE_SECONDS = 10e-3


def interleave(samplers, count):
    """`count` samples of each sampler, by name, taken in turn after one that is thrown away."""
    for sampler in samplers.values():
        sampler()
    samples = {name: [] for name in samplers}
    for _ in range(count):
        for name, sampler in samplers.items():
            samples[name].append(sampler())
    return samples


class CudaTimer:
    """Times calls as replays of a captured graph, between CUDA events. `call(i)` uses the i-th of the rotated buffers."""

    def __init__(self, stream):
        self.stream = stream

    def elapsed(self, work):
        """Seconds between events around the work that `work` queues."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(self.stream)
        work()
        end.record(self.stream)
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    def sampler(self, call, rotation, record=None):
        """A function that takes one sample, in seconds a call. `record` makes a graph of calls instead of PyTorch."""
        for i in range(max(5, rotation)):
            call(i % rotation)
        self.stream.synchronize()
        estimate = min(self.elapsed(lambda: call(i % rotation)) for i in range(3))
        calls = max(rotation, min(GRAPH_CALLS, math.ceil(GRAPH_SECONDS / estimate)))
        calls = math.ceil(calls / rotation) * rotation

        def queue():
            for i in range(calls):
                call(i % rotation)

        if record is not None:
            replay = record(queue)
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                queue()
            replay = graph.replay

        def sample():
            # The replay in front keeps the stream busy while the host launches the timed one.
            replay()
            return self.elapsed(replay) / calls
        return sample

    def synchronize(self):
        self.stream.synchronize()


class HostTimer:
    """Times calls that have finished when they return (the CPU's), or the host's share of those that have not."""

    def sampler(self, call, rotation, record=None):
        if record is not None:
            graphs = [record(partial(call, i)) for i in range(rotation)]
            return self.sampler(lambda i: graphs[i](), rotation)
        for i in range(max(3, rotation)):
            call(i % rotation)
        start = time.perf_counter()
        call(0)
        repeats = max(1, math.ceil(HOST_SAMPLE_SECONDS / (time.perf_counter() - start)))
        turn = itertools.count()

        def sample():
            time.sleep(HOST_PAUSE_SECONDS)
            call(next(turn) % rotation)
            start = time.perf_counter()
            for _ in range(repeats):
                call(next(turn) % rotation)
            return (time.perf_counter() - start) / repeats
        return sample

    def synchronize(self):
        pass

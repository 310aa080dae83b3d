"""A case to measure: what ours does, what the peers do, how much work it is and how its result is checked."""
import dataclasses
import math
import time
from typing import Callable

import nvb
import record
import timing
import torch

SCALES = {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "TB/s": 1e12, "GB/s": 1e9, "Gtoken/s": 1e9}
# The largest relative errors ‖out − ref‖ / ‖ref‖ that count as right, ref in f64.
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@dataclasses.dataclass
class Case:
    operation: str
    name: str
    # A key of SCALES, or "µs".
    unit: str
    # Each call queues the work on the i-th of `rotation` sets of buffers.
    ours: Callable[[int], None]
    # One row for each group, against the fastest of the group.
    peers: list[dict[str, Callable[[int], object]]]
    # The relative error of what `ours(i)` left in `outputs`, and the largest that counts as right.
    check: Callable[[int], float]
    bound: float
    # Filled with NaN (integers: -1) before a check, so that what was not written is seen.
    outputs: list[torch.Tensor]
    # Operations or bytes a call, for rates; `amounts` replaces it for some peers.
    amount: float = 0
    amounts: dict[str, float] = dataclasses.field(default_factory=dict)
    rotation: int = 1
    # Peers that were measured elsewhere: label to figure in `unit`.
    quoted: dict[str, float] = dataclasses.field(default_factory=dict)
    # Time the host's calls, also on a GPU.
    on_host: bool = False
    # Makes a graph of the library of ours (`Backend.record`); on a GPU its launches are timed instead of a captured graph.
    record: Callable | None = None

    def value(self, seconds, name):
        if self.unit == "µs":
            return seconds * 1e6
        return self.amounts.get(name, self.amount) / seconds / SCALES[self.unit]


@dataclasses.dataclass
class Gemma:
    """The shape of a Gemma model."""
    width: int
    query_heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int


GEMMA_3_270M = Gemma(640, 4, 1, 256, 2048, 262144)
GEMMA_3_4B = Gemma(2560, 8, 4, 256, 10240, 262144)
QUICK = Gemma(64, 4, 2, 16, 96, 1000)


@dataclasses.dataclass
class Context:
    """What the cases are made for. `quick`: tiny sizes, to see that a program runs."""
    backend: nvb.Backend
    timer: object
    device: torch.device
    dtype: torch.dtype
    model: Gemma
    quick: bool
    # Bytes that must pass between two uses of the same buffer for it to come from memory.
    cold_bytes: int

    def randn(self, *shape, dtype=None):
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)

    def empty(self, *shape, dtype=None):
        return torch.empty(*shape, device=self.device, dtype=dtype or self.dtype)

    def integers(self, limit, *shape):
        return torch.randint(limit, shape, device=self.device, dtype=torch.int32)

    def rotation(self, size):
        """How many buffers of `size` bytes to rotate so that none is still in a cache when its turn comes."""
        if self.quick:
            return 2
        return 1 if size >= 4 * self.cold_bytes else 1 + math.ceil(self.cold_bytes / size)

    def name_of(self, dtype):
        return {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]


def copy_peer(context, amount):
    """A group of peers: a copy that moves `amount` bytes, where those are more than caches hold."""
    if amount == 0 or (amount < 2 * context.cold_bytes and not context.quick):
        return []
    source = torch.empty(amount // 2, device=context.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return [{"PyTorch copy_ of as many bytes": lambda i: target.copy_(source)}]


def sample_indices(count, wanted, device):
    """Up to `wanted` of the indices below `count`, the first and the last among them."""
    if count <= wanted:
        return torch.arange(count, device=device)
    inner = torch.randperm(count - 2, device=device)[: wanted - 2] + 1
    return torch.cat([torch.tensor([0, count - 1], device=device), inner]).sort().values


def relative_error(pairs, outputs=()):
    """‖out − ref‖ / ‖ref‖ of (out, ref) pairs taken together; infinite when `outputs` hold anything that is not finite."""
    if any(not torch.isfinite(output).all() for output in outputs):
        return math.inf
    difference = sum((out.double() - ref.double()).square().sum().item() for out, ref in pairs)
    reference = sum(ref.double().square().sum().item() for _, ref in pairs)
    return math.sqrt(difference / reference) if math.isfinite(difference) else math.inf


def checked_error(case, timer, i):
    for output in case.outputs:
        output.fill_(math.nan if output.is_floating_point() else -1)
    timer.synchronize()
    case.ours(i)
    timer.synchronize()
    return case.check(i)


def samplers_of(case, timer, log):
    """Ours and the peers that run, by name, and the groups of names. A back end of PyTorch may refuse a shape, or
    this PyTorch lack a function."""
    samplers, groups = {"ours": timer.sampler(case.ours, case.rotation, case.record)}, []
    for group in case.peers:
        groups.append([])
        for name, call in group.items():
            try:
                samplers[name] = timer.sampler(call, case.rotation)
                groups[-1].append(name)
            except (RuntimeError, NotImplementedError, ValueError, AttributeError) as refusal:
                log.note(f"{case.operation}, {case.name}: {name} refused: {first_line(refusal)}")
    return samplers, groups


def first_line(error):
    return (str(error) or repr(error)).splitlines()[0][:200]


def measure(make, context, log):
    """Makes a case, checks ours, times all contenders, checks ours again, and adds the rows."""
    case = None
    try:
        case = make()
        timer = timing.HostTimer() if case.on_host else context.timer
        error = checked_error(case, context.timer, 0)
        samplers, groups = samplers_of(case, timer, log)
        samples = timing.interleave(samplers, timing.QUICK_SAMPLES if context.quick else timing.SAMPLES)
        error = max(error, checked_error(case, context.timer, case.rotation - 1))
    except (nvb.Error, RuntimeError) as failure:
        operation = case.operation if case else make.func.__name__
        name = case.name if case else " ".join(str(argument) for argument in make.args[1:])
        log.add(operation, name, case and case.unit, None, None, None, note=f"failed: {first_line(failure)}")
        return
    times = {name: record.median_and_spread(values) for name, values in samples.items()}
    values = {name: case.value(seconds, name) for name, (seconds, _) in times.items()}
    wrong = None if error <= case.bound else f"wrong: relative error {error:.3g} > {case.bound:.3g}"
    ours = None if wrong else values["ours"]
    more = {"error": record.significant(error, 2), "note": wrong}
    # Peers of one group do the same work: the quickest counts.
    bests = [min(group, key=times.get, default=None) for group in groups] or [None]
    for best in bests:
        spread = [round(times[name][1], 3) for name in ("ours", best) if name]
        log.add(case.operation, case.name, case.unit, ours, best, values.get(best), spread=spread, **more)
    for label, figure in case.quoted.items():
        log.add(case.operation, case.name, case.unit, ours, label, figure, **more)


def run(sections, context, log, seconds, whole):
    """Measures the cases of the sections until the time is used up, and writes the record after each section. `whole`: these
    are all sections, so that rows of earlier runs go if time suffices. Returns the exit status: 1 when ours failed or was wrong
    anywhere."""
    deadline = time.monotonic() + seconds
    for name, section in sections.items():
        for make in section(context):
            if time.monotonic() > deadline:
                log.note(f"section {name} is not complete: {seconds:.0f} s are used up")
                whole = False
                break
            measure(make, context, log)
            if context.device.type == "cuda":
                torch.cuda.empty_cache()
        log.write()
    log.write(whole)
    failures = log.failures()
    if failures:
        print(f"{len(failures)} rows in which ours failed or was wrong")
    if log.path:
        print(f"recorded in {log.path}")
    return 1 if failures else 0

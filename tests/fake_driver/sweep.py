#!/usr/bin/env python3
"""Runs programs in C and C++ on the fake driver and lets their N-th driver call fail, for one N after the other.

    sweep.py --library LIBRARY --driver DRIVER [--preload FILE] [--steps N] PROGRAM... [-- ARGUMENT...]

LIBRARY is libnvbackend.so with a stand-in for the CUDA runtime (tests/fake_driver/library.rs), DRIVER the fake driver.
Kernels do nothing, so what a program computes means nothing, and it may end with any exit code. It must end by itself,
though: no signal, no panic and no hang; and nothing may be left in the driver's books.
"""
import argparse
import collections
import concurrent.futures
import os
import subprocess
import sys
import tempfile

OUT_OF_MEMORY, OPERATING_SYSTEM, ILLEGAL_ADDRESS = 2, 304, 700
ONCE, FOREVER, STICKY = 0, 1, 2
FAULTS = [(OUT_OF_MEMORY, ONCE), (OPERATING_SYSTEM, ONCE), (OPERATING_SYSTEM, FOREVER), (ILLEGAL_ADDRESS, STICKY)]
MODES = {ONCE: "once", FOREVER: "for ever", STICKY: "sticky"}
# What lives on the device. Where unmapping fails for ever, addresses stay reserved rather than that mapped memory loses
# them.
KEPT = ["contexts", "blocks", "host_blocks", "mappings", "physicals", "pools", "streams", "events", "graphs"]
# The caller's context is put back, and an operation of several kernels queues them before it looks; in a few threads.
MOST_AFTER_LOSS = 20
MOST_PROBLEMS = 40

Outcome = collections.namedtuple("Outcome", "code books text")


def run(options, command, plan):
    """Runs the program with a planned fault; a signal is a negative code, a hang None."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "books")
        environment = dict(os.environ, NVB_LIBCUDA=options.driver, NVB_FAKE_BOOKS=path, NVB_TEST_DEVICE="cuda:0",
                           NVB_TEST_STOP="1", LD_PRELOAD=":".join(options.preload + [options.library]))
        if plan:
            environment["NVB_FAKE_FAULT"] = ",".join(str(number) for number in plan)
        try:
            result = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                    stderr=subprocess.STDOUT, timeout=options.seconds)
            code, text = result.returncode, result.stdout
        except subprocess.TimeoutExpired as expired:
            code, text = None, expired.stdout or b""
        books = {}
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                for line in file:
                    name, _, value = line.rstrip("\n").partition(" ")
                    books[name] = int(value) if value.lstrip("-").isdigit() else value
        return Outcome(code, books, text.decode("utf-8", "replace"))


def problem_of(options, outcome, mode):
    """What is wrong with a program's end, or None."""
    if outcome.code is None:
        return f"hung for {options.seconds} s; it said: {outcome.text[-300:]}"
    if outcome.code < 0:
        return f"ended by signal {-outcome.code}; it said: {outcome.text[-300:]}"
    if "a bug in nvbackend" in outcome.text:
        return "a panic: " + outcome.text[outcome.text.index("a bug in nvbackend"):][:200]
    if not outcome.books:
        return "wrote no books"
    if outcome.books["violations"]:
        return f"misused the driver: {outcome.books['violation']}"
    # A lost device keeps what it had: nothing is released there any more, and nothing asked. What fails before there is
    # a context loses no device; the next question starts anew.
    if mode == STICKY:
        if outcome.books["fault"].startswith(("cuInit", "cuDriver", "cuDevice")):
            return None
        asked = outcome.books["calls_after_sticky"]
        return f"{asked} calls of a driver whose device was lost" if asked > MOST_AFTER_LOSS else None
    kept = KEPT + (["ranges"] if mode == ONCE else [])
    left = [f"{outcome.books[name]} {name}" for name in kept if outcome.books[name]]
    return f"left over: {', '.join(left)}" if left else None


def sweep(options, program, arguments):
    """Returns the problems of one program, in words."""
    command = [program] + arguments
    name = os.path.basename(program)
    whole = run(options, command, None)
    if whole.code == 0 and (not whole.books or whole.books["calls"] == 0):
        print(f"{name}: asks no driver", flush=True)
        return []
    problem = problem_of(options, whole, ONCE)
    if problem or whole.code != 0 and not options.any_code:
        return [f"{name} without a fault: {problem or f'exit code {whole.code}'}; it said: {whole.text[-1000:]}"]
    calls = whole.books["calls"]
    steps = min(calls, options.steps or calls)
    # The first and the last call, and the same distance between all.
    numbers = sorted({1 + (calls - 1) * step // max(1, steps - 1) for step in range(steps)})
    problems = []

    def step(work):
        number, (status, mode) = work
        if len(problems) >= MOST_PROBLEMS:
            return 0
        outcome = run(options, command, (number, status, mode))
        problem = problem_of(options, outcome, mode)
        if problem:
            problems.append(f"{name}: call {number} ({outcome.books.get('fault', '?')}) fails {MODES[mode]} with "
                            f"{status}: {problem}")
        return 1 if outcome.books.get("faults") else 0

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        fired = sum(pool.map(step, [(number, fault) for number in numbers for fault in FAULTS]))
    print(f"{name}: {calls} calls and {whole.books['launches']} launches; {fired} runs met a fault", flush=True)
    if fired == 0:
        problems.append(f"{name}: no fault ever fired")
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--driver", required=True)
    parser.add_argument("--preload", action="append", default=[], help="a shared library that stands before LIBRARY")
    parser.add_argument("--steps", type=int, default=0, help="calls to fail, spread over all of them (all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=60, help="after which a program hangs (60)")
    parser.add_argument("--any-code", action="store_true", help="without a fault, a program may fail")
    parser.add_argument("programs", nargs="+")
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:at])
    options.library, options.driver = os.path.abspath(options.library), os.path.abspath(options.driver)
    options.preload = [os.path.abspath(file) for file in options.preload]
    problems = [problem for program in options.programs for problem in sweep(options, program, arguments[at + 1:])]
    for problem in problems:
        print(f"FAILED {problem}")
    print(f"sweep: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

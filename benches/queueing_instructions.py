#!/usr/bin/env python3
"""Counts the instructions that the library spends on queueing an eager operation, without a GPU.

    queueing_instructions.py --program bench_queueing --library LIBRARY --driver DRIVER [--functions OPERATION] [--rare FUNCTION]

PROGRAM is that of benches/queueing.c, LIBRARY nvbackend_without_kernels, in which a launch does nothing, and DRIVER the fake
driver (tests/fake_driver). valgrind's callgrind runs the program once for each operation. What the driver and the stand-in for
the CUDA runtime spend is counted apart, since neither is what a GPU's costs. `--functions` prints where the instructions go.
`--rare` fails if an operation calls a function of the runtime more often than where it comes first.
"""
import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile

# As the program names them, and the function whose calls are counted.
OPERATIONS = {
    "rms_norm": "nvb_rms_norm",
    "linear bf16": "nvb_linear",
    "linear int4": "nvb_linear",
    "rope": "nvb_rope",
    "attention decode": "nvb_attention_decode",
}
# Of a function that is called where an operation comes first, each of whose kernels may need it.
MOST_RARE_CALLS = 4
# A process has few addresses under valgrind.
MEMORY_BYTES = 1 << 30
FOREIGN = re.compile(r"cu[A-Z]\w*|cuda[A-Z]\w*|__cuda\w*|nvb_driver_\w*")


class Profile:
    """Instructions of each function, and of its calls of others, from callgrind's file."""

    def __init__(self, path, root):
        self.own, self.calls = collections.Counter(), collections.Counter()
        self.callees = collections.defaultdict(collections.Counter)
        names = {}

        def name(text):
            number, _, rest = text.partition(" ")
            return names.setdefault(number, rest)

        function = callee = None
        count = 0
        with open(path, encoding="utf-8") as file:
            for line in file:
                key, _, value = line.rstrip("\n").partition("=")
                if key == "fn":
                    function = name(value)
                elif key == "cfn":
                    callee = name(value)
                elif key == "calls":
                    count = int(value.split()[0])
                elif line[0] in "0123456789+-*" and len(line.split()) > 1:
                    cost = int(line.split()[1])
                    if count:
                        self.callees[function][callee] += cost
                        self.calls[function, callee] += count
                        count = 0
                    else:
                        self.own[function] += cost
        self.root = root
        self.count = sum(calls for (_, callee), calls in self.calls.items() if callee == root)

    def foreign(self):
        """Instructions and calls of the driver and the runtime."""
        edges = [(caller, callee, cost) for caller, callees in self.callees.items() if not FOREIGN.fullmatch(caller)
                 for callee, cost in callees.items() if FOREIGN.fullmatch(callee)]
        return sum(cost for _, _, cost in edges), sum(self.calls[caller, callee] for caller, callee, _ in edges)

    def print(self, function=None, cost=None, path=()):
        function = function or self.root
        cost = cost if cost is not None else self.own[function] + sum(self.callees[function].values())
        own = self.own[function] / self.count
        print(f"{'  ' * len(path)}{cost / self.count:8.0f}, itself {own:.0f}: {function[:90]}")
        if function in path or FOREIGN.fullmatch(function):
            return
        for callee, inside in self.callees[function].most_common():
            if inside / self.count >= 10:
                self.print(callee, inside, path + (function,))


def profile(options, folder, operation):
    path = os.path.join(folder, "callgrind")
    # Preloaded, since the program is linked with the library that has kernels.
    environment = dict(os.environ, NVB_LIBCUDA=options.driver, NVB_FAKE_MEMORY=str(MEMORY_BYTES),
                       LD_PRELOAD=options.library)
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={path}",
               f"--toggle-collect={OPERATIONS[operation]}", options.program, "cuda:0", operation]
    result = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}:\n{result.stderr.decode('utf-8', 'replace')[-2000:]}")
    found = Profile(path, OPERATIONS[operation])
    if found.count == 0:
        sys.exit(f"{operation}: no call of {OPERATIONS[operation]} was seen")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ["--program", "--library", "--driver"]:
        parser.add_argument(name, required=True, type=os.path.abspath)
    parser.add_argument("--functions", choices=OPERATIONS)
    parser.add_argument("--rare", metavar="FUNCTION")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.functions:
            profile(options, folder, options.functions).print()
            return
        for operation in OPERATIONS:
            found = profile(options, folder, operation)
            foreign, calls = found.foreign()
            library = (sum(found.own.values()) - foreign) / found.count
            others = calls / found.count
            print(f"{operation:18} {library:6.0f} instructions a call, and {others:.1f} calls of driver and runtime")
            often = sum(calls for (_, callee), calls in found.calls.items() if callee == options.rare)
            if often > MOST_RARE_CALLS:
                sys.exit(f"{operation}: {often} calls of {options.rare} in {found.count} operations")


if __name__ == "__main__":
    main()

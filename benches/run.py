#!/usr/bin/env python3
"""Runs all benchmarks that this machine can: the CPU's, and the GPU's where there is one. `make bench` calls it.

Makes the peers first (build/peers/, once), takes build/bin/gemma and the newest libnvbackend.so, leaves records in benches/results/
and draws the README's table and picture from them. Exit status 1 when an operation failed or gave wrong numbers.
"""
import pathlib
import subprocess
import sys

import prepare
import readme
import record

HERE = pathlib.Path(__file__).resolve().parent


def main():
    prepare.torch()
    prepare.llama_bench()
    programs = ["bench_cpu.py", "bench_model_cpu.py"]
    if record.gpu_driver():
        programs += ["bench_gpu.py", "bench_model_gpu.py"]
    statuses = [subprocess.run([sys.executable, str(HERE / program)]).returncode for program in programs]
    readme.main()
    return 1 if any(statuses) else 0


if __name__ == "__main__":
    raise SystemExit(main())

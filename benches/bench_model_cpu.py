#!/usr/bin/env python3
"""A whole Gemma model with random BF16 weights on the CPU, the example engine beside llama.cpp: decode after a short prompt
and prefill of 128 tokens. Both run in turns with the same number of threads; benches/README.md says how to read it.
"""
import argparse
import json
import os
import subprocess

import engine
import prepare
import record

MODEL = "gemma3-270m"
PREFILL_TOKENS = 128
SHORT_PROMPT, DECODE_TOKENS = 8, 64


def engine_speeds(path, threads):
    common = ["--random", MODEL, "--device", "cpu", "--threads", threads]
    # The first of the new tokens belongs to the prefill.
    prefill = engine.speeds(path, *common, "--prompt-tokens", PREFILL_TOKENS, "--max-tokens", 1)["prefill"]
    decode = engine.speeds(path, *common, "--prompt-tokens", SHORT_PROMPT, "--max-tokens", DECODE_TOKENS + 1)["decode"]
    return {"prefill": prefill, "decode": decode}


def llama_speeds(path, gguf, threads):
    """llama-bench warms up before each test, as the engine does."""
    def rate(*arguments):
        command = [str(path), "-m", str(gguf), "-t", str(threads), "-r", "1", "-fa", "1", "-o", "json", *map(str, arguments)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            raise RuntimeError(f"llama-bench failed with {run.returncode}: {run.stderr.strip()[-500:]}")
        return json.loads(run.stdout)[0]["avg_ts"]

    return {"prefill": rate("-p", PREFILL_TOKENS, "-n", 0), "decode": rate("-p", 0, "-n", DECODE_TOKENS, "-d", SHORT_PROMPT)}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help="the program gemma; else NVB_ENGINE, else build/bin/gemma")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count()), help="of both sides (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each side, in turns (%(default)s)")
    parser.add_argument("--output", default=str(record.RESULTS), help="folder of the record (%(default)s)")
    return parser.parse_args()


def main():
    options = arguments()
    ours = engine.find_engine(options.engine)
    llama_bench, gguf = prepare.llama_bench(), prepare.random_gguf(MODEL)
    samples = {(side, kind): [] for side in ("ours", "peer") for kind in ("prefill", "decode")}
    for _ in range(options.rounds):
        for side, speeds in (("ours", engine_speeds(ours, options.threads)), ("peer", llama_speeds(llama_bench, gguf, options.threads))):
            for kind, rate in speeds.items():
                samples[side, kind].append(rate)
    versions = {"nvbackend": engine.version(ours), "llama.cpp": f"of llama-cpp-python {prepare.LLAMA_VERSION}",
                "processor": record.cpu_name(), "threads": str(options.threads)}
    log = record.Record("model", "cpu", versions, options.output)
    for kind, case in (("prefill", f"{PREFILL_TOKENS} tokens"), ("decode", f"{DECODE_TOKENS} tokens after {SHORT_PROMPT}")):
        medians = {side: record.median_and_spread(samples[side, kind]) for side in ("ours", "peer")}
        log.add(f"model {MODEL} {kind} bf16", case, "tokens/s", medians["ours"][0], "llama.cpp", medians["peer"][0],
                spread=[round(medians[side][1], 3) for side in ("ours", "peer")])
    log.write()
    print(f"recorded in {log.path}")


if __name__ == "__main__":
    main()

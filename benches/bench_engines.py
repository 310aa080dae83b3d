#!/usr/bin/env python3
"""llama.cpp with this back end and with ggml-cuda: decode of 64 tokens, prompts of 512 and of 4,096 tokens, and for some models decode
of 16 streams and after 16,384 tokens, with the same host and the same files.

    bench_engines.py --bench llama-bench --plugin libggml-nvb.so --peer libggml-cuda.so MODEL-TYPE.gguf...

The host loads a back end from the file that GGML_BACKEND_PATH names, so either is measured in processes of its own, in turns.
Figures are the medians of llama-bench's samples; the first of a prompt, which pays for what is made once, counts as the others do.
"""
import argparse
import json
import os
import pathlib
import subprocess

import record

PEER = "llama.cpp, ggml-cuda"
# What is measured: llama-bench's arguments for each.
CASES = {
    ("decode", "64 tokens"): ("-p", "0", "-n", "64", "-r", "5"),
    ("prefill", "512 tokens, -ub 512"): ("-p", "512", "-n", "0", "-r", "5"),
    ("prefill", "4096 tokens, -ub 512"): ("-p", "4096", "-n", "0", "-r", "3"),
    ("prefill", "4096 tokens, -ub 4096"): ("-p", "4096", "-n", "0", "-b", "4096", "-ub", "4096", "-r", "3"),
}
LONG_CASES = {("decode", "64 tokens after 16,384"): ("-p", "0", "-n", "64", "-d", "16384", "-r", "3")}
# llama-batched-bench: 128 tokens of a prompt and 64 new ones for each of 16 streams.
STREAMS = ("-fa", "1", "-ngl", "99", "--output-format", "jsonl", "-c", "8192", "-npp", "128", "-ntg", "64", "-npl", "16")


def environment(plugin):
    return {**os.environ, "GGML_BACKEND_PATH": str(plugin)}


def streams(program, plugin, device, model):
    """Tokens a second of all streams, of three processes."""
    rates = []
    for _ in range(3):
        command = [program, "-m", model, "--device", device, *STREAMS]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(plugin), check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode != 0 or not lines:
            raise RuntimeError(f"{plugin}: {' '.join(done.stderr.splitlines()[-2:])[-200:]}")
        rates.append(lines[-1]["speed_tg"])
    return rates


def samples(bench, plugin, device, model, case):
    """Tokens a second of each sample; the last lines of its errors where the program fails."""
    command = [bench, "--device", device, "-fa", "1", "-ngl", "99", "-o", "jsonl", "-m", model, *case]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(plugin), check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"{plugin}: {' '.join(done.stderr.splitlines()[-2:])[-200:]}")
    return lines[-1]["samples_ts"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="GGUF files, NAME-TYPE.gguf")
    parser.add_argument("--bench", required=True, help="llama-bench of the host")
    parser.add_argument("--plugin", required=True, help="libggml-nvb.so")
    parser.add_argument("--peer", required=True, help="libggml-cuda.so of the same host")
    parser.add_argument("--batched", help="llama-batched-bench of the host")
    parser.add_argument("--long", action="append", default=[], metavar="NAME-TYPE", help="a model that decodes after a long prompt too")
    parser.add_argument("--streams", action="append", default=[], metavar="NAME-TYPE", help="a model that decodes 16 streams too")
    parser.add_argument("--version", action="append", default=[], metavar="NAME=VERSION", help="of the libraries, for the record")
    parser.add_argument("--note", action="append", default=[], help="what the record says of the run")
    parser.add_argument("--output", default=str(record.RESULTS), help="folder of the record (%(default)s)")
    return parser.parse_args()


def main():
    options = arguments()
    name = record.output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    log = record.Record("engines", name, dict(pair.split("=", 1) for pair in options.version), options.output)
    for note in options.note:
        log.note(note)
    for path in map(pathlib.Path, options.models):
        model, weights = path.stem.lower().rsplit("-", 1)
        cases = {key: (samples, options.bench, command) for key, command in CASES.items()}
        if path.stem in options.long:
            cases |= {key: (samples, options.bench, command) for key, command in LONG_CASES.items()}
        if path.stem in options.streams:
            cases["decode", "16 streams of 64 tokens"] = (streams, options.batched)
        for (kind, case), (measure, program, *command) in cases.items():
            operation = f"llama.cpp {model} {kind} {weights}"
            try:
                ours = measure(program, options.plugin, "NVB0", path, *command)
                peer = measure(program, options.peer, "CUDA0", path, *command)
            except RuntimeError as failure:
                log.add(operation, case, "tokens/s", None, None, None, note=f"failed: {failure}")
                continue
            (our_rate, our_spread), (peer_rate, peer_spread) = map(record.median_and_spread, (ours, peer))
            log.add(operation, case, "tokens/s", our_rate, PEER, peer_rate, spread=[round(our_spread, 3), round(peer_spread, 3)])
        log.write()
    print(f"recorded in {log.path}")
    return 1 if log.failures() else 0


if __name__ == "__main__":
    raise SystemExit(main())

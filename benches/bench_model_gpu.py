#!/usr/bin/env python3
"""Whole Gemma models with random weights on one GPU: decode of one sequence from BF16, INT8 and INT4 weights, and prefill of 4,096
tokens from BF16, by the example engine, beside llama.cpp's published figures, which are of another run and labelled so.
"""
import argparse

import engine
import gemma_shapes
import published
import record

PREFILL_TOKENS = 4096
SHORT_PROMPT, DECODE_TOKENS = 8, 256
CASES = {"prefill": f"{PREFILL_TOKENS} tokens", "decode": f"{DECODE_TOKENS} tokens after {SHORT_PROMPT}"}
# Bits of a weight with its scales and of an element of the token table, as the engine keeps them; what is measured with them.
FORMATS = {"bf16": (16, 16, ("prefill", "decode")), "int8": (8, 16, ("decode",)), "int4": (4.5, 8, ("decode",))}


def engine_speed(path, model, weights, kind, device):
    tokens = (PREFILL_TOKENS, 1) if kind == "prefill" else (SHORT_PROMPT, DECODE_TOKENS + 1)
    return engine.speeds(path, "--random", model, "--device", device, "--weights", weights,
                         "--prompt-tokens", tokens[0], "--max-tokens", tokens[1])[kind]


def work(model, weights, kind):
    """What a token costs at the least, from which the record's reader knows how far the hardware's limit is."""
    if model not in gemma_shapes.SHAPES:
        return {}
    if kind == "decode":
        return {"bytes": gemma_shapes.decode_bytes(model, *FORMATS[weights][:2])}
    return {"operations": gemma_shapes.prefill_operations(model)}


def peer(name, model, weights, kind):
    """llama.cpp's name and figure; nothing on another device than it was measured on."""
    figure = published.LLAMA_CPP.get((model, weights), {}).get(kind) if "H200" in name else None
    return (f"llama.cpp, {published.LLAMA_CPP_FORMATS[weights]} (published figure, another run)", figure) if figure else (None, None)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["gemma3-1b", "gemma3-4b", "gemma3-12b"], help="names that gemma --random knows")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--engine", help="the program gemma; else NVB_ENGINE, else build/bin/gemma")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each model (%(default)s)")
    parser.add_argument("--output", default=str(record.RESULTS), help="folder of the record (%(default)s)")
    return parser.parse_args()


def main():
    options = arguments()
    path = engine.find_engine(options.engine)
    name = record.output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or options.device
    log = record.Record("model", name, {"nvbackend": engine.version(path)}, options.output)
    for model, weights in ((model, weights) for model in options.models for weights in FORMATS):
        for kind in FORMATS[weights][2]:
            operation = f"model {model} {kind} {weights}"
            try:
                rates = [engine_speed(path, model, weights, kind, options.device) for _ in range(options.rounds)]
            except RuntimeError as failure:
                log.add(operation, CASES[kind], "tokens/s", None, None, None, note=f"failed: {str(failure).splitlines()[0][:200]}")
                continue
            middle, spread = record.median_and_spread(rates)
            log.add(operation, CASES[kind], "tokens/s", middle, *peer(name, model, weights, kind), spread=[round(spread, 3)],
                    **work(model, weights, kind))
        log.write()
    print(f"recorded in {log.path}")
    return 1 if log.failures() else 0


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""Whole Gemma models with random BF16 weights on one GPU: prefill of 4,096 tokens and decode of one sequence by the example
engine, beside llama.cpp's published figures, which are of another run and labelled so.
"""
import argparse

import engine
import gemma_shapes
import published
import record

PREFILL_TOKENS = 4096
SHORT_PROMPT, DECODE_TOKENS = 8, 256
PEER = "llama.cpp (published figure, another run)"


def engine_speeds(path, model, device):
    common = ["--random", model, "--device", device]
    prefill = engine.speeds(path, *common, "--prompt-tokens", PREFILL_TOKENS, "--max-tokens", 1)["prefill"]
    decode = engine.speeds(path, *common, "--prompt-tokens", SHORT_PROMPT, "--max-tokens", DECODE_TOKENS + 1)["decode"]
    return {"prefill": prefill, "decode": decode}


def work(model, kind):
    """What a token costs at the least, from which the record's reader knows how far the hardware's limit is."""
    if model not in gemma_shapes.SHAPES:
        return {}
    if kind == "decode":
        return {"bytes": gemma_shapes.decode_bytes(model)}
    return {"operations": gemma_shapes.prefill_operations(model)}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["gemma3-1b", "gemma3-4b"], help="names that gemma --random knows")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--engine", help="the program gemma; else NVB_ENGINE, else build/bin/gemma")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each model (%(default)s)")
    parser.add_argument("--output", default=str(record.RESULTS), help="folder of the record (%(default)s)")
    return parser.parse_args()


def main():
    options = arguments()
    path = engine.find_engine(options.engine)
    name = record.output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or options.device
    log = record.Record("model", name, {}, options.output)
    failed = False
    for model in options.models:
        cases = {"prefill": f"{PREFILL_TOKENS} tokens", "decode": f"{DECODE_TOKENS} tokens after {SHORT_PROMPT}"}
        try:
            runs = [engine_speeds(path, model, options.device) for _ in range(options.rounds)]
        except RuntimeError as failure:
            failed = True
            for kind, case in cases.items():
                log.add(f"model {model} {kind} bf16", case, "tokens/s", None, None, None, note=str(failure).splitlines()[0][:200])
            continue
        for kind, case in cases.items():
            middle, spread = record.median_and_spread([run[kind] for run in runs])
            peer = published.LLAMA_CPP.get(model, {}).get(kind) if "H200" in name else None
            log.add(f"model {model} {kind} bf16", case, "tokens/s", middle, PEER if peer else None, peer, spread=[round(spread, 3)],
                    **work(model, kind))
        log.write()
    log.write()
    print(f"recorded in {log.path}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

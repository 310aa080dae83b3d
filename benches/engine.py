"""Runs the example engine `gemma` with random weights and reads its speed."""
import os
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLACES = (ROOT / "build/bin/gemma", ROOT / "bin/gemma")
SPEED = re.compile(r"^(prefill|decode): (\d+) tokens in ([\d.]+) s, ([\d.]+) tokens/s", re.MULTILINE)


def find_engine(named=None):
    """The program named, or by NVB_ENGINE, or the one that was built in this checkout or a bundle of it."""
    named = named or os.environ.get("NVB_ENGINE")
    places = [pathlib.Path(named)] if named else PLACES
    for path in places:
        if path.exists():
            return path
    raise SystemExit(f"{places[0]} does not exist: build the examples (`make demo`) or name the engine with --engine")


def version(engine):
    """The library's, which the program prints."""
    run = subprocess.run([str(engine), "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = re.search(r"libnvbackend (\d+\.\d+\.\d+)", run.stdout)
    return found[1] if found else "unknown"


def speeds(engine, *arguments):
    """Tokens a second of one run, {"prefill": …, "decode": …}."""
    run = subprocess.run([str(engine), *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if run.returncode != 0:
        raise RuntimeError(f"{engine.name} failed with {run.returncode}: {run.stderr.strip()[-500:]}")
    found = {kind: float(rate) for kind, _, _, rate in SPEED.findall(run.stderr)}
    if set(found) != {"prefill", "decode"}:
        raise RuntimeError(f"{engine.name} reported no speed: {run.stderr.strip()[-500:]}")
    return found

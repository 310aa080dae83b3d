#!/usr/bin/env python3
"""Makes the peers that the benchmarks compare with, under build/peers/, once: PyTorch from its wheel (in python/) and
llama.cpp's llama-bench built from the source package of llama-cpp-python (in llama.cpp/). Without arguments it makes both.

Nothing of it is needed to build or to use the library.
"""
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEERS = ROOT / "build/peers"
PYTHON = PEERS / "python"
# The version of llama-cpp-python, whose source package holds llama.cpp.
LLAMA_VERSION = "0.3.36"
LLAMA_SOURCE = PEERS / f"llama_cpp_python-{LLAMA_VERSION}/vendor/llama.cpp"
LLAMA_BENCH = PEERS / "llama.cpp/bin/llama-bench"
# Everything that llama-bench does not need costs minutes to build.
LLAMA_OPTIONS = ("TESTS", "EXAMPLES", "SERVER", "APP")


def call(*command):
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True)


def environment():
    """The environment in which Python finds the packages of build/peers/python."""
    paths = [str(PYTHON), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def pip(*arguments):
    """Runs pip: this Python's, or that of the virtual environment that `make setup` made where Python came without one."""
    virtual = ROOT / ".toolchain/venv/bin/python"
    for python in (sys.executable, virtual):
        if pathlib.Path(python).exists() and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0:
            return call(python, "-m", "pip", *arguments)
    raise SystemExit("Python has no pip: install Debian's python3-pip, or python3-venv and run `make setup`")


def importable(*packages):
    code = "import importlib.util as u, sys; sys.exit(any(u.find_spec(p) is None for p in sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, *packages], env=environment()).returncode == 0


def install(*packages):
    """Installs those of `packages` that this Python lacks."""
    missing = [package for package in packages if not importable({"pyyaml": "yaml"}.get(package, package))]
    if missing:
        pip("install", "--quiet", "--target", PYTHON, *missing)


def torch():
    install("torch", "numpy")


def unpack_llama_cpp():
    if LLAMA_SOURCE.exists():
        return
    PEERS.mkdir(parents=True, exist_ok=True)
    pip("download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", PEERS, f"llama-cpp-python=={LLAMA_VERSION}")
    call("tar", "-xzf", PEERS / f"llama_cpp_python-{LLAMA_VERSION}.tar.gz", "-C", PEERS)


def llama_bench():
    """The path of llama-bench, built for this processor."""
    if LLAMA_BENCH.exists():
        return LLAMA_BENCH
    unpack_llama_cpp()
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    call("cmake", "-S", LLAMA_SOURCE, "-B", LLAMA_BENCH.parent.parent, *generator, "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF",
         "-DLLAMA_OPENSSL=OFF", *(f"-DLLAMA_BUILD_{part}=OFF" for part in LLAMA_OPTIONS))
    call("cmake", "--build", LLAMA_BENCH.parent.parent, "--target", "llama-bench", "--parallel", len(os.sched_getaffinity(0)))
    return LLAMA_BENCH


def random_gguf(name):
    """A GGUF file of a published shape with random BF16 weights, written by llama.cpp's own Python package."""
    path = PEERS / f"{name}-bf16.gguf"
    if not path.exists():
        unpack_llama_cpp()
        install("numpy", "pyyaml", "tqdm", "requests")
        sources = environment()
        sources["PYTHONPATH"] = os.pathsep.join([str(LLAMA_SOURCE / "gguf-py"), sources["PYTHONPATH"]])
        script = pathlib.Path(__file__).with_name("random_gguf.py")
        subprocess.run([sys.executable, str(script), name, str(path)], check=True, env=sources)
    return path


if __name__ == "__main__":
    torch()
    llama_bench()

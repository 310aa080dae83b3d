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
import tarfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEERS = ROOT / "build/peers"
PYTHON = PEERS / "python"
LLAMA_PACKAGE = "llama-cpp-python==0.3.36"
LLAMA_SOURCE = PEERS / "llama_cpp_python-0.3.36/vendor/llama.cpp"
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


def importable(*packages):
    code = "import importlib.util as u, sys; sys.exit(any(u.find_spec(p) is None for p in sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, *packages], env=environment()).returncode == 0


def install(*packages):
    """Installs those of `packages` that this Python lacks."""
    missing = [package for package in packages if not importable({"pyyaml": "yaml"}.get(package, package))]
    if missing:
        call(sys.executable, "-m", "pip", "install", "--quiet", "--target", PYTHON, *missing)


def torch():
    install("torch", "numpy")


def unpack_llama_cpp():
    if LLAMA_SOURCE.exists():
        return
    PEERS.mkdir(parents=True, exist_ok=True)
    call(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", PEERS, LLAMA_PACKAGE)
    with tarfile.open(next(PEERS.glob("llama_cpp_python-0.3.36.tar.gz"))) as archive:
        archive.extractall(PEERS, filter="data")


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

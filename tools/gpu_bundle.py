#!/usr/bin/env python3
"""Pack what was built here for a machine with a GPU and no Rust: gpu-bundle/, with a run.sh, and gpu-bundle.tar.xz of it.

    tools/gpu_bundle.py

Taken along: Cargo's test programs, the C and C++ tests and examples that ctest knows, the library, the
shared libraries that they need beyond those of every Linux machine, and benches/. models/ and tests/data/ are those of the
checkout in which the bundle is unpacked.
Left out: the gates and consumers, which need compilers, the AddressSanitizer variants, which need its libraries, and those of
the library without CUDA.
"""

import json
import lzma
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUNDLE = ROOT / "gpu-bundle"
ARCHIVE = ROOT / "gpu-bundle.tar.xz"
CMAKE_BUILD = ROOT / "build" / "test"
LIMIT_BYTES = 64 << 20
# Rust tests that read the source tree or never touch a device; each would carry another 17 MiB of kernels along.
LEFT_OUT = {
    "header", "abi_layout", "documents", "exports", "properties", "faults", "linear", "memory", "tuning",
    "nvbackend", "weight_data", "weight_properties",
}
# What every machine with a C++ program has.
BASE_LIBRARIES = re.compile(r"(ld-linux|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+)[-.]|linux-vdso")

RUN = """\
#!/bin/bash
# Runs the bundle's programs: ./run.sh [RESULTS] [PATTERN]
# RESULTS (./results) receives one log a program, summary.txt and the benchmarks' records. PATTERN picks programs by name:
# 'test/*' Rust tests, 'ctest/*' C and C++ tests, 'sm80/*' both again with the kernels of 8.0, 'bench/*' benchmarks.
# NVB_TEST_DEVICE (cuda) is the device of the C and C++ tests; NVB_TIMEOUT (300) seconds end a program.
# Exit status: how many failed.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
results=$(mkdir -p "${1:-results}" && cd "${1:-results}" && pwd)
pattern=${2:-*}
cd "$here" || exit 1
mkdir -p tests
for folder in models tests/data; do
  [ -e "$folder" ] || ln -s "$(dirname "$here")/$folder" "$folder"
  [ -d "$folder/" ] || { echo "run.sh: no $folder beside the bundle: unpack it in a checkout" >&2; exit 1; }
done
export NVB_TEST_DEVICE="${NVB_TEST_DEVICE-cuda}" NVB_COMMIT=@COMMIT@
export LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
failed=0
: >"$results/summary.txt"

# run NAME [VARIABLE=VALUE...] COMMAND...
run() {
  local name=$1 start=$SECONDS code
  shift
  # shellcheck disable=SC2254
  case $name in $pattern) ;; *) return ;; esac
  timeout "${NVB_TIMEOUT:-300}" env "$@" >"$results/${name//\\//.}.log" 2>&1
  code=$?
  [ $code = 0 ] || failed=$((failed + 1))
  printf '%s\\t%s\\t%ss\\n' "$([ $code = 0 ] && echo ok || echo "FAILED($code)")" "$name" $((SECONDS - start)) |
    tee -a "$results/summary.txt"
}

"""

END = """

[ ! -d benches/results ] || cp -r benches/results "$results/"
exit "$failed"
"""


def cargo_programs():
    """(name, path) of each program that `cargo test` would run, such as `test/conformance`."""
    command = ["cargo", "test", "--release", "--locked", "--no-run", "--message-format=json"]
    for message in map(json.loads, subprocess.check_output(command, cwd=ROOT, text=True).splitlines()):
        if message.get("executable") and message["target"]["name"] not in LEFT_OUT:
            yield f"test/{message['target']['name']}", pathlib.Path(message["executable"])


def native_tests():
    """(name, environment, command) of each ctest test whose program this build made."""
    subprocess.run(["make", "build-native"], cwd=ROOT, check=True)
    listing = subprocess.check_output(["ctest", "--test-dir", CMAKE_BUILD, "--show-only=json-v1"], text=True)
    for test in json.loads(listing)["tests"]:
        properties = {entry["name"]: entry["value"] for entry in test.get("properties", [])}
        command = test["command"]
        made_here = pathlib.Path(command[0]).parent == CMAKE_BUILD / "bin"
        if made_here and not test["name"].endswith(("_asan", "_cpu_only")):
            yield test["name"], properties.get("ENVIRONMENT", []), command


def pack(source, folder, name=None):
    """Copy a program or library into the bundle without its debug information; the path inside the bundle."""
    target = BUNDLE / folder / (name or source.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy2(source, target)
        subprocess.run(["strip", "--strip-debug", target], check=True)
    return target.relative_to(BUNDLE).as_posix()


def pack_needed_libraries(program):
    """Copy the libraries that the program loads and that another machine may lack."""
    listing = subprocess.check_output(["ldd", program], text=True)
    for name, path in re.findall(r"(\S+) => (/\S.*) \(0x", listing):
        if not BASE_LIBRARIES.match(name) and not (BUNDLE / "lib" / name).exists():
            pack(pathlib.Path(path).resolve(), "lib", name)


def relocated(text):
    """A command's word or a variable with this checkout's paths as the bundle has them."""
    path = pathlib.Path(text.partition("=")[2] or text)
    if path.is_absolute() and path.is_relative_to(CMAKE_BUILD):
        if path.suffix == ".json":
            return path.name  # the test writes it
        packed = pack(path, "lib" if ".so" in path.name else "bin")
        return text.replace(str(path), f"./{packed}")
    return text.replace(f"{ROOT}/", "")


def main():
    shutil.rmtree(BUNDLE, ignore_errors=True)
    lines = []
    for name, program in cargo_programs():
        lines.append([name, f"./{pack(program, 'rust', name.replace('/', '-'))}"])
    for name, environment, command in native_tests():
        pack_needed_libraries(command[0])
        lines.append([f"ctest/{name}", *map(relocated, environment), *map(relocated, command)])
    lines += [[f"sm80/{name}", "NVB_FORCE_ARCH=80", *command] for name, *command in lines]
    lines += [[f"bench/{name}", "python3", f"benches/bench_{name}.py"] for name in ("gpu", "model_gpu")]
    bench_memory, bench_latency = (f"./{pack(CMAKE_BUILD / 'bin' / name, 'bin')}" for name in ("bench_memory", "bench_latency"))
    for name, command in (("memory", f"{bench_memory} --device cuda"), ("latency", f"{bench_latency} cuda")):
        lines.append([f"bench/{name}", "bash", "-o", "pipefail", "-c", f"{command} | python3 benches/record.py {name}"])
    lines.append(["bench/memory_soak", bench_memory, "--device", "cuda", "--soak", "120"])
    shutil.copytree(ROOT / "benches", BUNDLE / "benches", ignore=shutil.ignore_patterns("__pycache__"))

    run = BUNDLE / "run.sh"
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    runs = "\n".join(f"run {shlex.join(line)}" for line in lines)
    run.write_text(RUN.replace("@COMMIT@", commit) + runs + END)
    run.chmod(0o755)
    files = [(path.stat().st_size, path) for path in BUNDLE.rglob("*") if path.is_file()]
    total = sum(size for size, _ in files)
    # The library and each Rust test have a copy of the kernels, which a window that holds two of them packs once: half the
    # size of xz's own window of 8 MiB.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 256 << 20}]
    with lzma.open(ARCHIVE, "w", filters=filters) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        archive.add(BUNDLE, BUNDLE.name)
    packed = ARCHIVE.stat().st_size
    print(f"gpu-bundle: {len(lines)} programs, {total / (1 << 20):.1f} MiB; {ARCHIVE.name}: {packed / (1 << 20):.1f} MiB")
    if packed > LIMIT_BYTES:
        for size, path in sorted(files, reverse=True)[:10]:
            print(f"  {size / (1 << 20):6.1f} MiB  {path.relative_to(BUNDLE)}")
        sys.exit(f"{ARCHIVE.name}: larger than {LIMIT_BYTES >> 20} MiB")


if __name__ == "__main__":
    main()

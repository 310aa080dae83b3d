#!/usr/bin/env python3
"""Pack what was built here for a machine with a GPU and no Rust: gpu-bundle/, with a run.sh.

    tools/gpu_bundle.py

Taken along: Cargo's test and benchmark programs, the C and C++ tests and examples that ctest knows, the library, the
shared libraries that they need beyond those of every Linux machine, models/, tests/data/ and the scripts in benches/.
Left out: the gates and consumers, which need compilers, and the AddressSanitizer variants, which need its libraries.
"""

import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUNDLE = ROOT / "gpu-bundle"
CMAKE_BUILD = ROOT / "build" / "test"
LIMIT_BYTES = 64 << 20
# Tests that read the source tree.
SOURCE_TESTS = {"header"}
# What every machine with a C++ program has.
BASE_LIBRARIES = re.compile(r"(ld-linux|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+)[-.]|linux-vdso")

RUN = """\
#!/bin/bash
# Runs the bundle's programs: ./run.sh [RESULTS] [PATTERN]
# RESULTS (./results) receives one log a program and summary.txt; PATTERN picks programs by name, e.g. 'test/*'.
# Exit status: how many failed.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
results=$(mkdir -p "${1:-results}" && cd "${1:-results}" && pwd)
pattern=${2:-*}
cd "$here" || exit 1
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


def cargo_programs():
    """(name, path) of each program that `cargo test` and `cargo bench` would run, such as `test/rms_norm`."""
    for command in (["test", "--release"], ["bench"]):
        output = subprocess.check_output(
            ["cargo", *command, "--locked", "--no-run", "--message-format=json"], cwd=ROOT, text=True
        )
        for message in map(json.loads, output.splitlines()):
            if not message.get("executable"):
                continue
            target = message["target"]
            kind = target["kind"][0] if target["kind"][0] in ("test", "bench", "example") else "unit"
            if kind == "example" or (command[0] == "bench") != (kind == "bench") or target["name"] in SOURCE_TESTS:
                continue
            yield f"{kind}/{target['name']}", pathlib.Path(message["executable"])


def native_tests():
    """(name, environment, command) of each ctest test whose program this build made."""
    subprocess.run(["make", "build-native"], cwd=ROOT, check=True)
    listing = subprocess.check_output(["ctest", "--test-dir", CMAKE_BUILD, "--show-only=json-v1"], text=True)
    for test in json.loads(listing)["tests"]:
        properties = {entry["name"]: entry["value"] for entry in test.get("properties", [])}
        command = test["command"]
        made_here = pathlib.Path(command[0]).parent == CMAKE_BUILD / "bin"
        if made_here and not test["name"].endswith("_asan"):
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
        packed = pack(path, "lib" if ".so" in path.name else "bin")
        return text.replace(str(path), f"./{packed}")
    return text.replace(f"{ROOT}/", "")


def main():
    shutil.rmtree(BUNDLE, ignore_errors=True)
    lines = []
    for name, program in cargo_programs():
        packed = pack(program, "rust", name.replace("/", "-"))
        arguments = ["--bench"] if name.startswith("bench/") else []
        lines.append(["run", name, f"./{packed}", *arguments])
    for name, environment, command in native_tests():
        pack_needed_libraries(command[0])
        lines.append(["run", f"ctest/{name}", *map(relocated, environment), *map(relocated, command)])
    for folder in ("models", "tests/data"):
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, BUNDLE / folder)
    for script in ROOT.glob("benches/*.py"):
        shutil.copy2(script, BUNDLE / script.name)

    run = BUNDLE / "run.sh"
    run.write_text(RUN + "\n".join(map(shlex.join, lines)) + '\n\nexit "$failed"\n')
    run.chmod(0o755)
    files = [(path.stat().st_size, path) for path in BUNDLE.rglob("*") if path.is_file()]
    total = sum(size for size, _ in files)
    print(f"gpu-bundle: {len(lines)} programs, {total / (1 << 20):.1f} MiB")
    if total > LIMIT_BYTES:
        for size, path in sorted(files, reverse=True)[:10]:
            print(f"  {size / (1 << 20):6.1f} MiB  {path.relative_to(BUNDLE)}")
        sys.exit(f"gpu-bundle: larger than {LIMIT_BYTES >> 20} MiB")


if __name__ == "__main__":
    main()

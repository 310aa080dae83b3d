#!/usr/bin/env python3
"""A wheel of tools/wheel.py serves whoever installs it into an empty environment: the module answers, its structs are the
header's, CMake and the linker find the library, and the plug-in loads into a host of ggml where one is given.

    wheel.py WORK WHEEL [LIBGGML]

WORK is emptied. LIBGGML is a host's library that exports ggml_backend_load.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

SIZES = r"""
#include <nvbackend.h>
#include <stdio.h>
int main(void) {
  printf("%zu %zu %zu %zu %zu %s\n", sizeof(nvb_device_info), offsetof(nvb_device_info, obstacle), sizeof(nvb_cpu_profile),
         offsetof(nvb_cpu_profile, memory_limit), offsetof(nvb_cpu_profile, available_threads), nvb_version_string());
  return 0;
}
"""
OFFSETS = ("import nvbackend as n, ctypes as c; d, p = n.DeviceInfo, n.CpuProfile; print(c.sizeof(d), d.obstacle.offset, "
           "c.sizeof(p), p.memory_limit.offset, p.available_threads.offset, n.version())")
PROJECT = """cmake_minimum_required(VERSION 3.22)
project(user C)
find_package(nvbackend REQUIRED)
if(NOT EXISTS "${nvbackend_GGML_PLUGIN}")
  message(FATAL_ERROR "the package names no plug-in")
endif()
add_executable(user sizes.c)
target_link_libraries(user PRIVATE nvbackend::nvbackend)
"""


def fail(text):
    sys.exit(f"wheel gate: {text}")


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        fail(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def python_with_pip():
    """This Python, or where it has no pip the one that `make setup` made."""
    has_pip = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0
    return sys.executable if has_pip else ROOT / ".toolchain" / "venv" / "bin" / "python"


def main():
    work, wheel = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    if work.exists() and not (work / "made-by-a-gate").exists():
        fail(f"{work} is there, and no gate made it")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / "made-by-a-gate").touch()
    for name in zipfile.ZipFile(wheel).namelist():
        if name.startswith(("/", "..")) or str(ROOT).encode() in zipfile.ZipFile(wheel).read(name):
            fail(f"{name} names a folder of this machine")
    python = work / "environment" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", work / "environment")
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    run(python_with_pip(), "-m", "pip", "install", "--no-index", "--disable-pip-version-check", "--target", packages, wheel)
    ask = lambda *options: run(python, "-m", "nvbackend", *options, cwd=work)
    plugin, library, include, prefix = (pathlib.Path(ask(option)) for option in ("--ggml", "--library", "--include", "--prefix"))
    for path in (plugin, library, include / "nvbackend.h", prefix / "lib" / "cmake" / "nvbackend" / "nvbackendConfig.cmake"):
        if not path.exists() or not path.is_relative_to(work):
            fail(f"{path} is not in the environment")
    devices = ask("--devices")
    if "cpu  " not in devices or ("cuda:" not in devices and "no GPU: " not in devices):
        fail(f"the devices are {devices}")
    if "usage:" not in ask() or subprocess.run([python, "-m", "nvbackend", "--nonsense"], capture_output=True).returncode == 0:
        fail("the module's command line")

    # By the linker with -L and -l, as pkg-config tells, and by CMake: structs as the module has them.
    (work / "sizes.c").write_text(SIZES)
    (work / "CMakeLists.txt").write_text(PROJECT)
    lib = prefix / "lib"
    run("cc", work / "sizes.c", f"-I{include}", f"-L{lib}", "-lnvbackend", f"-Wl,-rpath,{lib}", "-o", work / "linked")
    run("cmake", "-S", work, "-B", work / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", work / "build")
    sizes = {run(work / "linked"), run(work / "build" / "user"), run(python, "-c", OFFSETS, cwd=work)}
    if len(sizes) != 1:
        fail(f"the module's structs are not the header's: {sizes}")

    if len(sys.argv) > 3:
        environment = {**os.environ, "NVB_GGML_CPU": "1"}
        print("wheel gate: " + run(python, ROOT / "tests" / "engines" / "load.py", sys.argv[3], plugin, env=environment))
    print(f"wheel gate: {wheel.name} serves an empty environment: {sizes.pop()}")


if __name__ == "__main__":
    main()

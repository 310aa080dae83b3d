#!/usr/bin/env python3
"""Packs an archive of tools/dist.sh, or a folder with the same content, as a wheel, which `pip install` takes.

    tools/wheel.py FOLDER TREE...     writes FOLDER/nvbackend-VERSION-py3-none-manylinux_….whl of each archive or folder

Archives for the CPU alone become releases called VERSION+cpu. A wheel has no links, so the library lies in it once, under its
SONAME; `libnvbackend.so` is a line for the linker. What is packed from the same files is the same, byte for byte. Nothing is
published.
"""

import base64
import hashlib
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIME = (1980, 1, 1, 0, 0, 0)


def fail(text):
    sys.exit(f"wheel: {text}")


def readelf(option, file):
    command = ["env", "LC_ALL=C", "readelf", option, file]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def platform_of(files):
    """The oldest manylinux on which the files load: glibc's symbols that they need, and their processor."""
    needed, machines = set(), set()
    for file in files:
        needed |= {tuple(map(int, version.split("."))) for version in re.findall(r"Name: GLIBC_(\d+\.\d+)", readelf("-V", file))}
        machines |= set(re.findall(r"Machine: +(.*)", readelf("-h", file)))
    names = {"Advanced Micro Devices X86-64": "x86_64", "AArch64": "aarch64"}
    if len(machines) != 1 or not machines <= names.keys() or not needed:
        fail(f"the libraries are for {machines or 'nothing known'}")
    major, minor = max(needed)
    return f"manylinux_{major}_{minor}_{names[machines.pop()]}"


def content_of(tree):
    """Names in the wheel, with their bytes, and the version."""
    library = [file for file in tree.glob("lib/libnvbackend.so.*") if not file.is_symlink()]
    plugin = tree / "lib" / "libggml-nvb.so"
    if len(library) != 1 or not plugin.exists():
        fail(f"{tree} holds no library, or no plug-in")
    soname = re.search(r"SONAME.*\[(.*)\]", readelf("-d", library[0]))[1]
    # One without kernels beside one with them, of the same release.
    version = library[0].name[len("libnvbackend.so."):] + ("+cpu" if tree.name.endswith("-cpu") else "")
    content = {f"nvbackend/lib/{soname}": library[0].read_bytes(), "nvbackend/lib/libggml-nvb.so": plugin.read_bytes(),
               "nvbackend/lib/libnvbackend.so": f"INPUT({soname})\n".encode()}
    for pattern in ("include/*", "lib/cmake/nvbackend/*", "lib/pkgconfig/*"):
        for file in tree.glob(pattern):
            content[f"nvbackend/{file.relative_to(tree)}"] = file.read_bytes()
    config = "nvbackend/lib/cmake/nvbackend/nvbackendConfig.cmake"
    content[config] = content[config].replace(library[0].name.encode(), soname.encode())
    for file in (ROOT / "python" / "nvbackend").glob("*.py"):
        content[f"nvbackend/{file.name}"] = file.read_bytes()
    return content, version, platform_of([library[0], plugin])


def pack(tree, folder):
    content, version, platform = content_of(tree)
    info = f"nvbackend-{version}.dist-info"
    tag = f"py3-none-{platform}"
    content[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: nvbackend\nVersion: {version}\nSummary: Inference backend for C and C++ engines: NVIDIA "
        "GPUs, and the CPU where there is none\nLicense: MIT OR Apache-2.0\nRequires-Python: >=3.8\n").encode()
    content[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: nvbackend\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    for name in ("LICENSE-APACHE", "LICENSE-MIT"):
        content[f"{info}/{name}"] = (ROOT / name).read_bytes()
    record = f"{info}/RECORD"
    lines = [f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}"
             for name, data in sorted(content.items())]
    content[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"nvbackend-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in sorted(content.items(), key=lambda entry: (entry[0].startswith(info), entry[0])):
            entry = zipfile.ZipInfo(name, TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if ".so" in name else 0o644) << 16
            wheel.writestr(entry, data)
    print(f"wheel: {path}, {path.stat().st_size / 2 ** 20:.1f} MiB", flush=True)


def main():
    if len(sys.argv) < 3:
        fail("FOLDER TREE...")
    folder = pathlib.Path(sys.argv[1])
    for tree in map(pathlib.Path, sys.argv[2:]):
        if tree.is_dir():
            pack(tree, folder)
            continue
        unpacked = pathlib.Path(tempfile.mkdtemp())
        try:
            with tarfile.open(tree) as archive:
                archive.extractall(unpacked)
            pack(next(unpacked.iterdir()), folder)
        finally:
            shutil.rmtree(unpacked)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Write csrc/driver/symbols.h and csrc/driver/statuses.h from the declarations of the cust_raw crate.

    tools/list_driver_symbols.py            write both files
    tools/list_driver_symbols.py --check    exit 1 if they differ from what the crate declares

The crate's source is asked of Cargo, so the version is the one that Cargo.lock names. Each `cu*` function that cust, src/ or tests/
names gets a number, its place in the trampolines' table: a function that nobody can call needs no trampoline, and one that is
missed fails the link. Each value of its result type `cudaError_enum` is listed because a Rust enum must
never hold any other.
"""

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
DRIVER = ROOT / "csrc" / "driver"
# What csrc/driver/trampolines_*.S copies of a caller's stack.
STACK_ARGUMENT_BYTES = 64
# Types that a function takes by value and that are wider than a register.
WIDE_ARGUMENT_BYTES = {"CUipcMemHandle": 64, "CUipcEventHandle": 64}
FLOATING_REGISTERS = 8


def packages():
    """The folder and version of each crate by its name."""
    command = ["cargo", "metadata", "--format-version=1", "--locked"]
    found = json.loads(subprocess.check_output(command, cwd=ROOT))["packages"]
    return {package["name"]: (pathlib.Path(package["manifest_path"]).parent, package["version"]) for package in found}


def named(folders):
    """What looks like a function of the driver in Rust and C sources."""
    texts = (file.read_text() for folder in folders for file in folder.rglob("*") if file.suffix in (".rs", ".c"))
    return {name for text in texts for name in re.findall(r"\bcu[A-Z]\w+", text)}


def functions(source):
    """Names of the declared functions, sorted; refuses what the trampolines cannot carry."""
    declared = re.findall(r"pub fn (cu\w+)\s*\(([^)]*)\)\s*->\s*([\w:]+);", source)
    if len(declared) != len(re.findall(r"pub fn cu\w+", source)):
        sys.exit("a declaration has a form that this script does not read")
    for name, arguments, result in declared:
        if result != "CUresult":
            sys.exit(f"{name} returns {result}: a trampoline returns a CUresult")
        types = [part.split(":", 1)[1].strip() for part in arguments.split(",\n" if "\n" in arguments else ", ") if ":" in part]
        types = [text.rstrip(",") for text in types]
        wide = sum(WIDE_ARGUMENT_BYTES.get(text, 0) for text in types)
        floating = sum(text in ("f32", "f64") for text in types)
        general = sum(text not in WIDE_ARGUMENT_BYTES for text in types) - floating
        if floating > FLOATING_REGISTERS or wide + 8 * max(0, general - 6) > STACK_ARGUMENT_BYTES:
            sys.exit(f"{name} takes more arguments than a trampoline copies")
    return sorted(name for name, _, _ in declared)


def statuses(source):
    """The numbers of cudaError_enum, sorted."""
    body = re.search(r"pub enum cudaError_enum \{(.*?)\}", source, re.S).group(1)
    return sorted(int(number) for number in re.findall(r"= (\d+),", body))


def main():
    crates = packages()
    folder, version = crates["cust_raw"]
    source = (folder / "src" / "cuda.rs").read_text()
    used = named([crates["cust"][0] / "src", ROOT / "src", ROOT / "tests"])
    called = [name for name in functions(source) if name in used]
    note = f"// Written by tools/list_driver_symbols.py from cust_raw {version}; do not edit."
    symbols = [f"NVB_DRIVER_SYMBOL({index}, {name})" for index, name in enumerate(called)]
    known = [f"NVB_DRIVER_STATUS({number})" for number in statuses(source)]
    files = {
        DRIVER / "symbols.h": "\n".join([note, f"#define NVB_DRIVER_SYMBOLS {len(symbols)}", "#ifdef NVB_DRIVER_SYMBOL", *symbols, "#endif"]),
        DRIVER / "statuses.h": "\n".join([note, *known]),
    }
    for file, text in files.items():
        if "--check" not in sys.argv:
            file.write_text(text + "\n")
        elif not file.exists() or file.read_text() != text + "\n":
            sys.exit(f"{file.relative_to(ROOT)} is stale: run tools/list_driver_symbols.py")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""docs/dependencies.md names each crate that a Cargo.toml of the repository names, and no other."""

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

used = set()
for manifest in ("Cargo.toml", "tests/models/Cargo.toml"):
    command = ["cargo", "metadata", "--format-version=1", "--locked", "--no-deps", "--manifest-path", manifest]
    package = json.loads(subprocess.check_output(command, cwd=ROOT))["packages"][0]
    used |= {dependency["name"] for dependency in package["dependencies"]}
section = (ROOT / "docs" / "dependencies.md").read_text().split("\n## ")[1]
described = set(re.findall(r"^\| `([\w-]+)` \|", section, re.M))
for name in sorted(used - described):
    print(f"dependencies: a Cargo.toml names {name}, docs/dependencies.md does not", file=sys.stderr)
for name in sorted(described - used):
    print(f"dependencies: docs/dependencies.md names {name}, no Cargo.toml does", file=sys.stderr)
sys.exit(used != described)

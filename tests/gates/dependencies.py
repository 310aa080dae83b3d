#!/usr/bin/env python3
"""docs/dependencies.md names each crate that Cargo.toml names, and no other."""

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

command = ["cargo", "metadata", "--format-version=1", "--locked", "--no-deps"]
package = json.loads(subprocess.check_output(command, cwd=ROOT))["packages"][0]
used = {dependency["name"] for dependency in package["dependencies"]}
section = (ROOT / "docs" / "dependencies.md").read_text().split("\n## ")[1]
described = set(re.findall(r"^\| `([\w-]+)` \|", section, re.M))
for name in sorted(used - described):
    print(f"dependencies: Cargo.toml names {name}, docs/dependencies.md does not", file=sys.stderr)
for name in sorted(described - used):
    print(f"dependencies: docs/dependencies.md names {name}, Cargo.toml does not", file=sys.stderr)
sys.exit(used != described)

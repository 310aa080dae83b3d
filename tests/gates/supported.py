#!/usr/bin/env python3
"""README.md's "What it supports" names every operation, dtype, weight format and source format of include/nvbackend.h."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# What the README says in other words: floats, and whatever a part is in.
OTHER_WORDS = {"SOURCE_FORMAT_TENSOR", "WEIGHT_FORMAT_AS_IS"}


def missing(header, text):
    """Names of the header that a text lacks."""
    operations = re.findall(r"^NVB_MUST_USE nvb_status (nvb_\w+)\(\s*const nvb_(?:backend|attention) \*\w+,\s*const nvb_\w+_args \*args,"
                            r"\s*nvb_stream \*stream\);", header, re.M)
    names = [name for name in operations if not re.search(rf"`{name}`", text)]
    constants = re.findall(r"^#define NVB_((?:DTYPE|WEIGHT_FORMAT|SOURCE_FORMAT)_\w+) \d+$", header, re.M)
    if not operations or not constants:
        sys.exit("supported: the header has no operations or no formats where this gate looks for them")
    for constant in constants:
        spoken = re.sub(r"^(DTYPE|WEIGHT_FORMAT|SOURCE_FORMAT)_(GGUF_|KV_)?", "", constant)
        spoken = spoken if re.match(r"Q\d_", spoken) else spoken.replace("_", " ")
        if constant not in OTHER_WORDS and not re.search(rf"\b{spoken}\b", text):
            names.append(f"NVB_{constant} ({spoken})")
    return names


def main():
    text = (ROOT / "README.md").read_text()
    section = re.search(r"^## What it supports\n(.*?)^## ", text, re.S | re.M)
    if not section:
        sys.exit("supported: README.md has no section of what it supports")
    found = missing((ROOT / "include/nvbackend.h").read_text(), section[1])
    for name in found:
        print(f"supported: README.md's list of what it supports lacks {name}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

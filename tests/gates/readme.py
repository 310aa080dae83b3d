#!/usr/bin/env python3
"""Run every command of README.md's ```sh blocks in a fresh copy of the checkout.

    tests/gates/readme.py WORK_FOLDER

The copy holds what a clone would: tracked files and files not ignored. A block runs as one script that stops at its
first failing command. What cannot run inside a test is checked instead:

- `git clone` and the `cd` after it: the copy stands for the clone;
- `make test`, of which this is the last step, `make bench`, `make gpu-bundle` and `make setup`: the Makefile must have it;
- `sudo apt-get install`: each package must be one that tools/setup.sh installs.

`cmake --install` writes below DESTDIR in the work folder. A line that begins with `#` is a comment.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
KNOWN_TARGET = re.compile(r"make (test|bench|gpu-bundle|setup)$")
CLONE = re.compile(r"git clone \S+( && cd \S+)?$")
PACKAGES = re.compile(r"(sudo )?apt(-get)? install (-y )?(?P<names>.*)$")


def blocks(text):
    """The commands of each ```sh block, backslash continuations joined."""
    for body in re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M):
        lines = [line.strip().removeprefix("$ ") for line in body.replace("\\\n", " ").splitlines()]
        yield [line for line in lines if line and not line.startswith("#")]


def fresh_copy(folder):
    """Copy what a clone would hold."""
    shutil.rmtree(folder, ignore_errors=True)
    listing = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def checked(command, copy):
    """True if the command is one that is checked rather than run; ends the test if the check fails."""
    if CLONE.match(command) or re.match(r"cd nvbackend$", command):
        return True
    target = KNOWN_TARGET.match(command)
    if target:
        if not re.search(rf"^{target[1]}:.*##", (copy / "Makefile").read_text(), re.M):
            sys.exit(f"readme: the Makefile has no target {target[1]}, which README.md names")
        return True
    packages = PACKAGES.match(command)
    if packages:
        setup = (copy / "tools" / "setup.sh").read_text()
        unknown = [name for name in packages["names"].split() if not re.search(rf"[\" ]{re.escape(name)}[\" ]", setup)]
        if unknown:
            sys.exit(f"readme: tools/setup.sh does not install {' '.join(unknown)}, which README.md names")
        return True
    return False


def main():
    work = pathlib.Path(sys.argv[1]).resolve()
    copy = work / "checkout"
    fresh_copy(copy)
    environment = dict(os.environ, DESTDIR=str(work / "installed"))
    # The wheels that `make setup` unpacked serve the copy too: downloading them again would prove nothing.
    environment.setdefault("NVB_TOOLCHAIN", str(ROOT / ".toolchain" / "wheels"))
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        environment.pop(name, None)
    ran = 0
    found = list(blocks((copy / "README.md").read_text()))
    if not found:
        sys.exit("readme: README.md has no ```sh block")
    for block in found:
        commands = [command for command in block if not checked(command, copy)]
        if not commands:
            continue
        print("readme:", "; ".join(commands), flush=True)
        if subprocess.run(["bash", "-euo", "pipefail", "-c", "\n".join(commands)], cwd=copy, env=environment).returncode:
            sys.exit(f"readme: a command of this block of README.md failed: {commands}")
        ran += len(commands)
    print(f"readme: ran {ran} commands of README.md, checked {sum(map(len, found)) - ran}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Run every command of README.md's ```sh blocks in a fresh copy of the checkout, and build and run its ```c programs.

    tests/gates/readme.py WORK_FOLDER

The copy holds what a clone would: tracked files and files not ignored. A block runs as one script that stops at its
first failing command, in the environment of a user who has just logged in: without .toolchain/bin in the PATH and without the
variables of `make`. What Cargo built in an earlier run of this gate stays in the copy's target/, and the tools that
`make setup` unpacked here serve the copy by NVB_TOOLCHAIN, so that nothing is downloaded. What cannot run inside a test is
checked instead:

- `git clone` and the `cd` after it: the copy stands for the clone;
- `make test`, of which this is the last step, `make bench`, `make gpu-bundle` and `make setup`: the Makefile must have it;
- `sudo apt-get install`: each package must be one that tools/setup.sh asks for;
- Rust's installer: tools/setup.sh must name the same command.

`make install` writes below DESTDIR in the work folder. A line that begins with `#` is a comment.

A ```c block with a `main` is a whole program. It is compiled without a warning with what the README's commands have installed,
and what it writes must be what its comment says behind "prints:".
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
RUST = re.compile(r"curl .*https://sh.rustup.rs")
PACKAGES = re.compile(r"(sudo )?apt(-get)? install (-y )?(?P<names>.*)$")


def blocks(text):
    """The commands of each ```sh block, backslash continuations joined."""
    for body in re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M):
        lines = [line.strip().removeprefix("$ ") for line in body.replace("\\\n", " ").splitlines()]
        yield [line for line in lines if line and not line.startswith("#")]


def fresh_copy(folder):
    """Copy what a clone would hold. Of an earlier copy target/ stays."""
    for entry in folder.iterdir() if folder.is_dir() else []:
        if entry.name == "target":
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    listing = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def user_environment(work):
    """What a user's shell has: where programs are, who the user is, and how the network is reached."""
    kept = re.compile(r"(HOME|USER|LOGNAME|SHELL|LANG|LC_.*|TERM|TMPDIR|CARGO_HOME|RUSTUP_.*|SSL_CERT_.*|PIP_.*|.*_proxy|.*_PROXY)$")
    environment = {name: value for name, value in os.environ.items() if kept.match(name)}
    folders = [folder for folder in os.environ["PATH"].split(":") if folder and not pathlib.Path(folder).is_relative_to(ROOT)]
    environment.update(PATH=":".join(folders), DESTDIR=str(work / "installed"))
    wheels = pathlib.Path(os.environ.get("NVB_TOOLCHAIN") or ROOT / ".toolchain" / "wheels")
    if wheels.is_dir():
        environment["NVB_TOOLCHAIN"] = str(wheels)
    return environment


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
        unknown = [name for name in packages["names"].split() if not re.search(rf"['\" ]{re.escape(name)}['\" ]", setup)]
        if unknown:
            sys.exit(f"readme: tools/setup.sh does not ask for {' '.join(unknown)}, which README.md names")
        return True
    if RUST.match(command):
        if command not in (copy / "tools" / "setup.sh").read_text():
            sys.exit(f"readme: tools/setup.sh does not name `{command}`, as README.md does")
        return True
    return False


def run_programs(text, work):
    """Build and run the README's C programs with the installed library; return how many, or None where none is installed."""
    library = next((work / "installed").rglob("libnvbackend.so"), None)
    if library is None:
        return None
    header = next((work / "installed").rglob("nvbackend.h"))
    programs = [body for body in re.findall(r"^```c\n(.*?)^```", text, re.S | re.M) if re.search(r"\bmain\(", body)]
    for number, body in enumerate(programs):
        wanted = re.findall(r"// prints: (.*)", body)
        if not wanted:
            sys.exit("readme: a C program of README.md does not say what it prints")
        source, program = work / f"program_{number}.c", work / f"program_{number}"
        source.write_text(body)
        command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{header.parent}", source, "-o", program]
        command += [f"-L{library.parent}", f"-Wl,-rpath,{library.parent}", "-lnvbackend"]
        if subprocess.run(command).returncode:
            sys.exit("readme: a C program of README.md does not compile")
        ran = subprocess.run([program], stdout=subprocess.PIPE, text=True)
        if ran.returncode or ran.stdout.splitlines() != wanted:
            sys.exit(f"readme: a C program of README.md ended with {ran.returncode} and printed {ran.stdout!r}, not {wanted}")
    return len(programs)


def main():
    work = pathlib.Path(sys.argv[1]).resolve()
    copy = work / "checkout"
    fresh_copy(copy)
    shutil.rmtree(work / "installed", ignore_errors=True)
    environment = user_environment(work)
    ran = 0
    programs = None
    text = (copy / "README.md").read_text()
    found = list(blocks(text))
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
        # A later block may remove the library again.
        programs = programs or run_programs(text, work)
    if not programs:
        sys.exit("readme: README.md has no C program, or installs nothing to build it with")
    print(f"readme: ran {ran} commands of README.md, checked {sum(map(len, found)) - ran}, and ran {programs} C programs")


if __name__ == "__main__":
    main()

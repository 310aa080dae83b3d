#!/usr/bin/env python3
"""The modules of src/ import downwards alone, in the order in which docs/design.md lists them; or those of another checkout.

    tests/gates/layers.py [ROOT]

- Each module of src/ (a folder or file beside lib.rs) stands in the list once, and each line of the list that does not say
  "(planned)" is a module.
- A module names only modules that stand below it: in `use crate::…`, in any path `crate::…`, and in paths of `super` that lead
  to the crate's root; an exported macro is its module's. So no two modules can need each other.
- Code under `#[cfg(test)]` may name every module: a test stands above the library that it tries.
"""

import functools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Comments, strings, characters (which lifetimes are not), and then what paths, attributes and blocks consist of.
TOKEN = re.compile(r"""
    (?P<skip>//[^\n]*|/\*.*?\*/|b?r(?P<hashes>\#*)".*?"(?P=hashes)|[bc]?"(?:\\.|[^"\\])*"|b?'(?:\\.[^']*|[^'\\\n])')
    |(?P<token>[A-Za-z_]\w*|::|[^\s\w])""", re.X | re.S)
# Exported macros, which Rust puts at the crate's root.
MACRO = re.compile(r"#\[macro_export\]\s*macro_rules! (\w+)")
LISTED = re.compile(r"^  (\w+)(/|\.rs) +(\S.*)$", re.M)


def order(design):
    """(name, whether it is planned) of each module that the page lists, the highest first."""
    layout = design.split("\nsrc/\n", 1)[1]
    layout = re.split(r"^\S", layout, maxsplit=1, flags=re.M)[0]
    return [(name, text.startswith("(planned)")) for name, _, text in LISTED.findall(layout)]


def tokens(text):
    """(token, line) of Rust code."""
    line, at = 1, 0
    for match in TOKEN.finditer(text):
        line, at = line + text.count("\n", at, match.start()), match.start()
        if match["token"]:
            yield match["token"], line


def closing(code, at):
    """The place of the bracket that closes the one at `at`."""
    depth = 0
    for place in range(at, len(code)):
        depth += {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}.get(code[place][0], 0)
        if depth == 0:
            return place
    return len(code) - 1


def is_of_tests(attribute):
    """Whether these tokens of an attribute are `cfg(test)`, or a `cfg(all(…))` with it."""
    words = [token for token, _ in attribute]
    return words[:2] == ["cfg", "("] and "test" in words and not {"not", "any"} & set(words)


def end_of_item(code, at):
    """The place behind the item that begins at `at`, attributes before it included."""
    while at < len(code):
        token = code[at][0]
        if token in "([":
            at = closing(code, at)
        elif token == "{":
            at = closing(code, at)
            # `use a::{b};` ends with its semicolon, whatever else has braces with them.
            if at + 1 >= len(code) or code[at + 1][0] != ";":
                return at + 1
        elif token == ";":
            return at + 1
        at += 1
    return at


def without_tests(code):
    """The code that is compiled without `cfg(test)`, and the names of files that are compiled with it alone."""
    kept, files, at = [], set(), 0
    while at < len(code):
        if code[at][0] == "#" and at + 1 < len(code) and code[at + 1][0] == "[":
            end = closing(code, at + 1)
            if is_of_tests(code[at + 2:end]):
                stop = end_of_item(code, end + 1)
                words = [token for token, _ in code[end + 1:stop]]
                if "mod" in words and words[-1] == ";":
                    files.add(words[words.index("mod") + 1])
                at = stop
                continue
        kept.append(code[at])
        at += 1
    return kept, files


def first_names(code, at):
    """(name, line) of what the path that goes on at `at` begins with: one name, or those of a group's members."""
    if at >= len(code):
        return
    if code[at][0] != "{":
        yield code[at]
        return
    member = True
    place = at + 1
    while place < closing(code, at):
        if member:
            yield from first_names(code, place)
            member = False
        if code[place][0] == "{":
            place = closing(code, place)
        member = code[place][0] == ","
        place += 1


def imports(code, module):
    """(name, line) of everything at the crate's root that code names; `module` is the path of the module that its file is."""
    inside = []  # for each open block: whether it is that of an inline module
    for at, (token, _) in enumerate(code):
        before = code[at - 1][0] if at else ""
        if token == "{":
            inside.append(at >= 2 and code[at - 2][0] == "mod")
        elif token == "}" and inside:
            inside.pop()
        elif token == "crate" and at + 1 < len(code) and code[at + 1][0] == "::":
            yield from first_names(code, at + 2)
        elif token == "super" and not (before == "::" and code[at - 2][0] == "super"):
            ups = 0
            while [word for word, _ in code[at + 2 * ups:at + 2 * ups + 2]] == ["super", "::"]:
                ups += 1
            if ups and ups == len(module) + sum(inside):
                yield from first_names(code, at + 2 * ups)


@functools.cache
def read(text, module):
    """The names at the crate's root that a file's code has without `cfg(test)`, and the modules that it has for tests alone."""
    code, tests = without_tests(list(tokens(text)))
    inside = module if module != ("lib",) else ()
    return list(imports(code, inside)), {(*inside, name) for name in tests}


def module_of(path):
    """The path of the module in a file: ("cpu", "linear")."""
    parts = path.with_suffix("").parts
    return parts[:-1] if parts[-1] == "mod" else parts


def problems(root):
    """What is wrong in a checkout, as sentences."""
    source = root / "src"
    listed = order((root / "docs" / "design.md").read_text())
    names = [name for name, _ in listed]
    present = {path.relative_to(source).parts[0].removesuffix(".rs") for path in source.rglob("*.rs")} - {"lib"}
    found = [f"docs/design.md does not list the module {name}" for name in sorted(present - set(names))]
    found += [f"docs/design.md lists {name}, which src/ does not have" for name, planned in listed if not planned and name not in present]
    found += [f"docs/design.md lists {name} twice" for name in sorted({name for name in names if names.count(name) > 1})]
    if found:
        return found
    place = {name: number for number, name in enumerate(names)}
    files = {path: module_of(path.relative_to(source)) for path in sorted(source.rglob("*.rs"))}
    read_files = {path: read(path.read_text(), module) for path, module in files.items()}
    macros = {name: module[0] for path, module in files.items() for name in MACRO.findall(path.read_text())}
    tests = set().union(*(inner for _, inner in read_files.values()))
    for path, module in files.items():
        if module == ("lib",) or any(module[:length] in tests for length in range(1, len(module) + 1)):
            continue
        own = module[0]
        for name, line in read_files[path][0]:
            name = macros.get(name, name)
            where = f"{path.relative_to(root)}:{line}"
            if name not in place:
                found.append(f"{where} names crate::{name}, which is no module")
            elif place[name] < place[own]:
                found.append(f"{where} names {name}, which stands above {own} in docs/design.md")
    return found


def main():
    found = problems(pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
    for problem in found:
        print("layers:", problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""The API's pages hold each function, struct, handle and constant of the header once, and no link of theirs is dead.

    test_api_pages.py [FOLDER]     FOLDER: share/doc/nvbackend of an installed library; without it the pages are made here
"""

import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
VOID = {"meta", "link", "input", "br"}


class Page(html.parser.HTMLParser):
    """The identifiers and the addresses of a page; notes elements that do not close in order."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.open, self.wrong = [], [], [], []
        self.feed(text)
        if self.open:
            self.wrong.append(f"<{self.open[-1]}> is not closed")

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes[name] for name in ("href", "src") if name in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> closes nothing")


def names_of_header():
    """What must be on the pages: exported functions as the gate lists them, the rest as the header declares it."""
    header = (ROOT / "include/nvbackend.h").read_text(encoding="utf-8")
    names = (ROOT / "tests/gates/exports.txt").read_text().split()
    for pattern in (r"^\} (nvb_\w+);", r"^typedef struct (nvb_\w+) \1;", r"^typedef .*\(\*(nvb_\w+)\)", r"^typedef \w+ (nvb_\w+);",
                    r"^#define (NVB_\w+) ", r"^static inline \w+ (nvb_\w+)\("):
        found = re.findall(pattern, header, re.M)
        assert found, f"{pattern} matches nothing in the header"
        names += found
    return set(names) - {"NVB_MUST_USE"}


def problems(folder):
    """What is wrong with the pages in FOLDER/api."""
    api = folder / "api"
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(api.glob("*.html"))}
    wrong = [f"{path.name}: {what}" for path, page in pages.items() for what in page.wrong]
    places = {}
    for path, page in pages.items():
        wrong += [f"{path.name}: two elements are #{name}" for name in set(page.ids) if page.ids.count(name) > 1]
        for name in set(page.ids):
            places.setdefault(name, []).append(path.name)
    for name in sorted(names_of_header()):
        if len(places.get(name, [])) != 1:
            wrong.append(f"{name} is on the pages {places.get(name, [])}; it must be on one")
    entries = json.loads((api / "entries.js").read_text(encoding="utf-8").removeprefix("const ENTRIES = ").rstrip(";\n"))
    if {name for name, _, _ in entries} != names_of_header():
        wrong.append("entries.js, which the search reads, has other names than the header")
    links = [(path, link) for path, page in pages.items() for link in page.links] + [(api / "entries.js", link) for _, link, _ in entries]
    for path, link in links:
        target, _, fragment = link.partition("#")
        target = (api / target).resolve() if target else path
        if "://" in link or not target.is_file():
            wrong.append(f"{path.name}: {link} leads nowhere")
        elif fragment and fragment not in pages[target].ids:
            wrong.append(f"{path.name}: {link} names nothing on that page")
    reached = {link.partition("#")[0] for link in pages.get(api / "index.html", Page("")).links}
    wrong += [f"index.html has no link to {path.name}" for path in pages if path.name not in reached]
    return wrong


def check_that_faults_are_found(folder):
    """Plants one fault after the other."""
    page = folder / "api/pools.html"
    text = page.read_text(encoding="utf-8")
    plants = [(lambda s: s.replace('href="memory.html#nvb_memory_free"', 'href="memory.html#nvb_memory_fre"'), "names nothing"),
              (lambda s: s.replace('href="memory.html"', 'href="memories.html"'), "leads nowhere"),
              (lambda s: s.replace('id="nvb_pool_create"', ""), "nvb_pool_create is on the pages []"),
              (lambda s: s.replace("</main>", '<p id="nvb_memory_free"></p></main>'), "nvb_memory_free is on the pages ['memory.html', 'pools.html']"),
              (lambda s: s.replace("</main>", ""), "closes nothing")]
    for change, message in plants:
        assert change(text) != text, f"the fault for {message!r} was not planted"
        page.write_text(change(text), encoding="utf-8")
        found = problems(folder)
        assert any(message in what for what in found), f"{message!r} is not among {found}"
    page.write_text(text, encoding="utf-8")
    header = folder / "odd.h"
    header.write_text((ROOT / "include/nvbackend.h").read_text(encoding="utf-8").replace("typedef struct nvb_pool nvb_pool;", "union odd;"))
    ran = subprocess.run([ROOT / "tools/api_pages.py", folder / "odd", header], capture_output=True, text=True)
    assert ran.returncode and "no declaration" in ran.stderr, f"an unknown declaration was passed over: {ran.stderr}"


def main():
    if len(sys.argv) > 1:
        found = problems(pathlib.Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            subprocess.run([ROOT / "tools/api_pages.py", folder / "api"], check=True)
            shutil.copytree(ROOT / "docs", folder / "docs")
            found = problems(folder)
            if not found:
                check_that_faults_are_found(folder)
    for what in found:
        print(f"api pages: {what}", file=sys.stderr)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

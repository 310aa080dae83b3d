#!/usr/bin/env python3
"""Make the API's pages from the header: plain HTML, a page for each part of the header, with contents and a search.

    tools/api_pages.py FOLDER [HEADER]

The pages need no network and no server: they open from the disk, and their script searches a list of names beside them. Every
handle, struct, function and constant stands on the page of its part; a handle on that of the function that destroys it. The
header names pages of docs/, which the links look for beside FOLDER, as they are installed. Needs Python's standard library only.
"""

import dataclasses
import html
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PART = re.compile(r"^// (.+?) -{3,}\n//\n((?:// .*\n)+)", re.M)
NAME = re.compile(r"\b(?:nvb|NVB)_\w+…?")
# A line of a comment that begins a paragraph of its own.
LABEL = re.compile(r"(Errors|Formula|Threads): ")
# What has no section of its own: constants stand in a table, initializers at their structs.
TABLED = ("constant", "initializer")

STYLE = """\
:root { color-scheme: light dark; --line: #8885; --soft: #8881; --link: #0b57d0; }
@media (prefers-color-scheme: dark) { :root { --link: #8ab4f8; } }
body { margin: 0; font: 16px/1.5 system-ui, sans-serif; display: grid; grid-template-columns: 19rem minmax(0, 1fr); }
nav { position: sticky; top: 0; height: 100vh; overflow: auto; box-sizing: border-box; padding: 1rem; border-right: 1px solid var(--line); }
nav ul { list-style: none; margin: 0; padding: 0; } nav ul ul { padding-left: .8rem; font-size: .82rem; overflow-wrap: anywhere; }
nav input { width: 100%; box-sizing: border-box; font: inherit; margin: .3rem 0 .8rem; padding: .3rem; }
main { padding: 1rem 2rem 6rem; max-width: 60rem; } section { border-top: 1px solid var(--line); margin-top: 1.5rem; }
a { color: var(--link); text-decoration: none; } a:hover { text-decoration: underline; } h3 { margin-bottom: .2rem; }
code, pre { font: .88em/1.45 ui-monospace, monospace; } pre { background: var(--soft); padding: .6rem .8rem; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; vertical-align: top; padding: .25rem .7rem .25rem 0; border-top: 1px solid var(--line); }
.here { font-weight: 600; } :target { background: #fd03; }
@media (max-width: 50rem) { body { display: block; } nav { position: static; height: auto; } }
"""

# Finds names that hold each of the words that were typed; what begins with the first word comes first.
SCRIPT = """\
const box = document.getElementById("search"), found = document.getElementById("found");
box.addEventListener("input", () => {
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  const hits = words.length ? ENTRIES.filter(([name, , about]) => words.every(word => (name + " " + about).toLowerCase().includes(word))) : [];
  const rank = ([name]) => { const at = name.toLowerCase().indexOf(words[0]); return at < 0 ? 1000 : at; };
  hits.sort((a, b) => rank(a) - rank(b));
  found.replaceChildren(...hits.slice(0, 40).map(([name, address, about]) => {
    const item = document.createElement("li"), link = document.createElement("a");
    link.href = address; link.textContent = name; link.title = about;
    item.append(link);
    return item;
  }));
});
box.addEventListener("keydown", event => { if (event.key === "Enter" && found.querySelector("a")) found.querySelector("a").click(); });
"""


@dataclasses.dataclass
class Entry:
    """One declaration: its kind, its name, its comment's lines and its text in C."""
    kind: str  # "handle", "struct", "type", "function", "initializer" or "constant"
    name: str
    comment: list
    code: str


@dataclasses.dataclass
class Part:
    title: str
    about: str
    entries: list

    @property
    def file(self):
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-") + ".html"


def entry_of(block):
    """The declaration of a block of lines without an empty one."""
    lines = block.splitlines()
    comment = [line[3:] for line in lines if line.startswith("//")]
    code = "\n".join(line for line in lines if not line.startswith("//"))
    for kind, pattern in (("constant", r"#define (\w+)"), ("struct", r"typedef struct \{.*\} (\w+);$"), ("handle", r"typedef struct (\w+) \1;$"),
                          ("type", r"typedef .*?\(\*(\w+)\)\(.*\);$"), ("type", r"typedef .* (\w+);$"),
                          ("initializer", r"static inline void (\w+_init)\("), ("function", r"static inline .*?(\w+)\("), ("function", r"[\w *]*?\b(nvb_\w+)\(.*\);$")):
        found = re.match(pattern, code, re.S)
        if found:
            return Entry(kind, found[1], comment, code)
    raise ValueError(f"this is no declaration that the pages know:\n{block}")


def parts_of(text):
    """The introduction of the header and its parts, with each handle in the part of the function that destroys it."""
    introduction, rest = text.split("\n#ifndef NVBACKEND_H", 1)
    rest = rest.split("\n#ifdef __cplusplus\n}\n#endif", 1)[0]
    pieces = PART.split(rest)
    version = [Entry("constant", *found) for found in re.findall(r"^#define (NVB_VERSION_\w+)()( .*)$", pieces[0], re.M)]
    parts = []
    for title, about, body in zip(pieces[1::3], pieces[2::3], pieces[3::3]):
        about = " ".join(line[3:] for line in about.splitlines())
        parts.append(Part(title, about, [entry_of(block) for block in body.strip("\n").split("\n\n") if block.strip()]))
    handles, *parts = parts
    for handle in handles.entries:
        home = [part for part in parts if any(entry.name == f"{handle.name}_destroy" for entry in part.entries)]
        if handle.kind != "handle" or len(home) != 1:
            raise ValueError(f"{handle.name} stands among the handles, and {len(home)} parts have {handle.name}_destroy")
        home[0].entries.insert(0, handle)
    for entry in version:
        entry.comment, entry.code = ["Of this header."], f"#define {entry.name}{entry.code}"
    next(part for part in parts if part.title.startswith("Version")).entries[:0] = version
    return introduction, parts


class Pages:
    """Writes the pages; knows where each name stands."""

    def __init__(self, introduction, parts):
        self.introduction, self.parts = introduction, parts
        self.places = {entry.name: f"{part.file}#{entry.name}" for part in parts for entry in part.entries}

    def linked(self, text, own=None):
        """HTML of a text: names of the header and pages of docs/ become links, what stands in backticks code."""
        text = html.escape(text, quote=False)
        text = re.sub(r"`([^`]*)`", r"<code>\1</code>", text)
        text = re.sub(r"\bdocs/[a-z_]+\.md\b", lambda page: f'<a href="../{page[0]}">{page[0]}</a>', text)

        def link(found):
            name = found[0].rstrip("…")
            place = self.places.get(name)
            if place is None and found[0].endswith("…"):
                place = next((place for known, place in self.places.items() if known.startswith(name)), None)
            return found[0] if place is None or name == own else f'<a href="{place}">{found[0]}</a>'

        return NAME.sub(link, text)

    def paragraphs(self, comment, own=None):
        """HTML of a comment: paragraphs, labelled ones among them, and lists."""
        text = ""
        for line in comment:
            begins = line.startswith("- ") or LABEL.match(line)
            text += ("\n" if not line or begins else " ") + line
        out, items = [], []
        for paragraph in [*filter(None, map(str.strip, text.split("\n"))), ""]:
            if paragraph.startswith("- "):
                items.append(f"<li>{self.linked(paragraph[2:], own)}</li>")
                continue
            if items:
                out.append(f"<ul>{''.join(items)}</ul>")
                items = []
            if paragraph:
                label = LABEL.match(paragraph)
                body = self.linked(paragraph[label.end():] if label else paragraph, own)
                out.append(f"<p>{f'<b>{label[1]}:</b> ' if label else ''}{body}</p>")
        return "\n".join(out)

    def fields(self, entry):
        """A table of a struct's fields."""
        rows, comment = [], []
        for line in map(str.strip, entry.code.splitlines()[1:-1]):
            if line.startswith("//"):
                comment.append(line[3:])
                continue
            kind, stars, name, array = re.match(r"(.*?)\s*(\**)(\w+)(\[\d+\])?;$", line).groups()
            type_ = self.linked(f"{kind} {stars}{array or ''}".strip())
            rows.append(f"<tr><td><code>{name}</code></td><td><code>{type_}</code></td><td>{self.linked(' '.join(comment))}</td></tr>")
            comment = []
        return "<table><tr><th>Field</th><th>Type</th><th></th></tr>\n" + "\n".join(rows) + "</table>"

    def section(self, entry):
        title = f'<section id="{entry.name}"><h3>{entry.name}</h3>\n'
        if entry.kind == "struct":
            # Comments of fields stand among the code's lines, and those of the struct before it.
            body = self.paragraphs(entry.comment, entry.name) + self.fields(entry)
            initializer = f"{entry.name}_init"
            if initializer in self.places:
                body += f'<pre id="{initializer}">static inline void {initializer}({entry.name} *value);</pre>'
            return f"{title}{body}</section>"
        code = entry.code.split(" {\n")[0] + (";" if " {\n" in entry.code else "")
        return f"{title}<pre>{self.linked(code, entry.name)}</pre>\n{self.paragraphs(entry.comment, entry.name)}</section>"

    def constants(self, entries):
        rows = []
        for entry in entries:
            value = html.escape(entry.code.split(None, 2)[2])
            rows.append(f'<tr id="{entry.name}"><td><code>{entry.name}</code></td><td><code>{value}</code></td>'
                        f"<td>{self.linked(' '.join(entry.comment), entry.name)}</td></tr>")
        return '<section id="constants"><h3>Constants</h3><table>' + "\n".join(rows) + "</table></section>"

    def page(self, title, body, here=None):
        items = []
        for part in self.parts:
            own = part is here
            inner = ""
            if own:
                names = "".join(f'<li><a href="#{entry.name}">{entry.name}</a></li>' for entry in part.entries
                                if entry.kind not in TABLED)
                inner = f"<ul>{names}</ul>"
            items.append(f'<li{" class=here" if own else ""}><a href="{part.file}">{html.escape(part.title)}</a>{inner}</li>')
        return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">\n'
                f'<title>{html.escape(title)} · nvbackend</title><link rel="stylesheet" href="style.css"></head><body>\n'
                f'<nav><a href="index.html">nvbackend</a>\n<input id="search" type="search" placeholder="Search" aria-label="Search">\n'
                f'<ul id="found"></ul><ul>\n{chr(10).join(items)}\n</ul></nav>\n<main><h1>{html.escape(title)}</h1>\n{body}\n</main>\n'
                f'<script src="entries.js"></script><script src="search.js"></script></body></html>\n')

    def index(self):
        lines = [line[3:] for line in self.introduction.splitlines() if line.startswith("//")]
        at = lines.index("Conventions")
        head = [line for line in lines[:at] if not line.startswith("Generated")]
        rows = []
        for line in lines[at + 1:]:
            label, text = line[:12].strip(), line[12:].strip()
            if label:
                rows.append([label, text])
            else:
                rows[-1][1] += f" {text}"
        conventions = "".join(f"<tr><th>{label}</th><td>{self.linked(text)}</td></tr>" for label, text in rows if label != "Parts")
        parts = "".join(f'<tr><td><a href="{part.file}">{html.escape(part.title)}</a></td><td>{self.linked(part.about)}</td></tr>'
                        for part in self.parts)
        return self.page("nvbackend.h", f"{self.paragraphs(head)}\n<h2>Parts</h2><table>{parts}</table>\n"
                                        f"<h2>Conventions</h2><table>{conventions}</table>")

    def write(self, folder):
        files = {"style.css": STYLE, "search.js": SCRIPT, "index.html": self.index()}
        entries = [[entry.name, self.places[entry.name], " ".join(entry.comment)[:160]] for part in self.parts for entry in part.entries]
        files["entries.js"] = f"const ENTRIES = {json.dumps(entries, ensure_ascii=False, indent=0)};\n"
        for part in self.parts:
            constants = [entry for entry in part.entries if entry.kind == "constant"]
            body = f"<p>{self.linked(part.about)}</p>\n" + "\n".join(self.section(entry) for entry in part.entries if entry.kind not in TABLED)
            files[part.file] = self.page(part.title, body + (self.constants(constants) if constants else ""), part)
        if len(files) != 4 + len(self.parts):
            raise ValueError("two parts have one file's name")
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "entries.js").exists():  # pages of parts that have another title now
            for page in folder.glob("*.html"):
                page.unlink()
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    header = pathlib.Path(sys.argv[2]) if len(sys.argv) == 3 else ROOT / "include/nvbackend.h"
    try:
        pages = Pages(*parts_of(header.read_text(encoding="utf-8")))
        pages.write(pathlib.Path(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"api_pages: {header}: {error}")


if __name__ == "__main__":
    main()

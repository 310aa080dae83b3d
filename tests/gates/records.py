#!/usr/bin/env python3
"""What benches/results/ holds and what quotes it; or what another FOLDER holds.

    tests/gates/records.py [FOLDER]

- A record has the form that benches/record.py writes, a name that says its device and section, and beside it the Markdown that
  its JSON makes. Each ratio is that of its two figures, by whether less of the unit is better; where it is the median of the rounds' own
  ("ratio_of": "rounds") it is near that. A text begins with the date and commit of its run.
- No two rows hold the same case against the same peer, and each row of an earlier run names a run of the record.
- A record that README.md, docs/, benches/README.md or a comment of the sources names is there, and no name of the dated files of
  old is left.
- README.md's table, its pictures and benches/README.md's summary are what benches/readme.py makes of the records.
"""

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benches"))
sys.dont_write_bytecode = True

import readme  # noqa: E402
import record  # noqa: E402

DATE = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\dZ)?$")
COMMIT = re.compile(r"([0-9a-f]{7,40}|unknown)(\+changes)?$")
TEXT_HEAD = re.compile(r"\d{4}-\d\d-\d\d, commit [0-9a-f]{7,40}, .*nvbackend \d+\.\d+\.\d+")
DATED = re.compile(r"\b20\d\d-\d\d-\d\d-(?:cpu|h200)[\w.-]*")
# How the name of a record goes on behind the device; `cpu-only` is none.
SECTIONS = "operations|model|memory|latency|queueing|loading|engines"
ROW = {"operation": str, "case": str, "ours": (float, int, None), "peer": (float, int, None), "peer_name": (str, None),
       "unit": (str, None), "ratio": (float, int, None)}
OPTIONAL = {"spread": list, "error": (float, int), "note": str, "ratio_of": str, "bytes": int, "operations": int, "date": str,
            "commit": str}
RUN = {"date": str, "commit": str, "driver": str, "versions": dict, "notes": list}
HEAD = {"device": str, "section": str, **RUN, "earlier_runs": list, "rows": list}


def has_type(value, types):
    types = types if isinstance(types, tuple) else (types,)
    return any(value is None if kind is None else type(value) is kind for kind in types)


def form_problems(entry, required, optional, where):
    for key in required.keys() - entry.keys():
        yield f"{where} has no {key}"
    for key, value in entry.items():
        kinds = required.get(key, optional.get(key))
        if kinds is None:
            yield f"{where} has {key}, which no record has"
        elif not has_type(value, kinds):
            yield f"{where}: {key} is {value!r}"


def run_problems(run, where):
    if not DATE.match(run["date"]):
        yield f"{where}: {run['date']!r} is no date"
    if not COMMIT.match(run["commit"]):
        yield f"{where}: {run['commit']!r} is no commit"
    if not run["driver"]:
        yield f"{where} names no driver"
    if not run["versions"] or any(not version for version in run["versions"].values()):
        yield f"{where} names no versions"


def ratio_problems(row, where):
    if row["ours"] is None and "note" not in row:
        yield f"{where} has neither a figure of ours nor a note that says why"
    if (row["peer"] is None) != (row["peer_name"] is None):
        yield f"{where} has a peer without a name, or a name without a peer's figure"
    try:
        expected = record.ratio(row["ours"], row["peer"], row["unit"])
    except ValueError as unknown:
        yield f"{where}: {unknown}"
        return
    if (expected is None) != (row["ratio"] is None):
        yield f"{where}: the ratio is {row['ratio']}, its figures give {expected}"
    elif expected is not None:
        # Figures have four significant digits and ratios three. On a machine of two speeds the median of the rounds' ratios is as
        # far from the ratio of two medians as the speeds are.
        tolerance = 2.0 if row.get("ratio_of") == "rounds" else 1.0065
        if not 1 / tolerance <= row["ratio"] / expected <= tolerance:
            yield f"{where}: the ratio is {row['ratio']}, its figures give {expected:.4g}"
    if row.get("ratio_of", "rounds") != "rounds":
        yield f"{where}: ratio_of is {row['ratio_of']!r}"


def record_problems(path):
    """What is wrong with one record, as sentences."""
    name = path.name
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as broken:
        return [f"{name} is no JSON: {broken}"]
    found = list(form_problems(data, HEAD, {}, name))
    for number, run in enumerate(data.get("earlier_runs", []), 2):
        found += form_problems(run, RUN, {}, f"{name}, run {number}")
    for number, row in enumerate(data.get("rows", []), 1):
        found += form_problems(row, ROW, OPTIONAL, f"{name}, row {number}")
    if found:
        return found
    if not re.match(SECTIONS, data["section"]):
        found.append(f"{name} is of the section {data['section']}, which tests/gates/records.py does not know")
    if path.stem != (right := record.name_of(data["device"], data["section"])):
        found.append(f"{name} holds the section {data['section']} of {data['device']}, whose record is {right}.json")
    if not data["rows"]:
        found.append(f"{name} has no rows")
    runs = [data, *data["earlier_runs"]]
    for number, run in enumerate(runs, 1):
        found += run_problems(run, f"{name}, run {number}")
    dates = [run["date"][:10] for run in runs]
    if dates != sorted(dates, reverse=True):
        found.append(f"{name}: the runs do not stand newest first")
    named = [(run["date"], run["commit"]) for run in runs]
    if len(set(named)) != len(named):
        found.append(f"{name}: two runs have the same date and commit")
    used, seen = set(), set()
    for number, row in enumerate(data["rows"], 1):
        where = f"{name}, row {number} ({row['operation']}, {row['case']})"
        found += ratio_problems(row, where)
        key = (row["operation"], row["case"], row["peer_name"])
        if key in seen:
            found.append(f"{where} is there twice for the same peer")
        seen.add(key)
        if ("date" in row) != ("commit" in row) or ("date" in row and (row["date"], row["commit"]) not in named[1:]):
            found.append(f"{where} is of no run that the record lists")
        used.add((row.get("date"), row.get("commit")))
    found += [f"{name}: no row is of the run of {date} at {commit}" for date, commit in named[1:] if (date, commit) not in used]
    table = path.with_suffix(".md")
    if not found and (not table.exists() or table.read_text() != record.markdown(data)):
        found.append(f"{table.name} is not what {name} makes: benches/record.py write()s both")
    return found


def folder_problems(folder):
    """What is wrong with the records of a folder."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json":
            found += record_problems(path)
        elif path.suffix == ".txt":
            if not TEXT_HEAD.match(path.read_text()):
                found.append(f"{path.name} does not begin with the date, the commit and the version of its run")
        elif path.suffix != ".md" or not path.with_suffix(".json").exists():
            found.append(f"{path.name} is no record and no record's table")
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", path.stem) or re.search(r"\d{4}-\d\d|-\d+$", path.stem):
            found.append(f"{path.name}: a record is named by its device and section, without date or number")
    return found


def reference_problems(texts, folder):
    """What is wrong with the records that texts name; `texts` are pairs of a name and its content."""
    stems = {path.stem for path in folder.iterdir()}
    devices = "|".join(sorted({stem.split("-")[0] for stem in stems}))
    quoted = re.compile(rf"`(?:benches/)?(?:results/)?((?:{devices})-(?:{SECTIONS})[a-z-]*)(\.\w+)?`|benches/results/([\w-]+)(\.\w+)")
    found = []
    for name, text in texts:
        found += [f"{name} names {old}, a record of the old form" for old in DATED.findall(text)]
        for match in quoted.finditer(text):
            stem, suffix = match[1] or match[3], match[2] or match[4]
            there = (folder / f"{stem}{suffix}").exists() if suffix else stem in stems
            if not there and not DATED.search(match[0]):
                found.append(f"{name} names the record {stem}{suffix or ''}, which is not there")
    return found


def documents():
    """The texts that may name a record: pages, and what git knows of the sources."""
    listing = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listing.split("\0")):
        path = ROOT / name
        if path.suffix in (".md", ".rs", ".py", ".sh", ".c", ".h", ".cpp", ".hpp", ".cu", ".cuh", ".txt") and path.is_file():
            # Tests plant names that are wrong, and records quote none.
            if not name.startswith(("benches/results/", "tests/tools/test_records", "tests/data/", "models/")):
                yield name, path.read_text()


def repository_problems():
    found = folder_problems(record.RESULTS) + reference_problems(documents(), record.RESULTS)
    if not found:
        found = [f"{path.relative_to(ROOT)} is not what `python3 benches/readme.py` makes of the records" for path in readme.stale()]
    return found


def main():
    if len(sys.argv) > 1:
        folder = pathlib.Path(sys.argv[1])
        found = folder_problems(folder) if any(folder.glob("*.json")) else [f"{folder} holds no record"]
    else:
        found = repository_problems()
    for problem in found:
        print("records:", problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Records of benchmark runs: benches/results/<device>-<section>.json and the same as a Markdown table, with every row, the
bad ones too.

A run replaces the rows of the cases that it repeats; the others stay with the date and the commit of their own run, and a
run of all cases replaces the file. What stood there before is in git's history.

    bench_memory --device cuda | python3 benches/record.py memory

records what a program of C or C++ prints: first {"device": …, "versions": {…}}, then each row as a line of JSON. Other lines
pass by.
"""
import argparse
import datetime
import json
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benches/results"
LESS_IS_BETTER = ("s", "ms", "µs", "ns", "times as long")
MORE_IS_BETTER = ("TFLOP/s", "GFLOP/s", "TB/s", "GB/s", "tokens/s", "Gtoken/s", "million calls/s", "times as many")
# What a record says of a run, and the order in which it says so.
RUN = ("date", "commit", "driver", "versions", "notes")


def output_of(*command):
    """The first line that a program prints, or "" when it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip().split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return ""


def commit():
    """The commit of this checkout, "+changes" when files that a figure depends on differ from it; NVB_COMMIT names it where there is
    no git."""
    if named := os.environ.get("NVB_COMMIT"):
        return named
    head = output_of("git", "rev-parse", "--short=12", "HEAD")
    changed = output_of("git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benches/results", ":!*.md", ":!*.svg")
    return f"{head or 'unknown'}{'+changes' if changed else ''}"


def gpu_driver():
    return output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def cpu_name():
    text = pathlib.Path("/proc/cpuinfo").read_text()
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found.group(1).strip() if found else platform.machine()


def significant(value, digits=4):
    """Rounded to `digits` significant digits; None for what is no number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def median_and_spread(samples):
    """The median, and the interquartile range relative to it."""
    middle = statistics.median(samples)
    if len(samples) == 1:
        return middle, 0.0
    low, _, high = statistics.quantiles(samples, n=4)
    return middle, (high - low) / middle


def ratio(ours, peer, unit):
    """How much better ours is; None where there is no figure of one side."""
    if unit not in LESS_IS_BETTER + MORE_IS_BETTER and not (ours is None and peer is None):
        raise ValueError(f"record.py does not know whether less of {unit} is better")
    if not ours or not peer:
        return None
    return peer / ours if unit in LESS_IS_BETTER else ours / peer


def name_of(device, section):
    slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?i)nvidia|geforce", "", device).lower()).strip("-")
    return f"{slug}-{section}"


def run_of(data):
    return {key: data[key] for key in RUN}


def merged(before, data):
    """`data`, a record of one run, with those rows of the record `before` whose case it does not repeat.

    A case has a row for each peer. All of them are replaced together, because each holds the same figure of ours. Cases keep their
    place and stand together by operation, so that what a run changes is what git shows.
    """
    cases = {}
    for row in before["rows"]:
        stamp = {key: row.get(key, before[key]) for key in ("date", "commit")}
        cases.setdefault((row["operation"], row["case"]), []).append(row | stamp)
    new = {}
    for row in data["rows"]:
        new.setdefault((row["operation"], row["case"]), []).append(row)
    cases |= new
    operations = list(dict.fromkeys(operation for operation, _ in cases))
    rows = [row for key in sorted(cases, key=lambda key: operations.index(key[0])) for row in cases[key]]
    named = {(row["date"], row["commit"]) for row in rows if "date" in row}
    runs = [run_of(before), *before.get("earlier_runs", [])]
    return data | {"rows": rows, "earlier_runs": [run for run in runs if (run["date"], run["commit"]) in named]}


def json_text(data):
    """One row a line, so that git shows what changed."""
    head = {key: value for key, value in data.items() if key != "rows"}
    rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in data["rows"])
    return json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}") + f',\n "rows": [\n{rows}\n ]\n}}\n'


def figure(value, digits=4):
    """A number for people: `digits` significant ones, thousands apart, never an exponent."""
    if value is None:
        return "-"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def escaped(text):
    return text.replace("|", "\\|")


def markdown(data):
    """The record as tables: its runs, and one table an operation."""
    earlier = {(run["date"], run["commit"]): number for number, run in enumerate(data["earlier_runs"], 2)}
    lines = [f"# {data['section']} on {data['device']}", "",
             "Medians; a ratio above 1 says that ours is better. Rows without a number in the last column are of run 1.", "",
             "| run | date | commit | driver | versions |", "|---:|---|---|---|---|"]
    runs = [run_of(data), *data["earlier_runs"]]
    for number, run in enumerate(runs, 1):
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        lines.append(f"| {number} | {run['date'][:10]} | {run['commit']} | {run['driver']} | {versions} |")
    notes = [f"- Run {number}: {note}" for number, run in enumerate(runs, 1) for note in run["notes"]]
    lines += [""] * bool(notes) + notes
    operation = None
    for row in data["rows"]:
        if row["operation"] != operation:
            operation = row["operation"]
            lines += ["", f"## {operation}", "", "| case | ours | peer | unit | ratio | peer is | run |",
                      "|---|---:|---:|---|---:|---|---:|"]
        peer_name = (row["peer_name"] or "-") + (f" ({row['note']})" if "note" in row else "")
        run = earlier[row["date"], row["commit"]] if "date" in row else ""
        lines.append(f"| {escaped(row['case'])} | {figure(row['ours'])} | {figure(row['peer'])} | {row['unit'] or '-'} | "
                     f"{figure(row['ratio'], 3)} | {escaped(peer_name)} | {run} |")
    return "\n".join(lines) + "\n"


def write(path, data):
    """The two files, each of which appears whole: a program that is stopped meanwhile leaves the record that was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for target, text in ((path, json_text(data)), (path.with_suffix(".md"), markdown(data))):
        unfinished = target.with_name(target.name + ".part")
        unfinished.write_text(text)
        unfinished.replace(target)


class Record:
    """The rows of one run, for the record of a device and section; `None` as folder keeps nothing."""

    def __init__(self, section, device, versions, folder=RESULTS):
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.notes, self.rows = [], []
        self.data = {"device": device, "section": section, "date": date, "commit": commit(), "driver": gpu_driver() or "none",
                     "versions": versions, "notes": self.notes, "earlier_runs": [], "rows": self.rows}
        load = os.getloadavg()[0]
        if load > 0.25 * os.cpu_count():
            self.notes.append(f"The machine was busy before the run: load average {load:.1f} on {os.cpu_count()} cores.")
        self.path = folder and pathlib.Path(folder) / f"{name_of(device, section)}.json"
        self.before = json.loads(self.path.read_text()) if self.path and self.path.exists() else None

    def add(self, operation, case, unit, ours, peer_name, peer, **more):
        """Adds a row of medians. `ours` is None where ours failed or was wrong, `peer` where there is none."""
        row = {"operation": operation, "case": case, "ours": significant(ours), "peer": significant(peer), "peer_name": peer_name,
               "unit": unit, "ratio": significant(ratio(ours, peer, unit), 3)}
        row |= {key: value for key, value in more.items() if value is not None}
        self.rows.append(row)
        print(self.line(row), flush=True)

    @staticmethod
    def line(row):
        quotient = "    -" if row["ratio"] is None else f"{row['ratio']:5.2f}"
        extra = "".join(f"  {key} {row[key]}" for key in ("error", "spread", "note") if key in row)
        return (f"{row['operation']:28} {row['case']:44} {row['ours'] or '-':>9} {row['unit'] or '':8} {quotient} × "
                f"{row['peer'] or '-'} {row['peer_name'] or ''}{extra}")

    def note(self, text):
        self.notes.append(text)
        print(text, flush=True)

    def failures(self):
        """Rows in which ours failed or gave wrong numbers."""
        return [row for row in self.rows if row["ours"] is None]

    def write(self, whole=False):
        """Merges the rows so far into the record that stood when the run began. `whole`: all cases ran, so nothing of it stays."""
        if self.path:
            write(self.path, merged(self.before, self.data) if self.before and not whole else self.data)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", help="of the record: memory, latency, …")
    parser.add_argument("--note", action="append", default=[], help="said of the run in its record")
    parser.add_argument("--output", default=str(RESULTS), help="folder of the record (%(default)s)")
    options = parser.parse_args()
    log = None
    for line in sys.stdin:
        if not line.startswith("{"):
            print(line, end="")
            continue
        found = json.loads(line)
        if "device" in found:
            log = Record(options.section, found["device"], found["versions"], options.output)
            log.notes += options.note
            continue
        if log is None:
            parser.error("a row came before the line that names the device and the versions")
        # Where "ratio_of" is "rounds", the ratio is the median of the rounds' own, which two medians do not tell.
        ours, peer, unit = found.pop("ours"), found.pop("peer"), found.pop("unit")
        quotient = found.pop("ratio", None)
        log.add(found.pop("operation"), found.pop("case"), unit, ours, found.pop("peer_name"), peer, **found)
        if "ratio_of" in found:
            log.rows[-1]["ratio"] = significant(quotient, 3)
        log.write()
    if log is None:
        parser.error("standard input held no row")
    print(f"recorded in {log.path}")


if __name__ == "__main__":
    main()

"""The record of a benchmark run: one JSON file and one Markdown table beside it, with every row, the bad ones too."""
import datetime
import json
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benches/results"
# Units in which less is better; all others are rates.
DURATIONS = ("s", "ms", "µs")


def output_of(*command):
    """The first line that a program prints, or "" when it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip().split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return ""


def commit():
    """The commit of this checkout, "+changes" when files differ from it; NVB_COMMIT names it where there is no git."""
    if named := os.environ.get("NVB_COMMIT"):
        return named
    head = output_of("git", "rev-parse", "--short=12", "HEAD")
    changed = output_of("git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benches/results")
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


class Record:
    """Rows of one run. `what` and `device` name the file: `<date>-<device>-<what>.json`; `None` as folder keeps nothing."""

    def __init__(self, what, device, versions, folder=RESULTS):
        slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?i)nvidia|geforce", "", device).lower()).strip("-")
        self.started = datetime.datetime.now(datetime.timezone.utc)
        self.head = {"date": self.started.strftime("%Y-%m-%dT%H:%M:%SZ"), "what": what, "device": device, "commit": commit(),
                     "driver": gpu_driver() or "none", "versions": versions}
        self.rows, self.notes = [], []
        load = os.getloadavg()[0]
        if load > 0.25 * os.cpu_count():
            self.notes.append(f"The machine was busy before the run: load average {load:.1f} on {os.cpu_count()} cores.")
        self.path = folder and self.free_path(pathlib.Path(folder), f"{self.started:%Y-%m-%d}-{slug}-{what}")

    @staticmethod
    def free_path(folder, stem):
        """A later run of the same day gets a number: no record is replaced."""
        folder.mkdir(parents=True, exist_ok=True)
        names = [stem] + [f"{stem}-{number}" for number in range(2, 1000)]
        return next(folder / f"{name}.json" for name in names if not (folder / f"{name}.json").exists())

    def add(self, operation, case, unit, ours, peer_name, peer, **more):
        """Adds a row of medians. `ours` is None where ours failed or was wrong, `peer` where there is none."""
        ratio = None
        if ours and peer:
            ratio = peer / ours if unit in DURATIONS else ours / peer
        row = {"operation": operation, "case": case, "ours": significant(ours), "peer": significant(peer), "peer_name": peer_name,
               "unit": unit, "ratio": significant(ratio, 3), **{key: value for key, value in more.items() if value is not None}}
        self.rows.append(row)
        print(self.line(row), flush=True)

    @staticmethod
    def line(row):
        ratio = "    -" if row["ratio"] is None else f"{row['ratio']:5.2f}"
        extra = "".join(f"  {key} {row[key]}" for key in ("error", "spread", "note") if key in row)
        return (f"{row['operation']:28} {row['case']:44} {row['ours'] or '-':>9} {row['unit'] or '':8} {ratio} × "
                f"{row['peer'] or '-'} {row['peer_name'] or ''}{extra}")

    def note(self, text):
        self.notes.append(text)
        print(text, flush=True)

    def failures(self):
        """Rows in which ours failed or gave wrong numbers."""
        return [row for row in self.rows if row["ours"] is None]

    def write(self):
        if not self.path:
            return
        self.path.write_text(json.dumps({**self.head, "rows": self.rows, "notes": self.notes}, indent=1, ensure_ascii=False) + "\n")
        self.path.with_suffix(".md").write_text(self.markdown())

    def markdown(self):
        head = self.head
        versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
        lines = [f"# {head['what']} on {head['device']}, {head['date'][:10]}", "",
                 f"Commit {head['commit']}; driver {head['driver']}; {versions}. Medians; ratio > 1: ours is better.", ""]
        lines += [f"- {note}" for note in self.notes] + [""] * bool(self.notes)
        lines += ["| operation | case | ours | peer | unit | ratio | peer is |", "|---|---|---:|---:|---|---:|---|"]
        for row in self.rows:
            cells = [row["operation"], row["case"], row["ours"], row["peer"], row["unit"], row["ratio"],
                     (row["peer_name"] or "") + (f" ({row['note']})" if "note" in row else "")]
            lines.append("| " + " | ".join("-" if cell is None else str(cell).replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(lines) + "\n"

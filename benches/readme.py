#!/usr/bin/env python3
"""Draws the README's table and picture, and the summary in benches/README.md, from the records in benches/results/.

    python3 benches/readme.py

writes README.md and benches/README.md between their markers, and docs/speed-light.svg and docs/speed-dark.svg. A gate of
`make test` compares them with what this program makes, so no figure there is older than its record or in none.
"""
import dataclasses
import json
import math
import re
from xml.sax.saxutils import escape

import record

ROOT = record.ROOT
BEGIN = "<!-- benches/readme.py makes what follows from benches/results/. -->"
END = "<!-- Here ends what benches/readme.py made. -->"
# NVIDIA's data sheet of the H200 SXM, dense: HBM3e in bytes, products of BF16 and of 8 bits in operations a second.
H200_BYTES, H200_BF16, H200_8_BIT = 4.8e12, 989e12, 1979e12
# Bits of a weight of 14336 × 4096, its scales counted: INT4 has an f16 for 32 or 128 elements, the others an f32 a row.
WEIGHT_BITS = {"linear int4": 4.5, "linear int8": 8, "linear fp8_e4m3": 8}
# Ours in another way, and what bounds both sides: not peers.
NO_PEER = re.compile(r"nvbackend|.* copy_ of as many bytes|memory read|.*plain product|upper bound|the same model")
PEERS = {
    "PyTorch F.linear": "PyTorch (cuBLASLt)",
    "PyTorch F.linear, BF16 weights": "PyTorch, BF16 weights",
    "PyTorch F.linear, F.gelu, mul": "PyTorch, three calls",
    "PyTorch _grouped_mm, BF16 weights": "PyTorch, BF16 weights",
    "PyTorch _scaled_mm of codes, fast accumulation": "PyTorch (cuBLASLt)",
    "PyTorch SDPA": "PyTorch",
    "PyTorch SDPA, tokens before heads": "PyTorch",
    "PyTorch SDPA cuDNN": "cuDNN",
    "PyTorch SDPA cuDNN, tokens before heads": "cuDNN",
    "PyTorch SDPA flash": "FlashAttention 2",
    "PyTorch F.rms_norm": "PyTorch",
    "PyTorch rotate": "PyTorch",
    "PyTorch softmax, top-k or sort, draw": "PyTorch, three calls",
    "PyTorch int4 product": "PyTorch",
    "FlashAttention 3 (published figure, another run)": "FlashAttention 3, published",
    "llama.cpp, BF16": "llama.cpp",
    "llama.cpp, BF16 (published figure, another run)": "llama.cpp, published",
    "llama.cpp, Q8_0 (published figure, another run)": "llama.cpp Q8_0, published",
    "llama.cpp, Q4_0 (published figure, another run)": "llama.cpp Q4_0, published",
    "llama.cpp, Q8_0": "llama.cpp Q8_0",
    "llama.cpp, Q4_0": "llama.cpp Q4_0",
    "cuMemAllocAsync, cuMemFreeAsync, release threshold at its maximum": "CUDA's pool",
    "cuMemAllocAsync, cuMemFreeAsync, default release threshold": "CUDA's pool",
}


@dataclasses.dataclass
class Line:
    """A row of the README's table, and what names it in a record."""
    what: str
    operation: str
    case: str


DECODE, PREFILL = "256 tokens after 8", "4096 tokens"
GROUPS = (
    ("Gemma 3, one sequence, one H200", "h200-model", (
        Line("1B BF16, decode", "model gemma3-1b decode bf16", DECODE),
        Line("4B BF16, decode", "model gemma3-4b decode bf16", DECODE),
        Line("4B INT8, decode", "model gemma3-4b decode int8", DECODE),
        Line("4B INT4, decode", "model gemma3-4b decode int4", DECODE),
        Line("12B BF16, decode", "model gemma3-12b decode bf16", DECODE),
        Line("1B BF16, 4,096 tokens of prefill", "model gemma3-1b prefill bf16", PREFILL),
        Line("4B BF16, 4,096 tokens of prefill", "model gemma3-4b prefill bf16", PREFILL),
        Line("12B BF16, 4,096 tokens of prefill", "model gemma3-12b prefill bf16", PREFILL),
    )),
    ("Operations, one H200", "h200-operations", (
        Line("linear, 1 row, BF16 weights", "linear bf16", "m=1 n=14336 k=4096"),
        Line("linear, 1 row, INT8 weights", "linear int8", "m=1 n=14336 k=4096"),
        Line("linear, 1 row, INT4 weights", "linear int4", "m=1 n=14336 k=4096"),
        Line("linear, 64 rows, INT4 weights", "linear int4", "m=64 n=14336 k=4096"),
        Line("linear, 2,048 rows, BF16, tuned", "linear large bf16", "m=2048 n=14336 k=4096 tuned"),
        Line("linear, 2,048 rows, FP8 input and weights", "linear large fp8 of codes", "m=2048 n=14336 k=4096"),
        Line("16 tokens of 128 experts, INT4", "grouped linear int4", "tokens=16 of 128 experts n=1536 k=2048"),
        Line("attention, prefill of 16,384 tokens", "attention prefill bf16", "d=128 causal s=16384 b=1 h=16"),
        Line("attention, decode, 64 × 4,096 tokens", "attention decode bf16", "d=128 h=32/8 b=64 kv=4096"),
        Line("attention, decode, 1 × 4,096 tokens", "attention decode bf16", "d=128 h=32/8 b=1 kv=4096"),
        Line("RMS norm of 16,384 tokens", "rms_norm bf16", "tokens=16384 width=4096"),
        Line("rotary embedding of 16,384 tokens", "rope bf16", "tokens=16384 h=12/4 d=256"),
        Line("top-k sampling of 262,144 logits", "sample f32", "b=1 vocabulary=262144 top_k=64 top_p=0.95"),
    )),
    ("Memory, one H200", "h200-memory", (
        Line("allocate and free 4 KiB", "memory pair", "bytes=4096"),
        Line("10,000 random sizes to 64 MiB", "memory random allocations", "allocations=10000 largest=64 MiB cap=16000 MiB"),
        Line("allocations and frees of 16 threads", "memory threads", "threads=16 frees=same thread streams=private"),
    )),
    ("Gemma 3 270M, two CPU cores", "cpu-model", (
        Line("BF16, decode", "model gemma3-270m decode bf16", "64 tokens after 8"),
        Line("BF16, 128 tokens of prefill", "model gemma3-270m prefill bf16", "128 tokens"),
    )),
    ("Operations, two CPU cores", "cpu-operations", (
        Line("linear, 1 row, BF16 weights", "linear bf16", "m=1 n=14336 k=4096"),
        Line("linear, 1 row, INT4 weights", "linear int4", "m=1 n=14336 k=4096"),
        Line("linear, 128 rows, F32", "linear f32", "m=128 n=4096 k=4096"),
        Line("linear, 128 rows, BF16 weights", "linear bf16", "m=128 n=1536 k=640"),
        Line("attention, prefill of 1,024 tokens", "attention prefill f32", "d=128 causal s=1024 b=1 h=8/2"),
    )),
)


def load(name):
    return json.loads((record.RESULTS / f"{name}.json").read_text())


def cases_of(data):
    """The rows of each (operation, case)."""
    cases = {}
    for row in data["rows"]:
        cases.setdefault((row["operation"], row["case"]), []).append(row)
    return cases


def rows_of(line, cases, name):
    rows = cases.get((line.operation, line.case))
    if rows is None:
        raise SystemExit(f"the record {name} has no row of {line.operation}, {line.case}, which benches/readme.py lists")
    return rows


def best(rows):
    """The row of the peer that does best, or None where there is none to compare with."""
    peers = [row for row in rows if row["ratio"] and not NO_PEER.match(row["peer_name"])]
    return min(peers, key=lambda row: row["ratio"], default=None)


def share(part, limit):
    return f"{100 * part:.0f} % of {limit}"


def limit_of(rows):
    """How far the hardware's limit is, where the rows of a case tell: of the H200's data sheet, or of the bandwidth with which
    this CPU's memory was read in the same run."""
    row = rows[0]
    if row["ours"] is None:
        return ""
    for other in rows:
        if (other["peer_name"] or "").startswith("memory read") and other["ratio"]:
            return share(other["ratio"], "memory read")
    rates = {"TB/s": 1e12, "TFLOP/s": 1e12}
    eight_bit = re.search(r"fp8|int8", row["operation"])
    compute = (H200_8_BIT, "1,979 TFLOP/s") if eight_bit else (H200_BF16, "989 TFLOP/s")
    if row["unit"] == "TB/s":
        return share(row["ours"] * rates["TB/s"] / H200_BYTES, "4.8 TB/s")
    if row["unit"] == "TFLOP/s":
        return share(row["ours"] * rates["TFLOP/s"] / compute[0], compute[1])
    if "bytes" in row:
        return share(row["ours"] * row["bytes"] / H200_BYTES, "4.8 TB/s")
    if "operations" in row:
        return share(row["ours"] * row["operations"] / H200_BF16, "989 TFLOP/s")
    shape = re.fullmatch(r"m=\d+ n=(\d+) k=(\d+)", row["case"])
    if shape and row["unit"] == "µs" and row["operation"] in WEIGHT_BITS:
        size = int(shape[1]) * int(shape[2]) * WEIGHT_BITS[row["operation"]] / 8
        return share(size / (row["ours"] * 1e-6) / H200_BYTES, "4.8 TB/s")
    return ""


def peer_of(row, device):
    """A peer's short name; what PyTorch calls for a product is said where it is not PyTorch's own code."""
    if not row["ratio"]:
        return "none"
    name = PEERS.get(row["peer_name"], row["peer_name"])
    return name if device != "cpu" else name.removesuffix(" (cuBLASLt)")


def chosen():
    """(group, [(what, row against the best peer, that peer, limit)]) of the README's table. Where ours failed or has no peer, the
    row stands without a ratio."""
    for title, name, lines in GROUPS:
        data = load(name)
        cases = cases_of(data)
        entries = []
        for line in lines:
            rows = rows_of(line, cases, name)
            row = best(rows) or rows[0] | {"peer": None, "ratio": None}
            entries.append((line.what, row, peer_of(row, data["device"]), limit_of(rows)))
        yield title, entries


def times(ratio):
    return f"{record.figure(ratio, 3)} ×" if ratio else "-"


def sources():
    """The records that the table quotes, with the days of the rows in it."""
    for _, name, lines in GROUPS:
        data = load(name)
        cases = cases_of(data)
        days = sorted({row.get("date", data["date"])[:10] for line in lines for row in rows_of(line, cases, name)})
        yield f"[`{name}`](benches/results/{name}.md) ({' and '.join(days)})"


def table():
    lines = ["| | ours | best peer | ratio | of the hardware's limit |", "|---|---:|---|---:|---|"]
    for title, entries in chosen():
        lines.append(f"| **{title}** | | | | |")
        for what, row, peer, limit in entries:
            lines.append(f"| {what} | {record.figure(row['ours'], 3)} {row['unit'] or ''} | {record.figure(row['peer'], 3)}, {peer} "
                         f"| {times(row['ratio'])} | {limit} |")
    return "\n".join(lines)


def readme_part():
    picture = """<picture>
  <source media="(prefers-color-scheme: dark)" srcset="docs/speed-dark.svg">
  <img alt="How many times as fast as its best peer each operation is" src="docs/speed-light.svg">
</picture>"""
    return f"{picture}\n\n{table()}\n\nThe rows are those of {', '.join(sources())}."


def summary():
    """Every operation of every record beside the best peer of each case."""
    lines = ["| record | operation | cases | least | geometric mean | most |", "|---|---|---:|---:|---:|---:|"]
    for path in sorted(record.RESULTS.glob("*.json")):
        ratios = {}
        for (operation, _), rows in cases_of(load(path.stem)).items():
            if row := best(rows):
                ratios.setdefault(operation, []).append(row["ratio"])
        for operation, values in ratios.items():
            middle = math.exp(sum(map(math.log, values)) / len(values))
            figures = " | ".join(times(value) for value in (min(values), middle, max(values)))
            lines.append(f"| [`{path.stem}`](results/{path.stem}.md) | {operation} | {len(values)} | {figures} |")
    return "\n".join(lines)


# The picture: one bar a row of the table, from 1 × to its ratio on a logarithmic axis.
LEFT, RIGHT, TOP, ROW, GROUP, BAR = 300, 640, 62, 22, 34, 13
WIDTH = 860
LEAST, MOST = 0.25, 16
THEMES = {
    "light": {"text": "#1f2328", "muted": "#59636e", "grid": "#d1d9e0", "better": "#0969da", "worse": "#bc4c00"},
    "dark": {"text": "#f0f6fc", "muted": "#9198a1", "grid": "#3d444d", "better": "#4493f8", "worse": "#f0883e"},
}


def place(ratio):
    """Where on the axis a ratio stands."""
    part = (math.log2(min(max(ratio, LEAST), MOST)) - math.log2(LEAST)) / (math.log2(MOST) - math.log2(LEAST))
    return LEFT + part * (RIGHT - LEFT)


def picture(theme):
    colours = THEMES[theme]
    bars, y = [], TOP

    def text(x, y, content, colour="text", anchor="start", more=""):
        bars.append(f'<text x="{x:.1f}" y="{y:.1f}" fill="{colours[colour]}" text-anchor="{anchor}"{more}>{escape(content)}</text>')

    for title, entries in chosen():
        y += GROUP - ROW
        text(16, y + BAR, title, more=' font-weight="600"')
        y += ROW
        for what, row, peer, _ in entries:
            one, end = place(1), place(row["ratio"] or 1)
            text(LEFT - 12, y + BAR - 2, what, anchor="end")
            colour = colours["better" if (row["ratio"] or 1) >= 1 else "worse"]
            bars.append(f'<rect x="{min(one, end):.1f}" y="{y}" width="{max(abs(end - one), 1):.1f}" height="{BAR}" fill="{colour}"/>')
            if (row["ratio"] or 1) > MOST:
                # A bar that the axis cuts off ends in a point.
                end += BAR / 2
                bars.append(f'<path d="M{end - BAR / 2:.1f} {y}l{BAR / 2} {BAR / 2}l{-BAR / 2} {BAR / 2}z" fill="{colour}"/>')
            text(max(one, end) + 6, y + BAR - 2, times(row["ratio"]))
            text(WIDTH - 16, y + BAR - 2, peer, "muted", "end")
            y += ROW
    axis = []
    for power in range(int(math.log2(LEAST)), int(math.log2(MOST)) + 1):
        x, strong = place(2.0 ** power), power == 0
        axis.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{y}" stroke="{colours["muted" if strong else "grid"]}"/>')
        axis.append(f'<text x="{x:.1f}" y="{TOP - 14}" fill="{colours["muted"]}" text-anchor="middle">{2.0 ** power:g} ×</text>')
    title = "nvbackend beside the best peer of each row: above 1 × it is faster"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 14}" viewBox="0 0 {WIDTH} {y + 14}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13">',
        f"<title>{title}</title>",
        f'<text x="16" y="24" fill="{colours["text"]}" font-size="16" font-weight="600">{title}</text>',
        *axis, *bars, "</svg>", ""])


def between_markers(path, part):
    before, found, rest = path.read_text().partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"{path.name} lacks the marker {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"


def made():
    """What each file should hold."""
    files = {ROOT / "README.md": between_markers(ROOT / "README.md", readme_part()),
             ROOT / "benches/README.md": between_markers(ROOT / "benches/README.md", summary())}
    return files | {ROOT / f"docs/speed-{theme}.svg": picture(theme) for theme in THEMES}


def stale():
    """The files that hold something else."""
    return [path for path, text in made().items() if not path.exists() or path.read_text() != text]


def main():
    for path, text in made().items():
        path.write_text(text)


if __name__ == "__main__":
    main()

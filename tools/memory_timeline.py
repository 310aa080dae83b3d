#!/usr/bin/env python3
"""Draw the trace in a memory manager's snapshot as an SVG timeline.

    tools/memory_timeline.py SNAPSHOT.json [TIMELINE.svg]

The snapshot is what nvb_memory_write_snapshot writes for a manager with `trace_events`. The picture has, over time:

- bytes in live blocks, and bytes that the manager holds of the device, with the limit;
- failed allocations, trims, sleeps and wakes;
- each recovery step of the out-of-memory ladder, a row for each;
- bytes in live blocks of each pool, those with the most first;
- the largest blocks, each a bar from its allocation to its end, with the name of its pool.

Without a name for the picture it stands beside the snapshot. Needs Python's standard library only.
"""

import json
import math
import pathlib
import sys
from xml.sax.saxutils import escape

LEFT, RIGHT, PLOT_WIDTH, PLOT_HEIGHT, TOP = 150, 30, 1020, 320, 96
ROW, BLOCKS, POOLS, POOL_HEIGHT = 18, 14, 8, 24
IN_USE, HELD, LIMIT, FAILED, STEP, MOMENT = "#3366cc", "#c3cfe6", "#555555", "#cc2222", "#dd8800", "#228844"
BAR_COLOURS = ["#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377"]
MOMENTS = ("trim", "sleep", "wake")


class Trace:
    """The events of a snapshot, replayed: what was in use and held after each, and the life of every block."""

    def __init__(self, snapshot):
        trace = snapshot.get("trace")
        if trace is None:
            raise ValueError("the snapshot has no trace: create the manager with trace_events")
        columns = {name: i for i, name in enumerate(trace["columns"])}
        rows = sorted(trace["rows"], key=lambda row: row[columns["nanoseconds"]])
        if not rows:
            raise ValueError("the trace has no events yet")
        self.recovery_steps = [step["name"] for step in snapshot["recovery_steps"]]
        self.limit = snapshot["statistics"]["limit"]
        self.lost = trace["written"] - len(rows)
        self.start = rows[0][columns["nanoseconds"]]
        self.end = max(rows[-1][columns["nanoseconds"]], self.start + 1)
        self.times, self.in_use, self.held = [], [], []
        self.failures, self.moments, self.steps, self.blocks = [], [], [], []
        self.pools = {}  # name: [(time, bytes in live blocks from then on)]
        names = trace.get("pools", [])
        live, balance = {}, 0
        for row in rows:
            time, kind, address, size = (row[columns[name]] for name in ("nanoseconds", "kind", "address", "bytes"))
            if kind == "allocate":
                balance += size
                number = row[columns["pool"]] if "pool" in columns else 0
                pool = names[number - 1] if 0 < number <= len(names) else None
                live[address] = (time, size, pool)
                self.count(pool, time, size)
            elif kind == "free":
                balance -= size
                begun, _, pool = live.pop(address, (None, size, None))
                self.blocks.append((begun, time, size, address, pool))
                self.count(pool, time, -size)
            elif kind == "out_of_memory":
                self.failures.append((time, size))
            elif kind == "recovery_step":
                self.steps.append((time, address, size))
            elif kind in MOMENTS:
                self.moments.append((time, kind, size))
            self.times.append(time)
            self.in_use.append(balance)
            self.held.append(row[columns["reserved"]])
        self.blocks += [(begun, None, size, address, pool) for address, (begun, size, pool) in live.items()]
        # The ring may have lost the beginning, so the sums are counted back from what is known of the end.
        before = max(snapshot["statistics"]["allocated"] - balance, -min(self.in_use), 0)
        self.in_use = [bytes_ + before for bytes_ in self.in_use]

    def count(self, pool, time, change):
        if pool is not None:
            steps = self.pools.setdefault(pool, [])
            steps.append((time, (steps[-1][1] if steps else 0) + change))

    def largest_pools(self):
        """(name, steps, the most bytes at a time), those with the most first."""
        pools = [(name, steps, max(size for _, size in steps)) for name, steps in self.pools.items()]
        return sorted(pools, key=lambda pool: -pool[2])

    def largest_blocks(self):
        return sorted(self.blocks, key=lambda block: -block[2])[:BLOCKS]


def size_text(size):
    """Bytes with a binary unit and three digits."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.3g} {unit}"
        size /= 1024


def short(name):
    """A name that fits beside a row."""
    return name if len(name) <= 22 else f"{name[:21]}…"


def time_unit(nanoseconds):
    """(divisor, name) of the unit that suits a span."""
    for divisor, name in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if nanoseconds >= 2 * divisor:
            return divisor, name
    return 1, "ns"


def ticks(top, wanted):
    """Round values from 0 to `top`, about `wanted` of them."""
    raw = top / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [i * step for i in range(int(top / step + 1e-9) + 1)]


def byte_ticks(top):
    unit = 1024 ** min(4, int(math.log(max(top, 1), 1024)))
    return [tick * unit for tick in ticks(top / unit, 6)]


class Picture:
    def __init__(self, trace, snapshot):
        self.trace, self.snapshot = trace, snapshot
        self.parts = []
        self.top = max(max(trace.in_use), max(trace.held), 1) * 1.06
        # A limit far above what happened would press everything else flat.
        self.shows_limit = 0 < trace.limit <= 2 * self.top
        if self.shows_limit:
            self.top = max(self.top, trace.limit * 1.06)

    def x(self, time):
        return LEFT + PLOT_WIDTH * (time - self.trace.start) / (self.trace.end - self.trace.start)

    def y(self, size):
        return TOP + PLOT_HEIGHT * (1 - size / self.top)

    def add(self, text):
        self.parts.append(text)

    def text(self, x, y, text, kind="", anchor="start"):
        self.add(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')

    def line(self, x1, y1, x2, y2, colour, extra=""):
        self.add(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {extra}/>')

    def mark(self, kind, shape, tip):
        """A shape that shows its numbers when pointed at."""
        self.add(f'<g class="{kind}">{shape}<title>{escape(tip)}</title></g>')

    def moment(self, time):
        divisor, unit = time_unit(self.trace.end - self.trace.start)
        return f"at {(time - self.trace.start) / divisor:.4g} {unit}"

    def draw(self):
        self.title()
        self.axes()
        self.area(self.trace.held, HELD, "held", 0.75)
        self.area(self.trace.in_use, IN_USE, "in-use", 0.55)
        if self.shows_limit:
            y = self.y(self.trace.limit)
            self.line(LEFT, y, LEFT + PLOT_WIDTH, y, LIMIT, 'class="limit" stroke-dasharray="7 4"')
        self.events()
        y = self.ladder(TOP + PLOT_HEIGHT + 62)
        y = self.pools(y + 34)
        height = self.bars(y + 34)
        width = LEFT + PLOT_WIDTH + RIGHT
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
            f'viewBox="0 0 {width} {height:.0f}">\n<style>text {{ font: 12px sans-serif; fill: #222 }} '
            ".title { font-size: 17px; font-weight: bold } .small { font-size: 11px; fill: #555 }</style>\n"
            f'<rect width="{width}" height="{height:.0f}" fill="white"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"

    def title(self):
        statistics = self.snapshot["statistics"]
        self.text(LEFT, 28, f"Memory of {self.snapshot['device']}", "title")
        lost = f"; the {self.trace.lost} before them are no longer in the trace" if self.trace.lost > 0 else ""
        self.text(
            LEFT,
            48,
            f"{len(self.trace.times)} events{lost}. Peak in use {size_text(statistics['peak'])}, peak held "
            f"{size_text(statistics['peak_reserved'])}, {statistics['failures']} failed allocations, "
            f"{statistics['fragmentation']:.1%} of what is held in rounding and caches",
            "small",
        )
        keys = [("in use", IN_USE, "rect"), ("held", HELD, "rect")]
        if self.shows_limit:
            keys.append((f"limit, {size_text(self.trace.limit)}", LIMIT, "dashes"))
        keys.append(("failed allocation", FAILED, "triangle"))
        keys.append(("recovery step", STEP, "dot"))
        keys.append((", ".join(MOMENTS), MOMENT, "bar"))
        x = LEFT
        for name, colour, shape in keys:
            self.add('<g class="legend">')
            if shape == "rect":
                self.add(f'<rect x="{x}" y="66" width="18" height="11" fill="{colour}"/>')
            elif shape == "triangle":
                self.add(f'<path d="M{x + 9} 66l6 11h-12z" fill="{colour}"/>')
            elif shape == "dot":
                self.add(f'<circle cx="{x + 9}" cy="72" r="4" fill="{colour}"/>')
            elif shape == "bar":
                self.line(x + 9, 65, x + 9, 79, colour, 'stroke-width="2"')
            else:
                self.line(x, 72, x + 18, 72, colour, 'stroke-dasharray="7 4"')
            self.text(x + 24, 76, name)
            self.add("</g>")
            x += 48 + 7 * len(name)

    def axes(self):
        for size in byte_ticks(self.top):
            y = self.y(size)
            self.line(LEFT, y, LEFT + PLOT_WIDTH, y, "#e6e6e6")
            self.text(LEFT - 8, y + 4, size_text(size), "small", "end")
        bottom = TOP + PLOT_HEIGHT
        span = self.trace.end - self.trace.start
        divisor, unit = time_unit(span)
        for value in ticks(span / divisor, 10):
            x = self.x(self.trace.start + value * divisor)
            self.line(x, bottom, x, bottom + 5, "#222222")
            self.text(x, bottom + 19, f"{value:g}", "small", "middle")
        self.line(LEFT, bottom, LEFT + PLOT_WIDTH, bottom, "#222222")
        self.line(LEFT, TOP, LEFT, bottom, "#222222")
        self.text(LEFT + PLOT_WIDTH / 2, bottom + 36, f"time since the first event ({unit})", "", "middle")
        x, y = 72, TOP + PLOT_HEIGHT / 2
        self.add(f'<text x="{x}" y="{y}" text-anchor="middle" transform="rotate(-90 {x} {y})">bytes</text>')

    def area(self, values, colour, kind, opacity):
        """Steps; where several events share a column of pixels, the largest value stands there."""
        columns = {}
        last = values[0]
        for time, value in zip(self.trace.times, values):
            column = int(self.x(time) * 2)
            highest, _ = columns.get(column, (last, last))
            columns[column] = (max(highest, value), value)
            last = value
        path, bottom = [f"M{LEFT} {TOP + PLOT_HEIGHT}V{self.y(values[0]):.1f}"], TOP + PLOT_HEIGHT
        for column, (highest, value) in sorted(columns.items()):
            path.append(f"H{column / 2:.1f}V{self.y(highest):.1f}V{self.y(value):.1f}")
        path.append(f"H{LEFT + PLOT_WIDTH}V{bottom}Z")
        self.add(f'<path class="{kind}" d="{"".join(path)}" fill="{colour}" fill-opacity="{opacity}" stroke="{colour}"/>')

    def together(self, marks):
        """Marks that would lie on each other become one, with their number: (time, count, size) of the first."""
        groups = []
        for time, size in marks:
            if groups and self.x(time) - self.x(groups[-1][0]) < 4:
                groups[-1][1] += 1
            else:
                groups.append([time, 1, size])
        return groups

    def events(self):
        bottom = TOP + PLOT_HEIGHT
        for time, kind, size in self.trace.moments:
            x = self.x(time)
            line = f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="{MOMENT}" stroke-width="2"/>'
            self.mark(kind, line, f"{kind} {self.moment(time)}: {size_text(size)}")
            self.text(x + 3, TOP + 10, kind, "small")
        for time, count, size in self.together(self.trace.failures):
            triangle = f'<path d="M{self.x(time):.1f} {bottom - 14}l7 13h-14z" fill="{FAILED}"/>'
            tip = f"{size_text(size)} not to be had {self.moment(time)}"
            self.mark("failure", triangle, tip if count == 1 else f"{count} failed allocations from here on: {tip}")

    def ladder(self, y):
        tried = sorted({step for _, step, _ in self.trace.steps})
        if not tried:
            return y - 24
        self.text(LEFT, y, "Recovery steps")
        for step in tried:
            y += ROW
            name = self.trace.recovery_steps[step] if step < len(self.trace.recovery_steps) else f"recovery step {step}"
            self.text(LEFT - 8, y + 4, name, "small", "end")
            self.line(LEFT, y, LEFT + PLOT_WIDTH, y, "#eeeeee")
            steps = [(time, size) for time, one, size in self.trace.steps if one == step]
            for time, count, size in self.together(steps):
                dot = f'<circle cx="{self.x(time):.1f}" cy="{y}" r="4" fill="{STEP}"/>'
                tip = f"{name} {self.moment(time)}, for {size_text(size)}"
                self.mark("recovery_step", dot, tip if count == 1 else f"{count} times from here on: {tip}")
        return y

    def pools(self, y):
        """A row for each of the largest pools, as high as its own most bytes."""
        pools = self.trace.largest_pools()
        if not pools:
            return y - 34
        rest = f", the {POOLS} largest of {len(pools)}" if len(pools) > POOLS else ""
        self.text(LEFT, y, f"Bytes in pools{rest}")
        y += 6
        for number, (name, steps, most) in enumerate(pools[:POOLS]):
            y += POOL_HEIGHT + 4
            path = [f"M{LEFT} {y}"]
            for time, size in steps:
                path.append(f"H{self.x(time):.1f}V{y - POOL_HEIGHT * max(size, 0) / max(most, 1):.1f}")
            path.append(f"H{LEFT + PLOT_WIDTH}V{y}Z")
            colour = BAR_COLOURS[number % len(BAR_COLOURS)]
            area = f'<path d="{"".join(path)}" fill="{colour}" fill-opacity="0.6" stroke="{colour}"/>'
            self.mark("pool", area, f"pool {name}: at most {size_text(most)}")
            self.text(LEFT - 8, y - 12, short(name), "small", "end")
            self.text(LEFT - 8, y, size_text(most), "small", "end")
        return y

    def bars(self, y):
        self.text(LEFT, y, "Largest blocks")
        for number, (begun, ended, size, address, pool) in enumerate(self.trace.largest_blocks()):
            y += ROW
            start = LEFT if begun is None else self.x(begun)
            end = LEFT + PLOT_WIDTH if ended is None else self.x(ended)
            colour = BAR_COLOURS[number % len(BAR_COLOURS)]
            bar = (
                f'<rect x="{start:.1f}" y="{y - 9}" width="{max(end - start, 1.5):.1f}" height="{ROW - 4}" '
                f'fill="{colour}" fill-opacity="0.8"/>'
            )
            life = "before the trace" if begun is None else self.moment(begun)
            life += ", still live" if ended is None else f", freed {self.moment(ended)}"
            owner = f", pool {pool}" if pool is not None else ""
            self.mark("block", bar, f"{size_text(size)} at {address:#x}{owner}, allocated {life}")
            if pool is not None:
                # Where a bar begins far to the right its pool's name stands before it.
                right = start > LEFT + 0.8 * PLOT_WIDTH
                self.text(start - 4 if right else start + 4, y + 3, short(pool), "small", "end" if right else "start")
            self.text(LEFT - 8, y + 3, size_text(size), "small", "end")
        return y + 24


def draw(snapshot):
    """The picture as text. Raises ValueError for what is no snapshot with a trace."""
    if not isinstance(snapshot, dict) or snapshot.get("version") != 1:
        raise ValueError("this is no snapshot of version 1")
    return Picture(Trace(snapshot), snapshot).draw()


def main():
    if len(sys.argv) not in (2, 3) or sys.argv[1] in ("-h", "--help"):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    source = pathlib.Path(sys.argv[1])
    target = pathlib.Path(sys.argv[2]) if len(sys.argv) == 3 else source.with_suffix(".svg")
    try:
        target.write_text(draw(json.loads(source.read_text(encoding="utf-8"))), encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:
        print(f"memory_timeline: {source}: {error}", file=sys.stderr)
        return 1
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())

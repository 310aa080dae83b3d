#!/usr/bin/env python3
"""tools/memory_timeline.py on a small trace whose picture is known, on traces that are cut or broken, and on a snapshot
that the memory example wrote.

    tests/tools/test_memory_timeline.py SNAPSHOT.json
"""

import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

TOOL = pathlib.Path(__file__).resolve().parent.parent.parent / "tools" / "memory_timeline.py"
SVG = "{http://www.w3.org/2000/svg}"
MIB = 1 << 20
SNAPSHOT = pathlib.Path(sys.argv.pop()) if len(sys.argv) > 1 else None

specification = importlib.util.spec_from_file_location("memory_timeline", TOOL)
timeline = importlib.util.module_from_spec(specification)
specification.loader.exec_module(timeline)


def snapshot(rows, written=None, allocated=0, limit=64 * MIB):
    names = ("caches", "passed work", "waiting for work", "trim", "callbacks", "waiting for other threads", "spill")
    return {
        "version": 1,
        "device": 'a <device> & "more"',
        "statistics": {
            "limit": limit,
            "allocated": allocated,
            "peak": 48 * MIB,
            "peak_reserved": 50 * MIB,
            "failures": 1,
            "fragmentation": 0.125,
        },
        "recovery_steps": [{"name": name, "tried": 0, "helped": 0} for name in names],
        "trace": {
            "written": len(rows) if written is None else written,
            "columns": ["nanoseconds", "kind", "address", "bytes", "stream", "reserved"],
            "rows": rows,
        },
    }


EVENTS = [
    [1_000_000, "allocate", 4096, 16 * MIB, 0, 16 * MIB],
    [2_000_000, "allocate", 8192, 32 * MIB, 0, 50 * MIB],
    [3_000_000, "recovery_step", 0, 20 * MIB, 0, 50 * MIB],
    [3_100_000, "recovery_step", 3, 20 * MIB, 0, 50 * MIB],
    [3_200_000, "out_of_memory", 0, 20 * MIB, 0, 50 * MIB],
    [4_000_000, "free", 4096, 16 * MIB, 0, 50 * MIB],
    [5_000_000, "trim", 0, 18 * MIB, 0, 32 * MIB],
    [6_000_000, "sleep", 0, 32 * MIB, 0, 0],
    [7_000_000, "wake", 0, 32 * MIB, 0, 32 * MIB],
]


class Picture:
    """A drawn timeline, taken apart."""

    def __init__(self, text):
        self.root = ElementTree.fromstring(text)

    def of(self, kind):
        return [element for element in self.root.iter() if element.get("class") == kind]

    def tips(self, kind):
        return [element.find(f"{SVG}title").text for element in self.of(kind)]

    def texts(self):
        return [element.text for element in self.root.iter(f"{SVG}text")]


class Timeline(unittest.TestCase):
    def draw(self, *arguments, **named):
        return Picture(timeline.draw(snapshot(*arguments, **named)))

    def test_every_event_has_its_mark(self):
        picture = self.draw(EVENTS, allocated=32 * MIB)
        self.assertEqual(picture.tips("failure"), ["20 MiB not to be had at 2.2 ms"])
        self.assertEqual(len(picture.of("recovery_step")), 2)
        self.assertIn("trim at 2.1 ms, for 20 MiB", picture.tips("recovery_step"))
        for kind in ("trim", "sleep", "wake"):
            self.assertTrue(picture.tips(kind)[0].startswith(f"{kind} at"))
        blocks = picture.tips("block")
        self.assertEqual(blocks[0], "32 MiB at 0x2000, allocated at 1 ms, still live")
        self.assertEqual(blocks[1], "16 MiB at 0x1000, allocated at 0 ms, freed at 3 ms")

    def test_pools_have_a_row_each_and_blocks_their_pools_name(self):
        rows = [
            [1_000_000, "allocate", 4096, 16 * MIB, 0, 48 * MIB, 1],
            [2_000_000, "allocate", 8192, 8 * MIB, 0, 48 * MIB, 2],
            [3_000_000, "allocate", 12288, 4 * MIB, 0, 48 * MIB, 0],
            [4_000_000, "free", 4096, 16 * MIB, 0, 48 * MIB, 0],
            [5_000_000, "allocate", 16384, 2 * MIB, 0, 48 * MIB, 2],
        ]
        described = snapshot(rows)
        described["trace"]["columns"] += ["pool"]
        described["trace"]["pools"] = ["requests", "a <layer> with a name that is long"]
        self.assertEqual(timeline.Trace(described).pools["requests"], [(1_000_000, 16 * MIB), (4_000_000, 0)])
        picture = Picture(timeline.draw(described))
        self.assertEqual(
            picture.tips("pool"), ["pool requests: at most 16 MiB", "pool a <layer> with a name that is long: at most 10 MiB"]
        )
        self.assertEqual(picture.tips("block")[0], "16 MiB at 0x1000, pool requests, allocated at 0 ms, freed at 3 ms")
        self.assertIn("a <layer> with a name…", picture.texts())
        self.assertEqual(self.draw(EVENTS).of("pool"), [], "a trace without pools has no rows for them")

    def test_it_has_axes_a_legend_and_a_title(self):
        picture = self.draw(EVENTS)
        texts = picture.texts()
        self.assertEqual(len(picture.of("legend")), 6)
        for text in ('Memory of a <device> & "more"', "time since the first event (ms)", "20 MiB", "60 MiB", "6", "trim"):
            self.assertIn(text, texts)
        self.assertNotIn("callbacks", texts, "a recovery step that nobody took has no row")
        self.assertTrue(any("12.5% of what is held" in text for text in texts))
        self.assertEqual(len(picture.of("limit")), 1)

    def test_a_limit_far_away_does_not_press_the_rest_flat(self):
        picture = self.draw(EVENTS, limit=1 << 40)
        self.assertEqual(picture.of("limit"), [])
        self.assertIn("50 MiB", picture.texts())
        self.assertEqual(self.draw(EVENTS, limit=0).of("limit"), [])

    def test_sums_are_right_although_the_beginning_is_lost(self):
        trace = timeline.Trace(snapshot(EVENTS[5:], written=9, allocated=32 * MIB))
        self.assertEqual(trace.in_use[0], 32 * MIB)
        self.assertEqual(trace.lost, 5)
        self.assertEqual(trace.blocks, [(None, 4_000_000, 16 * MIB, 4096, None)])
        whole = timeline.Trace(snapshot(EVENTS, allocated=32 * MIB))
        self.assertEqual(whole.in_use[:3], [16 * MIB, 48 * MIB, 48 * MIB])
        self.assertEqual(min(timeline.Trace(snapshot(EVENTS[5:], allocated=0)).in_use), 0)

    def test_the_area_reaches_the_peak_and_the_end(self):
        path = self.draw(EVENTS, allocated=32 * MIB, limit=0).of("in-use")[0].get("d")
        top = timeline.TOP + timeline.PLOT_HEIGHT * (1 - 48 / 53)
        self.assertIn(f"V{top:.1f}", path)
        self.assertTrue(path.endswith(f"H{timeline.LEFT + timeline.PLOT_WIDTH}V{timeline.TOP + timeline.PLOT_HEIGHT}Z"))

    def test_marks_that_would_cover_each_other_are_one(self):
        rows = EVENTS + [[3_200_000 + i, "out_of_memory", 0, MIB, 0, 50 * MIB] for i in range(1, 1000)]
        tips = self.draw(rows).tips("failure")
        self.assertEqual(len(tips), 1)
        self.assertTrue(tips[0].startswith("1000 failed allocations from here on"))

    def test_a_long_trace_stays_small(self):
        rows = []
        for i in range(50_000):
            rows.append([i * 1000, "allocate", i % 512 << 12, MIB + i, 0, 600 * MIB])
            rows.append([i * 1000 + 500, "free", i % 512 << 12, MIB + i, 0, 600 * MIB])
        self.assertLess(len(timeline.draw(snapshot(rows))), 400_000)

    def test_a_single_event_and_a_single_byte_are_drawn(self):
        picture = self.draw([[5, "allocate", 256, 1, 0, 0]], allocated=1, limit=0)
        self.assertEqual(len(picture.of("block")), 1)

    def test_sizes_and_times_are_written_for_people(self):
        self.assertEqual([timeline.size_text(size) for size in (0, 999, 1536, 100 << 20, 3 << 40)],
                         ["0 bytes", "999 bytes", "1.5 KiB", "100 MiB", "3 TiB"])
        units = [timeline.time_unit(span)[1] for span in (10, 3000, 5_000_000, 3_000_000_000)]
        self.assertEqual(units, ["ns", "µs", "ms", "s"])
        self.assertEqual(timeline.ticks(7, 5), [0, 2, 4, 6])

    def test_what_is_no_trace_is_refused(self):
        without = snapshot([])
        without["trace"] = None
        for broken, word in (
            (without, "no trace"),
            (snapshot([]), "no events"),
            ({"version": 2}, "version 1"),
            ([], "version 1"),
        ):
            with self.assertRaisesRegex(ValueError, word):
                timeline.draw(broken)

    def test_the_program_says_what_is_wrong(self):
        def run(*arguments):
            return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, check=False)

        self.assertEqual(run().returncode, 2)
        self.assertIn("No such file", run("/no/such/snapshot.json").stderr)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "broken.json"
            path.write_text("{", encoding="utf-8")
            result = run(path)
            self.assertEqual((result.returncode, len(list(pathlib.Path(folder).iterdir()))), (1, 1))
            path.write_text(json.dumps(snapshot(EVENTS)), encoding="utf-8")
            self.assertEqual(run(path).returncode, 0)
            ElementTree.parse(path.with_suffix(".svg"))


@unittest.skipIf(SNAPSHOT is None, "no snapshot given")
class RealSnapshot(unittest.TestCase):
    def setUp(self):
        self.snapshot = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
        self.kinds = [row[1] for row in self.snapshot["trace"]["rows"]]

    def test_the_memory_example_is_drawn(self):
        picture = Picture(timeline.draw(self.snapshot))
        self.assertEqual(len(picture.of("block")), timeline.BLOCKS)
        for kind, events in (("failure", "out_of_memory"), ("trim", "trim"), ("sleep", "sleep"), ("wake", "wake")):
            self.assertGreater(self.kinds.count(events), 0, kind)
            self.assertGreater(len(picture.of(kind)), 0, kind)
        self.assertIn("callbacks", picture.texts())
        self.assertEqual([tip.split(":")[0] for tip in picture.tips("pool")], ["pool requests", "pool layers"])
        self.assertIn("100 MiB", [tip.split(" at")[0] for tip in picture.tips("block")])

    def test_the_trace_agrees_with_the_statistics(self):
        trace, statistics = timeline.Trace(self.snapshot), self.snapshot["statistics"]
        self.assertEqual(trace.lost, 0)
        self.assertEqual(max(trace.in_use), statistics["peak"])
        self.assertEqual(trace.in_use[-1], statistics["allocated"])
        self.assertEqual(trace.held[-1], statistics["reserved"])
        self.assertEqual(self.kinds.count("allocate"), statistics["allocations"])
        self.assertEqual(self.kinds.count("free"), statistics["frees"])
        held = sum(size for _, size in self.snapshot["pieces"])
        self.assertEqual(held, statistics["reserved"])


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""benches/record.py on runs that follow each other, tests/gates/records.py on records with one fault each, and
benches/readme.py on rows whose place in the README's table is known."""

import contextlib
import copy
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "benches"), str(ROOT / "tests" / "gates")]
sys.dont_write_bytecode = True

import readme  # noqa: E402
import record  # noqa: E402
import records  # noqa: E402


def row(operation="linear bf16", case="m=1", ours=4.0, peer=2.0, peer_name="PyTorch", unit="TB/s", **more):
    ratio = record.significant(record.ratio(ours, peer, unit), 3)
    return {"operation": operation, "case": case, "ours": ours, "peer": peer, "peer_name": peer_name, "unit": unit, "ratio": ratio,
            **more}


def run(*rows, date="2026-01-02T03:04:05Z", commit="0123456789ab"):
    return {"device": "NVIDIA H200", "section": "operations", "date": date, "commit": commit, "driver": "580", "notes": [],
            "versions": {"nvbackend": "0.1.0"}, "earlier_runs": [], "rows": list(rows)}


class Folder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def write(self, data, name="h200-operations"):
        record.write(self.folder / f"{name}.json", data)

    def problems(self):
        return records.folder_problems(self.folder)


class Merging(unittest.TestCase):
    def test_a_run_replaces_its_cases_with_all_their_peers_and_no_others(self):
        first = run(row(case="a"), row(case="a", peer_name="cuDNN"), row(case="b"), row("rope", "c"))
        second = run(row(case="b", ours=5.0), row(case="d"), date="2026-01-03", commit="abcdef0")
        data = record.merged(first, second)
        self.assertEqual([(entry["operation"], entry["case"], entry["ours"], entry.get("commit")) for entry in data["rows"]],
                         [("linear bf16", "a", 4.0, "0123456789ab"), ("linear bf16", "a", 4.0, "0123456789ab"),
                          ("linear bf16", "b", 5.0, None), ("linear bf16", "d", 4.0, None), ("rope", "c", 4.0, "0123456789ab")])
        self.assertEqual([earlier["commit"] for earlier in data["earlier_runs"]], ["0123456789ab"])
        self.assertEqual(data["commit"], "abcdef0")

    def test_a_run_of_which_no_row_is_left_is_forgotten(self):
        first = run(row(case="a"), row(case="b"))
        second = record.merged(first, run(row(case="a"), date="2026-01-03", commit="abcdef0"))
        third = record.merged(second, run(row(case="b"), date="2026-01-04", commit="abcdef1"))
        self.assertEqual([earlier["commit"] for earlier in third["earlier_runs"]], ["abcdef0"])
        self.assertEqual([entry["commit"] for entry in third["rows"] if "commit" in entry], ["abcdef0"])

    def test_a_ratio_above_one_says_that_ours_is_better(self):
        for unit in record.LESS_IS_BETTER:
            self.assertEqual(record.ratio(2.0, 4.0, unit), 2.0)
        for unit in record.MORE_IS_BETTER:
            self.assertEqual(record.ratio(2.0, 4.0, unit), 0.5)
        self.assertIsNone(record.ratio(None, 4.0, "µs"))
        with self.assertRaisesRegex(ValueError, "parsecs"):
            record.ratio(1.0, 1.0, "parsecs")

    def test_figures_have_no_exponent(self):
        self.assertEqual([record.figure(value, 3) for value in (None, 0.0123, 0.998, 1, 11.04, 100, 93060.0)],
                         ["-", "0.0123", "0.998", "1.00", "11.0", "100", "93,060"])


class Recording(Folder):
    def measure(self, case, ours, whole=False):
        log = record.Record("operations", "NVIDIA GeForce RTX 4090", {"nvbackend": "0.1.0"}, self.folder)
        with contextlib.redirect_stdout(io.StringIO()):
            log.add("linear bf16", case, "µs", ours, "PyTorch", 8.0)
        log.write(whole)
        return json.loads((self.folder / "rtx-4090-operations.json").read_text())

    def test_runs_share_one_file_and_a_whole_run_replaces_it(self):
        with mock.patch.object(record, "commit", side_effect=["1111111", "2222222", "3333333"]):
            self.measure("a", 4.0)
            data = self.measure("b", 2.0)
            self.assertEqual([(entry["case"], entry["ratio"], entry.get("commit")) for entry in data["rows"]],
                             [("a", 2.0, "1111111"), ("b", 4.0, None)])
            self.assertEqual(self.problems(), [])
            self.assertEqual(len(self.measure("b", 1.0, whole=True)["rows"]), 1)
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["rtx-4090-operations.json", "rtx-4090-operations.md"])
        self.assertEqual(self.problems(), [])

    def test_what_programs_print_becomes_a_record(self):
        head = {"device": "cpu", "versions": {"nvbackend": "0.1.0"}}
        rows = [row("memory pair", "bytes=256", 50.0, 580.0, "the pool", "ns") | {"ratio": 11.3, "ratio_of": "rounds"},
                {"operation": "queueing", "case": "rope", "ours": 1.2, "peer": None, "peer_name": None, "unit": "µs"}]
        text = "".join(json.dumps(line) + "\n" for line in (head, *rows)) + "for people\n"
        command = [sys.executable, ROOT / "benches/record.py", "memory", "--note", "alone", "--output", self.folder]
        ran = subprocess.run(command, input=text, capture_output=True, text=True)
        self.assertEqual((ran.returncode, ran.stderr), (0, ""))
        data = json.loads((self.folder / "cpu-memory.json").read_text())
        self.assertIn("alone", data["notes"])
        self.assertEqual([entry["ratio"] for entry in data["rows"]], [11.3, None])
        self.assertEqual(self.problems(), [])
        self.assertNotEqual(subprocess.run(command, input="no row\n", capture_output=True, text=True).returncode, 0)


class Gate(Folder):
    def good(self):
        data = record.merged(run(row(case="a"), row(case="b")), run(row(case="a"), row("rope", "c", None, None, None, note="failed: x"),
                                                                    date="2026-01-03", commit="abcdef0"))
        self.write(data)
        return data

    def test_a_good_record_passes(self):
        self.good()
        (self.folder / "cpu-memory-soak.txt").write_text("2026-01-02, commit abcdef0, nvbackend 0.1.0: fine\n")
        self.assertEqual(self.problems(), [])

    def test_each_fault_is_found(self):
        def planted(change):
            data = copy.deepcopy(self.good())
            change(data)
            (self.folder / "h200-operations.json").write_text(record.json_text(data))
            return " ".join(self.problems())

        faults = {
            "has no commit": lambda data: data.pop("commit"),
            "is no date": lambda data: data.update(date="yesterday"),
            "is no commit": lambda data: data.update(commit="main"),
            "names no driver": lambda data: data.update(driver=""),
            "names no versions": lambda data: data.update(versions={}),
            "has colour, which": lambda data: data["rows"][0].update(colour="red"),
            "ours is '4'": lambda data: data["rows"][0].update(ours="4"),
            "is 0.5, its figures give 2": lambda data: data["rows"][0].update(ratio=0.5),
            "is 2.03, its figures give 2": lambda data: data["rows"][0].update(ratio=2.03),
            "is None, its figures give 2": lambda data: data["rows"][0].update(ratio=None),
            "is 4.5, its figures": lambda data: data["rows"][0].update(ratio=4.5, ratio_of="rounds"),
            "its figures give 0.5": lambda data: data["rows"][0].update(unit="µs"),
            "less of GB is better": lambda data: data["rows"][0].update(unit="GB"),
            "peer without a name": lambda data: data["rows"][0].update(peer_name=None),
            "nor a note": lambda data: data["rows"][2].pop("note"),
            "twice for the same peer": lambda data: data["rows"].append(data["rows"][0]),
            "of no run that": lambda data: data["rows"][1].update(commit="7777777"),
            "no row is of the run": lambda data: data["rows"].pop(1),
            "newest first": lambda data: data.update(date="2025-01-01"),
            "does not know": lambda data: data.update(section="colours"),
            "has no rows": lambda data: data.update(rows=[], earlier_runs=[]),
            "whose record is h200-memory.json": lambda data: data.update(section="memory"),
        }
        for words, change in faults.items():
            with self.subTest(words):
                self.assertIn(words, planted(change))

    def test_files_that_are_no_records_are_found(self):
        self.good()
        table = self.folder / "h200-operations.md"
        table.write_text(table.read_text().replace("2.00", "3.00"))
        self.assertIn("is not what h200-operations.json makes", " ".join(self.problems()))
        table.unlink()
        self.assertIn("is not what h200-operations.json makes", " ".join(self.problems()))
        self.good()
        for name, text, words in (("h200-soak.txt", "fine\n", "does not begin with the date"), ("h200-alone.md", "", "no record's table"),
                                  ("h200-memory-2.txt", "2026-01-02, commit abcdef0, nvbackend 0.1.0", "without date or number"),
                                  ("2026-01-02-h200-x.txt", "2026-01-02, commit abcdef0, nvbackend 0.1.0", "without date or number")):
            path = self.folder / name
            path.write_text(text)
            self.assertIn(words, " ".join(self.problems()))
            path.unlink()
        self.assertEqual(self.problems(), [])

    def test_names_of_records_that_are_not_there_are_found(self):
        self.good()
        for text, count in (("`h200-operations`, `results/h200-operations.md` and [x](benches/results/h200-operations.json)", 0),
                            ("`h200-model`", 1), ("see benches/results/cpu-model.md", 1), ("`h200-operations.txt`", 1), ("`cpu-only`", 0),
                            ("(`2026-11-22-h200-operations-4`)", 1), ("// measured in 2026-11-22-h200-operations-4.json", 1)):
            with self.subTest(text):
                self.assertEqual(len(records.reference_problems([("README.md", text)], self.folder)), count)


class Readme(Folder):
    def test_the_best_peer_is_a_peer_and_the_best(self):
        rows = [row(peer_name="slow", peer=1.0), row(peer_name="quick", peer=3.0), row(peer_name="PyTorch copy_ of as many bytes", peer=9.0),
                row(peer_name="nvbackend, plain product", peer=9.0), row(peer_name="memory read, memchr", peer=9.0)]
        self.assertEqual(readme.best(rows)["peer_name"], "quick")
        self.assertIsNone(readme.best(rows[2:]))

    def test_the_limit_is_of_what_the_row_measures(self):
        for words, entry in (("88 % of 4.8 TB/s", row(ours=4.224)), ("80 % of 989 TFLOP/s", row(ours=791.0, unit="TFLOP/s")),
                             ("72 % of 1,979 TFLOP/s", row("linear large fp8 of codes", ours=1432.0, unit="TFLOP/s")),
                             ("61 % of 4.8 TB/s", row(ours=376.0, unit="tokens/s", bytes=7_759_462_400)),
                             ("60 % of 989 TFLOP/s", row(ours=91800.0, unit="tokens/s", operations=6_417_285_120)),
                             ("65 % of 4.8 TB/s", row("linear int4", "m=1 n=14336 k=4096", 10.65, 29.9, unit="µs")),
                             ("50 % of memory read", row(ours=10.0, peer=20.0, peer_name="memory read, memchr", unit="GB/s")),
                             ("", row("sample f32", ours=10.0, unit="µs"))):
            with self.subTest(words):
                self.assertEqual(readme.limit_of([entry]), words)

    def test_a_new_figure_makes_the_table_and_the_pictures_stale(self):
        for path in record.RESULTS.iterdir():
            (self.folder / path.name).write_text(path.read_text())
        with mock.patch.object(record, "RESULTS", self.folder):
            before = readme.made()
            self.assertEqual(readme.stale(), [])
            path = self.folder / "h200-model.json"
            data = json.loads(path.read_text())
            for entry in data["rows"]:
                entry["ours"] *= 2
                entry["ratio"] *= 2
            record.write(path, data)
            changed = [path for path, text in readme.made().items() if text != before[path]]
        self.assertEqual(sorted(path.name for path in changed), ["README.md", "README.md", "speed-dark.svg", "speed-light.svg"])

    def test_a_row_of_ours_that_failed_stands_without_a_figure(self):
        for path in record.RESULTS.iterdir():
            (self.folder / path.name).write_text(path.read_text())
        path = self.folder / "h200-model.json"
        data = json.loads(path.read_text())
        for entry in data["rows"]:
            entry.update(ours=None, ratio=None, note="failed: x")
        record.write(path, data)
        with mock.patch.object(record, "RESULTS", self.folder):
            self.assertIn("| 4B BF16, decode | - tokens/s | -, none | - |  |", readme.table())
            self.assertIn("<svg", readme.picture("dark"))
            data["rows"].clear()
            record.write(path, data)
            with self.assertRaisesRegex(SystemExit, "h200-model has no row of"):
                readme.table()


if __name__ == "__main__":
    unittest.main()

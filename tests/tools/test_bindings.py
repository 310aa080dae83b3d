#!/usr/bin/env python3
"""tests/gates/bindings.py on the header with one difference planted at a time."""

import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests" / "gates")]
sys.dont_write_bytecode = True

import bindings  # noqa: E402

HEADER = (ROOT / "include" / "nvbackend.h").read_text()
STRUCTS = bindings.bindings()


class Bindings(unittest.TestCase):
    def problems(self, before="", after=""):
        """What is found where the last occurrence of a text in nvb_rms_norm_args is another one."""
        end = HEADER.index("} nvb_rms_norm_args;")
        start = HEADER.rindex("typedef struct {", 0, end)
        body = HEADER[start:end]
        self.assertIn(before, body)
        head, found, tail = body.rpartition(before) if before else (body, "", "")
        text = HEADER[:start] + head + (after if found else "") + tail + HEADER[end:]
        return list(bindings.problems(text, STRUCTS))

    def test_the_repository_passes(self):
        self.assertEqual(self.problems(), [])

    def test_a_field_in_the_middle_is_found(self):
        found = self.problems("nvb_tensor weight;", "uint32_t rows;\n  nvb_tensor weight;")
        self.assertEqual(found, ["nvb_rms_norm_args: weight stands where the header has rows"])

    def test_another_type_is_found(self):
        self.assertIn("is c_float, and in the header uint32_t", self.problems("float epsilon;", "uint32_t epsilon;")[0])
        self.assertIn("in the header nvb_tensor *", self.problems("nvb_tensor weight;", "nvb_tensor *weight;")[0])

    def test_a_field_that_went_is_found(self):
        found = self.problems("float epsilon;")
        self.assertEqual(found, ["nvb_rms_norm_args: epsilon stands where the header has weight_offset"])

    def test_a_field_at_the_end_is_fine(self):
        self.assertEqual(self.problems("float weight_offset;", "float weight_offset;\n  uint64_t more[4];"), [])


if __name__ == "__main__":
    unittest.main()

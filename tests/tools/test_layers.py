#!/usr/bin/env python3
"""tests/gates/layers.py on a copy of src/ and docs/design.md with one import planted at a time."""

import pathlib
import shutil
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests" / "gates")]
sys.dont_write_bytecode = True

import layers  # noqa: E402


class Layers(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        shutil.copytree(ROOT / "src", self.root / "src")
        (self.root / "docs").mkdir()
        shutil.copy(ROOT / "docs" / "design.md", self.root / "docs")

    def problems(self, file=None, text=""):
        """What is found with the text at the end of a file, which is put back."""
        if file is None:
            return " ".join(layers.problems(self.root))
        path = self.root / file
        before = path.read_text() if path.exists() else None
        path.write_text((before or "") + text)
        found = " ".join(layers.problems(self.root))
        path.unlink() if before is None else path.write_text(before)
        return found

    def test_the_repository_passes(self):
        self.assertEqual(self.problems(), "")

    def test_each_planted_arrow_up_is_found(self):
        lines = len((self.root / "src/device/mod.rs").read_text().splitlines())
        place = f"src/device/mod.rs:{lines + 1} names memory, which stands above device"
        for text in ("use crate::memory::MemoryManager;", "pub(crate) use crate::memory::{self as m, Pool};",
                     "use crate::{error::Result, memory::{Pool, MemoryManager}};", "fn f() { crate::memory::log_level_changed() }",
                     "macro_rules! m { () => { $crate::memory::log_level_changed() } }", "#[cfg(not(test))] use crate::memory::Pool;",
                     "use super::memory::Pool;", "mod inner { use super::super::memory::Pool; }", "use self::super::memory::Pool;",
                     "fn f() -> [char; 2] { crate::memory::f(); ['\"', '\\''] }", "fn f<'a>(x: &'a crate::memory::Pool, y: &'a str) {}",
                     "#[cfg(test)] mod tests { } use crate::memory::Pool;", "#[cfg(test)] use crate::capi::x; use crate::memory::Pool;"):
            with self.subTest(text):
                self.assertIn(place, self.problems("src/device/mod.rs", text + "\n"))
        self.assertIn("src/device/features.rs", self.problems("src/device/features.rs", "use super::super::memory::Pool;\n"))
        self.assertIn("src/weight/gguf.rs", self.problems("src/weight/gguf.rs", "use crate::loading::Weight;\n"))

    def test_what_is_no_arrow_up_passes(self):
        for text in ("// use crate::memory::Pool;", "/* crate::memory */", 'const TEXT: &str = "crate::memory";', "use crate::error::Error;",
                     'const TEXT: &str = r#"" crate::memory"#;', "mod inner { use super::features; mod deep { use super::super::memory; } }",
                     "#[cfg(test)] mod more { use crate::memory::Pool; }", "#[cfg(test)] use crate::memory::{Pool, MemoryManager};",
                     '#[cfg(all(test, feature = "cuda"))] #[derive(Debug)] struct S(crate::memory::Pool);',
                     "#[cfg(test)] fn f() { crate::memory::log_level_changed() }"):
            with self.subTest(text):
                self.assertEqual(self.problems("src/device/mod.rs", text + "\n"), "")
        (self.root / "src/device/trial.rs").write_text("use crate::memory::Pool;\n")
        self.assertEqual(self.problems("src/device/mod.rs", "#[cfg(test)]\nmod trial;\n"), "")
        self.assertIn("src/device/trial.rs:1 names memory", self.problems("src/device/mod.rs", "mod trial;\n"))

    def test_the_list_and_the_modules_agree(self):
        design = self.root / "docs/design.md"
        text = design.read_text()
        self.assertIn("does not list the module extra", self.problems("src/extra.rs", "\n"))
        self.assertIn("names crate::nothing, which is no module", self.problems("src/device/mod.rs", "use crate::nothing::X;\n"))
        line = next(line for line in text.splitlines(True) if line.startswith("  memory/"))
        for changed, words in ((text.replace(line, ""), "does not list the module memory"),
                               (text.replace(line, line + line), "lists memory twice"),
                               (text.replace(line, line + "  absent/     what is not there\n"), "lists absent, which src/ does not have"),
                               (text.replace(line, "").replace("  registry/", line + "  registry/"), ""),
                               (text.replace(line, "").replace("  error.rs", line + "  error.rs"), "src/memory/mod.rs")):
            with self.subTest(words):
                design.write_text(changed)
                found = self.problems()
                self.assertIn(words, found) if words else self.assertEqual(found, "")
        design.write_text(text.replace(line, line + "  absent/     (planned) what is not there yet\n"))
        self.assertEqual(self.problems(), "")


if __name__ == "__main__":
    unittest.main()

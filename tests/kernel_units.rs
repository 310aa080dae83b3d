//! An object is kept by what was compiled: the tokens of a unit do not change with comments, layout or names of files, and do
//! change with everything else.

#[path = "../build_script/kernel_units.rs"]
mod kernel_units;

use kernel_units::{Sources, Unit};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

fn csrc() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("csrc")
}

/// The tokens of a unit with this text, besides which `header.cuh` and `folder/moved.cuh` lie.
fn tokens(text: &str) -> Result<String, String> {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernel_units");
        fs::create_dir_all(folder.join("folder")).expect("a folder can be made");
        let header = "#pragma once\n\n#include <stdint.h>\n\ninline int32_t twice(int32_t x) { return 2 * x; }\n";
        fs::write(folder.join("header.cuh"), header).expect("a header can be written");
        fs::write(folder.join("folder/moved.cuh"), format!("// Moved.\n{header}")).expect("a header can be written");
        folder
    });
    Sources::new(folder).tokens(&Unit { name: "unit".to_owned(), file: None, text: text.to_owned() })
}

const UNIT: &str =
    "#include \"header.cuh\"\n\n#define BOTH(x) (x, x)\nint f(int a, int b) { return a + twice(b) - '\\''; }\n\
                    const char* text() { return \"//  two  \\\" words\"; }\n";

#[test]
fn comments_layout_and_places_of_headers_are_not_compiled() {
    let expected = tokens(UNIT).expect("tokens");
    for (from, to) in [
        ("int f(", "// What f is for.\nint /* or\nlong */ f("),
        ("(int a, int b) {", "( int a,\n      int b )\n{\n"),
        (" return a", "\n\n  return a"),
        ("#define BOTH(x) (x, x)", "#define BOTH(x) \\\n  (x, x)  // both"),
        ("\"header.cuh\"", "\"folder/moved.cuh\""),
        ("\"header.cuh\"", "\"header.cuh\"\n#include \"header.cuh\""),
    ] {
        assert!(UNIT.contains(from), "{from}");
        assert_eq!(tokens(&UNIT.replace(from, to)).expect("tokens"), expected, "{from} became {to}");
    }
}

#[test]
fn everything_else_is_compiled() {
    let expected = tokens(UNIT).expect("tokens");
    for (from, to) in [
        ("a + twice", "a - twice"),
        ("return a", "returna"),
        ("//  two  ", "// two "),
        ("//  two  ", "/*two*/"),
        ("BOTH(x) (x", "BOTH (x) (x"),
        ("a + twice", "a + + twice"),
        ("#define", "#undef"),
        ("int f", "#include <math.h>\nint f"),
        ("#include \"header.cuh\"", "inline int32_t twice(int32_t x) { return x + x; }"),
    ] {
        assert!(UNIT.contains(from), "{from}");
        assert_ne!(tokens(&UNIT.replace(from, to)).expect("tokens"), expected, "{from} became {to}");
    }
    let missing = tokens(&UNIT.replace("header.cuh", "nowhere.cuh")).expect_err("a header is missing");
    assert!(missing.contains("there is no nowhere.cuh"), "{missing}");
    let angle = tokens(&UNIT.replace("\"header.cuh\"", "<header.cuh>")).expect_err("a header in angle brackets");
    assert!(angle.contains("angle brackets"), "{angle}");
    let condition = UNIT.replace("#include \"header.cuh\"", "#if X\n#include \"header.cuh\"\n#endif");
    assert!(tokens(&condition).expect_err("a condition").contains("under a condition"));
}

#[test]
fn each_unit_has_a_name_and_tokens_of_its_own() {
    let units = kernel_units::units(&csrc()).expect("units");
    assert!(units.len() > 80, "{} units", units.len());
    let mut sources = Sources::new(&csrc());
    let mut all: Vec<String> = units.iter().map(|unit| sources.tokens(unit).expect("tokens")).collect();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), units.len(), "two units are the same");
}

#[test]
fn units_that_only_instantiate_are_rows_of_the_table() {
    for unit in kernel_units::units(&csrc()).expect("units") {
        let code: Vec<&str> = unit.text.lines().filter(|line| !line.starts_with("//") && !line.is_empty()).collect();
        let instantiates = code.iter().all(|line| line.starts_with('#') || !line.contains('{'));
        assert!(unit.file.is_none() || !instantiates, "{} belongs into csrc/instances.rs", unit.name);
    }
}

#[test]
fn the_map_names_the_files_of_each_generation_and_none_that_is_gone() {
    let map = fs::read_to_string(csrc().join("README.md")).expect("csrc/README.md");
    let named: BTreeSet<&str> =
        map.split('`').skip(1).step_by(2).filter_map(|name| name.split('/').next_back()).collect();
    let mut files = BTreeSet::new();
    for path in below(&csrc()) {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let folder = path.parent().and_then(Path::file_name).expect("a folder").to_string_lossy().into_owned();
        let listed = ["sm80", "sm90", "common"].contains(&folder.as_str());
        assert!(!listed || named.contains(name.as_str()), "{} is not in csrc/README.md", path.display());
        files.insert(name);
    }
    for name in named.iter().filter(|name| [".cu", ".cuh", ".h"].iter().any(|end| name.ends_with(end) && name != &end))
    {
        assert!(files.contains(*name), "csrc/README.md names {name}, which is not there");
    }
}

#[test]
fn no_operation_reaches_into_the_folder_of_another() {
    let csrc = csrc().canonicalize().expect("csrc");
    let operation = |path: &Path| path.strip_prefix(&csrc).ok()?.iter().next()?.to_str().map(str::to_owned);
    let mut includes = 0;
    for path in below(&csrc).iter().filter(|path| path.extension().is_some_and(|end| end != "md" && end != "rs")) {
        let Ok(text) = fs::read_to_string(path) else { continue };
        let from = operation(path).expect("a folder of csrc");
        for name in text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"')) {
            let places = [path.parent().expect("a folder").join(name), csrc.join(name)];
            let Some(included) = places.iter().find_map(|place| place.canonicalize().ok()) else { continue };
            let to = operation(&included).expect("a file of csrc");
            let shared = to == from || ["common", "driver"].contains(&to.as_str());
            assert!(shared, "{} includes {name}: what operations share lies in csrc/common/", path.display());
            includes += 1;
        }
    }
    assert!(includes > 100, "{includes} includes were read");
    for unit in kernel_units::units(&csrc).expect("units").iter().filter(|unit| unit.file.is_none()) {
        let names = unit.text.lines().filter_map(|line| line.strip_prefix("#include \"")?.split('/').next());
        let folders: BTreeSet<&str> = names.collect();
        assert_eq!(folders.len(), 1, "{} includes headers of {folders:?}", unit.name);
    }
}

fn below(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    entries.flat_map(|path| if path.is_dir() { below(&path) } else { vec![path] }).collect()
}

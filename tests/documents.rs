//! The pages say what the library has: every field of a configuration, every status, every variable of the environment.
//! Links between pages lead somewhere.

use nvbackend::configuration::{Configuration, Preset};
use nvbackend::error::Status;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The text of a page below the heading.
fn section<'a>(text: &'a str, heading: &str) -> &'a str {
    let start = text.find(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("no heading {heading:?}")) + 1;
    let rest = &text[start..];
    rest[1..].find("\n## ").map_or(rest, |end| &rest[..end + 1])
}

/// The rows of a section's tables whose first cell is code: what stands in it, and the other cells.
fn rows(section: &str) -> BTreeMap<String, Vec<String>> {
    let mut rows = BTreeMap::new();
    for line in section.lines().filter(|line| line.starts_with("| `")) {
        let mut cells =
            line.trim_matches('|').split(" | ").map(|cell| cell.trim().trim_matches('|').trim().to_string());
        let name = cells.next().expect("a first cell").trim_matches('`').to_string();
        assert!(rows.insert(name.clone(), cells.collect()).is_none(), "{name} has two rows");
    }
    rows
}

fn names(rows: &BTreeMap<String, Vec<String>>) -> BTreeSet<&str> {
    rows.keys().map(String::as_str).collect()
}

/// "memory.limit" and so on, from the JSON that the library writes.
fn paths(value: &Value, front: &str, found: &mut BTreeMap<String, Value>) {
    for (name, value) in value.as_object().expect("an object") {
        let path = format!("{front}{name}");
        if value.is_object() {
            paths(value, &format!("{path}."), found);
        } else {
            found.insert(path, value.clone());
        }
    }
}

fn fields() -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    let json = serde_json::from_str(&Configuration::default().to_json()).expect("the library writes JSON");
    paths(&json, "", &mut found);
    found
}

#[test]
fn the_page_on_configurations_lists_every_field_with_its_default() {
    let fields = fields();
    let page = read("docs/configuration.md");
    let rows = rows(section(&page, "Every field"));
    assert_eq!(names(&rows), fields.keys().map(String::as_str).collect(), "docs/configuration.md (left), JSON (right)");
    for (path, default) in fields {
        let cell = &rows[&path][1];
        let said = cell.split(':').next().expect("the default comes first");
        let written = default.to_string();
        let same = match (&default, said.parse::<f64>()) {
            (Value::Number(number), Ok(said)) => number.as_f64() == Some(said),
            _ => said == written,
        };
        assert!(same, "docs/configuration.md says that the default of {path} is {said}; it is {default}");
    }
}

#[test]
fn the_header_lists_every_field() {
    let header = read("include/nvbackend.h");
    let comment =
        header.split("\n\n").find(|block| block.ends_with("typedef struct nvb_configuration nvb_configuration;"));
    let comment = comment.expect("nvb_configuration is in the header");
    for path in fields().keys() {
        assert!(comment.contains(&format!("`{path}`")), "the header's comment on nvb_configuration has no `{path}`");
    }
    assert!(comment.contains("NVB_TUNING_FILE"));
}

#[test]
fn the_page_on_configurations_lists_every_preset_with_what_it_changes() {
    let page = read("docs/configuration.md");
    let rows = rows(section(&page, "Which preset"));
    assert_eq!(names(&rows), Preset::NAMES.iter().copied().collect());
    let default = fields();
    for (preset, name) in Preset::ALL.into_iter().zip(Preset::NAMES) {
        let mut found = BTreeMap::new();
        paths(&serde_json::from_str(&preset.configuration().to_json()).expect("JSON"), "", &mut found);
        let cell = &rows[*name][1];
        let said: BTreeSet<&str> = cell.split('`').skip(1).step_by(2).collect();
        let changed = found.iter().filter(|(path, value)| default[*path] != **value).map(|(path, _)| path.as_str());
        assert_eq!(said, changed.collect(), "preset {name}: docs/configuration.md (left) and the library (right)");
    }
}

#[test]
fn every_status_of_the_header_has_a_cause_and_a_cure() {
    let header = read("include/nvbackend.h");
    let of_header: BTreeSet<&str> = header
        .lines()
        .filter_map(|line| line.strip_prefix("#define ")?.split_once(' '))
        .map(|(name, _)| name)
        .filter(|name| *name == "NVB_ERROR" || name.starts_with("NVB_ERROR_"))
        .collect();
    assert_eq!(of_header.len() + 1, Status::ALL.len(), "the header was read");
    let page = read("docs/errors.md");
    let rows = rows(section(&page, "Each status"));
    assert_eq!(names(&rows), of_header, "docs/errors.md (left) and the header (right)");
    for (status, cells) in &rows {
        assert!(!cells[0].is_empty(), "{status} has no cause");
        let never = cells[0].contains("no call returns it");
        assert_eq!(cells[1].is_empty(), never, "{status}: a cure is needed unless no call returns it");
    }
}

/// Files below a folder of the repository.
fn files(folder: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files(&path, ending, found);
        } else if path.to_string_lossy().ends_with(ending) {
            found.push(path);
        }
    }
}

#[test]
fn no_status_is_returned_that_the_page_calls_reserved() {
    let page = read("docs/errors.md");
    let rows = rows(section(&page, "Each status"));
    let mut sources = Vec::new();
    files(&root().join("src"), ".rs", &mut sources);
    let text: String = sources
        .iter()
        .filter(|path| !path.ends_with("src/error.rs"))
        .map(|path| std::fs::read_to_string(path).expect("UTF-8"))
        .collect();
    let reserved = |status: &Status| {
        let name = status.c_name().to_str().expect("ASCII");
        rows.get(name).is_some_and(|cells| *status != Status::Error && cells[0].contains("no call returns it"))
    };
    for status in Status::ALL.into_iter().filter(reserved) {
        let used = text.contains(&format!("::{status:?}"));
        assert!(!used, "docs/errors.md calls {status:?} reserved, and src/ returns it");
    }
}

#[test]
fn every_variable_of_the_environment_is_listed() {
    let mut sources = Vec::new();
    files(&root().join("src"), ".rs", &mut sources);
    files(&root().join("csrc"), ".c", &mut sources);
    let mut read_by_source = BTreeSet::new();
    for path in sources {
        let text = std::fs::read_to_string(path).expect("UTF-8");
        for call in ["env::var(\"", "env::var_os(\"", "getenv(\""] {
            for piece in text.split(call).skip(1) {
                let name = piece.split('"').next().expect("a quotation mark");
                if name.starts_with("NVB_") {
                    read_by_source.insert(name.to_string());
                }
            }
        }
    }
    assert!(read_by_source.contains("NVB_TUNING_FILE") && read_by_source.contains("NVB_LIBCUDA"), "{read_by_source:?}");
    let (page, readme) = (read("docs/configuration.md"), read("README.md"));
    let rows = rows(section(&page, "The environment"));
    assert_eq!(
        names(&rows),
        read_by_source.iter().map(String::as_str).collect(),
        "docs/configuration.md, src and csrc"
    );
    for name in read_by_source {
        assert!(readme.contains(&format!("`{name}`")), "README.md has no `{name}`");
    }
}

#[test]
fn no_page_says_that_nccl_or_libtpu_is_used() {
    let mut pages = vec![root().join("README.md"), root().join("include/nvbackend.h")];
    files(&root().join("docs"), ".md", &mut pages);
    for page in pages {
        let text = std::fs::read_to_string(&page).expect("a page");
        // A row of a table and a paragraph are what a reader takes together.
        for part in text.split("\n\n").flat_map(|part| part.split("\n| ")) {
            let named = part.contains("NCCL") || part.contains("libtpu");
            assert!(!named || part.contains("nothing"), "{}: it must say that nothing uses it: {part}", page.display());
        }
    }
}

/// Whoever adds something goes from file to file by this page.
#[test]
fn the_page_on_adding_names_files_that_are_there() {
    let page = read("docs/adding.md");
    let mut found = 0;
    for path in page.split('`').skip(1).step_by(2) {
        let folder = path.split('/').next().unwrap_or("");
        let is_path =
            ["src", "csrc", "tests", "fuzz", "benches", "docs", "include"].contains(&folder) && path.contains('/');
        if is_path && !path.contains(['<', '…']) {
            found += 1;
            assert!(root().join(path).exists(), "docs/adding.md names {path}, which is not there");
        }
    }
    assert!(found > 30, "{found} paths were found");
}

#[test]
fn links_between_pages_lead_somewhere() {
    let mut pages = vec![];
    files(&root().join("docs"), ".md", &mut pages);
    for name in ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benches/README.md", "fuzz/README.md"] {
        pages.push(root().join(name));
    }
    let mut links = 0;
    for page in pages {
        let text = std::fs::read_to_string(&page).expect("a page");
        for piece in text.split("](").skip(1) {
            let target = piece.split([')', '#']).next().expect("a bracket");
            if target.is_empty() || target.contains("://") || target.contains(' ') {
                continue;
            }
            links += 1;
            let there = page.parent().expect("a folder").join(target);
            assert!(there.exists(), "{}: the link {target} leads nowhere", page.display());
        }
    }
    assert!(links > 10, "{links} links were found");
}

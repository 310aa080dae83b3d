//! Every exported function has the panic guard or says why not, and the list of exports is that of the source.

use std::collections::BTreeMap;
use std::path::PathBuf;

/// Name → body, up to the next function, of each `extern "C"` function in src/capi.
fn functions() -> BTreeMap<String, String> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/capi");
    let mut functions = BTreeMap::new();
    for entry in std::fs::read_dir(folder).expect("src/capi") {
        let path = entry.expect("a file").path();
        let source = std::fs::read_to_string(&path).expect("UTF-8");
        for part in source.split("\npub unsafe extern \"C\" fn ").skip(1) {
            let (name, rest) = part.split_once('(').expect("parameters");
            let (_, body) = rest.split_once(" {\n").expect("a body");
            let body = body.split("\n}\n").next().expect("the rest");
            assert!(functions.insert(name.to_string(), body.to_string()).is_none(), "{name} is defined twice");
        }
        let exported = source.matches("#[no_mangle]").count();
        let found = source.matches("\npub unsafe extern \"C\" fn ").count();
        assert_eq!(exported, found, "{}: #[no_mangle] and `pub unsafe extern \"C\" fn` go together", path.display());
    }
    assert!(functions.len() > 40, "src/capi was read");
    functions
}

#[test]
fn every_function_is_guarded_under_its_own_name() {
    for (name, body) in functions() {
        let first = body.trim_start();
        let inside = first.strip_prefix("guard!(").unwrap_or_default().trim_start();
        let guarded = inside.starts_with(&format!("{name},"));
        let excused = first.starts_with("// No guard:") && !body.contains("guard!");
        assert!(guarded || excused, "{name} starts with neither `guard!({name}, …` nor `// No guard: why`");
        if excused {
            assert!(UNGUARDED.contains(&name.as_str()), "{name} is new among those without a guard: add it here");
        }
    }
}

/// They return no status, and nothing in them can panic.
const UNGUARDED: [&str; 7] = [
    "nvb_abi_version",
    "nvb_last_error_cause",
    "nvb_last_error_message",
    "nvb_status_name",
    "nvb_status_parent",
    "nvb_version_number",
    "nvb_version_string",
];

#[test]
fn the_list_of_exports_is_that_of_the_source() {
    let list = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/gates/exports.txt");
    let listed = std::fs::read_to_string(list).expect("tests/gates/exports.txt");
    let defined: String = functions().keys().map(|name| format!("{name}\n")).collect();
    assert_eq!(listed, defined, "tests/gates/exports.txt (left) and src/capi (right) differ");
}

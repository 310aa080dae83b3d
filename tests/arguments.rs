//! What crosses from src/ to csrc/ is the same on both sides, and build_script/arguments.rs sees where it is not: two
//! swapped fields of one type on either side, a field that one side lacks, another type, another number, another
//! signature.

#[path = "../build_script/arguments.rs"]
mod arguments;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn compiler() -> Command {
    let words = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let mut words = words.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or("c++"));
    command.args(words);
    command
}

/// A copy of the Rust sources and the kernels' headers, with changes.
struct Copy {
    root: PathBuf,
}

impl Copy {
    fn new(name: &str) -> Copy {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("arguments").join(name);
        let _ = fs::remove_dir_all(&root);
        let original = Path::new(env!("CARGO_MANIFEST_DIR"));
        for folder in ["src", "csrc"] {
            copy_sources(&original.join(folder), &root.join(folder));
        }
        Copy { root }
    }

    /// Changes the text of every file below a folder.
    fn change(&self, folder: &str, change: &mut dyn FnMut(&str) -> String) -> &Copy {
        let mut changed = 0;
        for path in files(&self.root.join(folder)) {
            let text = fs::read_to_string(&path).expect("UTF-8");
            let new = change(&text);
            changed += usize::from(new != text);
            fs::write(&path, new).expect("a copy can be written");
        }
        assert!(changed > 0, "nothing changed below {folder}");
        self
    }

    fn replace(&self, folder: &str, from: &str, to: &str) -> &Copy {
        self.change(folder, &mut |text| text.replacen(from, to, 1))
    }

    /// What the check says about the copy.
    fn refusal(&self) -> String {
        let refusal = arguments::check(&self.root, compiler(), &self.root).expect_err("the sides differ");
        fs::remove_dir_all(&self.root).expect("the copy can be removed");
        refusal
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    if folder.is_file() {
        return vec![folder.to_owned()];
    }
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    entries.flat_map(|path| files(&path)).collect()
}

fn copy_sources(from: &Path, to: &Path) {
    for path in files(from) {
        let is_source = path.extension().is_some_and(|extension| extension == "rs" || extension == "h");
        if is_source {
            let copy = to.join(path.strip_prefix(from).expect("below the folder"));
            fs::create_dir_all(copy.parent().expect("a folder")).expect("a folder can be made");
            fs::copy(&path, copy).expect("a source can be copied");
        }
    }
}

/// The first two neighbours of one type in each struct that crosses, swapped; their names go to `swapped`.
fn swap_fields(text: &str, starts: impl Fn(&[&str]) -> bool, split: Split, swapped: &mut Vec<String>) -> String {
    let mut lines: Vec<&str> = text.lines().collect();
    let mut at = 1;
    while at < lines.len() {
        if starts(&lines[..=at]) {
            let end = (at..lines.len()).find(|end| lines[*end].trim().starts_with('}')).expect("a struct ends");
            let pair = (at + 1..end - 1).find_map(|first| {
                let ((name, kind), (other, other_kind)) = (split(lines[first])?, split(lines[first + 1])?);
                (kind == other_kind).then_some((first, name, other))
            });
            if let Some((first, name, other)) = pair {
                swapped.extend([name.to_owned(), other.to_owned()]);
                lines.swap(first, first + 1);
            }
            at = end;
        }
        at += 1;
    }
    lines.join("\n") + "\n"
}

/// Name and type of a line that declares a field.
type Split = fn(&str) -> Option<(&str, &str)>;

fn rust_field(line: &str) -> Option<(&str, &str)> {
    let (name, kind) = line.trim().trim_end_matches(',').split_once(": ")?;
    // `mirror!` has a field's value behind its type.
    let kind = kind.split(" = ").next()?;
    Some((name.rsplit(' ').next()?, kind))
}

fn header_field(line: &str) -> Option<(&str, &str)> {
    let (field, _) = line.split_once(';')?;
    let (kind, name) = field.trim().rsplit_once(' ')?;
    Some((name.split('[').next()?, kind))
}

fn is_refused_by_name(refusal: &str, swapped: &[String]) {
    assert!(swapped.len() >= 40, "two fields of each struct are swapped, not {swapped:?}");
    for field in swapped {
        assert!(refusal.contains(&format!(".{field} lies elsewhere")), "{field} is not named in\n{refusal}");
    }
}

#[test]
fn both_sides_agree() {
    let work = Path::new(env!("CARGO_TARGET_TMPDIR")).join("arguments/both");
    fs::create_dir_all(&work).expect("a folder can be made");
    let compared = arguments::check(Path::new(env!("CARGO_MANIFEST_DIR")), compiler(), &work).expect("no difference");
    assert!(compared.len() >= 20, "{compared:?}");
}

#[test]
fn two_swapped_fields_of_one_type_in_rust_are_named() {
    let mut swapped = Vec::new();
    let starts = |lines: &[&str]| {
        let before = &lines[lines.len().saturating_sub(4)..];
        before.last().is_some_and(|line| line.contains("struct ") && line.ends_with('{'))
            && before.iter().any(|line| line.trim() == "#[repr(C)]")
            && before.iter().any(|line| line.trim().starts_with("/// `nvb_"))
    };
    let copy = Copy::new("swapped_in_rust");
    copy.change("src/cuda", &mut |text| swap_fields(text, starts, rust_field, &mut swapped));
    is_refused_by_name(&copy.refusal(), &swapped);
}

#[test]
fn two_swapped_fields_of_one_type_in_a_header_are_named() {
    let mut swapped = Vec::new();
    let starts =
        |lines: &[&str]| lines.last().is_some_and(|line| line.starts_with("struct nvb_") && line.ends_with('{'));
    let copy = Copy::new("swapped_in_a_header");
    copy.change("csrc", &mut |text| swap_fields(text, starts, header_field, &mut swapped));
    is_refused_by_name(&copy.refusal(), &swapped);
}

#[test]
fn a_field_that_one_side_lacks_is_refused() {
    let copy = Copy::new("lacks_in_rust");
    let refusal = copy
        .replace("src/cuda/rope.rs", "        slot_count: i32 = cache.map_or(0, |cache| cache.sequences as i32),\n", "")
        .refusal();
    assert!(refusal.contains("nvb_rope_params has a field or a gap"), "{refusal}");
    let copy = Copy::new("lacks_in_a_header");
    let refusal = copy.replace("csrc/rope/rope.h", "  int32_t slot_count;\n", "").refusal();
    assert!(refusal.contains("slot_count"), "{refusal}");
    // Behind the last field nothing moves, and alignment hides some from a comparison of sizes.
    let copy = Copy::new("last_in_a_header");
    let refusal = copy
        .replace("csrc/rope/rope.h", "  nvb_kv_placement placement;", "  nvb_kv_placement placement, more;")
        .refusal();
    assert!(refusal.contains("nvb_rope_params has a field or a gap"), "{refusal}");
    let copy = Copy::new("hidden_by_alignment");
    let refusal = copy.replace("src/cuda/softmax.rs", "        reserved: u32 = 0,\n", "").refusal();
    assert!(refusal.contains("nvb_softmax_params has a field or a gap"), "{refusal}");
}

#[test]
fn another_type_is_refused() {
    for (name, file, from, to, says) in [
        ("signed", "src/cuda/rope.rs", "capacity: i32", "capacity: u32", "nvb_rope_params.capacity is of another type"),
        ("float", "csrc/rope/rope.h", "float base;", "int32_t base;", "nvb_rope_params.base is of another type"),
        ("const", "src/cuda/norm.rs", " output: *mut", " output: *const", "nvb_norm_rows.output is of another type"),
        ("pointee", "src/cuda/linear_quantized_input.rs", "*const f32", "*const i32", "scales is of another type"),
        ("array", "src/cuda/quantize.rs", "MAX_PARTS: usize = 4", "MAX_PARTS: usize = 5", "of another type"),
    ] {
        let refusal = Copy::new(name).replace(file, from, to).refusal();
        assert!(refusal.contains(says), "{name}: {refusal}");
    }
}

#[test]
fn another_number_is_refused() {
    for (name, file, from, to, says) in [
        ("dtype", "csrc/common/launch.h", "NVB_BF16 = 3", "NVB_BF16 = 5", "nvb_dtype_code is not DType"),
        ("activation", "csrc/common/launch.h", "NVB_SILU = 3", "NVB_SILU = 4", "nvb_activation_code is not Activation"),
        (
            "new",
            "csrc/common/quantized.h",
            "  NVB_INT4 = 4,",
            "  NVB_INT4 = 4,\n  NVB_INT2 = 5,",
            "NVB_INT2 has no variant",
        ),
        ("gone", "csrc/elementwise/elementwise.h", "  NVB_ELEMENTWISE_SCALE = 3,", "", "NVB_ELEMENTWISE_SCALE"),
        (
            "constant",
            "csrc/attention/attention.h",
            "COUNTERS = 17",
            "COUNTERS = 18",
            "NVB_ATTENTION_DECODE_COUNTERS is not",
        ),
    ] {
        let refusal = Copy::new(name).replace(file, from, to).refusal();
        assert!(refusal.contains(says), "{name}: {refusal}");
    }
}

#[test]
fn another_signature_is_refused() {
    let lines = "nvb_cuda_linear_kernel_supports(int32_t index, const nvb_linear_params* params,";
    let swapped = "nvb_cuda_linear_kernel_supports(const nvb_linear_params* params, int32_t index,";
    for (name, file, from, to, says) in [
        (
            "order",
            "csrc/linear/linear_table.h",
            lines,
            swapped,
            "nvb_cuda_linear_kernel_supports has another signature",
        ),
        ("result", "src/cuda/argmax.rs", "-> usize", "-> i32", "nvb_cuda_argmax_workspace has another signature"),
        ("throws", "csrc/softmax/softmax.h", " noexcept", "", "nvb_cuda_softmax is not noexcept"),
        (
            "params",
            "src/cuda/embedding.rs",
            "*const QuantizedParams",
            "*const Params",
            "nvb_cuda_embedding_quantized has",
        ),
        ("name", "src/cuda/argmax.rs", "fn nvb_cuda_argmax(", "fn nvb_cuda_argmin(", "nvb_cuda_argmin"),
    ] {
        let refusal = Copy::new(name).replace(file, from, to).refusal();
        assert!(refusal.contains(says), "{name}: {refusal}");
    }
}

#[test]
fn a_struct_that_does_not_say_what_it_mirrors_is_refused() {
    let copy = Copy::new("unnamed");
    let refusal =
        copy.replace("src/cuda/rope.rs", "/// `nvb_rope_params` of csrc/rope/rope.h.", "/// Arguments.").refusal();
    assert!(refusal.contains("begins its comment with the name that it mirrors"), "{refusal}");
}

//! include/nvbackend.h is what cbindgen makes of src/capi, section by section.
//!
//! `make header` (NVB_UPDATE_HEADER=1) writes the file and what follows from it (header/derived.rs); without it these tests
//! fail where one is out of date.

#[path = "header/derived.rs"]
mod derived;

use nvbackend::configuration::field::FIELDS;
use nvbackend::operation::OperationKind;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// A part of the header: the file of src/capi that it comes from, its title, and what it holds.
struct Part {
    file: &'static str,
    title: &'static str,
    about: &'static str,
}

const fn part(file: &'static str, title: &'static str, about: &'static str) -> Part {
    Part { file, title, about }
}

/// In the order in which a reader meets the objects.
const PARTS: [Part; 41] = [
    part(
        "status",
        "Status codes and errors",
        "What every call returns, and what the calling thread's last error says: its text, its causes and its numbers.",
    ),
    part(
        "version",
        "Version and build",
        "Which release, which ABI and which kernels the loaded library has.",
    ),
    part(
        "tensor",
        "Tensors",
        "Plain structs that describe memory of the caller: `nvb_tensor`, and `nvb_quantized_rows` for activations in 8 bits. They own nothing and need no giving back.",
    ),
    part(
        "device",
        "Devices",
        "What a device is and can do. A backend is created on one of them.",
    ),
    part(
        "environment",
        "Environment",
        "The machine around the devices: its processor, NUMA nodes, driver and libraries.",
    ),
    part(
        "configuration",
        "Configuration",
        "The object `nvb_configuration`: what a backend is created with, as fields with names, from a preset, text or JSON.",
    ),
    part(
        "memory_options",
        "Memory options",
        "What a memory manager is created with: its limit, what it leaves to others, an allocator of the engine's, leak tracking and the trace.",
    ),
    part(
        "backend_options",
        "Backend options",
        "What a backend is created with, as a struct: a configuration or a preset to start from, and fields that override it.",
    ),
    part(
        "backend",
        "Backend",
        "The object `nvb_backend`: one device with its kernels, its memory and a default stream. All other objects are made from it.",
    ),
    part(
        "hardware",
        "Hardware: usage, peers, recommendation",
        "All devices of the machine without a backend: what they do now, how they reach each other, and which suits a workload.",
    ),
    part(
        "memory",
        "Memory",
        "The object `nvb_memory_manager`: allocating, freeing, copying and filling memory of a device or of the host.",
    ),
    part(
        "memory_control",
        "Memory: limits, reclaim and sleep",
        "Keeping a memory manager within bounds: limits, giving memory back, callbacks that make room, and sleep.",
    ),
    part(
        "memory_statistics",
        "Memory: statistics and reports",
        "What a memory manager holds: numbers that cost no lock, reports of leaks, and snapshots as JSON.",
    ),
    part(
        "pool",
        "Pools",
        "The object `nvb_pool`: blocks of a memory manager that are counted and end together, and those of a captured graph.",
    ),
    part(
        "stream",
        "Streams",
        "The object `nvb_stream`: a queue of a device's work, of the library's own or a wrapped `cudaStream_t`.",
    ),
    part(
        "event",
        "Events",
        "The object `nvb_event`: a point in a stream's work, which other streams or the host wait for.",
    ),
    part(
        "stream_manager",
        "Stream manager",
        "The object `nvb_stream_manager`: several streams of a backend, given out by load.",
    ),
    part(
        "weight_blocks",
        "Weights: formats of files",
        "What a weight may be made from: matrices as GGUF, AWQ, GPTQ, gemma.cpp and 8-bit checkpoints hold them.",
    ),
    part(
        "weight",
        "Weights",
        "The object `nvb_weight`: a matrix of a model in the device's layout, as floats or quantised.",
    ),
    part(
        "gguf",
        "GGUF files",
        "The object `nvb_gguf`: a file of llama.cpp's format, whose tensors become weights.",
    ),
    part(
        "kv_cache",
        "KV cache",
        "The object `nvb_kv_cache`: the keys and values of every layer that attention reads.",
    ),
    part(
        "kv_swap",
        "Sequences in host memory and files",
        "The object `nvb_kv_swap`: page-locked memory that a cache's sequence is copied to and back from while other streams work; and a sequence in a file.",
    ),
    part(
        "attention",
        "Attention",
        "The object `nvb_attention`, and its calls for prompts (prefill) and for one token of each sequence (decode).",
    ),
    part(
        "attention_merge",
        "Merging attention",
        "The attention over all keys from results over parts of them.",
    ),
    part(
        "attention_plan",
        "Planning attention",
        "How an attention would run, whether it can, and what memory it takes, before there is any.",
    ),
    part(
        "operations",
        "Operations of a layer",
        "What a transformer's layer is made of: embedding, norms, products with weights, gated activations, rotary embedding, and appending to a cache.",
    ),
    part(
        "products",
        "Batched and grouped products",
        "Products of two tensors, and those of a mixture of experts.",
    ),
    part(
        "sampling",
        "Elementwise operations and sampling",
        "Softmax, arithmetic on elements, conversions, and the choice of the next token.",
    ),
    part(
        "strided",
        "Operations over strided tensors",
        "What graphs of plain tensors are made of: functions of elements over four axes of any strides, rows to numbered places, rotary embedding, and softmax with a mask.",
    ),
    part(
        "rows",
        "Rows of plain tensors",
        "The order of a row's elements, its sum, and its length.",
    ),
    part(
        "block_rows",
        "Blocks of files as plain tensors",
        "Rows of GGUF's blocks that become floats, and floats that become blocks: caches in such formats, copies and gathers.",
    ),
    part(
        "workspace",
        "Workspace of the caller's",
        "For engines that plan all memory themselves: how much memory operations need between their kernels, and giving it to a stream.",
    ),
    part(
        "graph",
        "Graphs",
        "The object `nvb_graph`: operations recorded once and launched often, such as a decode step.",
    ),
    part(
        "graph_optimize",
        "Optimising graphs",
        "Passes that rewrite a recorded graph, what they did, what that is worth, and other memory for it.",
    ),
    part(
        "graph_fp8",
        "Graphs in FP8",
        "Products of a recorded graph with weights in FP8, within a bound of the error, and what that came to.",
    ),
    part(
        "graph_validate",
        "Validating graphs",
        "What a device lacks for a graph, before anything runs, also for devices that are not here.",
    ),
    part(
        "graph_profile",
        "Profiling graphs",
        "How long each node of a graph takes, as a table, JSON or a trace.",
    ),
    part(
        "metrics",
        "Profiling",
        "How often each operation ran, how long it took, and what share of the device's rate it reached.",
    ),
    part(
        "tuning",
        "Tuning",
        "Measuring which kernel is the fastest for a product, and keeping the choices in a file.",
    ),
    part("attention_tuning", "Tuning attention", "Measuring which kernel is the fastest for an attention."),
    part(
        "kernel",
        "Kernels",
        "Which kernels there are, which of them a product takes and why, and naming another one.",
    ),
];

const INTRODUCTION: &str = "\
// nvbackend: an inference backend for C and C++ engines. NVIDIA GPUs at their limit, the CPU when there is none.
//
// Generated by cbindgen from src/capi; `make header` makes it again.
//
// Conventions
//   Errors    Fallible calls return nvb_status, 0 for success; nvb_last_error_message has the text. Outputs are written
//             on success only.
//   Handles   Opaque. X_create makes one, X_destroy gives it back and accepts NULL. A destroyed, foreign or NULL handle
//             is an NVB_ERROR_INVALID_ARGUMENT. Children keep what they need of their parents, so any order is fine.
//   Structs   Start with struct_size; X_init zeroes one and sets it. 0 in a field means the default. Fields named
//             `reserved` are 0. Other languages zero the struct and set struct_size themselves.
//   Threads   A const handle may be used by many threads at once, a non-const one by one at a time, unless it says more.
//             A thread that calls needs a stack of 64 KiB on the CPU, and of 256 KiB with a GPU: CUDA's driver and cuBLASLt
//             took up to 127 KiB of it with driver 580.
//   Streams   Work is queued on the call's stream and the call returns; NULL is the backend's default stream, which
//             nvb_backend_synchronize waits for. Argument structs and host arrays are read before the call returns. On
//             the CPU the work has finished by then, and the same program runs unchanged.
//   Memory    Tensors lie in the memory of the backend's device (on the CPU: any memory) unless a comment says host.
//             No output shares a byte with another or with what the work reads, unless a comment says that it may be the same
//             memory, which means the very same rows; NVB_ERROR_INVALID_ARGUMENT names the two.
//             Where the host has no memory left a call fails with NVB_ERROR_OUT_OF_MEMORY and says what it was for; nothing
//             has changed then, and what gives back works: requests of up to 64 KiB that the C library refuses come from a
//             reserve of 4 MiB. With half of it in use nothing new is made. The process ends only when all of it is used up,
//             or the C library itself lacks the few bytes with which it remembers what a thread has at its end.
//             Texts of the caller have up to 32 KiB.
//   Numbers   Inside an operation f32, with one rounding where the result is stored.
//   Faults    A sticky CUDA error is latched: later calls return NVB_ERROR_DEVICE_LOST without touching CUDA, and
//             destroying still works.
//   Processes Calls may come from handlers of atexit and destructors of statics and threads, and exit while others run. Once
//             exit has begun, what needs CUDA answers NVB_ERROR_CUDA_NOT_AVAILABLE. One moment is left: cuBLASLt's first
//             search for an algorithm, in a process's first products on CUDA; an exit in the middle may crash in it.
//             A child of fork may create a backend of its own on the CPU; on CUDA that is NVB_ERROR_CUDA_NOT_AVAILABLE
//             if the parent had used the driver. Handles of the parent answer NVB_ERROR_INVALID_ARGUMENT in the child,
//             and X_destroy gives back the handle alone; its log callbacks are not called there. A child that was forked
//             inside a callback must not return from it.
//             The library stays loaded after dlclose (it is linked with -z nodelete), as its threads and the CUDA
//             runtime do not end with it.
";

const HANDLES: &str = "The objects of the library. Each is made and given back by the calls of its own part: `nvb_pool` by those of \"Pools\".";

const PRELUDE: &str = "\
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__cplusplus)
#define NVB_MUST_USE [[nodiscard]]
#elif defined(__GNUC__)
#define NVB_MUST_USE __attribute__((warn_unused_result))
#else
#define NVB_MUST_USE
#endif
";

const TENSOR_HELPERS: &str = "\
// A contiguous tensor of up to four axes; `rank` of the extents count.
static inline nvb_tensor nvb_tensor_make(void *data, uint32_t dtype, uint32_t rank, int64_t d0, int64_t d1, int64_t d2,
                                         int64_t d3) {
  nvb_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = rank;
  tensor.shape[0] = d0;
  tensor.shape[1] = d1;
  tensor.shape[2] = d2;
  tensor.shape[3] = d3;
  return tensor;
}

static inline nvb_tensor nvb_tensor_1d(void *data, uint32_t dtype, int64_t n) {
  return nvb_tensor_make(data, dtype, 1, n, 1, 1, 1);
}

static inline nvb_tensor nvb_tensor_2d(void *data, uint32_t dtype, int64_t rows, int64_t columns) {
  return nvb_tensor_make(data, dtype, 2, rows, columns, 1, 1);
}

static inline nvb_tensor nvb_tensor_3d(void *data, uint32_t dtype, int64_t d0, int64_t d1, int64_t d2) {
  return nvb_tensor_make(data, dtype, 3, d0, d1, d2, 1);
}
";

#[test]
fn the_committed_header_is_what_the_source_says() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    expect_committed(&root, "include/nvbackend.h", &generate(&root));
}

#[test]
fn what_follows_from_the_header_is_up_to_date() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let header = generate(&root);
    expect_committed(&root, "include/nvbackend_operations.hpp", &derived::wrappers(&header));
    expect_committed(&root, "tests/header/fields.in", &derived::fields(&header));
}

#[test]
fn every_file_with_exports_is_a_part() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    for entry in std::fs::read_dir(root.join("src/capi")).expect("src/capi") {
        let path = entry.expect("an entry").path();
        let exports =
            std::fs::read_to_string(&path).expect("a source file").contains("\npub unsafe extern \"C\" fn nvb_");
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let is_part = PARTS.iter().any(|part| part.file == name);
        assert!(is_part || !exports, "src/capi/{name}.rs has functions that no part of the header shows");
    }
}

#[test]
fn the_constants_of_operations_are_the_kinds() {
    let header = generate(&PathBuf::from(env!("CARGO_MANIFEST_DIR")));
    let mut kinds: Vec<String> =
        OperationKind::ALL.iter().map(|kind| format!("{} {}", kind.name().to_uppercase(), *kind as u32)).collect();
    kinds.push(format!("COUNT {}", OperationKind::ALL.len()));
    let defined = header.lines().filter_map(|line| line.strip_prefix("#define NVB_OPERATION_"));
    assert_eq!(defined.collect::<Vec<_>>(), kinds, "NVB_OPERATION_… of src/capi (left), src/operation (right)");
}

/// Compares a generated file with the committed one, or writes it.
fn expect_committed(root: &Path, name: &str, generated: &str) {
    let path = root.join(name);
    if std::env::var_os("NVB_UPDATE_HEADER").is_some() {
        std::fs::write(&path, generated).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    if let Some((line, (old, new))) = committed.lines().zip(generated.lines()).enumerate().find(|(_, (a, b))| a != b) {
        panic!("{name} line {} is out of date, run `make header`:\n- {old}\n+ {new}", line + 1);
    }
    assert_eq!(committed.lines().count(), generated.lines().count(), "{name} is out of date: `make header`");
}

#[test]
fn the_header_lists_every_field_of_a_configuration() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/capi/configuration.rs");
    let source = std::fs::read_to_string(path).expect("src/capi/configuration.rs");
    let (list, _) = source.split_once("pub struct nvb_configuration").expect("the struct that the list stands above");
    for field in FIELDS {
        // Each begins an entry or shares one with its sibling.
        let listed = |line: &str| line.starts_with("/// - ") && line.contains(&format!("`{}`", field.path));
        let mentioned = list.contains(&format!("`{}`", field.path));
        assert!(mentioned, "`{}` is not explained in the comment of nvb_configuration", field.path);
        let shared = ["memory.limit_of", "memory.leak_sample_bytes"].contains(&field.path);
        assert!(shared || list.lines().any(listed), "`{}` has no entry of its own", field.path);
    }
}

fn generate(root: &Path) -> String {
    let mut handles = String::new();
    let mut body = String::new();
    for Part { file, title, about } in PARTS {
        let section = section(root, file, &mut handles);
        write!(body, "\n{}{}\n{}\n", rule(title), comment(about, "// "), section.trim()).unwrap();
        if file == "tensor" {
            write!(body, "\n{}", TENSOR_HELPERS).unwrap();
        }
        body += &initializers(&section);
    }
    let version = env!("CARGO_PKG_VERSION");
    let numbers: Vec<u32> = version.split('.').map(|part| part.parse().unwrap()).collect();
    let [major, minor, patch] = numbers[..] else { panic!("version {version} has three parts") };
    let titles: Vec<&str> = PARTS.iter().map(|part| part.title).collect();
    let contents = comment(&format!("{}.", titles.join(" · ")), "//             ");
    format!(
        "{INTRODUCTION}{}\n#ifndef NVBACKEND_H\n#define NVBACKEND_H\n\n{PRELUDE}\n\
         #define NVB_VERSION_MAJOR {major}\n#define NVB_VERSION_MINOR {minor}\n#define NVB_VERSION_PATCH {patch}\n\
         #define NVB_VERSION_NUMBER {}\n#define NVB_VERSION_STRING \"{version}\"\n\n\
         #ifdef __cplusplus\nextern \"C\" {{\n#endif\n\n{}{}\n{}\n{}\n#ifdef __cplusplus\n}}\n#endif\n\n#endif  // NVBACKEND_H\n",
        contents.replacen("//             ", "//   Parts     ", 1),
        major * 10_000 + minor * 100 + patch,
        rule("Handles"),
        comment(HANDLES, "// "),
        handles.trim(),
        body.trim_end(),
    )
}

/// The line that a part begins with; tools/api_pages.py finds parts by it.
fn rule(title: &str) -> String {
    format!("// {title} {}\n//\n", "-".repeat(112usize.saturating_sub(title.len())))
}

/// Lines of up to 118 characters, each behind `front`.
fn comment(text: &str, front: &str) -> String {
    let mut lines = vec![front.to_string()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is a line");
        if line.chars().count() + word.chars().count() > 118 {
            line.truncate(line.trim_end().len());
            lines.push(format!("{front}{word} "));
        } else {
            write!(line, "{word} ").unwrap();
        }
    }
    lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// cbindgen's text for one file; the opaque types move to `handles`, because sections refer to each other's.
fn section(root: &Path, file: &str, handles: &mut String) -> String {
    let mut config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml");
    // No function of their own files mentions them, and cbindgen leaves out what none does.
    config.export.include = [
        "nvb_tensor",
        "nvb_quantized_rows",
        "nvb_memory_options",
        "nvb_backend_options",
        "nvb_weight_blocks",
        "nvb_block_tensor",
    ]
    .map(String::from)
    .into();
    let source = root.join("src/capi").join(format!("{file}.rs"));
    let bindings = cbindgen::Builder::new().with_config(config).with_src(source).generate().expect("src/capi parses");
    let mut text = Vec::new();
    bindings.write(&mut text);
    let text = String::from_utf8(text).expect("cbindgen writes UTF-8");
    let mut kept = String::new();
    for block in text.split("\n\n") {
        let opaque = block.lines().last().is_some_and(|line| line.starts_with("typedef struct") && !line.contains('}'));
        let target = if opaque { &mut *handles } else { &mut kept };
        let block = block.trim_matches('\n');
        if !block.is_empty() {
            write!(target, "{}\n\n", must_use(block)).unwrap();
        }
    }
    kept
}

/// Marks functions whose status must be looked at: all but those that give something back.
fn must_use(block: &str) -> String {
    let mark = |line: &str| {
        let giving_back = line.contains("_destroy(") || line.contains("_free(");
        if line.starts_with("nvb_status nvb_") && !giving_back && !line.contains("nvb_status_parent") {
            format!("NVB_MUST_USE {line}")
        } else {
            line.to_string()
        }
    };
    block.lines().map(mark).collect::<Vec<_>>().join("\n")
}

/// An `_init` function for each struct that starts with struct_size.
fn initializers(section: &str) -> String {
    let mut text = String::new();
    for block in section.split("typedef struct {").skip(1) {
        let (fields, rest) = block.split_once("\n}").expect("cbindgen closes its structs");
        if !fields.trim_start().starts_with("size_t struct_size;") {
            continue;
        }
        let name = rest.split(';').next().unwrap().trim();
        write!(
            text,
            "\nstatic inline void {name}_init({name} *value) {{\n  memset(value, 0, sizeof *value);\n  \
             value->struct_size = sizeof *value;\n}}\n"
        )
        .unwrap();
    }
    text
}

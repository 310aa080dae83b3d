//! Writes tables of all that include/nvbackend.h declares, for src/header, so that a new function is fuzzed at once; and
//! compiles the C++ reader of safetensors files.

mod classify;
mod emit;
mod parse;

use std::path::{Path, PathBuf};

fn main() {
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("Cargo sets it")).join("..");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("Cargo sets it"));
    let path = root.join("include/nvbackend.h");
    println!("cargo:rerun-if-changed={}", path.display());
    println!("cargo:rerun-if-changed=build");
    let text = std::fs::read_to_string(&path).expect("include/nvbackend.h is readable");
    let header = parse::header(&text);
    assert!(header.functions.len() > 100, "include/nvbackend.h was not read: {} functions", header.functions.len());
    std::fs::write(out.join("interface.rs"), emit::interface(&header)).expect("OUT_DIR is writable");
    compile_reader(&root);
}

/// The Gemma example's reader of safetensors behind one C function, with the fuzzer's coverage where the compiler knows it.
fn compile_reader(root: &Path) {
    let folder = root.join("cpp_examples/gemma");
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").include(&folder).include(root.join("include")).warnings(true);
    for file in ["safetensors.cpp", "strict_json.cpp", "mapped_file.cpp", "regular_file.cpp"] {
        build.file(folder.join(file));
    }
    build.file("src/safetensors.cpp");
    for name in
        ["safetensors.cpp", "safetensors.h", "strict_json.cpp", "mapped_file.cpp", "regular_file.cpp", "tensor_map.h"]
    {
        println!("cargo:rerun-if-changed={}", folder.join(name).display());
    }
    println!("cargo:rerun-if-changed=src/safetensors.cpp");
    build.flag_if_supported("-fsanitize-coverage=trace-pc,trace-cmp");
    if std::env::var_os("CARGO_CFG_SANITIZE").is_some_and(|names| names == "address") {
        build.flag("-fsanitize=address");
    }
    build.compile("safetensors_reader");
    println!("cargo:rerun-if-changed=src/coverage.c");
    cc::Build::new().file("src/coverage.c").compile("coverage");
    println!("cargo:rustc-link-arg-bin=safetensors=-Wl,--wrap=__sanitizer_cov_trace_pc");
}

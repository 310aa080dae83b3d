//! Compiles csrc/ (kernels and driver trampolines) into the library and gives the library its SONAME. What src/ and csrc/
//! say about each other is compared first (build_script/arguments.rs).
//!
//! Environment: `NVCC`, `CUDA_HOME` (where the CUDA compiler is), `NVB_CUDA_ARCHITECTURES` (what to build for, e.g.
//! `80;90a` or `all-major`), `NVCC_PREPEND_FLAGS` and `NVCC_APPEND_FLAGS` (read by nvcc itself).
//! Without the `cuda` feature only the link arguments are left and no CUDA compiler is needed.

#[path = "build_script/arguments.rs"]
mod arguments;
#[path = "build_script/kernel_units.rs"]
mod kernel_units;

use kernel_units::{Sources, Unit};
use std::collections::hash_map::DefaultHasher;
use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{exit, Command};
use std::sync::Mutex;
use std::thread;

/// The compute capabilities that the library is written for. 90 is built as 90a, whose kernels use wgmma and TMA.
const ARCHITECTURES: [&str; 8] = ["70", "75", "80", "86", "89", "90a", "100", "120"];
/// Left out unless asked for: CUDA 13 no longer builds it.
const OLDEST_DEFAULT: &str = "75";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build_script");
    name_library();
    let mut toolkit_version = 0;
    let mut architectures = Vec::new();
    if env::var_os("CARGO_FEATURE_CUDA").is_some() && env::var_os("DOCS_RS").is_none() {
        for variable in
            ["NVCC", "CUDA_HOME", "NVB_CUDA_ARCHITECTURES", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CXX"]
        {
            println!("cargo:rerun-if-env-changed={variable}");
        }
        println!("cargo:rerun-if-changed=csrc");
        compare_arguments();
        let toolkit = Toolkit::find();
        architectures = choose_architectures(&toolkit);
        let mut objects = compile_kernels(&toolkit, &architectures);
        objects.extend(compile_driver());
        link(&toolkit, &objects);
        toolkit_version = version_number(&toolkit.version);
    }
    println!("cargo:rustc-env=NVB_BUILD_HASH={}", hex(&(toolkit_version, &architectures, kernel_sources())));
    println!("cargo:rustc-env=NVB_BUILD_CUDA_VERSION={toolkit_version}");
    println!("cargo:rustc-env=NVB_BUILD_ARCHITECTURES={}", architectures.join(";"));
}

/// The text of everything that computes, so that what was tuned for other kernels is known by it.
fn kernel_sources() -> Vec<(PathBuf, Vec<u8>)> {
    let mut files = Vec::new();
    let mut folders: Vec<PathBuf> = ["csrc", "src/cpu", "src/cuda", "src/simd"].map(PathBuf::from).into();
    while let Some(folder) = folders.pop() {
        println!("cargo:rerun-if-changed={}", folder.display());
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| fail(&format!("{}: {error}", folder.display()))) {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                // Pages compute nothing.
                false if path.extension().is_some_and(|extension| extension == "md") => {}
                false => files.push(path),
            }
        }
    }
    files.sort();
    files.into_iter().map(|file| (file.clone(), fs::read(&file).unwrap_or_default())).collect()
}

/// Ends the build where src/ and csrc/ do not agree on what crosses between them. Some 0.2 s.
fn compare_arguments() {
    let work = PathBuf::from(env::var_os("OUT_DIR").unwrap());
    let compiler = cc::Build::new().cpp(true).cargo_metadata(false).get_compiler().to_command();
    let compared = arguments::check(Path::new("."), compiler, &work).unwrap_or_else(|difference| fail(&difference));
    for file in compared {
        println!("cargo:rerun-if-changed={}", file.display());
    }
}

/// Whether CMake runs Cargo, so that messages name what its user can change. A change of it alone builds nothing anew.
fn run_by_cmake() -> bool {
    env::var_os("NVB_BUILD_TOOL").is_some_and(|tool| tool == "cmake")
}

/// What builds a library without CUDA.
fn cpu_only_option() -> &'static str {
    match run_by_cmake() {
        true => "-DNVBACKEND_CUDA=OFF",
        false => "--no-default-features",
    }
}

/// What `NVB_CUDA_ARCHITECTURES` is called where it was set.
fn architectures_option() -> &'static str {
    match run_by_cmake() {
        true => "CMAKE_CUDA_ARCHITECTURES",
        false => "NVB_CUDA_ARCHITECTURES",
    }
}

/// Ends the build with a message and no backtrace.
fn fail(message: &str) -> ! {
    eprintln!("error: {message}");
    exit(1);
}

/// SONAME `libnvbackend.so.0.MINOR`, from 1.0 on `libnvbackend.so.MAJOR`; and no unloading, because the CUDA runtime
/// and the thread pool outlive a `dlclose`.
fn name_library() {
    let version = |part: &str| env::var(format!("CARGO_PKG_VERSION_{part}")).unwrap();
    let binary_version = match version("MAJOR").as_str() {
        "0" => format!("0.{}", version("MINOR")),
        major => major.to_owned(),
    };
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnvbackend.so.{binary_version}");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // A symbol that is missing fails this link, not the engine's start.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs");
}

/// A CUDA compiler and the folders that belong to it.
struct Toolkit {
    nvcc: PathBuf,
    /// The release, such as `13.0`.
    version: String,
    /// Capabilities that it builds code for, such as `80`.
    capabilities: Vec<String>,
    /// The folder with libcudart_static.a.
    libraries: PathBuf,
}

impl Toolkit {
    /// The first of: `NVCC`, `CUDA_HOME`, `PATH`, /usr/local/cuda, the wheels that `make setup` installed.
    fn find() -> Toolkit {
        let named = env::var_os("NVCC").map(PathBuf::from);
        let home = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin/nvcc"));
        let on_path = env::var_os("PATH").unwrap_or_default();
        let mut candidates: Vec<PathBuf> = named.into_iter().chain(home).collect();
        candidates.extend(env::split_paths(&on_path).map(|folder| folder.join("nvcc")));
        candidates.push(PathBuf::from("/usr/local/cuda/bin/nvcc"));
        candidates.push(Path::new(&env::var_os("CARGO_MANIFEST_DIR").unwrap()).join(".toolchain/cuda/bin/nvcc"));
        let Some(nvcc) = candidates.into_iter().find(|candidate| candidate.is_file()) else {
            fail(&format!(
                "no CUDA compiler: nvcc is not in NVCC, CUDA_HOME, PATH, /usr/local/cuda or .toolchain/.\n\
                 Either run `make setup`, which installs one into .toolchain/, or build a library that runs on the \
                 CPU alone with `{}`.",
                cpu_only_option()
            ));
        };
        let nvcc = nvcc.canonicalize().unwrap_or(nvcc);
        let version = release(&output(&nvcc, "--version"))
            .unwrap_or_else(|| fail(&format!("`{} --version` names no release", nvcc.display())));
        let list = output(&nvcc, "--list-gpu-arch");
        let capabilities = list.lines().filter_map(|line| line.strip_prefix("compute_")).map(str::to_owned).collect();
        Toolkit { version, capabilities, libraries: runtime_folder(&nvcc), nvcc }
    }
}

/// What `nvcc argument` prints.
fn output(nvcc: &Path, argument: &str) -> String {
    match Command::new(nvcc).arg(argument).output() {
        Ok(result) if result.status.success() => String::from_utf8_lossy(&result.stdout).into_owned(),
        Ok(result) => fail(&format!("`{} {argument}` failed with {}", nvcc.display(), result.status)),
        Err(error) => fail(&format!("`{} {argument}` does not run: {error}", nvcc.display())),
    }
}

/// `13.0` from "Cuda compilation tools, release 13.0, V13.0.88".
fn release(text: &str) -> Option<String> {
    let (_, rest) = text.split_once("release ")?;
    Some(rest.split(',').next()?.trim().to_owned())
}

/// 13000 for `13.0`, as CUDA's own version macros have it.
fn version_number(release: &str) -> u32 {
    let (major, minor) = release.split_once('.').unwrap_or((release, "0"));
    1000 * major.parse().unwrap_or(0) + 10 * minor.parse().unwrap_or(0)
}

/// Where libcudart_static.a lies: toolkits have lib64/ or targets/, wheels lib/, Debian the machine's folder.
fn runtime_folder(nvcc: &Path) -> PathBuf {
    let machine = env::var("CARGO_CFG_TARGET_ARCH").unwrap();
    let root = nvcc.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
    let targets = if machine == "aarch64" { "sbsa-linux" } else { "x86_64-linux" };
    let folders = [
        root.join("lib64"),
        root.join("lib"),
        root.join("targets").join(targets).join("lib"),
        root.join("lib").join(format!("{machine}-linux-gnu")),
    ];
    folders.iter().find(|folder| folder.join("libcudart_static.a").is_file()).cloned().unwrap_or_else(|| {
        let list: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
        fail(&format!("libcudart_static.a, which belongs to {}, is in none of {}", nvcc.display(), list.join(", ")))
    })
}

/// `NVB_CUDA_ARCHITECTURES` (or all of the library's) that this nvcc can build, oldest first.
fn choose_architectures(toolkit: &Toolkit) -> Vec<String> {
    let buildable = |name: &str| toolkit.capabilities.iter().any(|known| known == name.trim_end_matches('a'));
    let asked = env::var("NVB_CUDA_ARCHITECTURES").unwrap_or_default();
    let mut chosen: Vec<String> = Vec::new();
    for entry in asked.split([';', ',', ' ']).filter(|entry| !entry.is_empty()) {
        // CMake's spellings: "80-real" and "80-virtual" are built alike, because PTX comes with the newest anyhow.
        let name = entry.trim_end_matches("-real").trim_end_matches("-virtual");
        if name == "all" || name == "all-major" {
            chosen.extend(ARCHITECTURES.iter().map(|name| name.to_string()).filter(|name| buildable(name)));
        } else if !name.trim_end_matches(['a', 'f']).chars().all(|digit| digit.is_ascii_digit()) {
            let option = architectures_option();
            fail(&format!("{option}: `{entry}` is no compute capability; write for instance `80;90a`"));
        } else if buildable(name) {
            chosen.push(if name == "90" { "90a".to_owned() } else { name.to_owned() });
        } else {
            println!("cargo:warning=CUDA {} does not build for compute capability {name}: left out", toolkit.version);
        }
    }
    if asked.trim().is_empty() {
        let newer = ARCHITECTURES.iter().skip_while(|name| **name != OLDEST_DEFAULT);
        chosen.extend(newer.map(|name| name.to_string()).filter(|name| buildable(name)));
    }
    chosen.sort_by_key(|name| number(name));
    chosen.dedup();
    if chosen.is_empty() {
        let known = toolkit.capabilities.join(";");
        fail(&format!(
            "{} is `{asked}`, of which CUDA {} builds none; it builds {known}",
            architectures_option(),
            toolkit.version
        ));
    }
    chosen
}

/// 90 for `90a`.
fn number(architecture: &str) -> u32 {
    architecture.trim_end_matches(['a', 'f']).parse().unwrap_or(0)
}

/// Machine code for every architecture, and PTX of the newest that a later GPU may compile (never of an `a` target).
fn code_flags(architectures: &[String]) -> Vec<String> {
    let machine = architectures.iter().map(|name| format!("-gencode=arch=compute_{name},code=sm_{name}"));
    let plain = architectures.iter().rev().find(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
    machine.chain(plain.map(|name| format!("-gencode=arch=compute_{name},code=compute_{name}"))).collect()
}

/// Compiles the units of csrc/, `NUM_JOBS` at a time, and returns the objects.
///
/// They are kept in the target folder, shared by profiles, under the hash of what was compiled (build_script/kernel_units.rs):
/// who returns to an earlier state of csrc/ finds its objects there.
fn compile_kernels(toolkit: &Toolkit, architectures: &[String]) -> Vec<PathBuf> {
    let csrc = Path::new("csrc");
    let units = kernel_units::units(csrc).unwrap_or_else(|error| fail(&error));
    let jobs: usize = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1);
    let compiler = kernel_compiler(toolkit, architectures, jobs.div_ceil(units.len().max(1)));
    let mut fixed: Vec<OsString> = compiler.get_args().map(OsString::from).collect();
    fixed.extend(["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"].iter().filter_map(env::var_os));
    let folder = kernel_folder().join(hex(&(&toolkit.version, &fixed)));
    let kept = kept_objects(&folder).unwrap_or_else(|error| fail(&format!("{}: {error}", folder.display())));
    let mut objects = Vec::new();
    let mut missing = Vec::new();
    let mut sources = Sources::new(csrc);
    for unit in units {
        let tokens = sources.tokens(&unit).unwrap_or_else(|error| fail(&error));
        let key = hex(&tokens);
        let object = kept.get(&key).cloned().unwrap_or_else(|| folder.join(format!("{}-{key}.o", unit.name)));
        objects.push(object.clone());
        if !kept.contains_key(&key) {
            missing.push((tokens.len(), unit, object));
        }
    }
    // Large units first, so that none is left running alone at the end.
    missing.sort_by_key(|(size, _, _)| *size);
    let waiting = Mutex::new(missing);
    let next = || waiting.lock().unwrap().pop();
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some((_, unit, object)) = next() {
                    compile_kernel(&compiler, &unit, &object);
                }
            });
        }
    });
    objects
}

/// The objects of a folder, which it makes if need be, by the key at the end of their names.
fn kept_objects(folder: &Path) -> io::Result<BTreeMap<String, PathBuf>> {
    fs::create_dir_all(folder)?;
    let mut kept = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Some((_, key)) = name.strip_suffix(".o").and_then(|stem| stem.rsplit_once('-')) {
            kept.insert(key.to_owned(), path);
        }
    }
    Ok(kept)
}

/// nvcc with every flag but the file names. `cc` chooses the host compiler and its flags for the target.
fn kernel_compiler(toolkit: &Toolkit, architectures: &[String], threads: usize) -> Command {
    // Read by cc, which looks for nvcc nowhere else. No other thread runs yet.
    unsafe { env::set_var("NVCC", &toolkit.nvcc) };
    let mut build = cc::Build::new();
    build.cuda(true).cudart("none").opt_level(3).debug(false).pic(true).cargo_metadata(false).cargo_warnings(false);
    let mut command = build.get_compiler().to_command();
    command.args(["-std=c++17", "--expt-relaxed-constexpr", "--Werror=cross-execution-space-call"]);
    command.args(["-Xcompiler", "-fvisibility=hidden,-fno-exceptions", "-Icsrc"]);
    // A sixth of the size; a kernel file is unpacked when the first of its kernels is loaded.
    command.args(["-Xfatbin", "-compress-all"]);
    command.args(code_flags(architectures)).arg(format!("--threads={threads}"));
    command
}

fn compile_kernel(compiler: &Command, unit: &Unit, object: &Path) {
    let source = unit.file.clone().unwrap_or_else(|| {
        let folder = PathBuf::from(env::var_os("OUT_DIR").unwrap()).join("kernels");
        let path = folder.join(format!("{}.cu", unit.name));
        let written = fs::create_dir_all(&folder).and_then(|()| fs::write(&path, &unit.text));
        written.unwrap_or_else(|error| fail(&format!("{}: {error}", path.display())));
        path
    });
    let partial = object.with_extension(format!("{}.partial", std::process::id()));
    let mut command = Command::new(compiler.get_program());
    for (name, value) in compiler.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    command.args(compiler.get_args()).arg("-c").arg(&source).arg("-o").arg(&partial);
    let result = command.output().unwrap_or_else(|error| fail(&format!("{command:?}: {error}")));
    if !result.status.success() {
        let text = [result.stdout, result.stderr].concat();
        fail(&format!("{}\n{}\n{command:?}", source.display(), String::from_utf8_lossy(&text)));
    }
    // Renamed last, so that an object that exists is whole.
    fs::rename(&partial, object).unwrap_or_else(|error| fail(&format!("{}: {error}", object.display())));
}

fn hex(value: &impl Hash) -> String {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// `<target>/kernels`, four folders above `<target>/<profile>/build/nvbackend-<hash>/out`.
fn kernel_folder() -> PathBuf {
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap());
    out.ancestors().nth(4).unwrap_or(&out).join("kernels")
}

/// The trampolines that open libcuda.so.1 on first use (csrc/driver/driver.h).
fn compile_driver() -> Vec<PathBuf> {
    let machine = env::var("CARGO_CFG_TARGET_ARCH").unwrap();
    let trampolines = format!("csrc/driver/trampolines_{machine}.S");
    if !Path::new(&trampolines).is_file() {
        fail(&format!("the `cuda` feature needs {trampolines}: build with `{}` on {machine}", cpu_only_option()));
    }
    let mut build = cc::Build::new();
    build.file("csrc/driver/driver.c").file(trampolines).opt_level(2).pic(true).flag("-fvisibility=hidden");
    build.warnings_into_errors(true).extra_warnings(true).cargo_metadata(false).compile_intermediates()
}

/// Packs the objects and links them whole: cust_raw, which uses the trampolines, stands later on the link line.
fn link(toolkit: &Toolkit, objects: &[PathBuf]) {
    let out = env::var("OUT_DIR").unwrap();
    cc::Build::new().objects(objects).cargo_metadata(false).compile("nvbackend_cuda");
    println!("cargo:rustc-link-search=native={out}");
    println!("cargo:rustc-link-lib=static:+whole-archive=nvbackend_cuda");
    println!("cargo:rustc-link-search=native={}", toolkit.libraries.display());
    println!("cargo:rustc-link-lib=static=cudart_static");
    // nvcc's launch stubs use the C++ runtime's guards. Linked statically, so that the library runs beside any libstdc++.
    println!("cargo:rustc-link-search=native={}", standard_library_folder().display());
    println!("cargo:rustc-link-lib=static:-bundle=stdc++");
    for library in ["dl", "rt", "pthread"] {
        println!("cargo:rustc-link-lib=dylib={library}");
    }
}

/// Where the C++ compiler keeps libstdc++.a.
fn standard_library_folder() -> PathBuf {
    let compiler = cc::Build::new().cpp(true).cargo_metadata(false).get_compiler();
    let mut command = compiler.to_command();
    command.arg("-print-file-name=libstdc++.a");
    let answer = command.output().unwrap_or_else(|error| fail(&format!("{command:?}: {error}"))).stdout;
    let file = PathBuf::from(String::from_utf8_lossy(&answer).trim());
    match file.parent() {
        Some(folder) if file.is_absolute() => folder.to_owned(),
        _ => fail(&format!("{} has no libstdc++.a, which comes with g++", compiler.path().display())),
    }
}

//! Drivers that are missing, broken, old or without a device, and devices that are busy, full or without memory pools:
//! what the library says of each, word for word where users search for it.

use crate::child::{in_child, Outcome};
use crate::engine::{call, create_backend, Engine, Failure};
use crate::fake::{Fake, Mode, Setting};
use crate::sweep::expect_clean;
use nvbackend::capi::event::*;
use nvbackend::capi::memory::*;
use nvbackend::capi::memory_control::*;
use nvbackend::capi::status::*;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

pub fn passes(check: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    in_child(|| check().map(|()| Outcome::Passed)).map(drop)
}

pub fn works<T>(outcome: Result<T, Failure>) -> Result<T, String> {
    outcome.map_err(|failure| failure.to_string())
}

fn failure(outcome: Result<Engine, Failure>) -> Result<Failure, String> {
    outcome.err().ok_or_else(|| "a backend was created all the same".to_owned())
}

/// Without CUDA an engine that asks for "auto" gets the CPU.
fn expect_cpu_instead() -> Result<(), String> {
    create_backend(c"auto").map(drop).map_err(|failure| format!("device auto: {failure}"))
}

/// (name, what is set, status, code, text)
type Refusal = (&'static str, &'static [(Setting, i64)], i32, i32, &'static str);

const REFUSALS: [Refusal; 6] = [
    (
        "no device",
        &[(Setting::InitStatus, 100)],
        NVB_ERROR_CUDA_NOT_AVAILABLE,
        100,
        "nvb_backend_create: starting CUDA: CUDA error 100 (no CUDA-capable device is detected)",
    ),
    (
        "a driver that lists none",
        &[(Setting::Devices, 0)],
        NVB_ERROR_CUDA_NOT_AVAILABLE,
        0,
        "nvb_backend_create: the CUDA driver works and lists no device",
    ),
    (
        "no permission",
        &[(Setting::InitStatus, 304)],
        NVB_ERROR_CUDA_NOT_AVAILABLE,
        304,
        "nvb_backend_create: starting CUDA: CUDA error 304 (OS call failed or operation not supported on this OS) \
         (may this process open /dev/nvidiactl and /dev/nvidia-uvm, and is the nvidia_uvm module loaded?)",
    ),
    (
        "driver and kernel module of two versions",
        &[(Setting::InitStatus, 803)],
        NVB_ERROR_CUDA_NOT_AVAILABLE,
        803,
        "nvb_backend_create: starting CUDA: CUDA error 803 (system has unsupported display driver / cuda driver \
         combination)",
    ),
    (
        "a device that another process has to itself",
        &[(Setting::RetainStatus, 46)],
        NVB_ERROR_CUDA_NOT_AVAILABLE,
        46,
        "nvb_backend_create: retaining the primary context: CUDA error 46 (CUDA-capable device(s) is/are busy or \
         unavailable)",
    ),
    (
        "a GPU that is too old",
        &[(Setting::Capability, 61)],
        NVB_ERROR_INVALID_COMPUTE_CAPABILITY,
        0,
        "nvb_backend_create: Fake GPU 0 has compute capability 6.1; 7.0 is the oldest supported",
    ),
];

pub fn refusals(file: &Path) -> Result<String, String> {
    for (name, settings, status, code, text) in REFUSALS {
        passes(|| {
            let fake = Fake::open(file);
            settings.iter().for_each(|(setting, value)| fake.set(*setting, *value));
            let failure = failure(Engine::new())?;
            // Advice may follow that depends on what /dev and the PCI bus of this machine show.
            if (failure.status, failure.code) != (status, code) || !failure.text.starts_with(text) {
                return Err(format!("{failure}\n    does not begin with\n    {status} with code {code}: {text}"));
            }
            expect_cpu_instead()?;
            expect_clean(fake, 0)
        })
        .map_err(|problem| format!("{name}: {problem}"))?;
    }
    Ok(format!("{} texts", REFUSALS.len()))
}

/// The runtime that is linked in needs a driver of its own major version at least.
pub fn old_driver(file: &Path) -> Result<String, String> {
    let built: i64 = env!("NVB_BUILD_CUDA_VERSION").parse().unwrap();
    let (major, minor) = (built / 1000, built % 1000 / 10);
    passes(|| {
        Fake::open(file).set(Setting::DriverVersion, built - 1000);
        let failure = failure(Engine::new())?;
        let text = format!(
            "nvb_backend_create: the driver supports CUDA {}.{minor}; this library was built with CUDA {major}.{minor} \
             and needs a driver for {major}.0 or later (update the NVIDIA driver, or build the library with an older \
             toolkit)",
            major - 1
        );
        if (failure.status, failure.text.as_str()) != (NVB_ERROR_CUDA_NOT_AVAILABLE, text.as_str()) {
            return Err(format!("{failure}\n    is not\n    {text}"));
        }
        expect_cpu_instead()
    })?;
    passes(|| {
        Fake::open(file).set(Setting::DriverVersion, 1000 * major);
        works(Engine::new().and_then(|engine| engine.work()))
    })?;
    Ok(format!("CUDA {}.{minor} refused, {major}.0 accepted", major - 1))
}

/// No libcuda.so.1, and one that is no library.
pub fn unusable_files(_file: &Path) -> Result<String, String> {
    let broken = Path::new(env!("CARGO_TARGET_TMPDIR")).join("broken_libcuda.so");
    std::fs::write(&broken, "no library").map_err(|error| error.to_string())?;
    let cases = [
        (PathBuf::from("/no_such_folder/libcuda.so.1"), "cannot open shared object file: No such file or directory"),
        (broken, "file too short"),
    ];
    for (file, reason) in &cases {
        passes(|| {
            std::env::set_var("NVB_LIBCUDA", file);
            let failure = failure(Engine::new())?;
            let text = format!("nvb_backend_create: the CUDA driver could not be opened: {}: {reason}", file.display());
            if (failure.status, failure.code) != (NVB_ERROR_CUDA_NOT_AVAILABLE, 0) || !failure.text.starts_with(&text) {
                return Err(format!("{failure}\n    does not begin with\n    {text}"));
            }
            expect_cpu_instead()
        })?;
    }
    Ok(format!("{} files", cases.len()))
}

/// What stood in the way goes away: nothing of it is remembered.
pub fn detected_again(file: &Path) -> Result<String, String> {
    passes(|| {
        let fake = Fake::open(file);
        fake.set(Setting::InitStatus, 304);
        failure(Engine::new())?;
        fake.set(Setting::InitStatus, 0);
        fake.set(Setting::RetainStatus, 46);
        failure(Engine::new())?;
        fake.set(Setting::RetainStatus, 0);
        works(Engine::new().and_then(|engine| engine.work()))?;
        expect_clean(fake, 0)
    })?;
    Ok("a backend after two refusals".to_owned())
}

/// A copy of the fake driver without one symbol: its name is changed where the dynamic loader looks for it.
fn without(file: &Path, symbol: &str) -> PathBuf {
    let mut bytes = std::fs::read(file).unwrap();
    let name = [b"\0", symbol.as_bytes(), b"\0"].concat();
    let mut found = 0;
    for start in 0..bytes.len() - name.len() {
        if bytes[start..].starts_with(&name) {
            bytes[start + 1] = b'x';
            found += 1;
        }
    }
    assert!(found > 0, "the fake driver has no {symbol}");
    let copy = file.with_extension("one_less.so");
    std::fs::write(&copy, bytes).unwrap();
    copy
}

fn is_for_pools(name: &str) -> bool {
    name.starts_with("cuMemPool")
        || matches!(name, "cuMemAllocFromPoolAsync" | "cuMemFreeAsync" | "cuDeviceGraphMemTrim")
}

/// Graphs are launched operation by operation then.
fn is_for_graphs(name: &str) -> bool {
    matches!(
        name,
        "cuStreamBeginCapture_v2"
            | "cuStreamEndCapture"
            | "cuGraphInstantiateWithFlags"
            | "cuGraphLaunch"
            | "cuGraphDestroy"
            | "cuGraphExecDestroy"
    )
}

fn is_for_ranges(name: &str) -> bool {
    matches!(
        name,
        "cuMemAddressReserve"
            | "cuMemAddressFree"
            | "cuMemGetAllocationGranularity"
            | "cuMemCreate"
            | "cuMemRelease"
            | "cuMemMap"
            | "cuMemUnmap"
            | "cuMemSetAccess"
    )
}

/// Every function that the library calls, missing once.
pub fn missing_symbols(file: &Path) -> Result<String, String> {
    // The fake driver's own list, from a run with address ranges, one with memory pools and one without either; it comes
    // back through a file.
    let list = file.with_extension("functions");
    for pools in [2, 1, 0] {
        passes(|| {
            let fake = Fake::open(file);
            fake.set(Setting::Virtual, i64::from(pools == 2));
            fake.set(Setting::Pools, pools.min(1));
            works(Engine::new().and_then(|engine| engine.work()))?;
            std::fs::write(list.with_extension(format!("{pools}")), fake.functions_called().join("\n"))
                .map_err(|error| error.to_string())
        })?;
    }
    let names = |pools: i32| std::fs::read_to_string(list.with_extension(format!("{pools}"))).unwrap();
    let all = [names(0), names(1), names(2)].join("\n");
    let mut functions: Vec<String> = all.lines().map(str::to_owned).collect();
    functions.sort();
    functions.dedup();
    assert!(functions.iter().any(|name| name == "cuGraphLaunch"), "a graph is captured where the driver can");
    // These two are the runtime's to call.
    functions.retain(|name| name != "cuLaunchKernel" && name != "cuFuncSetAttribute");

    for name in &functions {
        let copy = without(file, name);
        passes(|| {
            let fake = Fake::open(&copy);
            fake.set(Setting::Virtual, i64::from(!is_for_pools(name)));
            let outcome = Engine::new();
            if is_for_pools(name) || is_for_ranges(name) || is_for_graphs(name) || name == "cuDeviceGetPCIBusId" {
                // Memory comes another way then.
                works(outcome.and_then(|engine| engine.work()))?;
                return expect_clean(fake, 0);
            }
            let failure = failure(outcome)?;
            let text = format!("nvb_backend_create: the CUDA driver lacks {name}");
            if failure.status != NVB_ERROR_CUDA_NOT_AVAILABLE || !failure.text.starts_with(&text) {
                return Err(format!("{failure}\n    does not begin with\n    {text}"));
            }
            expect_cpu_instead()?;
            expect_clean(fake, 0)
        })
        .map_err(|problem| format!("without {name}: {problem}"))?;
    }

    // Without the texts an error is a number still.
    let copy = without(file, "cuGetErrorString");
    passes(|| {
        let fake = Fake::open(&copy);
        let engine = Engine::new().map_err(|failure| failure.to_string())?;
        fake.fail(2, 304, Mode::Once);
        match engine.work() {
            Err(failure) if failure.text.contains("304") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })?;
    Ok(format!("{} functions missing in turn", functions.len() + 1))
}

/// A driver without unified memory: the call says which function it would take, and the rest works.
pub fn no_unified_memory(file: &Path) -> Result<String, String> {
    const BYTES: usize = 5000;
    let functions = ["cuMemAllocManaged", "cuMemAdvise", "cuMemPrefetchAsync"];
    for name in functions {
        let copy = without(file, name);
        passes(|| {
            let fake = Fake::open(&copy);
            let engine = Engine::new().map_err(|failure| failure.to_string())?;
            let memory = engine.memory.raw;
            let mut block = null_mut();
            let outcome = call!(nvb_memory_allocate_managed(memory, BYTES, &mut block))
                .and_then(|()| call!(nvb_memory_advise(memory, block, BYTES, NVB_ADVICE_PREFER_HOST)))
                .and_then(|()| call!(nvb_memory_prefetch(memory, block, BYTES, 1, null_mut())));
            let failure = outcome.err().ok_or("no failure")?;
            let text = format!("the CUDA driver lacks {name}");
            if failure.status != NVB_ERROR_UNSUPPORTED || !failure.text.contains(&text) {
                return Err(failure.to_string());
            }
            works(call!(nvb_memory_free(memory, block, null_mut())))?;
            works(engine.work())?;
            drop(engine);
            expect_clean(fake, 0)
        })
        .map_err(|problem| format!("without {name}: {problem}"))?;
    }
    Ok(format!("{} functions missing in turn", functions.len()))
}

/// Memory runs out at a number of bytes: typed, with the numbers, and what was there before goes on.
pub fn full_memory(file: &Path) -> Result<String, String> {
    const MEMORY: i64 = 16 << 20;
    for (ranges, pools) in [(1, 1), (0, 1), (0, 0)] {
        passes(|| {
            let fake = Fake::open(file);
            fake.set(Setting::MemoryBytes, MEMORY);
            fake.set(Setting::Virtual, ranges);
            fake.set(Setting::Pools, pools);
            let engine = Engine::new().map_err(|failure| failure.to_string())?;
            let neighbour = Engine::new().map_err(|failure| failure.to_string())?;
            let block = neighbour.block(10 << 20, null_mut()).map_err(|failure| failure.to_string())?;
            let Err(failure) = engine.block(6 << 20, null_mut()) else { return Err("16 of 16 MiB".to_owned()) };
            let text = "nvb_memory_allocate: 6291456 bytes requested: the device has 6291456 bytes free and 838860 of \
                        them are the safety margin; 0 allocated, 0 cached, 0 held";
            if failure.status != NVB_ERROR_OUT_OF_MEMORY || !failure.text.starts_with(text) {
                return Err(failure.to_string());
            }
            if engine.statistics().failures != 1 {
                return Err(format!("{} failures counted", engine.statistics().failures));
            }
            drop(block);
            works(call!(nvb_memory_trim(neighbour.memory.raw, 0, null_mut())))?;
            drop(engine.block(6 << 20, null_mut()).map_err(|failure| failure.to_string())?);
            drop((engine, neighbour));
            expect_clean(fake, 0)
        })
        .map_err(|problem| format!("ranges {ranges}, pools {pools}: {problem}"))?;
    }
    Ok("with ranges, with pools, and without".to_owned())
}

/// Events that take their time.
pub fn slow_events(file: &Path) -> Result<String, String> {
    const POLLS: i64 = 3;
    passes(|| {
        let fake = Fake::open(file);
        fake.set(Setting::Polls, POLLS);
        let engine = Engine::new().map_err(|failure| failure.to_string())?;
        let (stream, start, end) = (
            engine.stream().map_err(|failure| failure.to_string())?,
            engine.event().map_err(|failure| failure.to_string())?,
            engine.event().map_err(|failure| failure.to_string())?,
        );
        works(call!(nvb_event_record(start.raw, stream.raw)))?;
        works(call!(nvb_event_record(end.raw, stream.raw)))?;
        let mut milliseconds = 0.0;
        match call!(nvb_event_get_elapsed(start.raw, end.raw, &mut milliseconds)) {
            Err(failure) if failure.status == NVB_ERROR_INVALID_ARGUMENT => {}
            other => return Err(format!("elapsed time of an unfinished event: {other:?}")),
        }
        for poll in 0..=POLLS {
            let mut finished = 7;
            works(call!(nvb_event_query(end.raw, &mut finished)))?;
            if finished != u32::from(poll == POLLS) {
                return Err(format!("query {poll} says {finished}"));
            }
        }
        works(call!(nvb_event_synchronize(start.raw)))?;
        works(call!(nvb_event_get_elapsed(start.raw, end.raw, &mut milliseconds)))
    })?;
    Ok(format!("{POLLS} queries before an event has finished"))
}

/// A status that is newer than the bindings arrives as the number that it is.
pub fn unknown_status(file: &Path) -> Result<String, String> {
    const NEWER: i32 = 921;
    passes(|| {
        let fake = Fake::open(file);
        let engine = Engine::new().map_err(|failure| failure.to_string())?;
        fake.fail(1, NEWER, Mode::Forever);
        match engine.stream().map(drop) {
            Err(failure) if failure.code == NEWER && failure.text.contains("921") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })?;
    Ok(format!("status {NEWER}"))
}

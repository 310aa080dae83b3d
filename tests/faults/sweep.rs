//! Fails the first driver call of a scenario, then the second, and so on until the scenario ends before the fault
//! fires; each time once and for ever.

use crate::child::{in_child, Outcome};
use crate::engine::{Engine, Failure};
use crate::fake::{Fake, Mode, Setting};
use nvbackend::capi::status::*;
use std::path::Path;

/// The two families of codes: one that asks for less, and one that says nothing more than that something failed.
pub const OUT_OF_MEMORY: i32 = 2;
const OPERATING_SYSTEM: i32 = 304;
/// More calls than any scenario makes.
const END: i64 = 5000;
/// A sweep that fails this often has said enough.
const MOST_PROBLEMS: usize = 40;

#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// Whether the device maps memory behind reserved addresses.
    pub ranges: bool,
    pub pools: bool,
    /// The engine has a context of its own current, and must find it current again.
    pub other_context: bool,
    /// Events and streams are asked several times before they have finished.
    pub polls: i64,
    pub faults: &'static [(Mode, i32)],
}

pub const ALL_FAULTS: &[(Mode, i32)] = &[
    (Mode::Once, OUT_OF_MEMORY),
    (Mode::Once, OPERATING_SYSTEM),
    (Mode::Forever, OUT_OF_MEMORY),
    (Mode::Forever, OPERATING_SYSTEM),
];
/// Both modes and both codes still, for scenarios that differ from a full sweep's in few calls.
pub const SOME_FAULTS: &[(Mode, i32)] = &[(Mode::Once, OUT_OF_MEMORY), (Mode::Forever, OPERATING_SYSTEM)];

/// Fails when one step of the sweep does.
pub fn sweep(file: &Path, scenario: Scenario) -> Result<String, String> {
    each_fault(scenario.faults, |n, status, mode| step(Fake::open(file), scenario, n, status, mode))
}

/// Takes the step with each call failing in turn, once for each fault.
pub fn each_fault(
    faults: &[(Mode, i32)],
    step: impl Fn(i64, i32, Mode) -> Result<Outcome, String>,
) -> Result<String, String> {
    let mut problems = Vec::new();
    let mut summary = String::new();
    match in_child(|| step(END, OUT_OF_MEMORY, Mode::Once)) {
        Ok(Outcome::NoFault) => {}
        other => return Err(format!("without a fault: {other:?}")),
    }
    for (mode, status) in faults {
        let ended = (1..END).find(|&n| {
            let outcome = in_child(|| step(n, *status, *mode));
            if let Err(problem) = &outcome {
                let text = format!("call {n}, {mode:?}, status {status}: {problem}");
                eprintln!("  {text}");
                problems.push(text);
            }
            outcome == Ok(Outcome::NoFault) || problems.len() >= MOST_PROBLEMS
        });
        let Some(ended) = ended else { return Err(format!("{END} calls and no end")) };
        summary += &format!(" {}", ended - 1);
    }
    match problems.len() {
        0 => Ok(format!("calls failed in turn:{summary}")),
        count => Err(format!("{count} steps of the sweep failed, the first: {}", problems[0])),
    }
}

fn step(fake: &Fake, scenario: Scenario, n: i64, status: i32, mode: Mode) -> Result<Outcome, String> {
    fake.set(Setting::Virtual, scenario.ranges.into());
    fake.set(Setting::Pools, scenario.pools.into());
    fake.set(Setting::Polls, scenario.polls);
    let context = if scenario.other_context { fake.make_context_current(1) } else { 0 };
    fake.fail(n, status, mode);
    let mut failures = 0;
    let mut run = |doing: &mut dyn FnMut() -> Result<(), Failure>| match doing() {
        Ok(()) => Ok(true),
        Err(failure) => {
            failures += 1;
            expect(fake, &failure, status)?;
            if failures > 1 && mode == Mode::Once {
                return Err(format!("{failure}: the fault in {} was over", fake.fault_function()));
            }
            Ok(false)
        }
    };

    let mut engine = None;
    let mut create = || Engine::new().map(|created| engine = Some(created));
    if !run(&mut create)? && mode == Mode::Once {
        run(&mut create)?;
    }
    if let Some(engine) = &engine {
        let done = run(&mut || engine.work())?;
        if !done && mode == Mode::Once {
            run(&mut || engine.work())?;
        }
    }
    let unreported = engine.as_ref().is_some_and(|engine| engine.unreported.get());
    drop(engine);
    let books = fake.books();
    if books.faults > 0 && !unreported && failures == 0 && !may_pass_unseen(&fake.fault_function(), status) {
        return Err(format!("the fault in {} was reported by no call", fake.fault_function()));
    }
    let clean = if mode == Mode::Once { expect_clean } else { expect_released };
    clean(fake, context)?;
    if books.faults == 0 {
        return Ok(Outcome::NoFault);
    }

    // When the trouble is over, all is as it was.
    fake.fail(0, 0, Mode::Once);
    let again = Engine::new().and_then(|engine| engine.work());
    again.map_err(|failure| format!("after the fault in {} was over, {failure}", fake.fault_function()))?;
    clean(fake, context)?;
    Ok(Outcome::Passed)
}

/// Nothing is left over, nothing was misused, and `context` (the engine's, or none) is current again.
pub fn expect_clean(fake: &Fake, context: usize) -> Result<(), String> {
    expect_released(fake, context)?;
    if fake.capture_mode() != 0 {
        return Err(format!(
            "the capture mode stayed {}; the fault was in {}",
            fake.capture_mode(),
            fake.fault_function()
        ));
    }
    if fake.books().ranges != 0 {
        return Err(format!("addresses stay reserved; the fault was in {}", fake.fault_function()));
    }
    if fake.current_context() != context {
        return Err(format!("another context stayed current; the fault was in {}", fake.fault_function()));
    }
    Ok(())
}

/// Nothing is left over and nothing was misused. Where setting the context is what fails for ever, it cannot be put back,
/// and where unmapping does, addresses stay reserved rather than that memory which may be mapped there loses them.
fn expect_released(fake: &Fake, context: usize) -> Result<(), String> {
    let books = fake.books();
    let fault = fake.fault_function();
    if books.violations != 0 {
        return Err(format!("{} ({} in all); the fault was in {fault}", fake.violation(), books.violations));
    }
    let contexts = i64::from(context != 0);
    let left = [
        ("contexts", books.contexts - contexts),
        ("blocks", books.blocks),
        ("page-locked blocks", books.host_blocks),
        ("mappings", books.mappings),
        ("pieces of memory", books.physicals),
        ("pools", books.pools),
        ("streams", books.streams),
        ("events", books.events),
        ("graphs", books.graphs),
    ];
    for (name, count) in left {
        if count != 0 {
            return Err(format!("{count} {name} are left; the fault was in {fault}"));
        }
    }
    Ok(())
}

/// Calls whose failure changes nothing for the caller: they release, wait, restore, ask for a number to report, or give way
/// to another way; memory that is refused once is asked for again.
pub fn may_pass_unseen(function: &str, status: i32) -> bool {
    let asked_again = matches!(
        function,
        "cuMemAlloc_v2"
            | "cuMemAllocFromPoolAsync"
            | "cuMemPoolCreate"
            | "cuMemPoolSetAttribute"
            | "cuMemAllocManaged"
            | "cuMemHostAlloc"
            | "cuMemCreate"
            | "cuMemMap"
            | "cuMemSetAccess"
    );
    if asked_again && status == OUT_OF_MEMORY {
        return true;
    }
    matches!(
        function,
        "cuMemFree_v2"
            | "cuMemFreeAsync"
            | "cuMemFreeHost"
            | "cuMemPoolDestroy"
            | "cuStreamDestroy_v2"
            | "cuEventDestroy_v2"
            | "cuDevicePrimaryCtxRelease_v2"
            | "cuCtxSetCurrent"
            | "cuCtxGetCurrent"
            | "cuCtxSynchronize"
            | "cuStreamSynchronize"
            | "cuMemGetInfo_v2"
            | "cuMemAddressReserve"
            | "cuMemAddressFree"
            | "cuMemUnmap"
            | "cuMemRelease"
            | "cuThreadExchangeStreamCaptureMode"
            | "cuMemPoolTrimTo"
            | "cuDeviceGraphMemTrim"
            | "cuDeviceGetPCIBusId"
            | "cuEventCreate"
            | "cuEventRecord"
            | "cuEventQuery"
            | "cuEventSynchronize"
            | "cuStreamWaitEvent"
            | "cuStreamIsCapturing"
            | "cuGraphDestroy"
            | "cuGraphExecDestroy"
    )
}

/// The failure says what the driver said.
fn expect(fake: &Fake, failure: &Failure, status: i32) -> Result<(), String> {
    let function = fake.fault_function();
    let starting = matches!(function.as_str(), "cuInit" | "cuDeviceGetCount");
    let launching = matches!(function.as_str(), "cuLaunchKernel" | "cuFuncSetAttribute");
    let wanted = match status {
        _ if starting => NVB_ERROR_CUDA_NOT_AVAILABLE,
        OUT_OF_MEMORY => NVB_ERROR_OUT_OF_MEMORY,
        _ if launching => NVB_ERROR_KERNEL_LAUNCH,
        _ => NVB_ERROR_DEVICE,
    };
    let names_it = failure.text.contains(&status.to_string()) || status == OUT_OF_MEMORY;
    if failure.status == wanted && failure.code == status && names_it {
        return Ok(());
    }
    Err(format!("{failure}; {function} failed with {status}, so status {wanted} and code {status} were due"))
}

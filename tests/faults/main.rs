//! The CUDA executor's host side against a driver that fails: no GPU is needed, and none is used.
//!
//!     cargo test --test faults [-- PART_OF_A_NAME]
//!
//! A fake driver (tests/fake_driver) stands behind the library's trampolines, and a stand-in for the CUDA runtime behind
//! its launchers, so that every launch path runs but the kernels. Each step is a process of its own.

mod all_work;
mod attention_plans;
mod child;
mod described;
mod driver;
mod engine;
mod fake;
mod graph_order;
mod graphs;
mod invariance;
mod kernels;
mod lost;
mod memory;
mod numa;
mod operations;
mod plans;
mod profiling;
mod rounding;
mod runtime;
mod streams;
mod sweep;
mod workspace;

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;
use sweep::{sweep, Scenario, ALL_FAULTS, SOME_FAULTS};

type Check = fn(&Path) -> Result<String, String>;

const PLAIN: Scenario = Scenario { ranges: true, pools: true, other_context: false, polls: 0, faults: SOME_FAULTS };

const CHECKS: [(&str, Check); 36] = [
    ("plans", plans::products),
    ("attention_plans", attention_plans::attention),
    ("sweep_ranges", |file| sweep(file, Scenario { faults: ALL_FAULTS, ..PLAIN })),
    ("sweep_pools", |file| sweep(file, Scenario { ranges: false, ..PLAIN })),
    ("sweep_no_pools", |file| sweep(file, Scenario { ranges: false, pools: false, ..PLAIN })),
    ("sweep_slow_events", |file| sweep(file, Scenario { other_context: true, polls: 2, ..PLAIN })),
    ("memory_ranges", |file| memory::sweep(file, memory::RANGES, ALL_FAULTS)),
    ("memory_ranges_that_stay", |file| memory::sweep(file, memory::RANGES_THAT_STAY, SOME_FAULTS)),
    ("memory_no_ranges", |file| memory::sweep(file, memory::NO_RANGES, SOME_FAULTS)),
    ("memory_no_addresses", |file| memory::sweep(file, memory::NO_ADDRESSES, SOME_FAULTS)),
    ("memory_sticky_error", memory::sticky),
    ("sticky_error_while_working", lost::while_working),
    ("sticky_error_of_other_codes", lost::for_other_reasons),
    ("sticky_error_while_creating", lost::while_creating),
    ("refusals", driver::refusals),
    ("old_driver", driver::old_driver),
    ("unusable_files", driver::unusable_files),
    ("detected_again", driver::detected_again),
    ("missing_symbols", driver::missing_symbols),
    ("no_unified_memory", driver::no_unified_memory),
    ("full_memory", driver::full_memory),
    ("slow_events", driver::slow_events),
    ("unknown_status", driver::unknown_status),
    ("described_devices", described::devices),
    ("unreachable_peers", described::unreachable_peers),
    ("callers_workspace", workspace::callers),
    ("batch_invariance", invariance::launches),
    ("fp8_off", rounding::fp8_off),
    ("kernels_by_configuration", kernels::by_configuration),
    ("waits_for_all_work", all_work::threads),
    ("stream_priorities", streams::priorities),
    ("busy_streams", streams::busy_streams),
    ("order_of_graphs", graph_order::launches),
    ("captured_graphs", graph_order::captured),
    ("unmeasured_calls", profiling::unmeasured),
    ("page_locked_node", numa::page_locked),
];

/// With these arguments, a name and the driver's file, the program runs one check.
const ONE: &str = "--one";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [one, name, file] = &arguments[..] {
        if one == ONE {
            let (_, check) = CHECKS.iter().find(|(known, _)| known == name).expect("a check's name");
            return ExitCode::from(u8::from(!run(name, *check, Path::new(file))));
        }
    }
    let filter = arguments.into_iter().find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let names = CHECKS.iter().map(|(name, _)| *name).filter(|name| name.contains(&filter)).collect();
    let failed = run_each(names, &fake::build());
    println!("faults: {failed} failed");
    ExitCode::from(u8::from(failed > 0))
}

fn run(name: &str, check: Check, file: &Path) -> bool {
    let result = check(file);
    match &result {
        Ok(summary) => println!("ok {name}: {summary}"),
        Err(problem) => println!("FAILED {name}: {problem}"),
    }
    result.is_ok()
}

/// Runs the checks, as many at a time as there are processors, each by a process that has one thread and may fork. Returns how many failed.
fn run_each(names: Vec<&'static str>, file: &Path) -> usize {
    let (program, file) = (std::env::current_exe().expect("this program"), file.as_os_str());
    let (waiting, failed) = (Mutex::new(names.into_iter()), AtomicUsize::new(0));
    let next = || waiting.lock().unwrap().next();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(name) = next() {
                    let done = Command::new(&program).args([OsStr::new(ONE), OsStr::new(name), file]).output();
                    let done = done.unwrap_or_else(|error| panic!("{}: {error}", program.display()));
                    let text = [String::from_utf8_lossy(&done.stderr), String::from_utf8_lossy(&done.stdout)].concat();
                    print!("{text}");
                    if !done.status.success() {
                        failed.fetch_add(1, Ordering::Relaxed);
                        // Where it says nothing of itself, as after a signal.
                        if !text.contains("FAILED") {
                            println!("FAILED {name}: {}", done.status);
                        }
                    }
                }
            });
        }
    });
    failed.into_inner()
}

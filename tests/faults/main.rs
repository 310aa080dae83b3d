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

use std::path::Path;
use std::process::ExitCode;
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

fn main() -> ExitCode {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let file = fake::build();
    let mut failed = 0;
    for (name, check) in CHECKS.iter().filter(|(name, _)| name.contains(&filter)) {
        match check(&file) {
            Ok(summary) => println!("ok {name}: {summary}"),
            Err(problem) => {
                failed += 1;
                println!("FAILED {name}: {problem}");
            }
        }
    }
    println!("faults: {failed} failed");
    ExitCode::from(u8::from(failed > 0))
}

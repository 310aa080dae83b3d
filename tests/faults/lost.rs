//! A sticky error, such as an illegal address leaves behind: the device is lost for this process. The library says so in
//! every later call without touching the driver; statistics stay readable and destroying works.

use crate::child::{in_child, Outcome};
use crate::engine::{call, Engine, Failure};
use crate::fake::{Fake, Mode};
use nvbackend::capi::memory::*;
use nvbackend::capi::status::*;
use std::path::Path;
use std::ptr::null_mut;

const ILLEGAL_ADDRESS: i32 = 700;
const END: i64 = 5000;
/// Driver calls that one operation's launcher makes.
const MOST_LAUNCHES: i64 = 8;

/// While a backend works.
pub fn while_working(file: &Path) -> Result<String, String> {
    sweep(|n| working(Fake::open(file), n))
}

/// While one is created.
pub fn while_creating(file: &Path) -> Result<String, String> {
    sweep(|n| creating(Fake::open(file), n))
}

fn sweep(step: impl Fn(i64) -> Result<Outcome, String>) -> Result<String, String> {
    for n in 1..END {
        match in_child(|| step(n)) {
            Ok(Outcome::Passed) => {}
            Ok(Outcome::NoFault) => return Ok(format!("{} calls met the error in turn", n - 1)),
            Err(problem) => return Err(format!("call {n}: {problem}")),
        }
    }
    Err(format!("{END} calls and no end"))
}

fn creating(fake: &Fake, n: i64) -> Result<Outcome, String> {
    fake.fail(n, ILLEGAL_ADDRESS, Mode::Sticky);
    let outcome = Engine::new();
    let books = fake.books();
    let fault = fake.fault_function();
    match outcome {
        Ok(_) if books.faults == 0 => return Ok(Outcome::NoFault),
        // Putting back what was current before is all that a backend can do without.
        Ok(_) if fault == "cuCtxSetCurrent" => {}
        Err(failure) if failure.code == ILLEGAL_ADDRESS => {}
        Ok(_) => return Err(format!("a backend in spite of the error in {fault}")),
        Err(failure) => return Err(format!("after the error in {fault}: {failure}")),
    }
    if books.calls_after_sticky > 1 {
        return Err(format!("{} driver calls after the error in {fault}", books.calls_after_sticky));
    }
    Ok(Outcome::Passed)
}

fn working(fake: &Fake, n: i64) -> Result<Outcome, String> {
    let engine = Engine::new().map_err(|failure| failure.to_string())?;
    let neighbour = Engine::new().map_err(|failure| failure.to_string())?;
    let live = neighbour.block(1000, null_mut()).map_err(|failure| failure.to_string())?;
    fake.fail(n, ILLEGAL_ADDRESS, Mode::Sticky);
    let outcome = engine.work();
    let books = fake.books();
    if books.faults == 0 {
        return outcome.map(|()| Outcome::NoFault).map_err(|failure| failure.to_string());
    }
    let fault = fake.fault_function();
    if let Err(failure) = outcome {
        expect_lost(&fault, "the call that met it", Err(failure))?;
    }
    // What was current before is put back, and that is all; an operation of several kernels queues them before it looks.
    let launching = fault == "cuLaunchKernel" || fault == "cuFuncSetAttribute";
    let allowed = if launching { 1 + MOST_LAUNCHES } else { 1 };
    if books.calls_after_sticky > allowed {
        return Err(format!("{} driver calls after the error in {fault}", books.calls_after_sticky));
    }

    let untouched = |doing: &str| {
        let calls = fake.books().calls - books.calls;
        if calls == 0 {
            return Ok(());
        }
        Err(format!("{doing} made {calls} driver calls after the error in {fault}"))
    };
    expect_lost(&fault, "allocating", engine.block(1000, null_mut()).map(drop))?;
    expect_lost(&fault, "creating a stream", engine.stream().map(drop))?;
    expect_lost(&fault, "creating an event", engine.event().map(drop))?;
    expect_lost(&fault, "creating a KV cache", engine.kv_cache().map(drop))?;
    expect_lost(&fault, "filling", call!(nvb_memory_fill(neighbour.memory.raw, live.pointer, 0, 1000, null_mut())))?;
    expect_lost(&fault, "working", engine.work())?;
    expect_lost(&fault, "another backend's work", neighbour.work())?;
    expect_lost(&fault, "creating a backend", Engine::new().map(drop))?;
    untouched("a call that must fail")?;

    let statistics = neighbour.statistics();
    if (statistics.blocks, statistics.allocated, statistics.device_free) != (1, 1000, 0) {
        return Err(format!("statistics of {} blocks after the error in {fault}", statistics.blocks));
    }
    untouched("reading statistics")?;
    drop(live);
    if neighbour.statistics().blocks != 0 {
        return Err("a block that was freed is still counted".to_owned());
    }
    drop((engine, neighbour));
    untouched("destroying")?;
    Ok(Outcome::Passed)
}

fn expect_lost(fault: &str, doing: &str, outcome: Result<(), Failure>) -> Result<(), String> {
    match outcome {
        Err(failure) if (failure.status, failure.code) == (NVB_ERROR_DEVICE_LOST, ILLEGAL_ADDRESS) => Ok(()),
        Err(failure) => Err(format!("{doing} after the error in {fault}: {failure}")),
        Ok(()) => Err(format!("{doing} after the error in {fault} succeeded")),
    }
}

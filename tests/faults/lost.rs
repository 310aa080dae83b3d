//! A sticky error, such as an illegal address leaves behind: the device is lost for this process. The library says so in
//! every later call without touching the driver; statistics stay readable and destroying works.

use crate::child::{in_child, Outcome};
use crate::engine::{call, versioned, Engine, Failure, Handle};
use crate::fake::{Fake, Mode};
use nvbackend::capi::backend::*;
use nvbackend::capi::device::*;
use nvbackend::capi::memory::*;
use nvbackend::capi::memory_statistics::*;
use nvbackend::capi::metrics::*;
use nvbackend::capi::operations::*;
use nvbackend::capi::pool::*;
use nvbackend::capi::status::*;
use nvbackend::capi::stream::*;
use nvbackend::capi::stream_manager::*;
use std::path::Path;
use std::ptr::{null, null_mut};

const ILLEGAL_ADDRESS: i32 = 700;
/// Uncorrectable ECC error, hardware stack error, launch failure, a failed GPU of an NVLink fabric.
const OTHER_CODES: [i32; 4] = [214, 714, 719, 911];
const END: i64 = 5000;
/// Driver calls that one operation's launcher makes.
const MOST_LAUNCHES: i64 = 8;

/// While a backend works.
pub fn while_working(file: &Path) -> Result<String, String> {
    sweep(|n| working(Fake::open(file), n, ILLEGAL_ADDRESS))
}

/// A device that is gone for another reason, in the middle of the work.
pub fn for_other_reasons(file: &Path) -> Result<String, String> {
    for code in OTHER_CODES {
        match in_child(|| working(Fake::open(file), 100, code)) {
            Ok(Outcome::Passed) => {}
            other => return Err(format!("code {code}: {other:?}")),
        }
    }
    Ok(format!("codes {OTHER_CODES:?}"))
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

fn working(fake: &Fake, n: i64, code: i32) -> Result<Outcome, String> {
    let engine = Engine::new().map_err(|failure| failure.to_string())?;
    let neighbour = Engine::new().map_err(|failure| failure.to_string())?;
    let live = neighbour.block(1000, null_mut()).map_err(|failure| failure.to_string())?;
    let mut manager = Handle::new(nvb_stream_manager_destroy);
    let mut leased = Handle::new(nvb_stream_destroy);
    call!(nvb_stream_manager_create(neighbour.backend.raw, null(), &mut manager.raw))
        .map_err(|failure| failure.to_string())?;
    call!(nvb_stream_manager_acquire(manager.raw, 0, &mut leased.raw)).map_err(|failure| failure.to_string())?;
    let mut pool = Handle::new(nvb_pool_destroy);
    call!(nvb_pool_create(neighbour.memory.raw, c"cached".as_ptr(), &mut pool.raw))
        .map_err(|failure| failure.to_string())?;
    // From now on this thread has blocks at hand, in the manager and in the pool, and takes the shortcut to them.
    for _ in 0..2 {
        neighbour.block(1000, null_mut()).map(drop).map_err(|failure| failure.to_string())?;
        from_pool(&pool).map_err(|failure| failure.to_string())?;
    }
    fake.fail(n, code, Mode::Sticky);
    let outcome = engine.work();
    let books = fake.books();
    if books.faults == 0 {
        return outcome.map(|()| Outcome::NoFault).map_err(|failure| failure.to_string());
    }
    let fault = fake.fault_function();
    let expect_lost = |fault: &str, doing: &str, outcome| expect_lost(code, fault, doing, outcome);
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
    let memory = engine.memory.raw;
    expect_lost(&fault, "allocating", engine.block(1 << 30, null_mut()).map(drop))?;
    expect_lost(&fault, "allocating a block at hand", neighbour.block(1000, null_mut()).map(drop))?;
    expect_lost(&fault, "allocating a pool's block at hand", from_pool(&pool))?;
    expect_lost(&fault, "asking the device", call!(nvb_memory_query_device(memory, null_mut(), null_mut())))?;
    expect_lost(&fault, "creating a stream", engine.stream().map(drop))?;
    expect_lost(&fault, "creating an event", engine.event().map(drop))?;
    expect_lost(&fault, "creating a KV cache", engine.kv_cache().map(drop))?;
    expect_lost(&fault, "filling", call!(nvb_memory_fill(neighbour.memory.raw, live.pointer, 0, 1000, null_mut())))?;
    expect_lost(&fault, "working", engine.work())?;
    expect_lost(&fault, "another backend's work", neighbour.work())?;
    expect_lost(&fault, "creating a backend", Engine::new().map(drop))?;
    untouched("a call that must fail")?;

    let statistics = neighbour.statistics();
    if (statistics.blocks, statistics.allocated) != (1, 1000) {
        return Err(format!("statistics of {} blocks after the error in {fault}", statistics.blocks));
    }
    let mut streams: nvb_stream_statistics = versioned();
    let mut metrics: nvb_operation_metrics = versioned();
    let mut info: nvb_device_info = versioned();
    let readable = call!(nvb_stream_manager_get_statistics(manager.raw, &mut streams))
        .and_then(|()| call!(nvb_backend_get_metrics(engine.backend.raw, NVB_OPERATION_LINEAR, &mut metrics)))
        .and_then(|()| call!(nvb_backend_get_device_info(engine.backend.raw, &mut info)));
    readable.map_err(|failure| format!("after the error in {fault}: {failure}"))?;
    if (streams.streams, streams.users, streams.busy) != (1, 1, 0) {
        return Err(format!("{} busy streams after the error in {fault}", streams.busy));
    }
    untouched("reading statistics")?;
    drop(live);
    if neighbour.statistics().blocks != 0 {
        return Err("a block that was freed is still counted".to_owned());
    }
    drop((pool, manager, leased, engine, neighbour));
    untouched("destroying")?;
    Ok(Outcome::Passed)
}

/// Takes a block from the pool and gives it back.
fn from_pool(pool: &Handle<nvb_pool>) -> Result<(), Failure> {
    let mut pointer = null_mut();
    call!(nvb_pool_allocate(pool.raw, 1000, null_mut(), &mut pointer))?;
    call!(nvb_pool_free(pool.raw, pointer, null_mut()))
}

fn expect_lost(code: i32, fault: &str, doing: &str, outcome: Result<(), Failure>) -> Result<(), String> {
    match outcome {
        Err(failure) if (failure.status, failure.code) == (NVB_ERROR_DEVICE_LOST, code) => Ok(()),
        Err(failure) => Err(format!("{doing} after the error in {fault}: {failure}")),
        Ok(()) => Err(format!("{doing} after the error in {fault} succeeded")),
    }
}

//! The memory manager while driver calls fail: growth, frees on several streams, the out-of-memory ladder, pools, captures,
//! unified and page-locked memory, trimming, sleeping. What fails once is tried again or reported, with the driver's code;
//! when the trouble is over the same manager works on and gives everything back.

use crate::child::{in_child, Outcome};
use crate::fake::{Fake, Mode, Setting};
use crate::sweep::{each_fault, expect_clean, may_pass_unseen, OUT_OF_MEMORY};
use nvbackend::backend::Backend;
use nvbackend::configuration::memory::Spill;
use nvbackend::configuration::{Configuration, MemoryConfiguration};
use nvbackend::device::{CopyKind, ManagedAdvice, RawHandle};
use nvbackend::error::{Error, Result, Status};
use nvbackend::memory::{MemoryManager, Pool};
use nvbackend::stream::Stream;
use std::ffi::c_void;
use std::path::Path;
use std::sync::Arc;

const MIB: usize = 1 << 20;
const MEMORY: usize = 96 * MIB;
const ILLEGAL_ADDRESS: i32 = 700;
const END: i64 = 5000;

/// What a device can do, beside memory of `MEMORY` bytes.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    pub ranges: bool,
    pub longest_range: i64,
    pub pools: bool,
    /// An unmapping that reports a fault has done its work.
    pub unmaps: bool,
    pub spill: Spill,
}

pub const RANGES: Machine =
    Machine { ranges: true, longest_range: i64::MAX, pools: true, unmaps: true, spill: Spill::Never };
pub const RANGES_THAT_STAY: Machine = Machine { unmaps: false, spill: Spill::Managed, ..RANGES };
pub const NO_RANGES: Machine = Machine { ranges: false, ..RANGES };
pub const NO_ADDRESSES: Machine = Machine { longest_range: 0, pools: false, spill: Spill::Pinned, ..RANGES };

impl Machine {
    fn set_up(&self, file: &Path) -> &'static Fake {
        let fake = Fake::open(file);
        fake.set(Setting::MemoryBytes, MEMORY as i64);
        fake.set(Setting::Virtual, self.ranges.into());
        fake.set(Setting::RangeBytes, self.longest_range);
        fake.set(Setting::Pools, self.pools.into());
        fake.set(Setting::Unmaps, self.unmaps.into());
        fake.set(Setting::Polls, 1);
        fake
    }

    fn backend(&self) -> Result<Backend> {
        let memory = MemoryConfiguration {
            margin: 4 << 20,
            spill: self.spill,
            initial_bytes: 4 << 20,
            ..MemoryConfiguration::default()
        };
        let options =
            Configuration { device: "cuda:0".to_owned(), vendor_libraries: false, memory, ..Default::default() };
        Backend::new(options)
    }
}

/// A run of the scenario: it goes on after failures, which are judged in the end.
struct Run<'a> {
    machine: &'a Machine,
    /// Whether the manager got its addresses.
    ranges: bool,
    backend: &'a Backend,
    memory: &'a Arc<MemoryManager>,
    failures: Vec<(&'static str, Error)>,
    live: Vec<*mut c_void>,
}

impl<'a> Run<'a> {
    fn new(fake: &Fake, machine: &'a Machine, backend: &'a Backend) -> Run<'a> {
        let ranges = fake.books().ranges > 0;
        Run { machine, ranges, backend, memory: backend.memory(), failures: Vec::new(), live: Vec::new() }
    }

    fn tried<T>(&mut self, step: &'static str, outcome: Result<T>) -> Option<T> {
        outcome.map_err(|error| self.failures.push((step, error))).ok()
    }

    fn allocate(&mut self, bytes: usize, stream: &Stream) -> Option<*mut c_void> {
        let outcome = self.memory.allocate(bytes, stream.raw());
        self.tried("allocate", outcome)
    }

    /// Frees never fail, unless they must overwrite the block.
    fn free(&mut self, pointer: *mut c_void, stream: &Stream) {
        let outcome = self.memory.free(pointer, stream.raw());
        if self.tried("free", outcome).is_none() {
            self.live.push(pointer);
        }
    }

    fn stream(&mut self) -> Option<Stream> {
        let outcome = Stream::new(self.backend.executor(), 0);
        self.tried("stream", outcome)
    }

    fn everything(&mut self) {
        let (Some(one), Some(two)) = (self.stream(), self.stream()) else { return };
        self.small_blocks(&one, &two);
        self.large_blocks(&one, &two);
        self.full_device(&one, &two);
        let trimmed = self.memory.trim(0);
        self.tried("trim", trimmed);
        self.pool(&one);
        self.host_memory(&one);
        let trimmed = self.memory.trim(0);
        self.tried("trim", trimmed);
        self.sleep(&one, true);
        self.sleep(&one, false);
        for pointer in std::mem::take(&mut self.live) {
            self.free(pointer, &two);
        }
    }

    /// Enough of a class for batches to leave the thread, with an event each.
    fn small_blocks(&mut self, one: &Stream, two: &Stream) {
        let blocks: Vec<_> = (0..300).filter_map(|_| self.allocate(1000, one)).collect();
        for pointer in blocks {
            self.free(pointer, one);
        }
        for bytes in [1000, 70_000] {
            if let Some(pointer) = self.allocate(bytes, two) {
                self.live.push(pointer);
            }
        }
    }

    fn large_blocks(&mut self, one: &Stream, two: &Stream) {
        for bytes in [3 * MIB, 5 * MIB] {
            if let Some(pointer) = self.allocate(bytes, one) {
                self.free(pointer, two);
            }
        }
        if let Some(pointer) = self.allocate(3 * MIB, one) {
            self.live.push(pointer);
        }
        if let Some(pointer) = self.allocate(20 * MIB, two) {
            self.free(pointer, one);
        }
    }

    /// A block that needs the memory of another one, which another stream used, and one that does not fit at all.
    fn full_device(&mut self, one: &Stream, two: &Stream) {
        if let Some(pointer) = self.allocate(60 * MIB, one) {
            self.free(pointer, one);
        }
        if let Some(pointer) = self.allocate(70 * MIB, two) {
            match self.memory.allocate(40 * MIB, one.raw()) {
                Ok(spilled) if self.machine.spill != Spill::Never => self.free(spilled, one),
                Ok(_) => panic!("110 of 96 MiB"),
                Err(error) if error.status == Status::OutOfMemory => {}
                Err(error) => self.failures.push(("allocate too much", error)),
            }
            self.free(pointer, two);
        }
    }

    fn pool(&mut self, stream: &Stream) {
        let outcome = Pool::new(self.memory, "scenario");
        let Some(pool) = self.tried("pool", outcome) else { return };
        for bytes in [1000, 3 * MIB] {
            let outcome = pool.allocate(bytes, stream.raw());
            self.tried("allocate from the pool", outcome);
        }
        let outcome = pool.begin_capture(stream.raw());
        if self.tried("begin a capture", outcome).is_some() {
            let small = self.allocate(2000, stream);
            let large = self.allocate(5 * MIB, stream);
            for pointer in [small, large].into_iter().flatten() {
                self.free(pointer, stream);
            }
            let outcome = pool.end_capture(stream.raw());
            self.tried("end a capture", outcome);
        }
        let outcome = pool.clear();
        self.tried("clear the pool", outcome);
    }

    fn host_memory(&mut self, stream: &Stream) {
        let (memory, executor) = (self.memory, self.backend.executor().clone());
        for _ in 0..2 {
            if let Some(pinned) = self.tried("allocate pinned", memory.allocate_pinned(5000)) {
                self.free(pinned, stream);
            }
        }
        let Some(managed) = self.tried("allocate managed", memory.allocate_managed(MIB)) else { return };
        // SAFETY: a block of unified memory of this size.
        unsafe {
            for advice in [ManagedAdvice::PreferHost, ManagedAdvice::Nothing] {
                self.tried("advise", executor.managed_advise(managed, MIB, advice));
            }
            self.tried("prefetch", executor.managed_prefetch(managed, MIB, false, stream.raw()));
        }
        self.free(managed, stream);
    }

    /// With one block's content, if it is to come back.
    fn sleep(&mut self, stream: &Stream, keep: bool) {
        const BYTES: usize = 5000;
        if !self.ranges {
            return;
        }
        let written: Vec<u8> = (0..=250).cycle().take(BYTES).collect();
        let Some(block) = self.allocate(BYTES, stream) else { return };
        let filled =
            self.copy("copy", block, written.as_ptr().cast_mut().cast(), CopyKind::HostToDevice, stream, BYTES);
        let slept = self.memory.sleep(keep);
        if self.tried("sleep", slept).is_some() {
            let woken = self.memory.wake();
            if self.tried("wake", woken).is_none() && self.memory.wake().is_err() {
                self.live.push(block);
                return;
            }
        }
        if filled && keep {
            let mut read = vec![0u8; BYTES];
            let back = self.copy("copy back", block, read.as_mut_ptr().cast(), CopyKind::DeviceToHost, stream, BYTES);
            assert!(!back || read == written, "the content did not come back");
        }
        self.free(block, stream);
    }

    fn copy(
        &mut self,
        step: &'static str,
        device: *mut c_void,
        host: *mut c_void,
        kind: CopyKind,
        stream: &Stream,
        bytes: usize,
    ) -> bool {
        let (to, from) = if kind == CopyKind::HostToDevice { (device, host) } else { (host, device) };
        // SAFETY: a block and a buffer of this size.
        let outcome = unsafe { self.backend.executor().copy(to, from, bytes, kind, stream.raw()) };
        self.tried(step, outcome.and_then(|()| stream.synchronize())).is_some()
    }
}

/// Fails each call of a manager's life in turn.
pub fn sweep(file: &Path, machine: Machine, faults: &[(Mode, i32)]) -> std::result::Result<String, String> {
    each_fault(faults, |n, status, mode| step(machine.set_up(file), machine, n, status, mode))
}

fn step(fake: &Fake, machine: Machine, n: i64, status: i32, mode: Mode) -> std::result::Result<Outcome, String> {
    // Current already, so that most driver calls are the manager's.
    let context = fake.make_context_current(0);
    fake.fail(n, status, mode);
    let mut failures = Vec::new();
    let mut created = machine.backend();
    if let Err(error) = created {
        failures.push(("create", error));
        if mode != Mode::Once {
            // What the first one could not give back is lost, and nothing more can fail.
            fake.fail(0, 0, Mode::Once);
            let again = machine.backend().map(drop);
            return again.map(|()| Outcome::Passed).map_err(|error| format!("creating again: {error}"));
        }
        created = machine.backend();
    }
    let backend = created.map_err(|error| format!("creating again: {error}"))?;
    let mut run = Run::new(fake, &machine, &backend);
    run.failures = failures;
    run.everything();
    let Run { live, failures, ranges, .. } = run;
    let books = fake.books();
    let fault = fake.fault_function();
    for (doing, error) in &failures {
        let starting = error.status == Status::CudaNotAvailable && error.message.contains("starting CUDA");
        // Memory that is refused once is looked for elsewhere, where limits may be in the way.
        let full = status == OUT_OF_MEMORY && error.status == Status::OutOfMemory && error.cuda_code == 0;
        let kind = starting || (error.status == Status::OutOfMemory) == (status == OUT_OF_MEMORY);
        let right = full || error.cuda_code == status && kind;
        let asleep = mode == Mode::Forever && error.message.contains("asleep");
        if !right && !asleep {
            return Err(format!(
                "{doing}: {:?}, code {}: {error}; the fault was in {fault}",
                error.status, error.cuda_code
            ));
        }
    }
    if mode == Mode::Once && failures.len() > 1 {
        return Err(format!("{} failures, the fault in {fault} was one; {:?}", failures.len(), failures[1]));
    }
    if books.faults > 0 && failures.is_empty() && !may_pass_unseen(&fault, status) {
        return Err(format!("the fault in {fault} was reported by nothing"));
    }

    fake.fail(0, 0, Mode::Once);
    let recovered = works_and_gives_all_back(fake, ranges, &backend, live);
    if mode == Mode::Forever && !machine.unmaps && fault == "cuMemMap" {
        // A handle that was never mapped is released once: its number may mean other memory the next time.
        return Ok(Outcome::Passed);
    }
    recovered.map_err(|text| format!("{text}; the fault was in {fault}"))?;
    drop(backend);
    if mode == Mode::Forever {
        // What fails for ever cannot be put back.
        fake.restore_capture_mode();
    }
    expect_clean(fake, context)?;
    Ok(if books.faults == 0 { Outcome::NoFault } else { Outcome::Passed })
}

fn works_and_gives_all_back(
    fake: &Fake,
    ranges: bool,
    backend: &Backend,
    live: Vec<*mut c_void>,
) -> std::result::Result<(), String> {
    let memory = backend.memory();
    let text = |error: Error| format!("when the trouble was over: {error}");
    // A manager that could not wake sleeps until it can.
    let _ = memory.wake();
    for pointer in live {
        memory.free(pointer, RawHandle::NULL).map_err(text)?;
    }
    let stream = Stream::new(backend.executor(), 0).map_err(text)?;
    for bytes in [500, 8 * MIB] {
        let pointer = memory.allocate(bytes, stream.raw()).map_err(text)?;
        // SAFETY: a block of this size.
        unsafe { backend.executor().fill(pointer, 1, 500, stream.raw()) }.map_err(text)?;
        memory.free(pointer, stream.raw()).map_err(text)?;
    }
    drop(stream);
    memory.trim(0).map_err(text)?;
    let (statistics, books) = (memory.get_statistics(), fake.books());
    let found = (statistics.blocks, statistics.allocated, statistics.reserved, statistics.spilled);
    if found != (0, 0, 0, 0) {
        return Err(format!("{statistics:?}"));
    }
    if (books.ranges, books.mappings, books.physicals, books.blocks) != (ranges.into(), 0, 0, 0) {
        return Err(format!("{books:?}"));
    }
    Ok(())
}

/// Each call in turn meets an illegal address: the manager says that the device is lost, and leaves the driver alone.
pub fn sticky(file: &Path) -> std::result::Result<String, String> {
    for n in 1..END {
        match in_child(|| sticky_step(RANGES.set_up(file), n)) {
            Ok(Outcome::Passed) => {}
            Ok(Outcome::NoFault) => return Ok(format!("{} calls met the error in turn", n - 1)),
            Err(problem) => return Err(format!("call {n}: {problem}")),
        }
    }
    Err(format!("{END} calls and no end"))
}

fn sticky_step(fake: &Fake, n: i64) -> std::result::Result<Outcome, String> {
    let backend = RANGES.backend().map_err(|error| error.to_string())?;
    fake.fail(n, ILLEGAL_ADDRESS, Mode::Sticky);
    let mut run = Run::new(fake, &RANGES, &backend);
    run.everything();
    let Run { live, failures, .. } = run;
    let (books, fault) = (fake.books(), fake.fault_function());
    for (doing, error) in &failures {
        let asleep = error.message.contains("asleep");
        if (error.status, error.cuda_code) != (Status::DeviceLost, ILLEGAL_ADDRESS) && !asleep {
            return Err(format!("{doing} after the error in {fault}: {:?}: {error}", error.status));
        }
    }
    // What was current before is put back.
    if books.calls_after_sticky > 1 {
        return Err(format!("{} driver calls after the error in {fault}", books.calls_after_sticky));
    }
    let memory = backend.memory();
    if books.faults == 0 {
        return Ok(Outcome::NoFault);
    }
    match memory.trim(0) {
        Err(error) if error.status == Status::DeviceLost => {}
        other => return Err(format!("trimming after the error in {fault}: {other:?}")),
    }
    live.iter().for_each(|&pointer| memory.free(pointer, RawHandle::NULL).expect("a live block"));
    let statistics = memory.get_statistics();
    if statistics.blocks != 0 {
        return Err(format!("{} blocks after the error in {fault}", statistics.blocks));
    }
    drop(backend);
    let calls = fake.books().calls - books.calls;
    if calls != 0 {
        return Err(format!("{calls} driver calls long after the error in {fault}"));
    }
    Ok(Outcome::Passed)
}

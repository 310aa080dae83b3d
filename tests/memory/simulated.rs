//! A device in virtual time: addresses without memory behind them, streams that are busy until an instant, events that
//! pass at one, and failures on demand. It knows who uses which addresses until when, so that a block which is handed
//! out or unmapped too early is caught.

/// Locks that ThreadSanitizer sees, in builds for it.
#[cfg(nvb_thread_sanitizer)]
#[allow(dead_code)]
#[path = "../../src/memory/watched_locks.rs"]
mod locks;
#[cfg(not(nvb_thread_sanitizer))]
mod locks {
    pub use std::sync::{Mutex, MutexGuard};
}

use locks::{Mutex, MutexGuard};
use nvbackend::device::{CopyKind, ManagedAdvice, RawHandle, VirtualMemory};
use nvbackend::error::{Error, Result, Status};
use nvbackend::memory::source::Source;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::PoisonError;
use std::time::Duration;

const PAGE: usize = 2 << 20;
/// When an event passes that was recorded into a graph.
const NEVER: u64 = u64::MAX;

/// An assertion that lets a panic which is under way reach its test.
fn expect(fine: bool, text: &str) {
    assert!(fine || std::thread::panicking(), "{text}");
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Reserve,
    Map,
    Unmap,
    Allocate,
    EventCreate,
    EventRecord,
    EventQuery,
    EventWait,
    Synchronize,
}

#[derive(Default)]
pub struct State {
    pub now: u64,
    /// When the work queued on a stream so far will have finished.
    busy: HashMap<usize, u64>,
    /// When an event passes; `None` before it is recorded.
    events: HashMap<usize, Option<u64>>,
    next_event: usize,
    next_address: usize,
    reserved: BTreeMap<usize, usize>,
    mapped: BTreeMap<usize, usize>,
    /// What an `unmap` that failed has unmapped nevertheless.
    unmapped_in_secret: BTreeMap<usize, usize>,
    plain: BTreeMap<usize, usize>,
    /// Ranges in use by queued work, with the instant when that ends.
    uses: Vec<(usize, usize, u64)>,
    pub capturing: Vec<usize>,
    /// So many times waiting is refused, because of captures that the manager was not told of.
    pub untold_captures: usize,
    /// Streams that are destroyed.
    pub destroyed: Vec<usize>,
    /// Calls so far, and from which one on they fail, how many of them.
    pub calls: Vec<Call>,
    failing: Option<(usize, usize)>,
    pub lost: bool,
    /// What was overwritten: address and bytes.
    pub filled: Vec<(usize, usize)>,
    /// CUDA's code with which recording events and waiting for the device fail.
    pub refusing: Option<i32>,
    /// The call that will be held up, and whether one is.
    hold: Option<Call>,
    holding: bool,
    pub waits_in_streams: usize,
    pub synchronizations: usize,
}

pub struct Simulated {
    state: Mutex<State>,
    pub total: u64,
    pub ranges: bool,
    pub synchronous: bool,
    /// Whether an `unmap` that fails has done its work.
    pub unmaps_in_secret: bool,
    /// From when an event could pass until the host sees that it has.
    pub event_latency: u64,
    /// Threads that make an event are held up, and this says that one is.
    pub slow_events: bool,
    pub making_event: AtomicBool,
    /// Several threads call. A capture that one begins makes calls of the others fail, as a driver's do, instead of being
    /// the manager's fault, and every call lets another thread run.
    pub threaded: bool,
}

impl Simulated {
    pub fn new(total: u64) -> Simulated {
        let state = State { next_address: 1 << 40, next_event: 1, ..State::default() };
        Simulated {
            state: Mutex::new(state),
            total,
            ranges: true,
            synchronous: false,
            unmaps_in_secret: false,
            event_latency: 0,
            slow_events: false,
            making_event: AtomicBool::new(false),
            threaded: false,
        }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls number `first` (from 0, counted from now) and `count` - 1 after it fail.
    pub fn fail(&self, first: usize, count: usize) {
        let mut state = self.state();
        let first = state.calls.len() + first;
        state.failing = Some((first, first.saturating_add(count)));
    }

    pub fn stop_failing(&self) {
        self.state().failing = None;
    }

    /// The next such call (`EventRecord`, `EventQuery`) returns only after `let_go`.
    pub fn hold(&self, call: Call) {
        self.state().hold = Some(call);
    }

    pub fn is_holding(&self) -> bool {
        self.state().holding
    }

    pub fn let_go(&self) {
        let mut state = self.state();
        (state.hold, state.holding) = (None, false);
    }

    fn hold_up(&self, mut state: MutexGuard<State>, call: Call) {
        if state.hold != Some(call) {
            return;
        }
        (state.hold, state.holding) = (None, true);
        drop(state);
        while self.is_holding() {
            std::thread::yield_now();
        }
    }

    /// What would wait for a capture, or unmap in one, breaks it.
    fn expect_no_capture(&self, state: &State, doing: &str) -> Result<()> {
        if self.threaded && !state.capturing.is_empty() {
            return Err(Error::new(Status::Device, format!("{doing} in a capture")).with_cuda_code(900));
        }
        expect(state.capturing.is_empty(), &format!("{doing} in a capture"));
        Ok(())
    }

    pub fn advance(&self, nanoseconds: u64) {
        let mut state = self.state();
        state.now += nanoseconds;
        let now = state.now;
        state.uses.retain(|(_, _, end)| *end > now);
    }

    /// Queues work on the stream that uses the range for so long.
    pub fn work(&self, stream: RawHandle, address: usize, bytes: usize, nanoseconds: u64) {
        let mut state = self.state();
        let end = state.end_of(stream) + nanoseconds;
        state.busy.insert(stream.0 as usize, end);
        state.uses.push((address, bytes, end));
    }

    /// Makes the stream wait for everything that uses the range, as an engine does with events.
    pub fn wait_for_uses(&self, stream: RawHandle, address: usize, bytes: usize) {
        let mut state = self.state();
        let overlapping = state.uses.iter().filter(|(at, size, _)| *at < address + bytes && address < at + size);
        let end = overlapping.map(|(_, _, end)| *end).max().unwrap_or(0).max(state.end_of(stream));
        state.busy.insert(stream.0 as usize, end);
    }

    /// Panics if work on `stream` from now on could meet earlier work in the range.
    pub fn expect_usable(&self, stream: RawHandle, address: usize, bytes: usize) {
        let state = self.state();
        let start = if stream == RawHandle::NULL { state.now } else { state.end_of(stream) };
        let overlaps =
            |&&(other, length, _): &&(usize, usize, u64)| other < address + bytes && address < other + length;
        let in_use = state.uses.iter().filter(overlaps).map(|(_, _, end)| *end).max();
        let mapped = state.is_mapped(address, bytes);
        // Whatever goes as the test fails still needs the lock.
        drop(state);
        let end = in_use.unwrap_or(0);
        assert!(end <= start, "{address:#x} is in use until {end}, and the stream is free at {start}");
        assert!(mapped, "{address:#x} + {bytes} has no memory behind it");
    }

    /// Whether calls on the stream are recorded instead of run.
    pub fn is_recording(&self, stream: RawHandle) -> bool {
        self.state().capturing.contains(&(stream.0 as usize))
    }

    pub fn mapped_bytes(&self) -> usize {
        self.state().used_memory() as usize
    }

    /// Panics if anything that was taken has not been given back.
    pub fn expect_nothing_left(&self) {
        let state = self.state();
        assert!(state.mapped.is_empty(), "{} pieces are still mapped", state.mapped.len());
        assert!(state.reserved.is_empty(), "addresses are still reserved");
        assert!(state.plain.is_empty(), "{} plain blocks are left", state.plain.len());
        assert!(state.events.is_empty(), "{} events are left", state.events.len());
    }

    fn call(&self, call: Call) -> Result<MutexGuard<'_, State>> {
        if self.threaded {
            std::thread::yield_now();
        }
        let mut state = self.state();
        let number = state.calls.len();
        state.calls.push(call);
        if state.lost {
            return Err(Error::new(Status::DeviceLost, "the simulated device is lost"));
        }
        if let (Some(code), Call::EventRecord | Call::Synchronize) = (state.refusing, call) {
            return Err(Error::new(Status::Device, format!("{call:?} is refused")).with_cuda_code(code));
        }
        if state.failing.is_some_and(|(first, end)| (first..end).contains(&number)) {
            let status = match call {
                Call::Map | Call::Allocate | Call::Reserve => Status::OutOfMemory,
                _ => Status::Device,
            };
            return Err(Error::new(status, format!("injected failure of {call:?}")));
        }
        Ok(state)
    }
}

impl State {
    fn end_of(&self, stream: RawHandle) -> u64 {
        self.busy.get(&(stream.0 as usize)).copied().unwrap_or(0).max(self.now)
    }

    fn end_of_event(&self, event: RawHandle) -> Result<u64> {
        match self.events[&(event.0 as usize)].expect("recorded") {
            NEVER => Err(Error::new(Status::Device, "the event is part of a graph").with_cuda_code(907)),
            end => Ok(end),
        }
    }

    /// The stream is gone, and its handle free for another one.
    pub fn forget_stream(&mut self, stream: RawHandle) {
        self.busy.remove(&(stream.0 as usize));
    }

    fn is_mapped(&self, address: usize, bytes: usize) -> bool {
        let mut at = address;
        while at < address + bytes {
            let around = |map: &BTreeMap<usize, usize>| {
                map.range(..=at).next_back().map(|(start, length)| start + length).filter(|end| *end > at)
            };
            let Some(end) = around(&self.mapped).or_else(|| around(&self.plain)) else { return false };
            at = end;
        }
        true
    }

    fn used_memory(&self) -> u64 {
        (self.mapped.values().sum::<usize>() + self.plain.values().sum::<usize>()) as u64
    }

    fn pass_all(&mut self) {
        self.now = self.busy.values().copied().max().unwrap_or(0).max(self.now);
        self.uses.clear();
    }
}

impl VirtualMemory for Simulated {
    fn reserve(&self, bytes: usize) -> Result<usize> {
        let mut state = self.call(Call::Reserve)?;
        let address = state.next_address;
        state.next_address += bytes.next_multiple_of(1 << 30);
        state.reserved.insert(address, bytes);
        Ok(address)
    }

    unsafe fn release(&self, address: usize, bytes: usize) {
        let known = self.state().reserved.remove(&address) == Some(bytes);
        expect(known, "releasing addresses that are not reserved so");
    }

    unsafe fn map(&self, address: usize, bytes: usize) -> Result<()> {
        let mut state = self.call(Call::Map)?;
        assert!(address.is_multiple_of(PAGE) && bytes.is_multiple_of(PAGE) && bytes > 0);
        let inside =
            state.reserved.range(..=address).next_back().is_some_and(|(at, size)| address + bytes <= at + size);
        assert!(inside, "mapping outside the reservation");
        let before = state.mapped.range(..address + bytes).next_back();
        assert!(before.is_none_or(|(at, size)| at + size <= address), "mapping twice");
        if state.used_memory() + bytes as u64 > self.total {
            return Err(Error::new(Status::OutOfMemory, "the simulated device is full"));
        }
        state.mapped.insert(address, bytes);
        state.unmapped_in_secret.remove(&address);
        Ok(())
    }

    unsafe fn unmap(&self, address: usize, bytes: usize) -> Result<()> {
        let result = self.call(Call::Unmap).and_then(|state| self.expect_no_capture(&state, "unmapping"));
        let mut state = self.state();
        if state.unmapped_in_secret.get(&address) == Some(&bytes) {
            if result.is_ok() {
                state.unmapped_in_secret.remove(&address);
            }
            return result;
        }
        if result.is_err() && !self.unmaps_in_secret {
            return result;
        }
        expect(state.mapped.remove(&address) == Some(bytes), "unmapping what is not mapped so");
        if result.is_err() {
            state.unmapped_in_secret.insert(address, bytes);
        }
        let (now, lost) = (state.now, state.lost);
        let used = state.uses.iter().any(|&(at, size, end)| at < address + bytes && address < at + size && end > now);
        expect(!used || lost, "unmapping memory that queued work uses");
        result
    }
}

impl Source for Simulated {
    fn memory_info(&self) -> Result<(u64, u64)> {
        let used = self.state().used_memory();
        Ok((self.total - used, self.total))
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.ranges.then_some(self as &dyn VirtualMemory)
    }

    fn allocate(&self, bytes: usize, _stream: RawHandle) -> Result<*mut c_void> {
        let mut state = self.call(Call::Allocate)?;
        if state.used_memory() + bytes as u64 > self.total {
            return Err(Error::new(Status::OutOfMemory, "the simulated device is full"));
        }
        let address = state.next_address;
        state.next_address += bytes.next_multiple_of(256);
        state.plain.insert(address, bytes);
        Ok(address as *mut c_void)
    }

    unsafe fn free(&self, pointer: *mut c_void, bytes: usize, _stream: RawHandle) {
        let known = self.state().plain.remove(&(pointer as usize)) == Some(bytes);
        expect(known, "freed twice or with another size");
    }

    fn host_allocate(&self, bytes: usize) -> Result<*mut c_void> {
        self.allocate(bytes, RawHandle::NULL)
    }

    unsafe fn host_free(&self, pointer: *mut c_void, bytes: usize) {
        // SAFETY: the same list.
        unsafe { self.free(pointer, bytes, RawHandle::NULL) }
    }

    fn managed_allocate(&self, bytes: usize) -> Result<*mut c_void> {
        self.allocate(bytes, RawHandle::NULL)
    }

    unsafe fn managed_free(&self, pointer: *mut c_void, bytes: usize) {
        // SAFETY: the same list.
        unsafe { self.free(pointer, bytes, RawHandle::NULL) }
    }

    unsafe fn managed_advise(&self, _pointer: *mut c_void, _bytes: usize, _advice: ManagedAdvice) -> Result<()> {
        Ok(())
    }

    unsafe fn managed_prefetch(&self, _: *mut c_void, _: usize, _: bool, _: RawHandle) -> Result<()> {
        Ok(())
    }

    unsafe fn fill(&self, to: *mut c_void, _byte: u8, bytes: usize, stream: RawHandle) -> Result<()> {
        self.expect_usable(stream, to as usize, bytes);
        self.work(stream, to as usize, bytes, 1);
        self.state().filled.push((to as usize, bytes));
        Ok(())
    }

    unsafe fn copy(&self, _to: *mut c_void, _from: *const c_void, _bytes: usize, _kind: CopyKind) -> Result<()> {
        Ok(())
    }

    fn is_synchronous(&self) -> bool {
        self.synchronous
    }

    fn is_capturing(&self, stream: RawHandle) -> Result<bool> {
        Ok(self.state().capturing.contains(&(stream.0 as usize)))
    }

    fn synchronize(&self) -> Result<()> {
        let mut state = self.call(Call::Synchronize)?;
        if state.untold_captures > 0 {
            state.untold_captures -= 1;
            return Err(Error::new(Status::Device, "waiting for the device: a stream is captured").with_cuda_code(900));
        }
        self.expect_no_capture(&state, "synchronising")?;
        state.synchronizations += 1;
        state.pass_all();
        Ok(())
    }

    fn event_create(&self) -> Result<RawHandle> {
        let mut state = self.call(Call::EventCreate)?;
        let event = state.next_event;
        state.next_event += 1;
        state.events.insert(event, None);
        drop(state);
        if self.slow_events {
            self.making_event.store(true, Ordering::Release);
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(RawHandle(event as *mut c_void))
    }

    fn event_destroy(&self, event: RawHandle) {
        let known = self.state().events.remove(&(event.0 as usize)).is_some();
        expect(known, "destroying an event twice");
    }

    fn event_record(&self, event: RawHandle, stream: RawHandle) -> Result<()> {
        let mut state = self.call(Call::EventRecord)?;
        let captured = state.capturing.contains(&(stream.0 as usize));
        expect(!captured || self.threaded, "recording an event in a capture");
        expect(!state.destroyed.contains(&(stream.0 as usize)), "recording an event on a stream that is destroyed");
        let end = if captured { NEVER } else { state.end_of(stream) + self.event_latency };
        *state.events.get_mut(&(event.0 as usize)).expect("a live event") = Some(end);
        self.hold_up(state, Call::EventRecord);
        Ok(())
    }

    fn event_query(&self, event: RawHandle) -> Result<bool> {
        let state = self.call(Call::EventQuery)?;
        self.expect_no_capture(&state, "asking for an event")?;
        let passed = state.end_of_event(event)? <= state.now;
        self.hold_up(state, Call::EventQuery);
        Ok(passed)
    }

    fn event_synchronize(&self, event: RawHandle) -> Result<()> {
        let mut state = self.call(Call::EventWait)?;
        let end = state.end_of_event(event)?;
        state.now = state.now.max(end);
        Ok(())
    }

    fn stream_wait_event(&self, stream: RawHandle, event: RawHandle) -> Result<()> {
        let mut state = self.call(Call::EventWait)?;
        let end = state.end_of_event(event)?.max(state.end_of(stream));
        state.busy.insert(stream.0 as usize, end);
        state.waits_in_streams += 1;
        Ok(())
    }

    fn nanoseconds(&self) -> u64 {
        self.state().now
    }
}

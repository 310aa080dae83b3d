//! What is tried when there is no memory, from the cheapest to the dearest, and the error when nothing helps. No lock is
//! held while callbacks run or while anything is waited for.

use super::allocate::{Found, Request};
use super::arena::Arena;
use super::core::Core;
use super::direct::Kind;
use super::options::Spill;
use super::order::{Order, WaitFor};
use super::pages::Shortage;
use super::size_class::{CLASSES, LARGE};
use super::slab::Block;
use super::statistics::RecoveryStepStatistics;
use super::trace::EventKind;
use crate::allocation::has_room;
use crate::device::RawHandle;
use crate::error::Result;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The recovery steps, in the order in which they are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecoveryStep {
    /// Threads' magazines and the depot go back to the slabs, and empty slabs to the pages.
    Caches,
    /// Batches and large blocks of other streams whose work has passed by now go back as well.
    PassedWork,
    /// The stream, or else the host, waits for work of other streams that holds back enough.
    Wait,
    /// Memory behind free units is unmapped, to be mapped where the request can use it.
    Trim,
    /// The engine's callbacks free something.
    Callbacks,
    /// Other threads free something while this one waits, as long as the options allow.
    OtherThreads,
    /// The block is placed in host or unified memory, if the options allow.
    Spill,
}

pub const RECOVERY_STEPS: usize = 7;

pub const LADDER: [RecoveryStep; RECOVERY_STEPS] = [
    RecoveryStep::Caches,
    RecoveryStep::PassedWork,
    RecoveryStep::Wait,
    RecoveryStep::Trim,
    RecoveryStep::Callbacks,
    RecoveryStep::OtherThreads,
    RecoveryStep::Spill,
];

impl RecoveryStep {
    pub fn name(self) -> &'static str {
        match self {
            RecoveryStep::Caches => "caches",
            RecoveryStep::PassedWork => "passed work",
            RecoveryStep::Wait => "waiting for work",
            RecoveryStep::Trim => "trim",
            RecoveryStep::Callbacks => "callbacks",
            RecoveryStep::OtherThreads => "waiting for other threads",
            RecoveryStep::Spill => "spill",
        }
    }
}

#[derive(Default)]
pub struct RecoverySteps {
    tried: [AtomicU64; RECOVERY_STEPS],
    helped: [AtomicU64; RECOVERY_STEPS],
}

impl RecoverySteps {
    pub fn statistics(&self) -> [RecoveryStepStatistics; RECOVERY_STEPS] {
        std::array::from_fn(|i| RecoveryStepStatistics {
            tried: self.tried[i].load(Ordering::Relaxed),
            helped: self.helped[i].load(Ordering::Relaxed),
        })
    }
}

/// Between two looks at what other threads freed.
const WAIT_STEP: Duration = Duration::from_millis(1);

impl Core {
    pub fn recover(&self, request: &Request, first: Shortage) -> Result<Found> {
        let mut request = *request;
        let mut shortage = first;
        let mut tried = Vec::new();
        for step in LADDER {
            if let Shortage::Fatal(error) = shortage {
                return Err(error);
            }
            if !self.applies(step, &shortage) {
                continue;
            }
            tried.push(step);
            self.recovery_steps.tried[step as usize].fetch_add(1, Ordering::Relaxed);
            self.note(EventKind::RecoveryStep, step as usize, request.bytes as u64, request.stream);
            log::debug!(target: "nvbackend::memory", "{} bytes: {shortage:?}; trying {}", request.bytes, step.name());
            // Nothing is left that could be moved.
            request.borrow |= step == RecoveryStep::Callbacks;
            match self.run_step(step, &request) {
                Ok(found) => {
                    self.recovery_steps.helped[step as usize].fetch_add(1, Ordering::Relaxed);
                    return Ok(found);
                }
                Err(Some(now)) => shortage = now,
                Err(None) => {}
            }
        }
        if matches!(shortage, Shortage::Range) {
            // The addresses are used up, the memory may not be.
            log::debug!(target: "nvbackend::memory", "{} bytes: no addresses, allocated singly", request.bytes);
            match self.find_direct(&request, Kind::Plain, false) {
                Ok(pointer) => return Ok(Found::Direct(pointer)),
                Err(now) => shortage = now,
            }
        }
        Err(self.out_of_memory(request.bytes as u64, &shortage, &tried))
    }

    fn applies(&self, step: RecoveryStep, shortage: &Shortage) -> bool {
        let asynchronous = !self.synchronous && !self.captures.any();
        match step {
            RecoveryStep::Caches => self.pages.is_some(),
            RecoveryStep::PassedWork | RecoveryStep::Wait => self.pages.is_some() && asynchronous,
            // Where only the addresses are short, memory elsewhere does not help.
            RecoveryStep::Trim => !self.captures.any() && !matches!(shortage, Shortage::Range),
            RecoveryStep::Callbacks => !self.callbacks.is_empty(),
            RecoveryStep::OtherThreads => !self.options.wait.is_zero(),
            RecoveryStep::Spill => self.options.spill != Spill::Never,
        }
    }

    /// `Err(None)`: there was nothing to be done.
    fn run_step(&self, step: RecoveryStep, request: &Request) -> std::result::Result<Found, Option<Shortage>> {
        match step {
            RecoveryStep::Caches => {
                self.empty_caches(false);
                self.find(request).map_err(Some)
            }
            RecoveryStep::PassedWork => {
                self.empty_caches(true);
                self.find(request).map_err(Some)
            }
            RecoveryStep::Wait => self.wait_for_work(request),
            RecoveryStep::Trim => {
                let trimmed = self.trim_for(request).map_err(Some)?;
                self.source.trim();
                if trimmed > 0 || self.pages.is_none() {
                    if let Ok(found) = self.find(request) {
                        return Ok(found);
                    }
                }
                // What could be moved has been.
                self.find(&Request { borrow: true, ..*request }).map_err(Some)
            }
            RecoveryStep::Callbacks => {
                let mut last = None;
                // What a callback freed may still be in use by work that was queued before; to wait for that work is better
                // than to have the engine give up more.
                let retry = || {
                    let found = self.find_again(request, &mut last).or_else(|| self.find_after_waiting(request));
                    // What was waited for may have to move behind other addresses.
                    found.or_else(|| self.find_again(request, &mut last))
                };
                self.callbacks.ask(request.footprint(), retry).ok_or(last)
            }
            RecoveryStep::OtherThreads => {
                let mut last = None;
                let end = Instant::now() + self.options.wait;
                while Instant::now() < end {
                    std::thread::sleep(WAIT_STEP);
                    if let Some(found) = self.find_again(request, &mut last) {
                        return Ok(found);
                    }
                }
                Err(last)
            }
            RecoveryStep::Spill => {
                let kind = if self.options.spill == Spill::Pinned { Kind::Pinned } else { Kind::Managed };
                let pointer = self.find_direct(request, kind, true).map_err(|_| None)?;
                self.spilled.fetch_add(request.bytes as u64, Ordering::Relaxed);
                log::debug!(target: "nvbackend::memory", "{} bytes spilled to {kind:?} memory", request.bytes);
                Ok(Found::Direct(pointer))
            }
        }
    }

    /// After something was freed: gathers it and looks again.
    fn find_again(&self, request: &Request, last: &mut Option<Shortage>) -> Option<Found> {
        self.empty_caches(true);
        let trim = |shortage| {
            if !self.captures.any() && self.trim_for(request)? > 0 {
                self.find(request)
            } else {
                Err(shortage)
            }
        };
        match self.find(request).or_else(trim) {
            Ok(found) => Some(found),
            Err(shortage) => {
                *last = Some(shortage);
                None
            }
        }
    }

    fn trim_for(&self, request: &Request) -> std::result::Result<u64, Shortage> {
        self.pages.as_ref().map_or(Ok(0), |pages| pages.trim(request.footprint())).map_err(Shortage::Fatal)
    }

    /// Sends what threads and depots keep home, as far as nobody has to be waited for. `ask`: the driver may be asked
    /// whether events have passed.
    pub fn empty_caches(&self, ask: bool) {
        let Some(pages) = &self.pages else { return };
        let ask = ask && !self.captures.any();
        for arena in self.arenas() {
            arena.drain_caches(None);
            for mut batch in arena.drain_depot() {
                if matches!(batch.order, Order::Anybody) || ask && batch.order.has_passed(&self.events) {
                    arena.give_back(&batch.blocks);
                } else {
                    arena.put(0, batch);
                }
            }
            if ask || self.synchronous {
                arena.large.settle(None, &self.events, pages);
            }
            arena.release_empty_slabs();
        }
    }

    /// Empties the caches as `empty_caches` does, waiting for all work, so that nothing stays behind.
    pub fn empty_caches_after_all_work(&self) -> Result<()> {
        let Some(pages) = &self.pages else { return Ok(()) };
        let mut batches = Vec::new();
        let mut large = Vec::new();
        for arena in self.arenas() {
            arena.drain_caches(None);
            // What there is no room to remember stays where it is.
            for batch in arena.drain_depot() {
                match has_room(&mut batches) {
                    true => batches.push((arena, batch)),
                    false => arena.put(0, batch),
                }
            }
            while has_room(&mut large) {
                let Some((slabs, order)) = arena.large.take_oldest(&self.events) else { break };
                large.push((arena, slabs, order));
            }
        }
        // Whatever was freed until here had its work queued before.
        let result = self.source.synchronize();
        for (arena, batch) in batches {
            match result {
                Ok(()) => arena.give_back(&batch.blocks),
                Err(_) => arena.put(0, batch),
            }
        }
        for (arena, slabs, order) in large {
            match result {
                Ok(()) => arena.large.release(slabs, pages),
                Err(_) => arena.large.put_waiting(slabs, order),
            }
        }
        self.arenas().for_each(Arena::release_empty_slabs);
        result
    }

    /// Makes the request's stream wait for a fitting batch of another one; where none fits, the host waits for the
    /// oldest work until something does.
    fn wait_for_work(&self, request: &Request) -> std::result::Result<Found, Option<Shortage>> {
        if self.key(request.stream) != super::cache::ANYBODY_KEY {
            if let Some(block) = self.take_behind_event(request) {
                return Ok(Found::Block(block));
            }
        }
        let mut last = None;
        while self.wait_for_oldest() {
            match self.find(request) {
                Ok(found) => return Ok(found),
                Err(Shortage::Fatal(error)) => return Err(Some(Shortage::Fatal(error))),
                Err(shortage) => last = Some(shortage),
            }
        }
        Err(last)
    }

    fn find_after_waiting(&self, request: &Request) -> Option<Found> {
        let may_wait = self.applies(RecoveryStep::Wait, &Shortage::Limit);
        may_wait.then(|| self.wait_for_work(request).ok()).flatten()
    }

    fn take_behind_event(&self, request: &Request) -> Option<Block> {
        let pages = self.pages.as_ref()?;
        let arena = request.arena;
        if request.class == LARGE {
            let (slab, mut order) = arena.large.take_waiting(request.units, &self.events)?;
            let waits = match order.wait_for(&self.events) {
                Ok(WaitFor::Nothing) => true,
                Ok(WaitFor::Event(event)) => event.make_wait(request.stream).is_ok(),
                _ => false,
            };
            if !waits {
                arena.large.put_waiting(vec![NonNull::from(slab)], order);
                return None;
            }
            if slab.units() > request.units {
                // Where the rest cannot be listed the request gets it as well.
                let tail = arena.large.make_room().then(|| pages.split(slab, request.units)).flatten();
                if let Some(tail) = tail.filter(|tail| arena.large.add(tail)) {
                    arena.large.put_waiting(vec![NonNull::from(tail)], order);
                }
            }
            return Some(Block::large(slab));
        }
        let mut batch = arena.take_any_batch(0, request.class)?;
        let waits = match batch.order.wait_for(&self.events) {
            Ok(WaitFor::Nothing) => true,
            Ok(WaitFor::Event(event)) => event.make_wait(request.stream).is_ok(),
            _ => false,
        };
        if !waits {
            arena.put(0, batch);
            return None;
        }
        Some(self.keep_rest(request, batch.blocks))
    }

    /// Waits on the host for some work that holds memory back. `false`: there is none, or waiting failed.
    fn wait_for_oldest(&self) -> bool {
        self.arenas().any(|arena| self.wait_for_oldest_of(arena))
    }

    fn wait_for_oldest_of(&self, arena: &Arena) -> bool {
        let Some(pages) = &self.pages else { return false };
        if let Some((slabs, mut order)) = arena.large.take_oldest(&self.events) {
            let waited = order.wait_for(&self.events).is_ok_and(|wait_for| self.wait(wait_for));
            if waited {
                arena.large.release(slabs, pages);
            } else {
                arena.large.put_waiting(slabs, order);
            }
            return waited;
        }
        let Some(mut batch) = (0..CLASSES).find_map(|class| arena.take_any_batch(0, class)) else { return false };
        let waited = batch.order.wait_for(&self.events).is_ok_and(|wait_for| self.wait(wait_for));
        if waited {
            arena.give_back(&batch.blocks);
            arena.release_empty_slabs();
        } else {
            arena.put(0, batch);
        }
        waited
    }

    fn wait(&self, wait_for: WaitFor) -> bool {
        match wait_for {
            WaitFor::Nothing => true,
            WaitFor::Event(event) => event.wait().is_ok(),
            WaitFor::AllWork => self.source.synchronize().is_ok(),
        }
    }

    /// Waits for all work and gives back what no live block needs, down to `keep` bytes held. In a capture, which must
    /// not wait, nothing is given back. Returns the bytes given back.
    pub fn trim(&self, keep: u64) -> Result<u64> {
        if self.captures.any() {
            return Ok(0);
        }
        self.release_leaving(false);
        self.empty_caches_after_all_work()?;
        let wanted = self.budget.held().saturating_sub(keep);
        let trimmed = match &self.pages {
            Some(pages) if wanted > 0 => pages.trim(wanted)?,
            _ => 0,
        };
        self.source.trim();
        self.note(EventKind::Trim, 0, trimmed, RawHandle::NULL);
        log::debug!(target: "nvbackend::memory", "trimmed to {keep} bytes: {trimmed} given back");
        Ok(trimmed)
    }
}

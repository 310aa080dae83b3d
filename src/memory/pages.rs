//! The range of a device: which of its units are free, and which have physical memory behind them.
//!
//! One lock covers both. It is taken for large blocks and whole slabs only, and held while the driver maps memory, which
//! happens when the manager grows.

use super::arena::Arena;
use super::buddy::Side;
use super::budget::{Budget, Refusal};
use super::page_table::{PageTable, UNIT_BYTES};
use super::regions::{Region, Regions};
use super::size_class::{slab_units, CLASSES, LARGE};
use super::slab::Slab;
use super::sleep::Slept;
use super::source::Source;
use super::sync::{Mutex, MutexGuard};
use super::zeroed::Zeros;
use crate::allocation::{collected, no_memory, SMALL};
use crate::device::VirtualMemory;
use crate::error::{Error, Status};
use std::ops::RangeInclusive;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

/// What all tables together have for a unit is a little less than this, and what they lose between each other than that;
/// a table that would not fit has a mapping of its own.
const TABLE_BYTES_OF_A_UNIT: usize = 24;
const SPARE_TABLE_BYTES: usize = 8 << 10;
/// Physical memory is created in pieces, which can only be given back whole. A piece costs 31 µs on an H200, whether it
/// has 2 MiB or 128, so long blocks get a quarter of their length in one piece, within these bounds (32 and 256 MiB).
const PIECE_UNITS: RangeInclusive<usize> = 16..=128;
/// What is mapped ahead of need is at most this part of what is held and of what may still be taken, and so many units:
/// for slabs few, since a piece moves behind other addresses only when all of its slabs are empty. With 16 units, serving
/// for a week failed under a limit of a twentieth above what is live (tests/memory/serving.rs). For large blocks many:
/// with 16 units a thousand random allocations of up to 64 MiB mapped four times as often as with 128.
const GROWTH: usize = 16;
const AHEAD_OF_SLABS: usize = 2;
const AHEAD_OF_LARGE: usize = 128;

/// Why there are no units to be had.
#[derive(Debug)]
pub enum Shortage {
    /// No free run of addresses is long enough.
    Range,
    Limit,
    Margin {
        free: u64,
    },
    /// The device has no more.
    Device(Error),
    /// Trying again will not help.
    Fatal(Error),
}

/// One `map` of the source.
#[derive(Clone)]
pub(super) struct Piece {
    pub unit: usize,
    pub units: usize,
}

pub(super) struct Inner {
    regions: Regions,
    /// Bytes that the manager was told to hold from the start.
    initial_bytes: u64,
    pub pieces: Vec<Piece>,
    /// Pieces that the driver failed to take back: counted, and their units are nobody's until it does.
    stuck: Vec<Piece>,
    /// Every slab that was ever made, and those without a place, by class. They are freed with the pages. Boxed, because the
    /// pages are made by value, on stacks that may be small.
    slabs: Vec<NonNull<Slab>>,
    spare: Box<[Vec<NonNull<Slab>>]>,
    /// How many there are of each class.
    made: Box<[usize]>,
    /// What was mapped before the manager fell asleep.
    pub asleep: Option<Vec<Slept>>,
}

pub struct Pages {
    source: Arc<dyn Source>,
    pub(super) budget: Arc<Budget>,
    pub table: PageTable,
    base: usize,
    units: usize,
    inner: Mutex<Inner>,
    /// Copies for readers without the lock, in units.
    free_backed: AtomicUsize,
    largest_free: AtomicUsize,
    pub maps: AtomicU64,
    pub unmaps: AtomicU64,
    /// Whether `Inner::asleep` holds something.
    pub(super) asleep: AtomicBool,
}

// SAFETY: slabs may be shared between threads; the lists of them belong to the holder of the lock.
unsafe impl Send for Inner {}

fn zeros_for(units: usize) -> Result<Zeros, Error> {
    Zeros::new(units * TABLE_BYTES_OF_A_UNIT + SPARE_TABLE_BYTES)
}

impl Inner {
    fn new(zeros: &Zeros, units: usize) -> Inner {
        let spare = (0..=CLASSES).map(|_| Vec::new()).collect();
        Inner {
            regions: Regions::new(zeros, units),
            initial_bytes: 0,
            pieces: Vec::new(),
            stuck: Vec::new(),
            slabs: Vec::new(),
            spare,
            made: vec![0; CLASSES + 1].into(),
            asleep: None,
        }
    }

    /// Frees units, except those of pieces that are stuck.
    fn give(&mut self, unit: usize, units: usize) {
        self.regions.give(unit, units);
        let inside = |piece: &&Piece| (unit..unit + units).contains(&piece.unit);
        for piece in self.stuck.iter().filter(inside) {
            self.regions.take_at(piece.unit, piece.units);
        }
    }

    /// Sees to a slab without a place, so that `spare_slab` has one. `None`: the host has no memory for it.
    fn make_spare_slab(&mut self, class: usize) -> Option<()> {
        if !self.spare[class].is_empty() {
            return Some(());
        }
        // Room for it in both lists, so that it can come back.
        self.slabs.try_reserve(1).ok()?;
        self.made[class] += 1;
        let made = self.made[class];
        let slab = self.spare[class].try_reserve(made).ok().and_then(|()| Slab::new(class));
        let Some(slab) = slab else {
            self.made[class] -= 1;
            return None;
        };
        let slab = NonNull::from(Box::leak(Box::new(slab)));
        self.slabs.push(slab);
        self.spare[class].push(slab);
        Some(())
    }

    /// A slab without a place, to be placed by the caller, after `make_spare_slab`.
    fn spare_slab(&mut self, class: usize) -> &'static Slab {
        let slab = self.spare[class].pop().expect("a spare slab was seen to");
        // SAFETY: freed with the pages only, whose methods shorten the lifetime to theirs.
        unsafe { slab.as_ref() }
    }
}

/// Where blocks gather in their region.
fn side_of(region: Region) -> Side {
    match region {
        Region::Large => Side::Start,
        Region::Slabs => Side::End,
    }
}

/// What is asked of a manager that has given its memory back.
pub fn asleep() -> Error {
    Error::new(Status::MemoryAllocation, "the memory manager is asleep; wake it before allocating")
}

/// The host has no memory to keep account of the device's.
#[cold]
fn no_slab() -> Shortage {
    Shortage::Fatal(no_memory(SMALL, "the tables of a memory manager"))
}

impl From<Refusal> for Shortage {
    fn from(refusal: Refusal) -> Shortage {
        match refusal {
            Refusal::Limit => Shortage::Limit,
            Refusal::Margin { free } => Shortage::Margin { free },
            Refusal::Source(error) => Shortage::Fatal(error),
        }
    }
}

impl Pages {
    /// Reserves `bytes` of addresses, or half of that, and so on down to `least`. `None`: the source has no ranges.
    pub fn new(source: Arc<dyn Source>, budget: Arc<Budget>, bytes: u64, least: u64) -> Option<Pages> {
        let memory = source.virtual_memory()?;
        let mut wanted = usize::try_from(bytes).unwrap_or(usize::MAX / 2) / UNIT_BYTES * UNIT_BYTES;
        let (base, zeros) = loop {
            // The tables first, which go by themselves.
            let zeros = zeros_for(wanted / UNIT_BYTES);
            match zeros.and_then(|zeros| Ok((memory.reserve(wanted)?, zeros))) {
                Ok(reserved) => break reserved,
                Err(error) if wanted as u64 / 2 < least.max(UNIT_BYTES as u64) => {
                    log::info!(target: "nvbackend::memory", "no address range, blocks are allocated singly: {error}");
                    return None;
                }
                Err(_) => wanted = wanted / 2 / UNIT_BYTES * UNIT_BYTES,
            }
        };
        let units = wanted / UNIT_BYTES;
        Some(Pages {
            budget,
            table: PageTable::new(&zeros, base, units),
            base,
            units,
            inner: Mutex::new(Inner::new(&zeros, units)),
            free_backed: AtomicUsize::new(0),
            largest_free: AtomicUsize::new(1 << units.ilog2()),
            maps: AtomicU64::new(0),
            unmaps: AtomicU64::new(0),
            asleep: AtomicBool::new(false),
            source,
        })
    }

    /// Bytes that are backed and belong to nobody.
    pub fn free_backed_bytes(&self) -> u64 {
        (self.free_backed.load(Ordering::Relaxed) * UNIT_BYTES) as u64
    }

    /// Bytes of the longest free run of addresses, as far as buddies join.
    pub fn largest_free_bytes(&self) -> u64 {
        (self.largest_free.load(Ordering::Relaxed) * UNIT_BYTES) as u64
    }

    /// Units of the longest free run with memory behind it, and bytes of the pieces that are free as a whole, which can go
    /// behind other addresses.
    pub fn obtainable(&self) -> (usize, u64) {
        let inner = self.lock();
        let whole = inner.pieces.iter().filter(|piece| self.is_free(&inner, piece)).map(|piece| piece.units);
        (inner.regions.longest_backed_run(), (whole.sum::<usize>() * UNIT_BYTES) as u64)
    }

    /// Address and bytes of the reservation.
    pub fn range(&self) -> (usize, usize) {
        (self.base, self.units * UNIT_BYTES)
    }

    /// Address and bytes of each piece of physical memory.
    pub fn pieces(&self) -> Result<Vec<(usize, usize)>, Error> {
        let inner = self.lock();
        let pieces = inner.pieces.iter().map(|piece| (self.table.address(piece.unit), piece.units * UNIT_BYTES));
        collected(pieces, "the list of a memory manager's pieces")
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, inner: &Inner) {
        self.free_backed.store(inner.regions.free_backed_units(), Ordering::Relaxed);
        self.largest_free.store(inner.regions.largest_free_run(), Ordering::Relaxed);
    }

    fn memory(&self) -> &dyn VirtualMemory {
        self.source.virtual_memory().expect("a range was reserved from it")
    }

    /// A slab of the class with memory behind it; for `LARGE`, of `units`. It lives until `release`. `borrow`: slabs may
    /// have memory of the other region, whatever that holds up.
    pub fn allocate(&self, arena: &Arena, class: usize, units: usize, borrow: bool) -> Result<&Slab, Shortage> {
        let units = if class == LARGE { units } else { slab_units(class) };
        let region = if class == LARGE { Region::Large } else { Region::Slabs };
        let mut inner = self.lock();
        // Again with the lock held, since units that are free may not look so: the memory behind them is away.
        if inner.asleep.is_some() {
            return Err(Shortage::Fatal(asleep()));
        }
        inner.make_spare_slab(class).ok_or_else(no_slab)?;
        let unit = match self.take_backed(&mut inner, units, region, borrow) {
            Some(unit) => unit,
            None => match self.grow(&mut inner, units, region, region) {
                Err(Shortage::Range) => self.grow(&mut inner, units, region, region.other())?,
                grown => grown?,
            },
        };
        self.place(inner, arena, class, unit, units).ok_or_else(no_slab)
    }

    /// Whether as much again may be taken as is held, as far as is known without asking the device.
    pub fn has_plenty(&self) -> bool {
        self.budget.held() <= self.budget.room()
    }

    /// Units with memory behind them: of the region, or else of the other if that is harmless. Large blocks hold up short
    /// pieces there for no longer than themselves; slabs would hold up long ones, which matters when memory gets scarce.
    fn take_backed(&self, inner: &mut Inner, units: usize, region: Region, borrow: bool) -> Option<usize> {
        let side = side_of(region);
        let own = inner.regions.take_backed(units, region, side);
        own.or_else(|| {
            let held = self.budget.held();
            let harmless = region == Region::Large || held <= inner.initial_bytes;
            if borrow || harmless {
                inner.regions.take_backed(units, region.other(), side)
            } else {
                None
            }
        })
    }

    /// Units with new memory behind them, and if the limits allow more than are needed: a manager that holds much gets
    /// its memory in fewer pieces. `whose`: what they are for, `region`: where.
    fn grow(&self, inner: &mut Inner, units: usize, whose: Region, region: Region) -> Result<usize, Shortage> {
        let side = side_of(whose);
        let plenty = self.budget.held().min(self.budget.room()) as usize / UNIT_BYTES;
        let ample = (plenty / GROWTH).min(if whose == Region::Slabs { AHEAD_OF_SLABS } else { AHEAD_OF_LARGE });
        if ample > units {
            if let Some(unit) = inner.regions.take(ample, region, side) {
                let backed = self.back(inner, unit, ample);
                let kept = if backed.is_ok() { units } else { 0 };
                let start = if side == Side::Start { unit } else { unit + ample - kept };
                inner.give(if side == Side::Start { unit + kept } else { unit }, ample - kept);
                match backed {
                    Ok(()) => return Ok(start),
                    Err(Shortage::Fatal(error)) => return Err(Shortage::Fatal(error)),
                    Err(_) => {}
                }
            }
        }
        let unit = inner.regions.take(units, region, side).ok_or(Shortage::Range)?;
        let backed = self.back(inner, unit, units);
        backed.map(|()| unit).inspect_err(|_| {
            inner.give(unit, units);
            self.publish(inner);
        })
    }

    /// Allocates a large block as `allocate` does, if there are units with memory behind them: the driver is not asked.
    pub fn allocate_backed(&self, arena: &Arena, units: usize) -> Option<&Slab> {
        let mut inner = self.lock();
        if inner.asleep.is_some() {
            return None;
        }
        inner.make_spare_slab(LARGE)?;
        let unit = self.take_backed(&mut inner, units, Region::Large, false)?;
        self.place(inner, arena, LARGE, unit, units)
    }

    /// `None`: the host has no memory to list the slab, whose units are free again.
    fn place(
        &self,
        mut inner: MutexGuard<Inner>,
        arena: &Arena,
        class: usize,
        unit: usize,
        units: usize,
    ) -> Option<&Slab> {
        self.publish(&inner);
        let slab = inner.spare_slab(class);
        drop(inner);
        slab.place(arena, self.table.address(unit), unit, units);
        self.table.set(unit, units, slab);
        if class == LARGE && !arena.large.add(slab) {
            self.release(slab);
            return None;
        }
        Some(slab)
    }

    /// Puts memory behind the units that have none. When that fails, what was mapped so far stays: the next request will
    /// prefer it, and a capture would not let it go.
    fn back(&self, inner: &mut Inner, unit: usize, units: usize) -> Result<(), Shortage> {
        if inner.regions.all_backed(unit, units) {
            return Ok(());
        }
        let known = inner.pieces.len();
        let longest = (units / 4).clamp(*PIECE_UNITS.start(), *PIECE_UNITS.end());
        let mut result = Ok(());
        let mut at = unit;
        while at < unit + units {
            if inner.regions.is_backed(at) {
                at += 1;
                continue;
            }
            let most = (unit + units - at).min(longest);
            let length = (1..most).find(|&next| inner.regions.is_backed(at + next)).unwrap_or(most);
            if inner.pieces.try_reserve(1).is_err() {
                // With a piece given back there is room for another.
                result = Err(Shortage::Device(no_memory(SMALL, "the tables of a memory manager")));
                break;
            }
            match self.map(at, length) {
                Ok(piece) => inner.pieces.push(piece),
                Err(shortage) => {
                    result = Err(shortage);
                    break;
                }
            }
            at += length;
        }
        for i in known..inner.pieces.len() {
            let Piece { unit, units } = inner.pieces[i];
            inner.regions.set_backed(unit, units, true);
        }
        result
    }

    pub(super) fn map(&self, unit: usize, units: usize) -> Result<Piece, Shortage> {
        let bytes = units * UNIT_BYTES;
        let admission = self.budget.admit(bytes as u64, &*self.source)?;
        // SAFETY: units of the reservation that the caller knows to be unmapped.
        let result = unsafe { self.memory().map(self.table.address(unit), bytes) };
        result.map_err(|error| match error.status {
            Status::OutOfMemory => Shortage::Device(error),
            _ => Shortage::Fatal(error),
        })?;
        admission.keep();
        self.maps.fetch_add(1, Ordering::Relaxed);
        log::debug!(target: "nvbackend::memory", "took {bytes} bytes, {} held", self.budget.held());
        Ok(Piece { unit, units })
    }

    /// After a failure the bytes stay counted and the piece may be mapped or not: nobody uses its units until another try
    /// succeeds.
    pub(super) fn unmap(&self, piece: &Piece) -> Result<(), Error> {
        let bytes = piece.units * UNIT_BYTES;
        // SAFETY: the piece was mapped by `map`, and the caller knows that nobody uses its units.
        let result = unsafe { self.memory().unmap(self.table.address(piece.unit), bytes) };
        match &result {
            Ok(()) => {
                self.budget.give_back(bytes as u64);
                self.unmaps.fetch_add(1, Ordering::Relaxed);
                log::debug!(target: "nvbackend::memory", "gave {bytes} bytes back, {} held", self.budget.held());
            }
            // Its memory goes with the process.
            Err(error) if error.status == Status::DeviceLost => {}
            Err(error) => log::warn!(target: "nvbackend::memory", "{bytes} bytes could not be given back: {error}"),
        }
        result
    }

    /// Tries again to give back what is stuck. Returns the bytes that are, and why some are not.
    fn free_stuck(&self, inner: &mut Inner) -> (u64, Option<Error>) {
        let (mut bytes, mut failure) = (0, None);
        for piece in std::mem::take(&mut inner.stuck) {
            match self.unmap(&piece) {
                Ok(()) => {
                    inner.regions.give(piece.unit, piece.units);
                    bytes += (piece.units * UNIT_BYTES) as u64;
                }
                Err(error) => {
                    inner.stuck.push(piece);
                    failure = Some(error);
                }
            }
        }
        (bytes, failure)
    }

    /// Takes a slab's units back. No block of it is in use or known to any magazine, batch or list.
    pub fn release(&self, slab: &Slab) {
        let (unit, units, class) = (slab.unit(), slab.units(), slab.class());
        let mut inner = self.lock();
        inner.regions.give(unit, units);
        self.publish(&inner);
        inner.spare[class].push(NonNull::from(slab));
    }

    /// A slab of the last units of a large one, which keeps the first `keep`; `None`: the host has no memory for it.
    pub fn split(&self, slab: &Slab, keep: usize) -> Option<&Slab> {
        let (unit, rest) = (slab.unit() + keep, slab.units() - keep);
        let mut inner = self.lock();
        inner.make_spare_slab(LARGE)?;
        let tail = inner.spare_slab(LARGE);
        tail.place(slab.arena(), self.table.address(unit), unit, rest);
        slab.shorten(keep);
        self.table.set(unit, rest, tail);
        Some(tail)
    }

    /// Gives physical memory of free units back, at least `wanted` bytes if there is as much. Returns how much it was; an
    /// error if it is less because the driver failed.
    pub fn trim(&self, wanted: u64) -> Result<u64, Error> {
        let mut inner = self.lock();
        let (mut bytes, mut failure) = self.free_stuck(&mut inner);
        let mut at = 0;
        while at < inner.pieces.len() && bytes < wanted {
            let Piece { unit, units } = inner.pieces[at];
            if !inner.regions.is_free(unit, units) {
                at += 1;
                continue;
            }
            let piece = inner.pieces.swap_remove(at);
            inner.regions.set_backed(unit, units, false);
            if let Err(error) = self.unmap(&piece) {
                // A driver that fails is not asked for the next piece.
                inner.regions.take_at(unit, units);
                inner.stuck.push(piece);
                failure = Some(error);
                break;
            }
            bytes += (units * UNIT_BYTES) as u64;
        }
        self.publish(&inner);
        match failure {
            Some(error) if bytes < wanted => Err(error),
            _ => Ok(bytes),
        }
    }

    /// Puts memory behind free units until `bytes` are held, so that the first requests need not wait for the driver.
    pub fn grow_to(&self, bytes: u64) -> Result<(), Shortage> {
        let mut inner = self.lock();
        let held = self.budget.held();
        let units = usize::try_from(bytes.saturating_sub(held)).unwrap_or(usize::MAX).div_ceil(UNIT_BYTES);
        if units == 0 {
            return Ok(());
        }
        inner.initial_bytes = bytes;
        let unit = inner.regions.take(units, Region::Large, Side::Start).ok_or(Shortage::Range)?;
        let result = self.back(&mut inner, unit, units);
        inner.give(unit, units);
        self.publish(&inner);
        result
    }

    pub(super) fn is_free(&self, inner: &Inner, piece: &Piece) -> bool {
        inner.regions.is_free(piece.unit, piece.units)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let inner = self.lock();
        for slab in &inner.slabs {
            // SAFETY: leaked by `spare_slab`; whoever may know a slab is gone with the manager.
            drop(unsafe { Box::from_raw(slab.as_ptr()) });
        }
        let asleep = inner.asleep.iter().flatten().filter_map(Slept::stuck);
        let mapped = inner.pieces.iter().chain(&inner.stuck).chain(asleep);
        if mapped.filter(|piece| self.unmap(piece).is_err()).count() == 0 {
            // SAFETY: reserved by `new`, and nothing is mapped any more.
            unsafe { self.memory().release(self.base, self.units * UNIT_BYTES) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_tables_fit_into_one_mapping() {
        for units in [1, 2, 63, 64, 65, 1000, 4096, 4097, 48_207, 100_000, 281_999, 1 << 20, (1 << 20) + 1] {
            let zeros = zeros_for(units).unwrap();
            let _tables = (PageTable::new(&zeros, 1 << 40, units), Inner::new(&zeros, units));
            assert!(zeros.were_enough(), "{units} units");
        }
    }
}

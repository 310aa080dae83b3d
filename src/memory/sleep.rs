//! Giving all physical memory back while the addresses stay: an idle engine leaves the device to others and goes on
//! later with the same pointers.

use super::core::{all_cores, Core};
use super::page_table::UNIT_BYTES;
use super::pages::{Pages, Piece, Shortage};
use super::trace::EventKind;
use crate::allocation::with_room;
use crate::device::{CopyKind, RawHandle};
use crate::error::{Error, Result, Status};
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Managers that are asleep.
static ASLEEP: AtomicUsize = AtomicUsize::new(0);

/// How often any manager fell asleep. Addresses stay over a sleep, and what is mapped there does not.
static SLEEPS: AtomicUsize = AtomicUsize::new(0);

pub fn sleeps() -> usize {
    SLEEPS.load(Ordering::Relaxed)
}

/// Refuses work on memory that a manager, whosever it is, has given back until it wakes.
#[inline]
pub fn expect_awake(pointer: *const c_void) -> Result<()> {
    match ASLEEP.load(Ordering::Relaxed) {
        0 => Ok(()),
        _ => look_for_sleeper(pointer),
    }
}

/// Whether no manager sleeps, so that nobody need be asked for an address.
pub fn all_awake() -> bool {
    ASLEEP.load(Ordering::Relaxed) == 0
}

#[cold]
fn look_for_sleeper(pointer: *const c_void) -> Result<()> {
    let sleeps = |core: &Core| {
        let pages = core.pages.as_ref();
        pages.is_some_and(|pages| pages.asleep.load(Ordering::Relaxed) && pages.table.contains(pointer as usize))
    };
    if !all_cores().iter().any(|core| sleeps(core)) {
        return Ok(());
    }
    Err(Error::invalid(format!("the memory manager of {pointer:p} is asleep"))
        .with_advice("call nvb_memory_wake before work uses its blocks"))
}

/// A piece that is asleep: where it was, and what was in it if that is to come back.
pub struct Slept {
    piece: Piece,
    content: Option<Vec<u8>>,
    /// The driver failed to take the memory back.
    stuck: bool,
}

impl Slept {
    /// The piece, if it is still to be given back.
    pub fn stuck(&self) -> Option<&Piece> {
        self.stuck.then_some(&self.piece)
    }
}

impl Core {
    /// Waits for the device's work and gives the memory back. `keep`: what live blocks hold is copied to the host and
    /// comes back with `wake`; otherwise it is lost. Returns the bytes given back.
    pub fn sleep(&self, keep: bool) -> Result<u64> {
        let Some(pages) = &self.pages else {
            return Err(Error::unsupported("without an address range there is nothing to give back and keep pointers"));
        };
        if self.captures.any() {
            return Err(Error::invalid("a capture is running; end it before sleeping"));
        }
        // Threads go the long way from here on, where they find that there is no memory.
        self.set_asleep(pages, true);
        let result = self.fall_asleep(pages, keep);
        if result.is_err() && pages.lock().asleep.is_none() {
            self.set_asleep(pages, false);
        }
        result.map_err(|error| match error.status {
            Status::OutOfMemory => self.out_of_memory(error.requested, &Shortage::Device(error), &[]),
            _ => error,
        })
    }

    fn fall_asleep(&self, pages: &Pages, keep: bool) -> Result<u64> {
        self.empty_caches_after_all_work()?;
        let mut inner = pages.lock();
        if inner.asleep.is_some() {
            return Err(Error::invalid("the memory manager is asleep already"));
        }
        let mut slept = with_room(inner.pieces.len(), "the list of what sleeps")?;
        for piece in &inner.pieces {
            let content = if keep && !pages.is_free(&inner, piece) { Some(self.save(pages, piece)?) } else { None };
            slept.push(Slept { piece: piece.clone(), content, stuck: false });
        }
        let mut bytes = 0;
        inner.pieces.clear();
        for Slept { piece, stuck, .. } in &mut slept {
            *stuck = pages.unmap(piece).is_err();
            if !*stuck {
                bytes += (piece.units * UNIT_BYTES) as u64;
            }
        }
        inner.asleep = Some(slept);
        self.source.trim();
        self.note(EventKind::Sleep, 0, bytes, RawHandle::NULL);
        log::debug!(target: "nvbackend::memory", "asleep: {bytes} bytes given back");
        Ok(bytes)
    }

    fn set_asleep(&self, pages: &Pages, asleep: bool) {
        if pages.asleep.swap(asleep, Ordering::Relaxed) != asleep {
            let step = if asleep { 1 } else { usize::MAX };
            SLEEPS.fetch_add(asleep.into(), Ordering::Relaxed);
            ASLEEP.fetch_add(step, Ordering::Relaxed);
        }
        self.renew_settings();
    }

    /// A manager that goes in its sleep is none of those that sleep.
    pub fn end_sleep(&self) {
        if self.pages.as_ref().is_some_and(|pages| pages.asleep.swap(false, Ordering::Relaxed)) {
            ASLEEP.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn save(&self, pages: &Pages, piece: &Piece) -> Result<Vec<u8>> {
        let bytes = piece.units * UNIT_BYTES;
        let layout = std::alloc::Layout::array::<u8>(bytes).expect("a mapped size");
        // SAFETY: the size is not 0.
        let pointer = unsafe { std::alloc::alloc_zeroed(layout) };
        if pointer.is_null() {
            let text = "the host has no memory to keep what the device holds";
            return Err(Error::new(Status::OutOfMemory, text).with_limit(bytes as u64, 0));
        }
        // SAFETY: allocated just now with the layout that the vector will free it with; zero bytes are valid.
        let mut content = unsafe { Vec::from_raw_parts(pointer, bytes, bytes) };
        let from = pages.table.address(piece.unit) as *const c_void;
        // SAFETY: a mapped piece, and a buffer of its size.
        unsafe { self.source.copy(content.as_mut_ptr().cast(), from, bytes, CopyKind::DeviceToHost)? };
        Ok(content)
    }

    /// Takes the memory back. On failure the manager sleeps on, and the call may be tried again.
    pub fn wake(&self) -> Result<u64> {
        let Some(pages) = &self.pages else { return Err(Error::invalid("the memory manager is not asleep")) };
        let mut inner = pages.lock();
        let Some(mut slept) = inner.asleep.take() else {
            return Err(Error::invalid("the memory manager is not asleep"));
        };
        match self.restore(pages, &mut slept) {
            Ok(pieces) => {
                let bytes: usize = pieces.iter().map(|piece| piece.units * UNIT_BYTES).sum();
                inner.pieces.extend(pieces);
                self.set_asleep(pages, false);
                self.note(EventKind::Wake, 0, bytes as u64, RawHandle::NULL);
                log::debug!(target: "nvbackend::memory", "awake: {bytes} bytes taken back");
                Ok(bytes as u64)
            }
            Err((bytes, shortage)) => {
                inner.asleep = Some(slept);
                drop(inner);
                Err(self.out_of_memory(bytes as u64, &shortage, &[]).context("waking"))
            }
        }
    }

    /// The pieces, mapped again; or the bytes that could not be, and why.
    fn restore(&self, pages: &Pages, slept: &mut [Slept]) -> std::result::Result<Vec<Piece>, (usize, Shortage)> {
        for Slept { piece, stuck, .. } in slept.iter_mut().filter(|slept| slept.stuck) {
            pages.unmap(piece).map_err(|error| (0, Shortage::Fatal(error)))?;
            *stuck = false;
        }
        let mut pieces: Vec<Piece> = Vec::new();
        let result = slept.iter().try_for_each(|Slept { piece, content, .. }| {
            let bytes = piece.units * UNIT_BYTES;
            let mapped = pages.map(piece.unit, piece.units).map_err(|shortage| (bytes, shortage))?;
            let to = pages.table.address(mapped.unit) as *mut c_void;
            pieces.push(mapped);
            match content {
                // SAFETY: mapped just now, and the buffer has its size.
                Some(content) => unsafe {
                    let copied = self.source.copy(to, content.as_ptr().cast(), bytes, CopyKind::HostToDevice);
                    copied.map_err(|error| (bytes, Shortage::Fatal(error)))
                },
                None => Ok(()),
            }
        });
        if let Err(error) = result {
            for (piece, slept) in pieces.iter().zip(slept) {
                slept.stuck = pages.unmap(piece).is_err();
            }
            return Err(error);
        }
        Ok(pieces)
    }
}

impl Pages {
    /// Overwrites a range of what comes back with `wake`; `false` if the manager is awake.
    pub fn zero_asleep(&self, address: usize, bytes: usize) -> bool {
        let mut inner = self.lock();
        let Some(slept) = &mut inner.asleep else { return false };
        for Slept { piece, content, .. } in slept {
            let start = self.table.address(piece.unit);
            let Some(content) = content else { continue };
            let from = address.clamp(start, start + content.len()) - start;
            let to = (address + bytes).clamp(start, start + content.len()) - start;
            content[from..to].fill(0);
        }
        true
    }
}

//! Handles: what C holds instead of pointers.
//!
//! A handle is a number dressed as a pointer: kind, index and generation of a slot in a table. A NULL, foreign, stale or
//! twice-destroyed handle is an error with a name, and a call that runs while another thread destroys the handle keeps
//! the object alive until it is done.
//!
//! A slot never moves and is never freed, so looking a handle up takes no lock: the thread pins the slot while it uses the
//! `Arc`, in one of a few counters beside the slot's state. Callers that keep what they found in their thread ask the
//! state alone (`Validity`). Nothing but the beginning, the end and a panic writes to the state, so that this scales to any
//! number of threads.

use super::guard::note_subject;
use crate::allocation::{no_memory, push_if_room, with_room};
use crate::error::{Error, Result, Status};
use crate::fork::{self, Heir, PerProcess};
use crate::reserve;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The object is there.
const LIVE: u64 = 1 << 31;
/// The object met a panic.
const POISONED: u64 = 1 << 30;
/// The object is that of the process that this one was forked from, and must not be touched.
const INHERITED: u64 = 1 << 29;
/// What threads kept of the object holds no more; calls that look the handle up find the object as before.
const UNKEPT: u64 = 1 << 28;
const MARKS: u64 = POISONED | UNKEPT;

/// Generation in the upper half, then `LIVE`, `POISONED`, `INHERITED` and `UNKEPT`.
#[repr(align(64))]
pub struct State(AtomicU64);

impl State {
    fn of(generation: u32) -> u64 {
        u64::from(generation) << 32 | LIVE
    }

    /// Makes the object refuse all calls but destroy, if the handle of this generation is still there.
    pub fn poison(&self, generation: u32) {
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |state| {
            (state & !MARKS == State::of(generation)).then_some(state | POISONED)
        });
    }

    /// The state, for who looks the handle up.
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order) & !UNKEPT
    }
}

/// Whether a handle that was found once would be found again, and `Table::end_validity` was not called since.
#[derive(Clone, Copy)]
pub struct Validity {
    state: &'static State,
    generation: u32,
}

impl Validity {
    #[inline]
    pub fn holds(&self) -> bool {
        self.state.0.load(Ordering::Acquire) == State::of(self.generation)
    }
}

/// Look-ups by some of the threads that run at the moment.
#[repr(align(64))]
struct Pins(AtomicU64);

/// Counters of pins for each slot, on lines of their own: with fewer than threads, these take them from each other.
const PIN_COUNTERS: usize = 16;

struct Slot<T> {
    state: State,
    pins: [Pins; PIN_COUNTERS],
    value: UnsafeCell<Option<Arc<T>>>,
}

/// The counter that the thread pins with.
fn pin_counter() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static COUNTER: usize = THREADS.fetch_add(1, Ordering::Relaxed) % PIN_COUNTERS;
    }
    COUNTER.try_with(|counter| *counter).unwrap_or(0)
}

/// A pin on a slot whose object is there. Unpins on panic as well.
struct Pinned<'a>(&'a Pins);

impl<'a> Pinned<'a> {
    /// `None`: the object of this generation has ended or met a panic.
    fn new<T>(slot: &'a Slot<T>, generation: u32) -> Option<Pinned<'a>> {
        let pins = &slot.pins[pin_counter()];
        // All four accesses, here and where objects end, are in one order: who ends an object sees this pin, or this
        // look at the state sees the end.
        pins.0.fetch_add(1, Ordering::SeqCst);
        let pinned = Pinned(pins);
        (slot.state.load(Ordering::SeqCst) == State::of(generation)).then_some(pinned)
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        self.0 .0.fetch_sub(1, Ordering::Release);
    }
}

/// Slots of the first chunk; each further chunk has twice as many as the one before.
const FIRST_CHUNK: usize = 64;
/// Live handles of one kind; more than an engine can mean.
const MAX_HANDLES: usize = 1 << 24;
const CHUNKS: usize = (MAX_HANDLES / FIRST_CHUNK).trailing_zeros() as usize;

pub struct Table<T> {
    name: &'static str,
    kind: usize,
    chunks: [AtomicPtr<Slot<T>>; CHUNKS],
    /// Slots that have been given out so far. Changed by the holder of the lock.
    used: AtomicUsize,
    /// Slots without an object. Whoever holds the lock may write the values of slots that are not live.
    free: PerProcess<Mutex<Vec<usize>>>,
    /// Children of `fork` are told of.
    watched: AtomicBool,
}

// SAFETY: values are written by the holder of the lock alone, while the slot is not live and nobody who found it live has it
// pinned.
unsafe impl<T: Send + Sync> Sync for Table<T> {}

/// Chunk and place within it: chunk k starts at index 64 · (2^k − 1).
fn place(index: usize) -> (usize, usize) {
    let chunk = (index / FIRST_CHUNK + 1).ilog2() as usize;
    (chunk, index - FIRST_CHUNK * ((1 << chunk) - 1))
}

/// Whether a handle says of itself that it is one of the kind.
#[inline]
pub fn is_of_kind(handle: usize, kind: usize) -> bool {
    handle & 0xff == (kind << 1 | 1)
}

impl<T: Send + Sync + 'static> Table<T> {
    pub const fn new(name: &'static str, kind: usize) -> Table<T> {
        assert!(kind < 128, "the kind takes seven bits");
        let chunks = [const { AtomicPtr::new(std::ptr::null_mut()) }; CHUNKS];
        let (used, watched) = (AtomicUsize::new(0), AtomicBool::new(false));
        Table { name, kind, chunks, used, free: PerProcess::new(Mutex::default), watched }
    }

    /// Generation in the upper half, then 24 bits of index, 7 of kind and a 1, which no object's address has.
    fn encode(&self, index: usize, generation: u32) -> usize {
        (generation as usize) << 32 | index << 8 | self.kind << 1 | 1
    }

    fn decode(&self, handle: usize) -> Option<(usize, u32)> {
        is_of_kind(handle, self.kind).then_some(((handle >> 8) & 0xff_ffff, (handle >> 32) as u32))
    }

    fn slot(&self, index: usize) -> Option<&'static Slot<T>> {
        let (chunk, at) = place(index);
        let chunk = self.chunks.get(chunk)?.load(Ordering::Acquire);
        // SAFETY: NULL, or a chunk that `add_slot` leaked with more than `at` slots.
        (!chunk.is_null()).then(|| unsafe { &*chunk.add(at) })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for the object of this index.
    fn add_slot(&self, index: usize) -> Result<()> {
        let (chunk, _) = place(index);
        if self.chunks[chunk].load(Ordering::Relaxed).is_null() {
            let slot = || Slot {
                state: State(AtomicU64::new(0)),
                pins: [const { Pins(AtomicU64::new(0)) }; PIN_COUNTERS],
                value: UnsafeCell::new(None),
            };
            let mut slots = with_room(FIRST_CHUNK << chunk, format_args!("{} handles", self.name))?;
            slots.resize_with(FIRST_CHUNK << chunk, slot);
            self.chunks[chunk].store(slots.leak().as_mut_ptr(), Ordering::Release);
        }
        Ok(())
    }

    pub fn insert<H>(&'static self, value: Arc<T>) -> Result<*mut H> {
        if !self.watched.load(Ordering::Relaxed) && !self.watched.swap(true, Ordering::Relaxed) {
            fork::add_heir(self);
        }
        if reserve::is_low() {
            return Err(no_memory(size_of::<T>(), format_args!("a new {}", self.name))
                .with_advice("destroy what is not needed any more; the process has no memory left"));
        }
        let mut free = self.lock();
        let used = self.used.load(Ordering::Relaxed);
        let index = match free.pop() {
            Some(index) => index,
            None if place(used).0 < CHUNKS => {
                self.add_slot(used)?;
                self.used.store(used + 1, Ordering::Relaxed);
                used
            }
            None => return Err(Error::new(Status::Error, format!("{MAX_HANDLES} {} handles are alive", self.name))),
        };
        let slot = self.slot(index).expect("its chunk is there");
        let generation = ((slot.state.0.load(Ordering::Relaxed) >> 32) as u32).wrapping_add(1);
        // SAFETY: the lock is held, and the slot is free: not live, and whoever pins it finds that out and lets go.
        unsafe { *slot.value.get() = Some(value) };
        slot.state.0.store(State::of(generation), Ordering::SeqCst);
        Ok(self.encode(index, generation) as *mut H)
    }

    /// The slot of a live handle.
    #[inline]
    fn find(&self, handle: usize) -> Result<(&'static Slot<T>, u32)> {
        match self.decode(handle).and_then(|(index, generation)| Some((self.slot(index)?, generation))) {
            Some((slot, generation)) if slot.state.load(Ordering::Relaxed) == State::of(generation) => {
                Ok((slot, generation))
            }
            found => Err(self.refusal(handle, found)),
        }
    }

    /// Why there is no object to work with behind the handle.
    #[cold]
    fn refusal(&self, handle: usize, found: Option<(&'static Slot<T>, u32)>) -> Error {
        let Some((slot, generation)) = found else { return self.unknown(handle) };
        match slot.state.load(Ordering::Relaxed) {
            state if state == State::of(generation) | POISONED => Error::new(
                Status::Internal,
                format!(
                    "this {} met an internal error in an earlier call and refuses all calls but destroy",
                    self.name
                ),
            ),
            state if state & !POISONED == State::of(generation) | INHERITED => self.inherited(handle),
            _ => self.unknown(handle),
        }
    }

    pub fn get<H>(&self, handle: *const H) -> Result<Arc<T>> {
        self.with(handle, Arc::clone)
    }

    /// Runs `body` with the object, whose end waits meanwhile: for what takes microseconds and calls nobody back.
    #[inline]
    pub fn with<H, R>(&self, handle: *const H, body: impl FnOnce(&Arc<T>) -> R) -> Result<R> {
        let (slot, generation) = self.find(handle as usize)?;
        let Some(_pinned) = Pinned::new(slot, generation) else {
            // It was destroyed or poisoned a moment ago.
            return Err(self.find(handle as usize).err().unwrap_or_else(|| self.unknown(handle as usize)));
        };
        note_subject(&slot.state, generation);
        // SAFETY: `take` empties a slot only when no look-up has it pinned, and a pinned slot was live.
        Ok(body(unsafe { (*slot.value.get()).as_ref() }.expect("live slots have a value")))
    }

    /// What tells whether `get` would find the handle; it writes nothing.
    pub fn validity<H>(&self, handle: *const H) -> Result<Validity> {
        self.find(handle as usize).map(|(slot, generation)| Validity { state: &slot.state, generation })
    }

    /// Ends every `Validity` of the objects that are there. Those objects give out none that holds any more; who looks a
    /// handle up finds its object. It takes no lock.
    pub fn end_validity(&self) {
        for (at, chunk) in self.chunks.iter().enumerate() {
            let chunk = chunk.load(Ordering::Acquire);
            if chunk.is_null() {
                continue;
            }
            // SAFETY: a chunk that `add_slot` leaked, with this many slots.
            for slot in unsafe { std::slice::from_raw_parts(chunk, FIRST_CHUNK << at) } {
                let unkept = |state| (state & LIVE != 0).then_some(state | UNKEPT);
                let _ = slot.state.0.fetch_update(Ordering::SeqCst, Ordering::Relaxed, unkept);
            }
        }
    }

    /// Finds the object of a handle as `get` does; NULL gives `None`.
    pub fn get_optional<H>(&self, handle: *const H) -> Result<Option<Arc<T>>> {
        if handle.is_null() {
            return Ok(None);
        }
        self.get(handle).map(Some)
    }

    /// NULL is fine. The object itself goes with the last child that holds it.
    pub fn remove<H>(&self, handle: *mut H) -> Result<()> {
        // Dropped here, outside the lock: the destructor may free device memory or wait for a stream.
        self.take(handle).map(drop)
    }

    /// Removes a handle as `remove` does and hands its object over; `None` for NULL, and for a parent process's, which
    /// stays where it is: its threads, locks and driver are not this process's.
    pub fn take<H>(&self, handle: *mut H) -> Result<Option<Arc<T>>> {
        if handle.is_null() {
            return Ok(None);
        }
        let mut free = self.lock();
        let found = self
            .decode(handle as usize)
            .and_then(|(index, generation)| self.slot(index).map(|slot| (index, generation, slot)));
        let (index, generation, slot) = found.ok_or_else(|| self.unknown(handle as usize))?;
        let end = |state| (state & !MARKS == State::of(generation)).then_some(state & !(LIVE | MARKS));
        if let Err(state) = slot.state.0.fetch_update(Ordering::SeqCst, Ordering::Relaxed, end) {
            if state & !MARKS == State::of(generation) | INHERITED {
                slot.state.0.store(state & !(LIVE | MARKS), Ordering::SeqCst);
                return Ok(None);
            }
            return Err(self.unknown(handle as usize));
        }
        // Pins last for nanoseconds, or microseconds of a call that says so, unless the thread was stopped in the middle.
        for pins in &slot.pins {
            while pins.0.load(Ordering::SeqCst) != 0 {
                std::thread::yield_now();
            }
        }
        // SAFETY: the lock is held; the slot is not live any more and nobody who found it live has it pinned.
        let value = unsafe { (*slot.value.get()).take() };
        // A slot that cannot be listed stays unused.
        push_if_room(&mut free, index);
        Ok(value)
    }

    fn inherited(&self, handle: usize) -> Error {
        Error::invalid(format!("the {} handle {handle:#x} is the parent's: this process was forked from it", self.name))
            .with_advice("create objects of the child's own; of the parent's it may only destroy the handles")
    }

    fn unknown(&self, handle: usize) -> Error {
        let name = self.name;
        Error::invalid(match handle {
            0 => format!("the {name} handle is NULL"),
            _ if self.decode(handle).is_some() => format!("the {name} handle {handle:#x} was destroyed"),
            _ => {
                let article = if name.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
                format!("{handle:#x} is not {article} {name} handle")
            }
        })
    }
}

impl<T: Send + Sync + 'static> Heir for Table<T> {
    fn inherit(&self) {
        for index in 0..self.used.load(Ordering::Relaxed) {
            let Some(slot) = self.slot(index) else { continue };
            if slot.state.0.load(Ordering::Relaxed) & LIVE != 0 {
                slot.state.0.fetch_or(INHERITED, Ordering::Relaxed);
            }
            // Pins of threads that are not here.
            slot.pins.iter().for_each(|pins| pins.0.store(0, Ordering::Relaxed));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_foreign_and_null_handles_are_told_apart() {
        static THINGS: Table<u32> = Table::new("thing", 3);
        static OTHERS: Table<u32> = Table::new("other", 4);
        let handle: *mut u8 = THINGS.insert(Arc::new(7)).unwrap();
        assert_eq!(*THINGS.get(handle).unwrap(), 7);
        assert!(OTHERS.get(handle).unwrap_err().message.contains("is not an other handle"));
        assert!(THINGS.get(std::ptr::null::<u8>()).unwrap_err().message.contains("NULL"));
        let validity = THINGS.validity(handle).unwrap();
        assert!(validity.holds());
        THINGS.remove(handle).unwrap();
        assert!(!validity.holds());
        assert!(THINGS.get(handle).unwrap_err().message.contains("destroyed"));
        assert!(THINGS.remove(handle).is_err());
        let again: *mut u8 = THINGS.insert(Arc::new(8)).unwrap();
        assert_ne!(handle, again, "the slot is reused with another generation");
        assert!(THINGS.get(handle).is_err() && !validity.holds());
        THINGS.remove(again).unwrap();
    }

    #[test]
    fn poisoned_objects_refuse_everything_but_their_end() {
        static THINGS: Table<u32> = Table::new("thing", 3);
        let handle: *mut u8 = THINGS.insert(Arc::new(7)).unwrap();
        let validity = THINGS.validity(handle).unwrap();
        validity.state.poison(validity.generation.wrapping_sub(1));
        assert!(validity.holds(), "an earlier generation's panic is not this one's");
        validity.state.poison(validity.generation);
        assert!(!validity.holds());
        assert_eq!(THINGS.get(handle).unwrap_err().status, Status::Internal);
        assert_eq!(THINGS.take(handle).unwrap().as_deref(), Some(&7));
    }

    #[test]
    fn objects_without_validity_are_found_poisoned_and_ended() {
        static THINGS: Table<u32> = Table::new("thing", 3);
        let handles: Vec<*mut u8> = (0..100).map(|i| THINGS.insert(Arc::new(i)).unwrap()).collect();
        let validity = handles.iter().map(|&handle| THINGS.validity(handle).unwrap());
        let validity: Vec<Validity> = validity.collect();
        THINGS.end_validity();
        assert!(validity.iter().all(|validity| !validity.holds()));
        assert!((0..100).all(|i| *THINGS.get(handles[i]).unwrap() == i as u32));
        assert!(!THINGS.validity(handles[70]).unwrap().holds());
        validity[70].state.poison(validity[70].generation);
        assert_eq!(THINGS.get(handles[70]).unwrap_err().status, Status::Internal);
        handles.iter().for_each(|&handle| THINGS.remove(handle).unwrap());
        let again: *mut u8 = THINGS.insert(Arc::new(7)).unwrap();
        assert!(THINGS.validity(again).unwrap().holds(), "an object that came later gives out its own");
        THINGS.remove(again).unwrap();
    }

    #[test]
    fn indices_find_their_chunks() {
        assert_eq!([0, 63, 64, 191, 192].map(place), [(0, 0), (0, 63), (1, 0), (1, 127), (2, 0)]);
        static THINGS: Table<usize> = Table::new("thing", 3);
        let handles: Vec<*mut u8> = (0..1000).map(|i| THINGS.insert(Arc::new(i)).unwrap()).collect();
        for (i, &handle) in handles.iter().enumerate() {
            assert_eq!(*THINGS.get(handle).unwrap(), i);
            THINGS.remove(handle).unwrap();
        }
        assert!(THINGS.get((0xff_ffff << 8 | 3 << 1 | 1) as *const u8).is_err(), "an index beyond all chunks in use");
    }

    #[test]
    fn objects_outlive_the_calls_that_race_with_their_end() {
        struct Counted;
        static ALIVE: AtomicUsize = AtomicUsize::new(0);
        impl Drop for Counted {
            fn drop(&mut self) {
                ALIVE.fetch_sub(1, Ordering::SeqCst);
            }
        }
        static THINGS: Table<Counted> = Table::new("thing", 3);
        static CURRENT: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
        static ENDED: AtomicUsize = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..2000 {
                    ALIVE.fetch_add(1, Ordering::SeqCst);
                    let handle: *mut u8 = THINGS.insert(Arc::new(Counted)).unwrap();
                    CURRENT.store(handle, Ordering::SeqCst);
                    std::thread::yield_now();
                    THINGS.remove(handle).unwrap();
                }
                ENDED.store(1, Ordering::SeqCst);
            });
            for _ in 0..2 {
                scope.spawn(|| {
                    while ENDED.load(Ordering::SeqCst) == 0 {
                        if let Ok(_thing) = THINGS.get(CURRENT.load(Ordering::SeqCst)) {
                            assert!(ALIVE.load(Ordering::SeqCst) > 0);
                        }
                    }
                });
            }
        });
        assert_eq!(ALIVE.load(Ordering::SeqCst), 0);
    }
}

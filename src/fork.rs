//! Children of `fork`. A child has one thread and a copy of all memory: locks that other threads of the parent held are held
//! for ever, what they were changing is half changed, and the threads of a pool are gone. So nothing that may be in such a
//! state is touched. What the whole process shares is made anew (`PerProcess`), and the objects behind the parent's handles
//! are left as they are (`Heir`): their handles are marked, and answer with an error.
//!
//! It costs calls nothing: the C library tells of the fork, and a mark on a handle fails the check that it goes through anyway.

use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

/// How many forks lie between the process that loaded the library and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

#[inline]
pub fn count() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// Is told in a child. It allocates nothing and takes no lock.
pub trait Heir: Sync {
    fn inherit(&self);
}

struct Entry {
    heir: &'static dyn Heir,
    next: *mut Entry,
}

static HEIRS: AtomicPtr<Entry> = AtomicPtr::new(null_mut());

/// Every child is told of from now on.
pub fn add_heir(heir: &'static dyn Heir) {
    watch();
    let entry = Box::leak(Box::new(Entry { heir, next: HEIRS.load(Ordering::Acquire) }));
    while let Err(now) = HEIRS.compare_exchange_weak(entry.next, entry, Ordering::AcqRel, Ordering::Acquire) {
        entry.next = now;
    }
}

/// No `Once`: a child would wait for ever for a thread that was in the middle.
fn watch() {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if !WATCHED.swap(true, Ordering::AcqRel) {
        // SAFETY: a function of this library, which is never unloaded.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    }
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    let mut at = HEIRS.load(Ordering::Acquire);
    // SAFETY: entries are leaked, and complete when they are listed.
    while let Some(entry) = unsafe { at.as_ref() } {
        entry.heir.inherit();
        at = entry.next;
    }
}

/// A static that each process has its own of, made when it is first used. Threads that come at once may each make one, of
/// which one is kept: nobody waits.
pub struct PerProcess<T: 'static> {
    make: fn() -> T,
    current: AtomicPtr<Made<T>>,
}

struct Made<T> {
    forks: u32,
    value: T,
    /// The parent's, which is not freed and can still be found by leak checkers.
    _parents: *mut Made<T>,
}

// SAFETY: what is shared is the value; the addresses are read alone.
unsafe impl<T: Send + Sync> Sync for PerProcess<T> {}

impl<T> PerProcess<T> {
    pub const fn new(make: fn() -> T) -> PerProcess<T> {
        PerProcess { make, current: AtomicPtr::new(null_mut()) }
    }

    #[cold]
    fn make_anew(&self) -> &T {
        watch();
        let parents = self.current.load(Ordering::Acquire);
        // Another thread may have made it since this one found none; a second one beside it would be a second lock of the
        // same data.
        // SAFETY: NULL, or made here and never freed.
        if let Some(made) = unsafe { parents.as_ref() }.filter(|made| made.forks == count()) {
            return &made.value;
        }
        let made = Box::into_raw(Box::new(Made { forks: count(), value: (self.make)(), _parents: parents }));
        match self.current.compare_exchange(parents, made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: never freed from now on.
            Ok(_) => unsafe { &(*made).value },
            Err(others) => {
                // SAFETY: made above, and seen by nobody; the other thread's is never freed.
                unsafe {
                    drop(Box::from_raw(made));
                    &(*others).value
                }
            }
        }
    }
}

impl<T> Deref for PerProcess<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: NULL, or made by `make_anew` and never freed.
        match unsafe { self.current.load(Ordering::Acquire).as_ref() } {
            Some(made) if made.forks == count() => &made.value,
            _ => self.make_anew(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Runs `body` in a child and returns its exit status, which is `body`'s.
    fn in_fork(body: impl FnOnce() -> i32) -> i32 {
        let mut status = 0;
        // SAFETY: the child calls what is safe after a fork, and ends without unwinding.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(body());
            }
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
        }
        libc::WEXITSTATUS(status)
    }

    #[test]
    fn a_child_has_its_own_and_waits_for_no_lock_of_the_parents() {
        static SHARED: PerProcess<Mutex<u32>> = PerProcess::new(|| Mutex::new(7));
        static OTHER: PerProcess<u32> = PerProcess::new(|| 3);
        assert_eq!(*OTHER, 3);
        let mut held = SHARED.lock().unwrap();
        *held = 8;
        let forks = count();
        let status = in_fork(|| {
            let fresh = SHARED.try_lock().map_or(0, |value| *value);
            i32::from(fresh == 7 && *OTHER == 3 && count() == forks + 1)
        });
        assert_eq!((status, *held), (1, 8));
    }

    #[test]
    fn a_thread_that_comes_late_finds_what_another_made() {
        static SHARED: PerProcess<Mutex<u32>> = PerProcess::new(|| Mutex::new(7));
        let first: &Mutex<u32> = &SHARED;
        // Where a thread that found nothing goes, as late as it may get there.
        assert!(std::ptr::eq(first, SHARED.make_anew()) && std::ptr::eq(first, &*SHARED));
    }

    #[test]
    fn heirs_are_told_in_the_child_alone() {
        struct Told(AtomicU32);
        impl Heir for Told {
            fn inherit(&self) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        static TOLD: [Told; 2] = [const { Told(AtomicU32::new(0)) }; 2];
        TOLD.iter().for_each(|told| add_heir(told));
        let told = || TOLD.iter().map(|told| told.0.load(Ordering::Relaxed)).sum::<u32>() as i32;
        assert_eq!((in_fork(told), told()), (2, 0));
    }
}

//! Waiting for all work of a device, by one thread at a time.
//!
//! Several threads inside `cuCtxSynchronize` may stand there for ever, one at a mutex and the others at a reader-writer
//! lock of the driver (580.159.04). It was seen where other processes kept the GPU busy: beside compute-sanitizer and
//! programs that fault, 4 of 7 runs of the conformance suite on an H200 stood still, and none of 5 since one thread calls
//! it and the others wait for that one. Who came while a wait ran needs another, because the running one need not cover
//! what was queued since; that one serves all who came before it began.
//!
//! Nor does a wait begin while a list is captured as a graph, which it would invalidate: a later `cuCtxSynchronize` then ended in
//! a segmentation fault of the driver, in two of six runs of the conformance tests of graphs on four and twelve threads.

use crate::error::Result;
use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};

thread_local! {
    /// Whether this thread holds a [`NoWait`].
    static HOLDS_OFF: Cell<bool> = const { Cell::new(false) };
}

/// While it lives no other thread begins a wait.
pub struct NoWait<'a>(#[expect(dead_code, reason = "held, not read")] MutexGuard<'a, u64>);

impl Drop for NoWait<'_> {
    fn drop(&mut self) {
        HOLDS_OFF.set(false);
    }
}

#[derive(Default)]
pub struct AllWork {
    /// The number of the wait that began last.
    begun: Mutex<u64>,
    /// The number of the last wait that succeeded. Locked while one runs.
    passed: Mutex<u64>,
}

fn lock(number: &Mutex<u64>) -> MutexGuard<'_, u64> {
    number.lock().unwrap_or_else(PoisonError::into_inner)
}

impl AllWork {
    /// Returns when a call of `wait` that began after this one has succeeded, be it another thread's. A failure is told to
    /// the thread alone whose call failed: whether the driver refuses depends on how that thread captures.
    pub fn wait(&self, wait: impl FnOnce() -> Result<()>) -> Result<()> {
        if HOLDS_OFF.get() {
            // The driver answers that this thread captures.
            return wait();
        }
        self.wait_past(self.begun(), wait)
    }

    /// Waits for the wait that runs, and holds off others until the answer goes. One at a time in a thread.
    pub fn hold_off(&self) -> NoWait<'_> {
        let held = NoWait(lock(&self.passed));
        HOLDS_OFF.set(true);
        held
    }

    fn begun(&self) -> u64 {
        *lock(&self.begun)
    }

    /// Returns when a wait has succeeded that began after the one of this number.
    fn wait_past(&self, before: u64, wait: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut passed = lock(&self.passed);
        if *passed > before {
            return Ok(());
        }
        let number = {
            let mut begun = lock(&self.begun);
            *begun += 1;
            *begun
        };
        wait()?;
        *passed = number;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn no_two_threads_wait_at_once() {
        let (all_work, inside) = (AllWork::default(), AtomicUsize::new(0));
        let wait = || {
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
            std::thread::yield_now();
            inside.fetch_sub(1, Ordering::SeqCst);
            Ok(())
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| all_work.wait(wait).unwrap()));
            }
        });
    }

    #[test]
    fn a_wait_serves_all_who_came_before_it_began() {
        let (all_work, calls) = (AllWork::default(), Cell::new(0));
        let count = || {
            calls.set(calls.get() + 1);
            Ok(())
        };
        let (first, second) = (all_work.begun(), all_work.begun());
        let mut during = 0;
        let wait = || {
            during = all_work.begun();
            count()
        };
        all_work.wait_past(first, wait).unwrap();
        all_work.wait_past(second, count).unwrap();
        assert_eq!(calls.get(), 1);
        // Who came while it ran is served by the next alone.
        all_work.wait_past(during, count).unwrap();
        assert_eq!(calls.get(), 2);
        all_work.wait(count).unwrap();
        assert_eq!(calls.get(), 3);
    }

    #[test]
    fn nobody_waits_while_waits_are_held_off() {
        let (all_work, waited) = (AllWork::default(), AtomicUsize::new(0));
        let wait = || {
            waited.fetch_add(1, Ordering::SeqCst);
            Ok(())
        };
        std::thread::scope(|scope| {
            let held = all_work.hold_off();
            let other = scope.spawn(|| all_work.wait(wait));
            // The thread that holds the others off is answered by its own call.
            assert!(all_work.wait(|| Err(Error::invalid("a capture"))).is_err());
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert_eq!(waited.load(Ordering::SeqCst), 0);
            drop(held);
            other.join().unwrap().unwrap();
        });
        all_work.wait(wait).unwrap();
        assert_eq!(waited.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_failure_is_nobody_elses() {
        let (all_work, called) = (AllWork::default(), Cell::new(false));
        let (first, second) = (all_work.begun(), all_work.begun());
        assert!(all_work.wait_past(first, || Err(Error::invalid("a capture"))).is_err());
        let wait = || {
            called.set(true);
            Ok(())
        };
        all_work.wait_past(second, wait).unwrap();
        assert!(called.get());
    }
}

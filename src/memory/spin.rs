//! A lock for data that one thread uses nearly always: taking it free of contention is one exchange.

use super::sync::{relax, AtomicBool, Ordering, UnsafeCell};

pub struct SpinLock<T> {
    locked: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only by the holder of the lock.
unsafe impl<T: Send> Send for SpinLock<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    pub fn new(value: T) -> SpinLock<T> {
        SpinLock { locked: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Runs `body` alone. It must be short, and must neither block nor take this lock again.
    #[inline]
    pub fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        let mut spins = 0;
        while self.locked.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            // Waiting only reads: exchanges would take the line away from the holder, who wants to unlock.
            while self.locked.load(Ordering::Relaxed) {
                relax(spins);
                spins += 1;
            }
        }
        let release = Release(&self.locked);
        // SAFETY: this thread alone holds the lock.
        let result = self.value.with_mut(|value| body(unsafe { &mut *value }));
        drop(release);
        result
    }
}

/// Unlocks on panic as well.
struct Release<'a>(&'a AtomicBool);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

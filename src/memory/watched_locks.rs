//! Locks for builds under ThreadSanitizer, which does not see what happens inside std's own when threads wait for each
//! other. These are std's with a counter that is read after locking and written before unlocking, where it is seen.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::LockResult;

#[derive(Default)]
struct Order(AtomicU64);

impl Order {
    const fn new() -> Order {
        Order(AtomicU64::new(0))
    }

    fn acquire(&self) {
        self.0.load(Ordering::Acquire);
    }

    /// An exchange, so that the releases of readers add up.
    fn release(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

pub struct Guard<'a, G> {
    order: &'a Order,
    guard: G,
}

impl<G: Deref> Deref for Guard<'_, G> {
    type Target = G::Target;
    fn deref(&self) -> &G::Target {
        &self.guard
    }
}

impl<G: DerefMut> DerefMut for Guard<'_, G> {
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.guard
    }
}

impl<G> Drop for Guard<'_, G> {
    fn drop(&mut self) {
        self.order.release();
    }
}

pub type MutexGuard<'a, T> = Guard<'a, std::sync::MutexGuard<'a, T>>;

#[derive(Default)]
pub struct Mutex<T> {
    order: Order,
    lock: std::sync::Mutex<T>,
}

impl<T> Mutex<T> {
    pub const fn new(value: T) -> Mutex<T> {
        Mutex { order: Order::new(), lock: std::sync::Mutex::new(value) }
    }

    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        let guard = self.lock.lock().expect("no panic under a lock");
        self.order.acquire();
        Ok(Guard { order: &self.order, guard })
    }

    pub fn get_mut(&mut self) -> LockResult<&mut T> {
        self.lock.get_mut()
    }
}

#[derive(Default)]
pub struct RwLock<T> {
    order: Order,
    lock: std::sync::RwLock<T>,
}

impl<T> RwLock<T> {
    pub fn read(&self) -> LockResult<Guard<'_, std::sync::RwLockReadGuard<'_, T>>> {
        let guard = self.lock.read().expect("no panic under a lock");
        self.order.acquire();
        Ok(Guard { order: &self.order, guard })
    }

    pub fn write(&self) -> LockResult<Guard<'_, std::sync::RwLockWriteGuard<'_, T>>> {
        let guard = self.lock.write().expect("no panic under a lock");
        self.order.acquire();
        Ok(Guard { order: &self.order, guard })
    }
}

//! How many objects name a raw stream, so that its end is announced once: with its owner, or with the last object of a
//! stream that the caller owns. Until then other objects queue work and free blocks on it.

use super::RawHandle;
use crate::executor::Executor;
use crate::fork::PerProcess;
use crate::memory::sync::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// Executors give the same values to streams of their own.
type Key = (usize, usize);

#[derive(Default)]
struct Named {
    objects: usize,
    /// The end is being announced: whoever names the stream now waits, and then finds nothing of the past.
    ending: bool,
}

static HANDLES: PerProcess<Mutex<Option<HashMap<Key, Named>>>> = PerProcess::new(|| Mutex::new(None));

/// Between two looks at whether an end is over. It takes microseconds, and hardly ever is anybody there to wait for it.
const WAIT_STEP: Duration = Duration::from_micros(20);

fn key(executor: &Arc<dyn Executor>, raw: RawHandle) -> Key {
    (Arc::as_ptr(executor).cast::<()>() as usize, raw.0 as usize)
}

fn lock() -> MutexGuard<'static, Option<HashMap<Key, Named>>> {
    HANDLES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Another object names the stream.
pub fn enter(executor: &Arc<dyn Executor>, raw: RawHandle) {
    let key = key(executor, raw);
    loop {
        let mut handles = lock();
        let named = handles.get_or_insert_with(HashMap::new).entry(key).or_default();
        if !named.ending {
            named.objects += 1;
            return;
        }
        drop(handles);
        std::thread::sleep(WAIT_STEP);
    }
}

/// An object that named the stream goes. `end` runs if it was its owner or the last one, before anybody names it again.
pub fn leave(executor: &Arc<dyn Executor>, raw: RawHandle, owner: bool, end: impl FnOnce()) {
    let key = key(executor, raw);
    {
        let mut handles = lock();
        let Some(named) = handles.as_mut().and_then(|named| named.get_mut(&key)) else { return };
        named.objects -= 1;
        if named.objects > 0 && !owner {
            return;
        }
        named.ending = true;
    }
    let _ending = Ending(key);
    end();
}

/// Should the announcement panic, nobody waits for it for ever.
struct Ending(Key);

impl Drop for Ending {
    fn drop(&mut self) {
        let mut handles = lock();
        if let Some(named) = handles.as_mut() {
            if named.get(&self.0).is_some_and(|named| named.objects == 0) {
                named.remove(&self.0);
            } else if let Some(named) = named.get_mut(&self.0) {
                named.ending = false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuExecutor;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn executor() -> Arc<dyn Executor> {
        Arc::new(CpuExecutor::new(1).unwrap())
    }

    #[test]
    fn the_end_comes_with_the_owner_or_with_the_last_object() {
        let (executor, raw) = (executor(), RawHandle(0x10 as *mut _));
        let ends = AtomicUsize::new(0);
        let leave = |owner| {
            leave(&executor, raw, owner, || {
                ends.fetch_add(1, Ordering::Relaxed);
            })
        };
        (0..3).for_each(|_| enter(&executor, raw));
        leave(false);
        leave(false);
        assert_eq!(ends.load(Ordering::Relaxed), 0);
        leave(false);
        assert_eq!(ends.load(Ordering::Relaxed), 1);
        enter(&executor, raw);
        enter(&executor, raw);
        leave(true);
        assert_eq!(ends.load(Ordering::Relaxed), 2, "the owner goes before the last");
        leave(false);
        assert_eq!(ends.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn nobody_names_a_stream_while_its_end_is_announced() {
        let (executor, raw) = (executor(), RawHandle(0x20 as *mut _));
        let inside = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        enter(&executor, raw);
                        assert_eq!(inside.load(Ordering::SeqCst), 0);
                        leave(&executor, raw, false, || {
                            inside.fetch_add(1, Ordering::SeqCst);
                            std::thread::yield_now();
                            inside.fetch_sub(1, Ordering::SeqCst);
                        });
                    }
                });
            }
        });
    }

    #[test]
    fn an_announcement_that_panics_holds_nobody_up() {
        let (executor, raw) = (executor(), RawHandle(0x30 as *mut _));
        enter(&executor, raw);
        let end = || leave(&executor, raw, false, || panic!("on purpose"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(end)).is_err());
        enter(&executor, raw);
        leave(&executor, raw, false, || {});
    }
}

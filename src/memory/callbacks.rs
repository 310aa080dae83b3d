//! Engine callbacks that free memory when there is none left: caches, idle sequences, speculative buffers.

use std::cell::Cell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Asks for bytes and returns how many were freed; it may call the manager, and must not wait for the allocating thread.
pub type Reclaim = dyn Fn(u64) -> u64 + Send + Sync;

struct Callback {
    id: u64,
    priority: i32,
    reclaim: Box<Reclaim>,
    calls: Mutex<Calls>,
    /// Signalled when the last call under way ends.
    idle: Condvar,
}

#[derive(Default)]
struct Calls {
    running: usize,
    removed: bool,
}

impl Callback {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None`: it has been removed.
    fn call(&self, bytes: u64) -> Option<u64> {
        {
            let mut calls = self.calls();
            if calls.removed {
                return None;
            }
            calls.running += 1;
        }
        let _running = Running(self);
        Some((self.reclaim)(bytes))
    }
}

/// Counts a call as ended, after a panic as well.
struct Running<'a>(&'a Callback);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut calls = self.0.calls();
        calls.running -= 1;
        if calls.running == 0 {
            self.0.idle.notify_all();
        }
    }
}

#[derive(Default)]
pub struct Callbacks {
    list: Mutex<(u64, Vec<Arc<Callback>>)>,
}

/// How often one failing allocation asks each callback: one that claims to free and never does cannot hold it forever.
const ROUNDS: usize = 4;

thread_local! {
    static RECLAIMING: Cell<bool> = const { Cell::new(false) };
}

impl Callbacks {
    /// Lower priorities are asked first.
    pub fn add(&self, priority: i32, reclaim: Box<Reclaim>) -> u64 {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        list.0 += 1;
        let id = list.0;
        let at = list.1.partition_point(|other| other.priority <= priority);
        let (calls, idle) = Default::default();
        list.1.insert(at, Arc::new(Callback { id, priority, reclaim, calls, idle }));
        id
    }

    /// Returns whether there was one. No call of it begins any more, and calls under way in other threads are waited for,
    /// unless a reclaim callback asks: two that remove each other would wait for ever.
    pub fn remove(&self, id: u64) -> bool {
        let removed = {
            let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
            let found = list.1.iter().position(|callback| callback.id == id);
            found.map(|at| list.1.remove(at))
        };
        let Some(callback) = removed else { return false };
        let mut calls = callback.calls();
        calls.removed = true;
        while calls.running > 0 && !RECLAIMING.get() {
            calls = callback.idle.wait(calls).unwrap_or_else(PoisonError::into_inner);
        }
        true
    }

    /// Asks one after the other for `bytes`, calling `retry` whenever something was freed, until it has a result. Holds
    /// no lock. An allocation inside a callback that fails as well asks nobody.
    pub fn ask<T>(&self, bytes: u64, mut retry: impl FnMut() -> Option<T>) -> Option<T> {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner).1.clone();
        if list.is_empty() || RECLAIMING.replace(true) {
            return None;
        }
        let _end = End;
        for callback in list {
            for _ in 0..ROUNDS {
                let Some(freed) = callback.call(bytes) else { break };
                log::debug!(target: "nvbackend::memory", "reclaim callback {} freed {freed} of {bytes} bytes", callback.id);
                if freed == 0 {
                    break;
                }
                if let Some(result) = retry() {
                    return Some(result);
                }
            }
        }
        None
    }

    pub fn is_empty(&self) -> bool {
        self.list.lock().unwrap_or_else(PoisonError::into_inner).1.is_empty()
    }
}

/// Lets the thread ask callbacks again, after a panic in one as well.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        RECLAIMING.set(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn callbacks_are_asked_by_priority_and_a_bounded_number_of_times() {
        let callbacks = Callbacks::default();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let note = |name: &'static str, freed| {
            let asked = asked.clone();
            Box::new(move |_| {
                asked.lock().unwrap().push(name);
                freed
            })
        };
        callbacks.add(5, note("late", 1));
        callbacks.add(-5, note("early", 0));
        let gone = callbacks.add(0, note("gone", 1));
        assert!(callbacks.remove(gone) && !callbacks.remove(gone));
        assert_eq!(callbacks.ask(10, || None::<()>), None);
        assert_eq!(*asked.lock().unwrap(), ["early", "late", "late", "late", "late"]);
    }

    #[test]
    fn removing_waits_for_calls_under_way_in_other_threads() {
        let callbacks = Arc::new(Callbacks::default());
        let (inside, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (in_call, after_call) = (inside.clone(), ended.clone());
        let id = callbacks.add(
            0,
            Box::new(move |_| {
                in_call.store(1, Ordering::SeqCst);
                std::thread::sleep(std::time::Duration::from_millis(20));
                after_call.store(1, Ordering::SeqCst);
                0
            }),
        );
        std::thread::scope(|scope| {
            scope.spawn(|| callbacks.ask(1, || None::<()>));
            while inside.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            assert!(callbacks.remove(id));
            assert_eq!(ended.load(Ordering::SeqCst), 1, "its data may go now");
        });
    }

    #[test]
    fn a_callback_may_remove_itself() {
        let callbacks = Arc::new(Callbacks::default());
        let (inner, id) = (callbacks.clone(), Arc::new(AtomicUsize::new(0)));
        let own = id.clone();
        id.store(
            callbacks.add(0, Box::new(move |_| u64::from(inner.remove(own.load(Ordering::SeqCst) as u64)))) as usize,
            Ordering::SeqCst,
        );
        assert_eq!(callbacks.ask(1, || None::<()>), None);
        assert!(callbacks.is_empty());
    }

    #[test]
    fn a_callback_may_ask_again_and_gets_nothing() {
        let callbacks = Arc::new(Callbacks::default());
        let depth = Arc::new(AtomicUsize::new(0));
        let (inner, count) = (callbacks.clone(), depth.clone());
        callbacks.add(
            0,
            Box::new(move |bytes| {
                count.fetch_add(1, Ordering::Relaxed);
                assert_eq!(inner.ask(bytes, || Some(())), None);
                1
            }),
        );
        assert_eq!(callbacks.ask(1, || Some(7)), Some(7));
        assert_eq!(callbacks.ask(1, || Some(7)), Some(7));
        assert_eq!(depth.load(Ordering::Relaxed), 2);
    }
}

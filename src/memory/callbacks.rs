//! Engine callbacks that free memory when there is none left: caches, idle sequences, speculative buffers.

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};

/// Asks for bytes and returns how many were freed; it may call the manager, and must not wait for the allocating thread.
pub type Reclaim = dyn Fn(u64) -> u64 + Send + Sync;

struct Callback {
    id: u64,
    priority: i32,
    reclaim: Box<Reclaim>,
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
        list.1.insert(at, Arc::new(Callback { id, priority, reclaim }));
        id
    }

    /// Returns whether there was one. A call that is under way in another thread is not waited for.
    pub fn remove(&self, id: u64) -> bool {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let before = list.1.len();
        list.1.retain(|callback| callback.id != id);
        list.1.len() < before
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
                let freed = (callback.reclaim)(bytes);
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

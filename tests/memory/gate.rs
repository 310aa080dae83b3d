//! Threads that touch blocks, and one that puts the manager to sleep, when nobody may. Allocating and freeing need no
//! gate.

use std::sync::atomic::{AtomicBool, Ordering};

const PLACES: usize = 8;

/// Each thread has a place of its own: a lock would order the threads, and so hide their races from ThreadSanitizer.
#[derive(Default)]
pub struct Gate {
    closed: AtomicBool,
    inside: [AtomicBool; PLACES],
}

/// Sets the flag back when whoever set it is done, or has panicked.
pub struct Pass<'a>(&'a AtomicBool);

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

fn wait_while(flag: &AtomicBool) {
    while flag.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
}

impl Gate {
    /// Waits until the gate is open, which it then stays until the pass is dropped.
    pub fn enter(&self, place: usize) -> Pass<'_> {
        loop {
            self.inside[place].store(true, Ordering::SeqCst);
            let pass = Pass(&self.inside[place]);
            if !self.closed.load(Ordering::SeqCst) {
                return pass;
            }
            drop(pass);
            wait_while(&self.closed);
        }
    }

    /// Waits until nobody is inside, and keeps everybody out until the pass is dropped.
    pub fn close(&self) -> Pass<'_> {
        self.closed.store(true, Ordering::SeqCst);
        self.inside.iter().for_each(wait_while);
        Pass(&self.closed)
    }
}

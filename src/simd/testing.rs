//! A run at every instruction set of this CPU.

use super::Level;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// One more than the index of the level that `dispatch` uses; 0: the best.
static FORCED: AtomicUsize = AtomicUsize::new(0);

pub fn level() -> Level {
    match FORCED.load(Ordering::Relaxed) {
        0 => Level::best(),
        forced => Level::supported().nth(forced - 1).expect("a supported level was forced"),
    }
}

/// Calls `body` with the kernels compiled for each instruction set of this CPU in turn.
pub fn at_every_level(body: impl Fn(Level)) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for (index, level) in Level::supported().enumerate() {
        FORCED.store(index + 1, Ordering::Relaxed);
        body(level);
    }
    FORCED.store(0, Ordering::Relaxed);
}

//! A run at every instruction set of this CPU.

use super::Level;
use std::sync::{Mutex, PoisonError};

/// Calls `body` with the kernels compiled for each instruction set of this CPU in turn.
pub fn at_every_level(body: impl Fn(Level)) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for level in Level::supported() {
        body(level.force());
    }
    Level::best().force();
}

//! Who is told that a device has been lost.

use std::sync::atomic::{fence, Ordering};
use std::sync::OnceLock;

static ON_LOSS: OnceLock<fn()> = OnceLock::new();

/// Has `act` called whenever a device has been lost, in the thread whose driver call failed, whatever locks it holds: `act`
/// takes none. The first `act` of a process is the one that is called.
pub fn when_a_device_is_lost(act: fn()) {
    ON_LOSS.get_or_init(|| act);
    // Who asks `refuse_lost` after this and is not refused did all before it in time for `act`: of this fence and the other
    // one, one comes first.
    fence(Ordering::SeqCst);
}

/// For the device whose `refuse_lost` has begun to refuse.
#[cfg(feature = "cuda")]
pub fn a_device_is_lost() {
    fence(Ordering::SeqCst);
    if let Some(act) = ON_LOSS.get() {
        act();
    }
}

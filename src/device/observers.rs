//! Who is told when a stream of a device ends.

use super::{Device, RawHandle};
use crate::fork::PerProcess;
use std::sync::{Arc, PoisonError, RwLock, Weak};

/// Is told when a stream's handle is about to lose its meaning, while work may still be queued on it.
pub trait StreamObserver: Send + Sync {
    fn stream_ends(&self, stream: RawHandle);

    /// Whether the range lies inside one of the observer's live blocks; `None`: its memory is elsewhere.
    fn owns_live(&self, address: usize, bytes: usize) -> Option<bool>;
}

/// Observers with the device whose streams they care about.
type Observers = Vec<(Weak<dyn Device>, Weak<dyn StreamObserver>)>;

static OBSERVERS: PerProcess<RwLock<Observers>> = PerProcess::new(Default::default);

/// `observer` hears of every stream of the device that ends from now on (`stream/handles.rs`), for as long as it lives.
pub fn observe(device: &Arc<dyn Device>, observer: Weak<dyn StreamObserver>) {
    let mut observers = OBSERVERS.write().unwrap_or_else(PoisonError::into_inner);
    observers.retain(|(_, observer)| observer.strong_count() > 0);
    observers.push((Arc::downgrade(device), observer));
}

/// Those of the device's streams. Used outside the lock: one may be the last to hold a manager, whose end takes time.
pub fn observers_of(device: &dyn Device) -> Vec<Arc<dyn StreamObserver>> {
    let mut concerned = Vec::new();
    for (other, observer) in OBSERVERS.read().unwrap_or_else(PoisonError::into_inner).iter() {
        if std::ptr::addr_eq(other.as_ptr(), device) {
            concerned.extend(observer.upgrade());
        }
    }
    concerned
}

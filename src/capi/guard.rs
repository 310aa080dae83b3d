//! The panic guard around every exported function, and what it leaves behind for the caller.

use super::status::{nvb_status, set_last_error};
use crate::error::{Error, Result, Status};
use std::any::Any;
use std::cell::RefCell;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

/// Runs the body of an exported function; a panic becomes `NVB_ERROR_INTERNAL` and poisons the call's object.
macro_rules! guard {
    ($name:ident, $body:block) => {
        $crate::capi::guard::run(stringify!($name), || -> $crate::error::Result<()> {
            let _ = $name as *const ();
            $body
        })
    };
}
pub(crate) use guard;

thread_local! {
    /// The flag of the first handle that the running call looked up: the object that a panic poisons.
    static SUBJECT: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Called by handle lookups.
pub fn note_subject(poisoned: &Arc<AtomicBool>) {
    SUBJECT.with(|subject| {
        subject.borrow_mut().get_or_insert_with(|| poisoned.clone());
    });
}

pub fn run(name: &'static str, body: impl FnOnce() -> Result<()>) -> nvb_status {
    install_panic_hook();
    SUBJECT.with(|subject| subject.borrow_mut().take());
    let outcome = catch_unwind(AssertUnwindSafe(body));
    let subject = SUBJECT.with(|subject| subject.borrow_mut().take());
    let error = match outcome {
        Ok(Ok(())) => return Status::Ok as nvb_status,
        Ok(Err(error)) => error,
        Err(panic) => {
            if let Some(poisoned) = subject {
                poisoned.store(true, Ordering::Release);
            }
            Error::new(Status::Internal, format!("a bug in nvbackend: {}", panic_text(panic.as_ref())))
                .with_advice("please report it; the object of this call now refuses all calls but destroy")
        }
    };
    log::debug!(target: "nvbackend::capi", "{name}: {error}");
    let status = error.status;
    set_last_error(error.context(name));
    status as nvb_status
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without a text")
}

/// The library prints nothing: a panic's place goes to the log. The hook is that of this library's own copy of std.
fn install_panic_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if cfg!(test) {
            return;
        }
        std::panic::set_hook(Box::new(|info| log::error!(target: "nvbackend", "{info}")));
    });
}

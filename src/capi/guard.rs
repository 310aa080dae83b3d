//! The panic guard around every exported function, and what it leaves behind for the caller.

use super::handle::State;
use super::last_error::set_last_error;
use super::status::nvb_status;
use crate::error::{Error, Result, Status};
use std::any::Any;
use std::cell::Cell;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};

/// Runs the body of an exported function; a panic becomes `NVB_ERROR_INTERNAL` and poisons the call's object. With an
/// expression before the body that is tried first, as in `run_unless`.
macro_rules! guard {
    ($name:ident, $body:block) => {
        $crate::capi::guard::run(stringify!($name), || -> $crate::error::Result<()> {
            let _ = $name as *const ();
            $body
        })
    };
    ($name:ident, $quick:expr, $body:block) => {
        $crate::capi::guard::run_unless(stringify!($name), $quick, || -> $crate::error::Result<()> {
            let _ = $name as *const ();
            $body
        })
    };
}
pub(crate) use guard;

type Subject = Cell<Option<(&'static State, u32)>>;

thread_local! {
    /// The first handle that the running call looked up: the object that a panic poisons.
    static SUBJECT: Subject = const { Cell::new(None) };
}
const _: () = assert!(!std::mem::needs_drop::<Subject>(), "it must answer after the thread's destructors");

/// Called by handle lookups with the slot's state and the handle's generation.
pub fn note_subject(state: &'static State, generation: u32) {
    SUBJECT.with(|subject| subject.set(subject.get().or(Some((state, generation)))));
}

pub fn run(name: &'static str, body: impl FnOnce() -> Result<()>) -> nvb_status {
    install_panic_hook();
    // The caller of a callback has a subject of its own, which it gets back.
    let outer = SUBJECT.replace(None);
    let outcome = catch_unwind(AssertUnwindSafe(body));
    let subject = SUBJECT.replace(outer);
    let error = match outcome {
        Ok(Ok(())) => return Status::Ok as nvb_status,
        Ok(Err(error)) => error,
        Err(panic) => {
            if let Some((state, generation)) = subject {
                state.poison(generation);
            }
            Error::new(Status::Internal, format!("a bug in nvbackend: {}", panic_text(panic.as_ref())))
                .with_advice("please report it; the object of this call now refuses all calls but destroy")
        }
    };
    let status = error.status;
    // The log writes to a place of the engine's, where a panic is none of the caller's business either.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        log::debug!(target: "nvbackend::capi", "{name}: {error}");
        set_last_error(error.context(name));
    }));
    status as nvb_status
}

/// Does what `run` does, unless `quick`, which looks no handle up and cannot fail, has done the call's work. It costs
/// the caller neither a subject nor the stack of the body.
#[inline]
pub fn run_unless(
    name: &'static str,
    quick: impl FnOnce() -> Option<()>,
    body: impl FnOnce() -> Result<()>,
) -> nvb_status {
    match catch_unwind(AssertUnwindSafe(quick)) {
        Ok(Some(())) => Status::Ok as nvb_status,
        Ok(None) => run_slowly(name, None, body),
        Err(panic) => run_slowly(name, Some(panic), body),
    }
}

#[cold]
#[inline(never)]
fn run_slowly(name: &'static str, panic: Option<Box<dyn Any + Send>>, body: impl FnOnce() -> Result<()>) -> nvb_status {
    run(name, || match panic {
        Some(panic) => resume_unwind(panic),
        None => body(),
    })
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
    // No `Once`: a child of `fork` would wait for ever for a thread that was in the middle.
    static INSTALLED: AtomicBool = AtomicBool::new(cfg!(test));
    if !INSTALLED.load(Ordering::Relaxed) && !INSTALLED.swap(true, Ordering::Relaxed) {
        std::panic::set_hook(Box::new(|info| log::error!(target: "nvbackend", "{info}")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn the_quick_way_is_tried_once_and_its_panic_is_an_error() {
        let ok = Status::Ok as nvb_status;
        assert_eq!(run_unless("call", || Some(()), || panic!("the work is done")), ok);
        let ran = Cell::new(0);
        let body = || {
            ran.set(ran.get() + 1);
            Ok(())
        };
        assert_eq!((run_unless("call", || None, body), ran.get()), (ok, 1));
        let failed = run_unless("call", || None, || Err(Error::invalid("a reason")));
        assert_eq!(failed, Status::InvalidArgument as nvb_status);
        let failed = run_unless("call", || panic!("a bug"), body);
        assert_eq!((failed, ran.get()), (Status::Internal as nvb_status, 1));
    }
}

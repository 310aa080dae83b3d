//! The last error of each thread, which is asked for and replaced until the thread's very end (`thread_end.rs`).

use crate::error::Error;
use crate::thread_end::ThreadEnd;
use std::cell::Cell;
use std::ffi::c_void;

type Last = Cell<*mut Error>;

thread_local! {
    /// NULL, or a box that the thread owns.
    static LAST: Last = const { Cell::new(std::ptr::null_mut()) };
}
const _: () = assert!(!std::mem::needs_drop::<Last>(), "it must answer after the thread's destructors");

static END: ThreadEnd = ThreadEnd::new(free);

pub fn set_last_error(error: Error) {
    let old = LAST.replace(Box::into_raw(Box::new(error)));
    if old.is_null() {
        END.expect();
    } else {
        // SAFETY: the thread's own, which nobody reads any more.
        drop(unsafe { Box::from_raw(old) });
    }
}

/// Runs `body`, which calls nobody back, with the calling thread's last error.
pub fn with_last_error<R>(body: impl FnOnce(Option<&Error>) -> R) -> R {
    // SAFETY: NULL, or the thread's own box, which only `set_last_error` and the thread's end replace.
    body(unsafe { LAST.get().as_ref() })
}

extern "C" fn free(_: *mut c_void) {
    let last = LAST.replace(std::ptr::null_mut());
    if !last.is_null() {
        // SAFETY: as in `set_last_error`.
        drop(unsafe { Box::from_raw(last) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_has_its_own_and_the_latest() {
        let text = || with_last_error(|last| last.map(|error| error.message.clone()));
        std::thread::spawn(move || {
            assert_eq!(text(), None);
            set_last_error(Error::invalid("the first"));
            set_last_error(Error::invalid("the second"));
            assert_eq!(text().as_deref(), Some("the second"));
            free(std::ptr::null_mut());
            assert_eq!(text(), None);
        })
        .join()
        .unwrap();
    }
}

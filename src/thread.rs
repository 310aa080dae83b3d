//! Threads that the system may refuse. The standard library's ask for memory on their way that they cannot do without, and
//! end the process where there is none; the system's own call answers with an error.

use std::any::Any;
use std::ffi::c_void;
use std::io::{Error, Result};
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::{Mutex, PoisonError};

/// What the standard library gives its threads too. The system's default follows a limit of the process, mostly 8 MiB of
/// address space.
const STACK_BYTES: usize = 2 << 20;

/// A thread that has not been joined.
pub struct Handle(libc::pthread_t);

// SAFETY: the number of a thread, which any other may join.
unsafe impl Send for Handle {}
// SAFETY: as above; joining takes the handle.
unsafe impl Sync for Handle {}

impl Handle {
    pub fn join(self) {
        // SAFETY: a joinable thread, joined once because the handle goes.
        unsafe { libc::pthread_join(self.0, std::ptr::null_mut()) };
    }
}

type Body<'a> = Box<dyn FnOnce() + Send + 'a>;

/// Starts a thread that runs `body`, which must not panic. `name` has at most 15 bytes that tools show.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<Handle> {
    // SAFETY: nothing is borrowed.
    unsafe { start(name, Box::new(body)) }
}

/// # Safety
/// What the body borrows lives until the thread is joined.
unsafe fn start(name: &str, body: Body<'_>) -> Result<Handle> {
    extern "C" fn run(start: *mut c_void) -> *mut c_void {
        // SAFETY: `start` gave the box away to this thread.
        let start = unsafe { Box::from_raw(start.cast::<Start<'_>>()) };
        let Start { name, body } = *start;
        // SAFETY: NUL-terminated by its one byte more than is written.
        #[cfg(target_os = "linux")]
        unsafe {
            libc::prctl(libc::PR_SET_NAME, name.as_ptr());
        }
        // A panic must not leave the thread; bodies see to theirs.
        let _ = catch_unwind(AssertUnwindSafe(body));
        std::ptr::null_mut()
    }
    struct Start<'a> {
        name: [u8; 16],
        body: Body<'a>,
    }
    let mut short = [0; 16];
    short.iter_mut().take(15).zip(name.bytes()).for_each(|(to, from)| *to = from);
    let start = Box::into_raw(Box::new(Start { name: short, body }));
    // SAFETY: an attribute object initialised before it is used and destroyed once; `start` belongs to the thread if there
    // is one, and to this call if not.
    unsafe {
        let mut attributes = std::mem::zeroed();
        let mut id = std::mem::zeroed();
        let mut code = libc::pthread_attr_init(&mut attributes);
        if code == 0 {
            libc::pthread_attr_setstacksize(&mut attributes, STACK_BYTES);
            code = libc::pthread_create(&mut id, &attributes, run, start.cast());
            libc::pthread_attr_destroy(&mut attributes);
        }
        if code != 0 {
            drop(Box::from_raw(start));
            return Err(Error::from_raw_os_error(code));
        }
        Ok(Handle(id))
    }
}

/// Runs `body` on this thread and on up to `count` − 1 others, as many as the system allows, and returns when all have
/// ended. A panic of any is raised again here.
pub fn on_several(count: usize, body: impl Fn() + Sync) {
    /// Joins whatever was started, should this thread's own share panic.
    struct Joined(Vec<Handle>);
    impl Drop for Joined {
        fn drop(&mut self) {
            self.0.drain(..).for_each(Handle::join);
        }
    }
    let panic: Mutex<Option<Box<dyn Any + Send>>> = Mutex::new(None);
    let guarded = || {
        if let Err(payload) = catch_unwind(AssertUnwindSafe(&body)) {
            panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
        }
    };
    let mut others = Joined(Vec::new());
    for index in 1..count {
        if others.0.try_reserve(1).is_err() {
            break;
        }
        // SAFETY: `others` is joined before `guarded` and what it borrows go.
        match unsafe { start("nvbackend-work", Box::new(&guarded)) } {
            Ok(handle) => others.0.push(handle),
            Err(error) => {
                log::warn!(target: "nvbackend", "{index} of {count} threads work: {error}");
                break;
            }
        }
    }
    guarded();
    drop(others);
    let payload = panic.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(payload) = payload {
        resume_unwind(payload);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Barrier};

    #[test]
    fn several_threads_run_the_body_and_end() {
        let (barrier, runs) = (Barrier::new(4), AtomicUsize::new(0));
        on_several(4, || {
            barrier.wait();
            runs.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(runs.into_inner(), 4);
    }

    #[test]
    fn a_panic_of_any_thread_reaches_the_caller_after_all_have_ended() {
        let runs = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            on_several(3, || {
                if runs.fetch_add(1, Ordering::Relaxed) == 1 {
                    panic!("the second");
                }
            });
        }));
        assert_eq!(*result.unwrap_err().downcast::<&str>().unwrap(), "the second");
        assert_eq!(runs.into_inner(), 3);
    }

    #[test]
    fn a_joined_thread_has_run() {
        let ran = Arc::new(AtomicUsize::new(0));
        let inside = ran.clone();
        spawn("a name longer than tools show", move || inside.store(1, Ordering::Relaxed)).unwrap().join();
        assert_eq!(ran.load(Ordering::Relaxed), 1);
    }
}

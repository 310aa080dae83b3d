//! Says which call was running when something went wrong, and hands over to libFuzzer, which keeps the input.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::Once;

/// What a thread is doing: a function's name and the bytes that its arguments come from.
#[derive(Clone, Copy)]
pub struct Doing {
    pub function: &'static str,
    pub step: usize,
    pub bytes: [u8; 3],
}

thread_local! {
    static DOING: Cell<Doing> = const { Cell::new(Doing { function: "nothing", step: 0, bytes: [0; 3] }) };
}

#[allow(dead_code)] // A target of one call has nothing to tell.
pub fn note(doing: Doing) {
    DOING.set(doing);
}

/// Frames with their names, for which memory is allocated.
fn report_named(what: &str) {
    report(&format!("{what}\n{}\nfuzz: that was", std::backtrace::Backtrace::force_capture()), false);
}

fn report(what: &str, with_frames: bool) {
    let Doing { function, step, bytes } = DOING.get();
    let text = format!("\nfuzz: {what} in {function}, step {step} ({bytes:?})\n");
    // SAFETY: bytes that are there. In a handler the formatting above may fail, which then ends the process all the same.
    unsafe {
        libc::write(2, text.as_ptr().cast(), text.len());
        if !with_frames {
            return;
        }
        let mut frames = [std::ptr::null_mut(); 64];
        let count = libc::backtrace(frames.as_mut_ptr(), 64);
        libc::backtrace_symbols_fd(frames.as_ptr(), count, 2);
    }
}

/// Ends the process because a rule of the header was broken.
pub fn fail(what: &str) -> ! {
    report_named(what);
    // SAFETY: no memory is at stake.
    unsafe { libc::abort() }
}

static mut NEXT: [Option<libc::sigaction>; 32] = [None; 32];

extern "C" fn handle(signal: c_int, _information: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    report(&format!("signal {signal}"), true);
    // SAFETY: written once, before the handler was installed. Back in the program the fault happens again.
    unsafe {
        let next = (*(&raw const NEXT))[signal as usize].as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        libc::sigaction(signal, next, std::ptr::null_mut());
    }
}

/// Stands before libFuzzer's handlers, which are there when the first input comes, and behind the library's panic hook, which
/// its first call installs and which prints nothing.
pub fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: NULL is refused.
        let _ = unsafe { nvbackend::capi::version::nvb_get_build_info(std::ptr::null_mut()) };
        std::panic::set_hook(Box::new(|information| {
            if DOING.get().function != "nvb_test_inject_panic" {
                report_named(&information.to_string());
            }
        }));
        for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL] {
            // SAFETY: a handler of the type that SA_SIGINFO asks for.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = handle as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                let mut before: libc::sigaction = std::mem::zeroed();
                libc::sigaction(signal, &action, &mut before);
                (*(&raw mut NEXT))[signal as usize] = Some(before);
            }
        }
    });
}

//! Runs a check in a process of its own: the library detects devices once a process, and a crash or a hang must name
//! the check and not end the others.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::time::Duration;

/// What a check came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Passed,
    /// Passed, and the planned fault never fired: the sweep is over.
    NoFault,
}

const NO_FAULT: i32 = 10;
const FAILED: i32 = 11;
/// A check makes some hundred calls of a driver that never waits.
const LIMIT: Duration = Duration::from_secs(60);

/// Forks, runs `check` and waits for it; a failure is printed as it happens and returned as its text.
pub fn in_child(check: impl FnOnce() -> Result<Outcome, String>) -> Result<Outcome, String> {
    // SAFETY: this program has one thread, so the child may go on as its parent would.
    match unsafe { libc::fork() } {
        -1 => Err(format!("fork: {}", std::io::Error::last_os_error())),
        0 => {
            // SAFETY: ends this process if it hangs.
            unsafe { libc::alarm(LIMIT.as_secs() as u32) };
            let code = match catch_unwind(AssertUnwindSafe(check)) {
                Ok(Ok(Outcome::Passed)) => 0,
                Ok(Ok(Outcome::NoFault)) => NO_FAULT,
                Ok(Err(problem)) => {
                    eprintln!("    {problem}");
                    FAILED
                }
                Err(panic) => {
                    let text = panic.downcast_ref::<String>().map(String::as_str);
                    eprintln!("    panicked: {}", text.or(panic.downcast_ref().copied()).unwrap_or("without a text"));
                    FAILED
                }
            };
            // SAFETY: without exit handlers, which belong to the parent.
            unsafe { libc::_exit(code) }
        }
        child => wait(child),
    }
}

fn wait(child: libc::pid_t) -> Result<Outcome, String> {
    let mut status = 0;
    // SAFETY: the child's number and a valid pointer.
    if unsafe { libc::waitpid(child, &mut status, 0) } != child {
        return Err(format!("waitpid: {}", std::io::Error::last_os_error()));
    }
    if libc::WIFSIGNALED(status) {
        return Err(match libc::WTERMSIG(status) {
            libc::SIGALRM => format!("hung for {} seconds", LIMIT.as_secs()),
            signal => format!("crashed with signal {signal}"),
        });
    }
    match libc::WEXITSTATUS(status) {
        0 => Ok(Outcome::Passed),
        NO_FAULT => Ok(Outcome::NoFault),
        FAILED => Err("failed (above)".to_owned()),
        code => Err(format!("ended with code {code}")),
    }
}

//! How often each function was called and succeeded: a fuzzer whose calls all fail tests little.

use super::interface::FUNCTIONS;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Once};

struct Count {
    calls: AtomicU64,
    successes: AtomicU64,
}

static COUNTS: LazyLock<Vec<Count>> = LazyLock::new(|| {
    FUNCTIONS.iter().map(|_| Count { calls: AtomicU64::new(0), successes: AtomicU64::new(0) }).collect()
});

pub fn count(function: usize, succeeded: bool) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: a function that takes nothing.
        unsafe { libc::atexit(at_exit) };
    });
    COUNTS[function].calls.fetch_add(1, Ordering::Relaxed);
    COUNTS[function].successes.fetch_add(u64::from(succeeded), Ordering::Relaxed);
}

extern "C" fn at_exit() {
    super::setup::remove_files();
    let Ok(wanted) = std::env::var("NVB_FUZZ_STATISTICS") else { return };
    for (function, count) in FUNCTIONS.iter().zip(COUNTS.iter()) {
        let (calls, successes) = (count.calls.load(Ordering::Relaxed), count.successes.load(Ordering::Relaxed));
        if wanted != "failing" || successes == 0 {
            eprintln!("fuzz: {:48} {calls:8} calls, {successes:8} successes", function.name);
        }
    }
}

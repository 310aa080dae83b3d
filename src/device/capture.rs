//! Waiting for a device's work while some thread may capture a stream.

use crate::error::Result;
use std::cell::Cell;
use std::time::{Duration, Instant};

/// Waits by `wait` for the whole device before memory goes that its work may use. While any thread captures a stream CUDA
/// refuses that, and invalidates the capture; that thread then ends it, so what was refused is tried again, for a second at
/// most: the capture may be the caller's own. Who gave up is not made to wait again for the next block, but for a second.
pub fn wait_past_captures(wait: impl Fn() -> Result<()>) -> Result<()> {
    const STREAM_CAPTURE_UNSUPPORTED: i32 = 900;
    const PATIENCE: Duration = Duration::from_secs(1);
    thread_local! {
        static GAVE_UP: Cell<Option<Instant>> = const { Cell::new(None) };
    }
    let start = Instant::now();
    let patient = GAVE_UP.get().is_none_or(|then| then.elapsed() > PATIENCE);
    loop {
        match wait() {
            Err(error) if error.cuda_code == STREAM_CAPTURE_UNSUPPORTED => {
                if !patient {
                    return Err(error);
                }
                if start.elapsed() > PATIENCE {
                    GAVE_UP.set(Some(Instant::now()));
                    return Err(error);
                }
                std::thread::sleep(Duration::from_micros(100));
            }
            waited => return waited,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_blocks_wait_for_a_capture_together() {
        let tries = Cell::new(0);
        let refuse = || {
            tries.set(tries.get() + 1);
            Err(crate::error::Error::new(crate::error::Status::Device, "captured").with_cuda_code(900))
        };
        (0..1000).for_each(|_| assert!(wait_past_captures(refuse).is_err()));
        assert!(tries.get() > 1000, "the first was tried again");
        let before = tries.get();
        assert!(wait_past_captures(refuse).is_err());
        assert_eq!(tries.get(), before + 1);
        assert!(wait_past_captures(|| Ok(())).is_ok());
    }
}

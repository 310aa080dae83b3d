//! Waiting with a limit, where the driver only offers to wait for ever.

use crate::error::Result;
use std::time::{Duration, Instant};

/// Asks again at once for this long, the length of a short kernel; then with growing pauses.
const SPIN: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// Asks `finished` until it says so or `timeout` is over; at least once. False: the time is over.
pub fn until(mut finished: impl FnMut() -> Result<bool>, timeout: Duration) -> Result<bool> {
    let start = Instant::now();
    let mut pause = SPIN;
    loop {
        if finished()? {
            return Ok(true);
        }
        let waited = start.elapsed();
        let Some(left) = timeout.checked_sub(waited).filter(|left| !left.is_zero()) else { return Ok(false) };
        if waited < SPIN {
            std::hint::spin_loop();
        } else {
            std::thread::sleep(pause.min(left));
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, Status};

    #[test]
    fn what_is_finished_is_not_waited_for() {
        assert!(until(|| Ok(true), Duration::ZERO).unwrap());
        let mut questions = 0;
        let third = || {
            questions += 1;
            Ok(questions == 3)
        };
        assert!(until(third, Duration::from_secs(60)).unwrap());
    }

    #[test]
    fn the_time_is_kept() {
        let start = Instant::now();
        assert!(!until(|| Ok(false), Duration::from_millis(5)).unwrap());
        assert!(start.elapsed() >= Duration::from_millis(5));
        assert!(!until(|| Ok(false), Duration::ZERO).unwrap());
    }

    #[test]
    fn an_error_ends_the_wait() {
        let lost = || Err(Error::new(Status::DeviceLost, "gone"));
        assert_eq!(until(lost, Duration::from_secs(60)).unwrap_err().status, Status::DeviceLost);
    }
}

//! `stream`: order within a stream, order between streams by events, queries and times.

use crate::run::{check, expect_error, Failure};
use nvbackend::device::CopyKind;
use nvbackend::error::Status;
use nvbackend::stream::{Event, Stream};

/// A chain of copies through two streams and back arrives in order.
#[test]
fn events_order_streams() {
    let cases = [1000usize, 1 << 20, 1 << 24];
    check("streams and events", &cases, |run, &bytes| {
        let executor = run.device.backend.executor().clone();
        let other = Stream::new(&executor, -1)?;
        let (filled, copied) = (Event::new(&executor)?, Event::new(&executor)?);
        let memory = run.device.backend.memory().clone();
        let (a, b) = (memory.allocate(bytes, run.stream.raw())?, memory.allocate(bytes, run.stream.raw())?);
        let mut wrong = 0;
        for round in 1..=8u8 {
            let mut back = vec![0u8; bytes];
            // SAFETY: blocks and buffer hold `bytes`; the buffer is read after the stream was waited for.
            unsafe {
                executor.fill(a, round, bytes, run.stream.raw())?;
                filled.record(run.stream)?;
                other.wait(&filled)?;
                executor.copy(b, a, bytes, CopyKind::DeviceToDevice, other.raw())?;
                copied.record(&other)?;
                run.stream.wait(&copied)?;
                executor.fill(a, 0, bytes, run.stream.raw())?;
                executor.copy(back.as_mut_ptr().cast(), b, bytes, CopyKind::DeviceToHost, run.stream.raw())?;
            }
            run.stream.synchronize()?;
            wrong += back.iter().filter(|&&byte| byte != round).count();
        }
        memory.free(a, run.stream.raw())?;
        memory.free(b, run.stream.raw())?;
        if wrong == 0 {
            return Ok(());
        }
        Err(format!("{wrong} bytes overtook a copy").into())
    });
}

#[test]
fn queries_and_times() {
    check("stream queries", &[()], |run, _| {
        let executor = run.device.backend.executor().clone();
        let stream = Stream::new(&executor, 0)?;
        let (start, end) = (Event::new(&executor)?, Event::new(&executor)?);
        expect_error(end.milliseconds_since(&start), Status::InvalidArgument, &["record"])?;
        start.record(&stream)?;
        std::thread::sleep(std::time::Duration::from_millis(20));
        end.record(&stream)?;
        end.synchronize()?;
        stream.synchronize()?;
        let (idle, passed) = (stream.query()?, start.query()? && end.query()?);
        let milliseconds = end.milliseconds_since(&start)?;
        if idle && passed && (10.0..60_000.0).contains(&milliseconds) {
            return Ok(());
        }
        Err(Failure::from(format!("idle {idle}, events passed {passed}, {milliseconds} ms")))
    });
}

//! Events: points in a stream's work.

use super::prelude::*;
use super::stream::STREAMS;
use crate::stream::{Event, Stream};
use std::time::Duration;

/// A point in a stream's work, for ordering streams and for timing.
///
/// Threads: one at a time.
pub struct nvb_event {
    _private: [u8; 0],
}

pub(super) struct EventObject {
    pub event: Event,
    /// Where the event is recorded if no stream is named. It lives as long as the event, whose backend may be gone.
    default_stream: Arc<Stream>,
}

pub(super) static EVENTS: Table<EventObject> = Table::new("event", 4);

/// Creates an event that has recorded nothing yet.
#[no_mangle]
pub unsafe extern "C" fn nvb_event_create(backend: *const nvb_backend, event: *mut *mut nvb_event) -> nvb_status {
    guard!(nvb_event_create, {
        let object = BACKENDS.get(backend)?;
        expect_out("event", event)?;
        let backend = &object.backend;
        let created =
            EventObject { event: Event::new(backend.executor())?, default_stream: backend.default_stream().clone() };
        let handle = EVENTS.insert(Arc::new(created))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("event", event, handle) }
    })
}

/// Destroys the handle; NULL is fine.
#[no_mangle]
pub unsafe extern "C" fn nvb_event_destroy(event: *mut nvb_event) -> nvb_status {
    guard!(nvb_event_destroy, { EVENTS.remove(event) })
}

/// Marks the end of the work queued on `stream` so far; NULL: on the default stream of the backend that the event was
/// created with. May be captured.
#[no_mangle]
pub unsafe extern "C" fn nvb_event_record(event: *mut nvb_event, stream: *mut nvb_stream) -> nvb_status {
    guard!(nvb_event_record, {
        let EventObject { event, default_stream } = &*EVENTS.get(event)?;
        let Some(stream) = STREAMS.get_optional(stream.cast_const())? else {
            return event.record(default_stream);
        };
        if !Arc::ptr_eq(stream.executor(), event.executor()) {
            return Err(Error::invalid("the stream belongs to another backend"));
        }
        event.record(&stream)
    })
}

/// Writes 1 to `finished` if the recorded work has finished (or nothing was recorded), else 0. Does not wait.
#[no_mangle]
pub unsafe extern "C" fn nvb_event_query(event: *mut nvb_event, finished: *mut u32) -> nvb_status {
    guard!(nvb_event_query, {
        let object = EVENTS.get(event)?;
        expect_out("finished", finished)?;
        let value = object.event.query()?;
        // SAFETY: NULL is checked; otherwise valid by the header's contract.
        unsafe { write_out("finished", finished, value.into()) }
    })
}

/// Waits for the recorded work.
#[no_mangle]
pub unsafe extern "C" fn nvb_event_synchronize(event: *mut nvb_event) -> nvb_status {
    guard!(nvb_event_synchronize, { EVENTS.get(event)?.event.synchronize() })
}

/// Waits as `nvb_event_synchronize` does, for at most `timeout_ns` nanoseconds: writes 1 to `finished` if the work has
/// finished, 0 if the time was over first.
#[no_mangle]
pub unsafe extern "C" fn nvb_event_synchronize_for(
    event: *mut nvb_event,
    timeout_ns: u64,
    finished: *mut u32,
) -> nvb_status {
    guard!(nvb_event_synchronize_for, {
        let object = EVENTS.get(event)?;
        expect_out("finished", finished)?;
        let value = object.event.synchronize_for(Duration::from_nanos(timeout_ns))?;
        // SAFETY: NULL is checked; otherwise valid by the header's contract.
        unsafe { write_out("finished", finished, value.into()) }
    })
}

/// Writes the milliseconds between two recorded and finished events.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` if one was not recorded or has not finished.
#[no_mangle]
pub unsafe extern "C" fn nvb_event_get_elapsed(
    start: *mut nvb_event,
    end: *mut nvb_event,
    milliseconds: *mut f32,
) -> nvb_status {
    guard!(nvb_event_get_elapsed, {
        let (start, end) = (EVENTS.get(start)?, EVENTS.get(end)?);
        let (start, end) = (&start.event, &end.event);
        if !Arc::ptr_eq(start.executor(), end.executor()) {
            return Err(Error::invalid("the events belong to different backends"));
        }
        let value = end.milliseconds_since(start)?;
        // SAFETY: NULL is checked; otherwise valid by the header's contract.
        unsafe { write_out("milliseconds", milliseconds, value) }
    })
}

//! Stream managers: a device's streams, shared out.

use super::prelude::*;
use super::stream::insert;
use crate::stream::manager::StreamManager;

/// Streams of one backend's device, given out by load. Created by `nvb_stream_manager_create`.
///
/// Threads: every call may run at once from many threads.
pub struct nvb_stream_manager {
    _private: [u8; 0],
}

static STREAM_MANAGERS: Table<StreamManager> = Table::new("stream manager", 9);

/// Options of `nvb_stream_manager_create`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_stream_manager_options {
    pub struct_size: usize,
    /// Streams of one priority at most, up to 32; 0: 4.
    pub streams_per_priority: u32,
    /// Must be 0.
    pub reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_stream_statistics {
    pub struct_size: usize,
    /// Streams made so far.
    pub streams: u32,
    /// Handles given out and not yet destroyed.
    pub users: u32,
    /// Streams with unfinished work.
    pub busy: u32,
    /// Must be 0.
    pub reserved: u32,
}
versioned!(nvb_stream_manager_options, nvb_stream_statistics);

/// Creates a manager without a stream; they are made as they are needed. Options may be NULL for the defaults.
#[no_mangle]
pub unsafe extern "C" fn nvb_stream_manager_create(
    backend: *const nvb_backend,
    options: *const nvb_stream_manager_options,
    manager: *mut *mut nvb_stream_manager,
) -> nvb_status {
    guard!(nvb_stream_manager_create, {
        let object = BACKENDS.get(backend)?;
        expect_out("manager", manager)?;
        let mut limit = 0;
        if !options.is_null() {
            // SAFETY: a struct with its size set, by the header's contract.
            let options = unsafe { read(options)? };
            if options.reserved != 0 {
                return Err(Error::invalid(format!("reserved is {}; 0 is needed", options.reserved)));
            }
            limit = options.streams_per_priority as usize;
        }
        let handle = STREAM_MANAGERS.insert(Arc::new(StreamManager::new(object.backend.executor(), limit)?))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("manager", manager, handle) }
    })
}

/// Destroys the handle; NULL is fine. Streams that are still given out live until they are destroyed.
#[no_mangle]
pub unsafe extern "C" fn nvb_stream_manager_destroy(manager: *mut nvb_stream_manager) -> nvb_status {
    guard!(nvb_stream_manager_destroy, { STREAM_MANAGERS.remove(manager) })
}

/// Writes a handle to the least loaded stream of `priority` (0 normal, negative more urgent; clamped to what the device
/// offers): the one with the fewest handles, among these one without unfinished work, among these the one that rested
/// longest. A new stream is made while all are in use and the limit allows. Give it back with `nvb_stream_destroy`; its
/// work then runs to its end.
#[no_mangle]
pub unsafe extern "C" fn nvb_stream_manager_acquire(
    manager: *mut nvb_stream_manager,
    priority: i32,
    stream: *mut *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_stream_manager_acquire, {
        let manager = STREAM_MANAGERS.get(manager)?;
        expect_out("stream", stream)?;
        insert(manager.acquire(priority)?, stream)
    })
}

/// Waits for the work of every stream of the manager, and returns the first error that any of it met.
#[no_mangle]
pub unsafe extern "C" fn nvb_stream_manager_synchronize(manager: *mut nvb_stream_manager) -> nvb_status {
    guard!(nvb_stream_manager_synchronize, { STREAM_MANAGERS.get(manager)?.synchronize() })
}

/// Counts streams, users and busy streams; set `statistics->struct_size` first. Readable after `NVB_ERROR_DEVICE_LOST`
/// too, with no stream busy.
#[no_mangle]
pub unsafe extern "C" fn nvb_stream_manager_get_statistics(
    manager: *mut nvb_stream_manager,
    statistics: *mut nvb_stream_statistics,
) -> nvb_status {
    guard!(nvb_stream_manager_get_statistics, {
        let found = STREAM_MANAGERS.get(manager)?.get_statistics()?;
        let value = nvb_stream_statistics {
            struct_size: 0,
            streams: found.streams as u32,
            users: found.users as u32,
            busy: found.busy as u32,
            reserved: 0,
        };
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(statistics, &value) }
    })
}

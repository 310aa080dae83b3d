//! Streams of a stream manager: their priorities, and which of them is the least loaded.

use crate::driver::{passes, works};
use crate::engine::{call, versioned, Engine, Handle};
use crate::fake::{Fake, Setting};
use nvbackend::capi::memory::*;
use nvbackend::capi::stream::*;
use nvbackend::capi::stream_manager::*;
use std::ffi::{c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;

/// What the fake driver offers.
const MOST_URGENT: i32 = -5;

fn manager(engine: &Engine, limit: u32) -> Result<Handle<nvb_stream_manager>, String> {
    let mut options: nvb_stream_manager_options = versioned();
    options.streams_per_priority = limit;
    let mut manager = Handle::new(nvb_stream_manager_destroy);
    works(call!(nvb_stream_manager_create(engine.backend.raw, &options, &mut manager.raw)))?;
    Ok(manager)
}

fn acquire(manager: &Handle<nvb_stream_manager>, priority: i32) -> Result<Handle<nvb_stream>, String> {
    let mut stream = Handle::new(nvb_stream_destroy);
    works(call!(nvb_stream_manager_acquire(manager.raw, priority, &mut stream.raw)))?;
    Ok(stream)
}

fn native(stream: &Handle<nvb_stream>) -> Result<*mut c_void, String> {
    let mut native = null_mut();
    works(call!(nvb_stream_get_native(stream.raw, &mut native)))?;
    Ok(native)
}

/// Priorities arrive at the driver, and those that the device does not have make no streams of their own.
pub fn priorities(file: &Path) -> Result<String, String> {
    passes(|| {
        let fake = Fake::open(file);
        let engine = Engine::new().map_err(|failure| failure.to_string())?;
        let manager = manager(&engine, 1)?;
        // SAFETY: the driver's type of this function.
        let get: extern "C" fn(*mut c_void, *mut c_int) -> c_int =
            unsafe { fake.function(c"cuStreamGetPriority").unwrap() };
        let before = fake.books().streams;
        let mut streams = Vec::new();
        for asked in -50..50 {
            let stream = acquire(&manager, asked)?;
            let mut priority = 7;
            let status = get(native(&stream)?, &mut priority);
            if (status, priority) != (0, asked.clamp(MOST_URGENT, 0)) {
                return Err(format!("priority {asked} became {priority} with status {status}"));
            }
            streams.push(stream);
        }
        match fake.books().streams - before {
            6 => Ok(()),
            made => Err(format!("{made} streams for the {} priorities of the device", 1 - MOST_URGENT)),
        }
    })?;
    Ok("100 priorities, 6 streams".to_owned())
}

/// The one of two streams without a user that has finished its work is given out, though the other has rested longer.
pub fn busy_streams(file: &Path) -> Result<String, String> {
    const BYTES: usize = 4096;
    passes(|| {
        let fake = Fake::open(file);
        fake.set(Setting::Polls, 1000);
        let engine = Engine::new().map_err(|failure| failure.to_string())?;
        let block = engine.block(BYTES, null_mut()).map_err(|failure| failure.to_string())?;
        let manager = manager(&engine, 2)?;
        let (first, second) = (acquire(&manager, 0)?, acquire(&manager, 0)?);
        let (busy, idle) = (native(&first)?, native(&second)?);
        works(call!(nvb_memory_fill(engine.memory.raw, block.pointer, 1, BYTES, first.raw)))?;
        drop((first, second));
        let taken = native(&acquire(&manager, 0)?)?;
        if taken != idle {
            return Err("a stream with unfinished work was given out beside one without".to_owned());
        }
        works(call!(nvb_stream_manager_synchronize(manager.raw)))?;
        let taken = native(&acquire(&manager, 0)?)?;
        if taken != busy {
            return Err("the stream that rested longest was not given out".to_owned());
        }
        Ok(())
    })?;
    Ok("a busy and an idle one".to_owned())
}

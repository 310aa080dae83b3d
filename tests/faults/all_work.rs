//! Waits for all work of a device: the fake driver notes a thread that comes while another waits for the same device.

use crate::driver::{passes, works};
use crate::engine::{call, Engine};
use crate::fake::Fake;
use nvbackend::capi::memory::nvb_memory_manager;
use nvbackend::capi::memory_control::nvb_memory_trim;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Barrier;

const THREADS: usize = 8;
const ROUNDS: usize = 200;

/// Threads of two backends, which share the device, give memory back.
pub fn threads(file: &Path) -> Result<String, String> {
    passes(|| {
        let fake = Fake::open(file);
        let engine = || Engine::new().map_err(|failure| failure.to_string());
        let engines = [engine()?, engine()?];
        let managers = engines.each_ref().map(|engine| engine.memory.raw as usize);
        let start = Barrier::new(THREADS);
        let trim = |manager: usize| -> Result<(), String> {
            let manager = manager as *mut nvb_memory_manager;
            start.wait();
            (0..ROUNDS).try_for_each(|_| works(call!(nvb_memory_trim(manager, 0, null_mut()))))
        };
        let trim = &trim;
        std::thread::scope(|scope| {
            let threads: [_; THREADS] = std::array::from_fn(|i| scope.spawn(move || trim(managers[i % 2])));
            threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
        })?;
        if !fake.functions_called().iter().any(|name| name == "cuCtxSynchronize") {
            return Err("nothing waited for all work".to_owned());
        }
        match fake.books().violations {
            0 => Ok(()),
            _ => Err(fake.violation()),
        }
    })?;
    Ok(format!("{THREADS} threads, one of them at a time"))
}

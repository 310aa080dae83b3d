//! The order of graphs' launches: those of one graph and of graphs that share a workspace wait for each other on the device,
//! and on a stream that the caller captures the operations become a part of the caller's CUDA graph.

use crate::driver::{passes, works};
use crate::engine::{call, versioned, Engine, Handle};
use crate::fake::Fake;
use nvbackend::capi::backend::*;
use nvbackend::capi::graph::*;
use nvbackend::capi::memory::*;
use nvbackend::capi::status::*;
use nvbackend::capi::stream::*;
use std::ffi::{c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;

const BYTES: usize = 4096;

/// A graph that fills the bytes.
fn fill(engine: &Engine, at: *mut c_void, byte: u32) -> Result<Handle<nvb_graph>, String> {
    let mut graph = Handle::new(nvb_graph_destroy);
    works(call!(nvb_graph_create(engine.backend.raw, &mut graph.raw)))?;
    works(call!(nvb_graph_begin(graph.raw, null_mut())))?;
    works(call!(nvb_memory_fill(engine.memory.raw, at, byte, BYTES, null_mut())))?;
    works(call!(nvb_graph_end(graph.raw, null_mut())))?;
    Ok(graph)
}

fn bytes_at(engine: &Engine, at: *mut c_void) -> Result<[u8; BYTES], String> {
    let mut bytes = [0u8; BYTES];
    works(call!(nvb_memory_copy(
        engine.memory.raw,
        bytes.as_mut_ptr().cast(),
        at,
        BYTES,
        NVB_COPY_DEVICE_TO_HOST,
        null_mut()
    )))?;
    works(call!(nvb_backend_synchronize(engine.backend.raw)))?;
    Ok(bytes)
}

fn workspace(graph: &Handle<nvb_graph>) -> Result<(u64, u32), String> {
    let mut info: nvb_graph_info = versioned();
    works(call!(nvb_graph_get_info(graph.raw, &mut info)))?;
    Ok((info.workspace_bytes, info.workspace_graphs))
}

/// How many waits for another stream the launches make.
fn waits(fake: &Fake, launches: &[(&Handle<nvb_graph>, &Handle<nvb_stream>)]) -> Result<i64, String> {
    let before = fake.books().waits;
    for (graph, stream) in launches {
        works(call!(nvb_graph_launch(graph.raw, stream.raw)))?;
    }
    Ok(fake.books().waits - before)
}

pub fn launches(file: &Path) -> Result<String, String> {
    passes(|| {
        let fake = Fake::open(file);
        let engine = works(Engine::new())?;
        let block = works(engine.block(BYTES, null_mut()))?;
        let (one, other) = (works(engine.stream())?, works(engine.stream())?);
        let (first, second) = (fill(&engine, block.pointer, 1)?, fill(&engine, block.pointer, 2)?);
        let alone = waits(fake, &[(&first, &one), (&second, &other), (&first, &one), (&second, &other)])?;
        let in_turn = waits(fake, &[(&first, &other), (&first, &one), (&first, &one)])?;
        let blocks = fake.books().blocks;
        works(call!(nvb_graph_share_workspace(second.raw, first.raw)))?;
        let shared = waits(fake, &[(&second, &other), (&first, &one), (&second, &other), (&second, &other)])?;
        if (alone, in_turn, shared) != (0, 2, 3) {
            return Err(format!("{alone} waits of graphs alone, {in_turn} of one in turn, {shared} of two that share"));
        }
        if (workspace(&first)?, workspace(&second)?) != ((workspace(&first)?.0, 2), workspace(&first)?) {
            return Err("the two do not share one workspace".to_owned());
        }
        if fake.books().blocks > blocks {
            return Err("a launch with a shared workspace took another block".to_owned());
        }
        drop(first);
        match (waits(fake, &[(&second, &one)])?, bytes_at(&engine, block.pointer)?[0], fake.books().violations) {
            (1, 2, 0) => Ok(()),
            found => Err(format!("waits, the byte and violations are {found:?}; {}", fake.violation())),
        }
    })?;
    Ok("launches that share wait for each other, and others do not".to_owned())
}

/// Of the driver, what an engine calls that captures.
struct Driver {
    begin: extern "C" fn(*mut c_void, c_int) -> c_int,
    end: extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int,
    instantiate: extern "C" fn(*mut *mut c_void, *mut c_void, u64) -> c_int,
    launch: extern "C" fn(*mut c_void, *mut c_void) -> c_int,
    destroy: extern "C" fn(*mut c_void) -> c_int,
    destroy_launchable: extern "C" fn(*mut c_void) -> c_int,
}

impl Driver {
    fn of(fake: &Fake) -> Driver {
        // SAFETY: the driver's types of these functions.
        unsafe {
            Driver {
                begin: fake.function(c"cuStreamBeginCapture_v2").unwrap(),
                end: fake.function(c"cuStreamEndCapture").unwrap(),
                instantiate: fake.function(c"cuGraphInstantiateWithFlags").unwrap(),
                launch: fake.function(c"cuGraphLaunch").unwrap(),
                destroy: fake.function(c"cuGraphDestroy").unwrap(),
                destroy_launchable: fake.function(c"cuGraphExecDestroy").unwrap(),
            }
        }
    }

    /// What `queue` queues on the captured stream, ready to be launched.
    fn capture(&self, stream: *mut c_void, queue: impl FnOnce() -> Result<(), String>) -> Result<*mut c_void, String> {
        const RELAXED: c_int = 2;
        let (mut graph, mut launchable) = (null_mut(), null_mut());
        if (self.begin)(stream, RELAXED) != 0 {
            return Err("no capture".to_owned());
        }
        let queued = queue();
        let statuses = ((self.end)(stream, &mut graph), (self.instantiate)(&mut launchable, graph, 0));
        queued?;
        match (statuses, (self.destroy)(graph)) {
            ((0, 0), 0) => Ok(launchable),
            statuses => Err(format!("ending the capture: {statuses:?}")),
        }
    }
}

/// A graph inside a CUDA graph of the caller's.
pub fn captured(file: &Path) -> Result<String, String> {
    passes(|| {
        let fake = Fake::open(file);
        let engine = works(Engine::new())?;
        fake.make_context_current(0);
        let driver = Driver::of(fake);
        let block = works(engine.block(2 * BYTES, null_mut()))?;
        let (one, other) = (works(engine.stream())?, works(engine.stream())?);
        let mut native = null_mut();
        works(call!(nvb_stream_get_native(one.raw, &mut native)))?;
        let (first, second) = (fill(&engine, block.pointer, 1)?, fill(&engine, block.pointer, 2)?);
        works(call!(nvb_graph_share_workspace(second.raw, first.raw)))?;
        works(call!(nvb_graph_launch(first.raw, other.raw)))?;
        // One that was not launched before is refused, and the caller's capture goes on.
        let launchable = driver.capture(native, || {
            let refused = call!(nvb_graph_launch(second.raw, one.raw));
            match refused {
                Err(failure) if failure.status == NVB_ERROR_INVALID_ARGUMENT && failure.text.contains("captured") => {}
                outcome => return Err(format!("a graph that was not launched before: {outcome:?}")),
            }
            works(call!(nvb_graph_launch(first.raw, one.raw)))
        })?;
        works(call!(nvb_graph_launch(second.raw, other.raw)))?;
        if bytes_at(&engine, block.pointer)?[0] != 2 {
            return Err("what was captured ran at once".to_owned());
        }
        let launched = (driver.launch)(launchable, native);
        let byte = bytes_at(&engine, block.pointer)?[0];
        if (launched, byte, fake.books().violations) != (0, 1, 0) {
            return Err(format!("{launched}, {byte}; {}", fake.violation()));
        }
        // Another workspace for the graph leaves the caller's the one that it names.
        let bytes = workspace(&first)?.0;
        works(call!(nvb_graph_share_workspace(first.raw, null_mut())))?;
        drop(second);
        let kept = fake.books().bytes;
        works(call!(nvb_graph_launch(first.raw, other.raw)))?;
        if workspace(&first)? != (bytes, 1) || (driver.launch)(launchable, native) != 0 || fake.books().bytes < kept {
            return Err(format!("{:?}, {kept} bytes became {:?}", workspace(&first)?, fake.books()));
        }
        match ((driver.destroy_launchable)(launchable), fake.books().violations) {
            (0, 0) => Ok(()),
            _ => Err(fake.violation()),
        }
    })?;
    Ok("a graph runs as a part of the caller's".to_owned())
}

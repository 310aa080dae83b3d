//! The backend: the object that an engine creates first.

use super::backend_options::{convert as convert_options, nvb_backend_options};
use super::device::{convert, nvb_device_info};
use super::guard::guard;
use super::handle::Table;
use super::memory::{nvb_memory_manager, ManagerObject, MEMORY_MANAGERS};
use super::status::nvb_status;
use super::stream::{nvb_stream, STREAMS};
use super::structs::{expect_out, give_text, write, write_out};
use crate::backend::Backend;
use crate::configuration::LogLevel;
use crate::error::{Error, Result};
use crate::logging;
use crate::stream::Stream;
use std::ffi::c_char;
use std::sync::{Arc, Mutex};

/// A chosen device with its kernels, memory and default stream. Created by `nvb_backend_create`.
///
/// Threads: calls that take `const nvb_backend *` may run at once from many threads.
pub struct nvb_backend {
    _private: [u8; 0],
}

pub struct BackendObject {
    pub backend: Arc<Backend>,
    /// Taken when the handle is destroyed, so that records stop then, whatever children or running calls live on.
    sink: Mutex<Option<logging::Sink>>,
}

pub(super) static BACKENDS: Table<BackendObject> = Table::new("backend", 1);

/// The backend of a call together with the stream that it goes to.
pub(super) fn backend_and_stream(
    backend: *const nvb_backend,
    stream: *mut nvb_stream,
) -> Result<(Arc<Backend>, Arc<Stream>)> {
    let backend = BACKENDS.with(backend, |object| object.backend.clone())?;
    let stream = stream_of(&backend, stream)?;
    Ok((backend, stream))
}

/// `arguments!(backend, args, stream)` binds the backend of a call, what its arguments are, and the stream that it goes to.
macro_rules! arguments {
    ($backend:ident, $args:ident, $stream:ident) => {
        let ($backend, $stream) = $crate::capi::backend::backend_and_stream($backend, $stream)?;
        let mut read = std::mem::MaybeUninit::uninit();
        // SAFETY: a struct with its size set, by the header's contract.
        let $args = unsafe { $crate::capi::structs::read_into($args, &mut read)? };
    };
}
pub(super) use arguments;

/// The stream behind a handle, or the backend's default stream for NULL.
pub(super) fn stream_of(backend: &Backend, stream: *mut nvb_stream) -> Result<Arc<Stream>> {
    let Some(stream) = STREAMS.get_optional(stream.cast_const())? else {
        return Ok(backend.default_stream().clone());
    };
    expect_same_backend(backend, stream.executor(), "stream")?;
    Ok(stream)
}

pub(super) fn expect_same_backend(
    backend: &Backend,
    executor: &Arc<dyn crate::executor::Executor>,
    name: &str,
) -> Result<()> {
    if Arc::ptr_eq(backend.executor(), executor) {
        return Ok(());
    }
    Err(Error::invalid(format!("the {name} belongs to another backend")))
}

/// Chooses a device and prepares it; `*backend` receives the handle. Options may be NULL for the defaults.
///
/// On CUDA this retains the device's primary context, which the engine and the CUDA runtime share.
/// Errors: `NVB_ERROR_CONFIGURATION` (a field, by itself or together with another; the text names it, its value and what is
/// allowed), `NVB_ERROR_CUDA_NOT_AVAILABLE` (no driver or device, with the reason), `NVB_ERROR_DEVICE` (no such ordinal),
/// `NVB_ERROR_INVALID_COMPUTE_CAPABILITY`, `NVB_ERROR_INVALID_ARCHITECTURE`, `NVB_ERROR_FP8` (`fp8` is required and the device
/// has none), `NVB_ERROR_UNSUPPORTED` (likewise `tensor_cores`; a TPU), `NVB_ERROR_OUT_OF_MEMORY` (the memory's
/// `initial_bytes`).
#[no_mangle]
pub unsafe extern "C" fn nvb_backend_create(
    options: *const nvb_backend_options,
    backend: *mut *mut nvb_backend,
) -> nvb_status {
    guard!(nvb_backend_create, {
        expect_out("backend", backend)?;
        logging::initialize();
        // SAFETY: a struct with its size set or NULL, by the header's contract.
        let wanted = unsafe { convert_options(options)? };
        let level = wanted.configuration.logging.level;
        let sink = match wanted.log_callback {
            Some(callback) => Some(logging::add_sink(callback, wanted.log_user_data, level as u32)),
            // Who raised the level above the default wants to read the records.
            None if level as u32 > LogLevel::default() as u32 => logging::add_standard_error(level as u32),
            None => None,
        };
        let made = Backend::with_allocator(wanted.configuration, wanted.allocator)?;
        let object = BackendObject { backend: Arc::new(made), sink: Mutex::new(sink) };
        let handle = BACKENDS.insert(Arc::new(object))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("backend", backend, handle) }
    })
}

/// Destroys the handle; NULL is fine. Streams, weights and the other children stay valid: what they need of the
/// backend lives until the last of them is destroyed. Waits for the work on the default stream; a fault in it is logged.
#[no_mangle]
pub unsafe extern "C" fn nvb_backend_destroy(backend: *mut nvb_backend) -> nvb_status {
    guard!(nvb_backend_destroy, {
        if let Some(object) = BACKENDS.take(backend)? {
            object.backend.finish();
            let sink = object.sink.lock().unwrap_or_else(|poison| poison.into_inner()).take();
            drop(object);
            drop(sink);
        }
        Ok(())
    })
}

/// Waits until all work queued so far on the backend's default stream has finished, and returns the first error that any
/// of it met. Streams that were created or wrapped are waited for with `nvb_stream_synchronize`.
#[no_mangle]
pub unsafe extern "C" fn nvb_backend_synchronize(backend: *const nvb_backend) -> nvb_status {
    guard!(nvb_backend_synchronize, { BACKENDS.get(backend)?.backend.default_stream().synchronize() })
}

/// Copies the configuration that the backend runs with as JSON: the device, its architecture and the threads that were chosen,
/// what the environment has set, the memory's limit and margin in bytes, and what was changed since (the limit, profiling, an
/// overridden kernel). A configuration of this JSON makes a backend that runs the same, apart from an engine's allocator and
/// the log callback, which are code. `text` receives at most `capacity` bytes with the closing NUL and may be NULL; `needed`,
/// if not NULL, receives the bytes that the whole text needs, NUL included.
#[no_mangle]
pub unsafe extern "C" fn nvb_backend_get_configuration_json(
    backend: *const nvb_backend,
    text: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> nvb_status {
    guard!(nvb_backend_get_configuration_json, {
        let json = BACKENDS.get(backend)?.backend.running_configuration().to_json();
        // SAFETY: the caller's buffer and pointer, by the header's contract.
        unsafe { give_text(&json, text, capacity, needed) }
    })
}

/// Describes the backend's device; set `info->struct_size` first.
#[no_mangle]
pub unsafe extern "C" fn nvb_backend_get_device_info(
    backend: *const nvb_backend,
    info: *mut nvb_device_info,
) -> nvb_status {
    guard!(nvb_backend_get_device_info, {
        let object = BACKENDS.get(backend)?;
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(info, &convert(object.backend.device())) }
    })
}

/// Writes a handle to the memory manager of the backend's device; `index` is 0, as a backend has one device.
/// The handle is a reference of its own: give it back with `nvb_memory_manager_destroy`, before or after the backend.
#[no_mangle]
pub unsafe extern "C" fn nvb_backend_get_memory_manager(
    backend: *const nvb_backend,
    index: u32,
    memory: *mut *mut nvb_memory_manager,
) -> nvb_status {
    guard!(nvb_backend_get_memory_manager, {
        expect_out("memory", memory)?;
        let object = BACKENDS.get(backend)?;
        if index != 0 {
            return Err(
                Error::invalid(format!("device index {index}; this backend has 1 device")).with_limit(index.into(), 1)
            );
        }
        let handle = MEMORY_MANAGERS.insert(ManagerObject::of(&object.backend))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("memory", memory, handle) }
    })
}

/// For tests of an engine's error handling: panics inside the library, which must come back as `NVB_ERROR_INTERNAL`
/// and leave this handle refusing all calls but destroy.
#[no_mangle]
pub unsafe extern "C" fn nvb_test_inject_panic(backend: *const nvb_backend) -> nvb_status {
    guard!(nvb_test_inject_panic, {
        let _object = BACKENDS.get(backend)?;
        panic!("injected by nvb_test_inject_panic");
    })
}

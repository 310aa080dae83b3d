//! The backend: the object that an engine creates first.

use super::device::{convert, nvb_device_info};
use super::guard::guard;
use super::handle::Table;
use super::memory::{nvb_memory_manager, ManagerObject, MEMORY_MANAGERS};
use super::memory_options::{convert as convert_memory_options, nvb_memory_options, NVB_MEMORY_DEVICE};
use super::status::nvb_status;
use super::stream::{nvb_stream, STREAMS};
use super::structs::{expect_out, read, text, versioned, write};
use crate::backend::{Backend, BackendOptions, MOST_THREADS};
use crate::configuration::LogLevel;
use crate::error::{Error, Result, Status};
use crate::logging;
use crate::memory::options::Limit;
use crate::memory::MemoryOptions;
use crate::stream::Stream;
use std::ffi::{c_char, c_void};
use std::sync::{Arc, Mutex};

/// A chosen device with its kernels, memory and default stream. Created by `nvb_backend_create`.
///
/// Threads: calls that take `const nvb_backend *` may run at once from many threads.
pub struct nvb_backend {
    _private: [u8; 0],
}

/// Receives one log record. Called from any thread, also from within library calls; it must not call the library.
/// `target` names the part ("nvbackend::memory"), `message` has `length` bytes and a closing NUL. None come after
/// `nvb_backend_destroy` has returned.
pub type nvb_log_callback = Option<
    unsafe extern "C" fn(
        level: u32,
        target: *const c_char,
        message: *const c_char,
        length: usize,
        user_data: *mut c_void,
    ),
>;

/// `log_level`: no records.
pub const NVB_LOG_OFF: u32 = 0;
pub const NVB_LOG_ERROR: u32 = 1;
pub const NVB_LOG_WARNING: u32 = 2;
/// One line for each backend and choice of device.
pub const NVB_LOG_INFO: u32 = 3;
/// Failing calls and library look-ups.
pub const NVB_LOG_DEBUG: u32 = 4;
/// Every allocation.
pub const NVB_LOG_TRACE: u32 = 5;

/// Options of `nvb_backend_create`. All zero after `nvb_backend_options_init` is a sensible choice.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_backend_options {
    pub struct_size: usize,
    /// "auto" (the best GPU, else the CPU), "cpu", "cuda" (device 0) or "cuda:N". NULL: "auto".
    pub device: *const c_char,
    /// Bytes that the memory manager may hold; 0: only the device's memory bounds it, or what `memory` says.
    pub memory_limit: u64,
    /// CPU threads, at most 4096; 0: one for each core that this process may run on.
    pub threads: u32,
    /// Run kernels of an older architecture: 80 on a 9.0 GPU. 0: the device's own, or the environment's NVB_FORCE_ARCH.
    pub force_architecture: u32,
    /// 1: never call cuBLASLt, even where it is present.
    pub own_kernels_only: u32,
    /// The most verbose records that `log_callback` receives, `NVB_LOG_…`.
    pub log_level: u32,
    /// NULL: no callback.
    pub log_callback: nvb_log_callback,
    /// Handed to `log_callback`.
    pub log_user_data: *mut c_void,
    /// Of the backend's own memory manager; NULL: the defaults, with `memory_limit`.
    pub memory: *const nvb_memory_options,
    /// The kernel that products take where it can do them, a name of `nvb_kernel_get`. NULL: the tuned or the default one.
    pub linear_kernel: *const c_char,
    /// Where tuned choices are kept and read from. NULL: the environment's NVB_TUNING_FILE, and without that nowhere. A file
    /// of another device, driver, cuBLASLt or build is ignored with one line in the log.
    pub tuning_file: *const c_char,
}
versioned!(nvb_backend_options { device, log_callback, memory, linear_kernel, tuning_file });

pub struct BackendObject {
    pub backend: Arc<Backend>,
    /// Taken when the handle is destroyed, so that records stop then, whatever children or running calls live on.
    sink: Mutex<Option<logging::Sink>>,
}

impl BackendObject {
    pub(super) fn new(backend: Backend, sink: Option<logging::Sink>) -> BackendObject {
        BackendObject { backend: Arc::new(backend), sink: Mutex::new(sink) }
    }
}

pub(super) static BACKENDS: Table<BackendObject> = Table::new("backend", 1);

/// The backend of a call together with the stream that it goes to.
pub(super) fn backend_and_stream(
    backend: *const nvb_backend,
    stream: *mut nvb_stream,
) -> Result<(Arc<Backend>, Arc<Stream>)> {
    let backend = BACKENDS.get(backend)?.backend.clone();
    let stream = stream_of(&backend, stream)?;
    Ok((backend, stream))
}

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

/// # Safety
/// `options.memory` is NULL or a struct with its size set.
unsafe fn memory_options(options: &nvb_backend_options) -> Result<MemoryOptions> {
    // SAFETY: the caller's contract.
    let (memory, space) = unsafe { convert_memory_options(options.memory)? };
    let wrong = |text: String| Err(Error::new(Status::Configuration, text));
    if space != NVB_MEMORY_DEVICE {
        return wrong(format!("memory->space is {space}; a backend's own manager has NVB_MEMORY_DEVICE"));
    }
    if options.memory_limit != 0 && memory.limit != Limit::None {
        return wrong(format!(
            "memory_limit is {} and memory has a limit of its own; one of them must be 0",
            options.memory_limit
        ));
    }
    Ok(memory)
}

/// Chooses a device and prepares it; `*backend` receives the handle. Options may be NULL for the defaults.
///
/// On CUDA this retains the device's primary context, which the engine and the CUDA runtime share.
/// Errors: `NVB_ERROR_CONFIGURATION` (an option; the text lists the kernels if it is `linear_kernel`),
/// `NVB_ERROR_CUDA_NOT_AVAILABLE` (no driver or device, with the reason), `NVB_ERROR_DEVICE` (no such ordinal),
/// `NVB_ERROR_INVALID_COMPUTE_CAPABILITY`, `NVB_ERROR_INVALID_ARCHITECTURE`, `NVB_ERROR_UNSUPPORTED` (a TPU).
#[no_mangle]
pub unsafe extern "C" fn nvb_backend_create(
    options: *const nvb_backend_options,
    backend: *mut *mut nvb_backend,
) -> nvb_status {
    guard!(nvb_backend_create, {
        expect_out("backend", backend)?;
        logging::initialize();
        let mut sink = None;
        let mut chosen = BackendOptions { log_level: LogLevel::Off, ..BackendOptions::default() };
        if !options.is_null() {
            // SAFETY: a struct with its size set, by the header's contract; its string is NUL-terminated.
            let options = unsafe { read(options)? };
            // SAFETY: as above.
            chosen.device = unsafe { text("device", options.device)? };
            chosen.memory_limit = options.memory_limit;
            // SAFETY: as above.
            chosen.memory = unsafe { memory_options(&options)? };
            // SAFETY: as above.
            chosen.linear_kernel = unsafe { text("linear_kernel", options.linear_kernel)? };
            // SAFETY: as above.
            chosen.tuning_file = unsafe { text("tuning_file", options.tuning_file)? };
            if options.threads > MOST_THREADS {
                let text = format!("threads is {}; 0 to {MOST_THREADS} is needed", options.threads);
                let limit = (options.threads.into(), MOST_THREADS.into());
                return Err(Error::new(Status::Configuration, text).with_limit(limit.0, limit.1));
            }
            chosen.threads = options.threads as usize;
            chosen.force_architecture = options.force_architecture;
            chosen.own_kernels_only = match options.own_kernels_only {
                0 => false,
                1 => true,
                other => {
                    return Err(Error::new(
                        Status::Configuration,
                        format!("own_kernels_only is {other}; 0 or 1 is needed"),
                    ))
                }
            };
            if options.log_level > NVB_LOG_TRACE {
                return Err(Error::new(
                    Status::Configuration,
                    format!("log_level is {}; {NVB_LOG_OFF} to {NVB_LOG_TRACE} is needed", options.log_level),
                ));
            }
            if let Some(callback) = options.log_callback {
                sink = Some(logging::add_sink(callback, options.log_user_data, options.log_level));
                chosen.log_level = LogLevel::ALL[options.log_level as usize];
            }
        }
        let object = BackendObject::new(Backend::new(&chosen)?, sink);
        let handle = BACKENDS.insert(Arc::new(object))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { backend.write(handle) };
        Ok(())
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

/// Writes a handle to the memory manager of the backend's device `index` (0: the only one of a single-device backend).
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
        unsafe { memory.write(handle) };
        Ok(())
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

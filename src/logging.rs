//! Logging: the `log` crate's records go to the callbacks of live backends, and to stderr when NVB_LOG is set or a backend's
//! configuration asks for more than warnings and has no callback for them.
//!
//! NVB_LOG takes `env_logger`'s filters ("debug", "nvbackend::memory=trace"). Without all of these the library is silent.

use crate::fork::PerProcess;
use env_logger::{Target, WriteStyle};
use log::{Level, LevelFilter, Log, Metadata, Record};
use std::ffi::{c_void, CString};
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::RwLock;

/// `nvb_log_callback` that is not NULL.
type Callback = unsafe extern "C" fn(u32, *const std::ffi::c_char, *const std::ffi::c_char, usize, *mut c_void);

struct Receiver {
    id: u64,
    /// `None`: records are written to stderr.
    callback: Option<Callback>,
    user_data: *mut c_void,
    level: LevelFilter,
}

// SAFETY: the ABI says that the callback is called from any thread with this pointer.
unsafe impl Send for Receiver {}
// SAFETY: as above.
unsafe impl Sync for Receiver {}

/// Each process has receivers of its own: a parent's belong to backends that its children cannot use.
struct Logger {
    receivers: PerProcess<RwLock<Vec<Receiver>>>,
    environment: PerProcess<Option<env_logger::Logger>>,
}

static LOGGER: Logger =
    Logger { receivers: PerProcess::new(Default::default), environment: PerProcess::new(logger_of_environment) };

fn logger_of_environment() -> Option<env_logger::Logger> {
    std::env::var_os("NVB_LOG")?;
    // `env_logger` takes the writer for a file, and would choose no colours.
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let style = if colours { WriteStyle::Always } else { WriteStyle::Never };
    let mut builder = env_logger::Builder::from_env("NVB_LOG");
    Some(builder.target(Target::Pipe(Box::new(StandardError))).write_style(style).build())
}

/// Past the lock of std's, which a thread of the parent may have held when this process was forked.
struct StandardError;

impl Write for StandardError {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        // SAFETY: bytes that are there.
        let written = unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
        usize::try_from(written).map_err(|_| std::io::Error::last_os_error())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A registered callback; dropping it waits for running calls of it and ends them.
pub struct Sink {
    id: u64,
}

/// Installs the logger once a process; an earlier logger of the same process (in Rust tests) is left in place.
pub fn initialize() {
    if log::set_logger(&LOGGER).is_ok() {
        update_level();
    }
}

pub fn add_sink(callback: Callback, user_data: *mut c_void, level: u32) -> Sink {
    add(Some(callback), user_data, level)
}

/// Writes records to stderr while the sink lives; `None` where NVB_LOG decides already what is written there.
pub fn add_standard_error(level: u32) -> Option<Sink> {
    initialize();
    LOGGER.environment.is_none().then(|| add(None, std::ptr::null_mut(), level))
}

fn add(callback: Option<Callback>, user_data: *mut c_void, level: u32) -> Sink {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    initialize();
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let receiver = Receiver { id, callback, user_data, level: filter(level) };
    LOGGER.receivers.write().unwrap_or_else(|poison| poison.into_inner()).push(receiver);
    update_level();
    Sink { id }
}

impl Drop for Sink {
    fn drop(&mut self) {
        LOGGER.receivers.write().unwrap_or_else(|poison| poison.into_inner()).retain(|sink| sink.id != self.id);
        update_level();
    }
}

fn filter(level: u32) -> LevelFilter {
    LevelFilter::iter().nth(level as usize).unwrap_or(LevelFilter::Trace)
}

/// The cheapest test of a disabled record is the global maximum, so it follows the receivers.
fn update_level() {
    let receivers = LOGGER.receivers.read().unwrap_or_else(|poison| poison.into_inner());
    let most = receivers.iter().map(|receiver| receiver.level).max().unwrap_or(LevelFilter::Off);
    let before = log::max_level();
    log::set_max_level(most.max(LOGGER.environment.as_ref().map_or(LevelFilter::Off, |logger| logger.filter())));
    drop(receivers);
    if (before == LevelFilter::Trace) != (log::max_level() == LevelFilter::Trace) {
        crate::memory::log_level_changed();
    }
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("nvbackend")
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        if let Some(environment) = &*self.environment {
            environment.log(record);
        }
        let receivers = self.receivers.read().unwrap_or_else(|poison| poison.into_inner());
        if !receivers.iter().any(|receiver| record.level() <= receiver.level) {
            return;
        }
        let message = record.args().to_string().replace('\0', " ");
        let (length, target) = (message.len(), CString::new(record.target()).unwrap_or_default());
        let message = CString::new(message).unwrap_or_default();
        let level = match record.level() {
            Level::Error => 1,
            Level::Warn => 2,
            Level::Info => 3,
            Level::Debug => 4,
            Level::Trace => 5,
        };
        let mut written = false;
        for receiver in receivers.iter().filter(|receiver| record.level() <= receiver.level) {
            match receiver.callback {
                // SAFETY: the callback is valid until its sink is dropped, which takes the write lock first.
                Some(callback) => unsafe {
                    callback(level, target.as_ptr(), message.as_ptr(), length, receiver.user_data)
                },
                // Once, however many backends ask for it. A stderr that is closed has nobody to tell.
                None if !written => {
                    written = true;
                    let _ = writeln!(StandardError, "[{} {}] {}", record.level(), record.target(), record.args());
                }
                None => {}
            }
        }
    }

    fn flush(&self) {}
}

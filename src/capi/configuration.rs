//! Configurations: everything a backend is created with, as an object with presets, text fields and JSON.

use super::backend::{nvb_backend, nvb_log_callback, BackendObject, BACKENDS};
use super::guard::guard;
use super::handle::Table;
use super::status::nvb_status;
use super::structs::{copy_text, expect_out, text};
use crate::backend::Backend;
use crate::configuration::field::{find, Value};
use crate::configuration::{Configuration, LogLevel, Preset};
use crate::error::Error;
use crate::logging;
use std::ffi::{c_char, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Device, precision, memory, timing and logging of a backend to come. Created by `nvb_configuration_create`. Fields:
///
/// - `device`: "auto", "cpu", "cuda" or "cuda:N"
/// - `architecture`: 0, or an older one whose kernels to run, such as 80 on a 9.0 GPU
/// - `threads`: of the CPU; 0: one a core
/// - `precision`: "auto", "f32", "f16", "bf16": what is stored where a call leaves the dtype open (KV caches)
/// - `fp8`, `tensor_cores`: "auto", "off", "required" (no backend on a device without). With `fp8` "off" inputs of
///   products with FP8 weights are never rounded to FP8, whatever `quantized_activations` says; FP8 stays a format that
///   weights are stored in, and calls that are handed FP8 codes (`quantized_input`) or asked for them run with them
/// - `attention`: "auto", "plain" (kernels without Tensor Cores)
/// - `vendor_libraries`: whether cuBLASLt may run
/// - `quantized_activations`: whether large products with FP8 and INT8 weights may round their input to 8 bits
/// - `batch_invariant`: whether each row of a result of `nvb_linear`, `nvb_grouped_linear` and `nvb_matmul` is the same to
///   the bit whatever the number and the content of the other rows; slower, see docs/tuning.md
/// - `linear_kernel`: the kernel that products take where it can do them, a name of `nvb_kernel_get`; "": the best known
/// - `tuning_file`: where tuned choices are kept and read from; "": the environment's NVB_TUNING_FILE, else nowhere
/// - `memory.initial`: bytes taken at creation; `memory.growth`: whether more is taken later
/// - `memory.limit` in bytes or `memory.limit_fraction` of the device's memory; 0: none
/// - `memory.margin`: bytes left to others; 0: the library's choice; "none": none
///   Sizes may be text with a unit in place of a number of bytes: "8GB" (8 · 10⁹), "1.5GiB" (1.5 · 2³⁰); kB to TB, KiB to TiB
/// - `memory.unified`: whether unified memory may serve what does not fit
/// - `timing.profiling`: whether profiling is on from the start
/// - `logging.level`: "off", "error", "warning", "info", "debug", "trace"
///
/// Threads: calls that take `const nvb_configuration *` may run at once from many threads.
pub struct nvb_configuration {
    _private: [u8; 0],
}

static CONFIGURATIONS: Table<Mutex<Configuration>> = Table::new("configuration", 10);

/// `preset`: everything that helps and costs no accuracy.
pub const NVB_PRESET_INFERENCE: u32 = 0;
/// `preset`: memory is taken at the start, so that the first answers come as soon as later ones.
pub const NVB_PRESET_LOW_LATENCY: u32 = 1;
/// `preset`: nearly all of the device's memory, for many sequences at once.
pub const NVB_PRESET_THROUGHPUT: u32 = 2;
/// `preset`: unified memory behind the device's own, BF16, no FP8.
pub const NVB_PRESET_TRAINING: u32 = 3;
/// `preset`: profiling and debug records on; without a callback they are written to standard error.
pub const NVB_PRESET_DEVELOPMENT: u32 = 4;

fn lock(configuration: &Mutex<Configuration>) -> MutexGuard<'_, Configuration> {
    configuration.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Creates a configuration from a preset (`NVB_PRESET_…`).
#[no_mangle]
pub unsafe extern "C" fn nvb_configuration_create(
    preset: u32,
    configuration: *mut *mut nvb_configuration,
) -> nvb_status {
    guard!(nvb_configuration_create, {
        expect_out("configuration", configuration)?;
        let preset = Preset::from_code(preset)
            .ok_or_else(|| Error::invalid(format!("preset is {preset}; NVB_PRESET_… (0 to 4) is needed")))?;
        let handle = CONFIGURATIONS.insert(Arc::new(Mutex::new(preset.configuration())))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { configuration.write(handle) };
        Ok(())
    })
}

/// Destroys the handle; NULL is fine. A backend keeps what it was created with.
#[no_mangle]
pub unsafe extern "C" fn nvb_configuration_destroy(configuration: *mut nvb_configuration) -> nvb_status {
    guard!(nvb_configuration_destroy, { CONFIGURATIONS.remove(configuration) })
}

/// Sets one field ("memory.limit") from text ("1073741824", "1GiB", "true", "bf16").
/// Errors: `NVB_ERROR_CONFIGURATION`, whose text names the field, the value and what is allowed; nothing changes then.
#[no_mangle]
pub unsafe extern "C" fn nvb_configuration_set(
    configuration: *mut nvb_configuration,
    field: *const c_char,
    value: *const c_char,
) -> nvb_status {
    guard!(nvb_configuration_set, {
        let configuration = CONFIGURATIONS.get(configuration)?;
        // SAFETY: NUL-terminated strings, by the header's contract.
        let (field, value) = unsafe { (text("field", field)?, text("value", value)?) };
        let mut configuration = lock(&configuration);
        find(&field)?.set_text(&mut configuration, &value)
    })
}

/// Copies one field's value as text. `text` receives at most `capacity` bytes with the closing NUL and may be NULL;
/// `needed`, if not NULL, receives the bytes that the whole text needs, NUL included.
#[no_mangle]
pub unsafe extern "C" fn nvb_configuration_get(
    configuration: *const nvb_configuration,
    field: *const c_char,
    text: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> nvb_status {
    guard!(nvb_configuration_get, {
        let configuration = CONFIGURATIONS.get(configuration)?;
        // SAFETY: a NUL-terminated string, by the header's contract.
        let field = find(&unsafe { super::structs::text("field", field)? })?;
        let value = match field.get(&lock(&configuration)) {
            Value::Text(text) => text,
            other => other.to_string(),
        };
        // SAFETY: the caller's buffer and pointer, by the header's contract.
        unsafe { give(&value, text, capacity, needed) };
        Ok(())
    })
}

/// Changes the fields that a JSON object names: {"preset": "throughput", "memory": {"limit_fraction": 0.8}}. "preset"
/// sets all other fields first. Whole numbers may be written as floats (8e9). A field that is given twice is an error.
/// Nothing changes on an error.
/// Errors: `NVB_ERROR_CONFIGURATION`: a field, its value and what is allowed, or the line and column of what is no JSON.
#[no_mangle]
pub unsafe extern "C" fn nvb_configuration_apply_json(
    configuration: *mut nvb_configuration,
    json: *const c_char,
) -> nvb_status {
    guard!(nvb_configuration_apply_json, {
        let configuration = CONFIGURATIONS.get(configuration)?;
        // SAFETY: a NUL-terminated string, by the header's contract.
        let json = unsafe { text("json", json)? };
        let mut configuration = lock(&configuration);
        configuration.apply_json(&json)
    })
}

/// Copies the configuration as JSON, every field of it; `text`, `capacity` and `needed` as in `nvb_configuration_get`.
#[no_mangle]
pub unsafe extern "C" fn nvb_configuration_get_json(
    configuration: *const nvb_configuration,
    text: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> nvb_status {
    guard!(nvb_configuration_get_json, {
        let json = lock(&*CONFIGURATIONS.get(configuration)?).to_json();
        // SAFETY: the caller's buffer and pointer, by the header's contract.
        unsafe { give(&json, text, capacity, needed) };
        Ok(())
    })
}

/// Checks what no single field can be checked for: fields that do not go together.
/// Errors: `NVB_ERROR_CONFIGURATION`, whose text names both.
#[no_mangle]
pub unsafe extern "C" fn nvb_configuration_validate(configuration: *const nvb_configuration) -> nvb_status {
    guard!(nvb_configuration_validate, { lock(&*CONFIGURATIONS.get(configuration)?).validate() })
}

/// As `nvb_backend_create`, with a configuration in place of options. `log_callback` receives records up to `logging.level`.
/// Where it is NULL and the level "info", "debug" or "trace", they are written to standard error, unless the environment's
/// NVB_LOG says what is.
/// Errors: those of `nvb_backend_create`, and `NVB_ERROR_FP8` or `NVB_ERROR_UNSUPPORTED` if the device lacks what is
/// required.
#[no_mangle]
pub unsafe extern "C" fn nvb_backend_create_configured(
    configuration: *const nvb_configuration,
    log_callback: nvb_log_callback,
    log_user_data: *mut c_void,
    backend: *mut *mut nvb_backend,
) -> nvb_status {
    guard!(nvb_backend_create_configured, {
        expect_out("backend", backend)?;
        let configuration = lock(&*CONFIGURATIONS.get(configuration)?).clone();
        logging::initialize();
        let level = configuration.logging.level;
        let sink = match log_callback {
            Some(callback) => Some(logging::add_sink(callback, log_user_data, level as u32)),
            // Who raised the level above the default wants to read the records.
            None if level as u32 > LogLevel::default() as u32 => logging::add_standard_error(level as u32),
            None => None,
        };
        let object = BackendObject::new(Backend::from_configuration(configuration)?, sink);
        let handle = BACKENDS.insert(Arc::new(object))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { backend.write(handle) };
        Ok(())
    })
}

/// Copies the configuration that the backend runs with as JSON, however it was created: the device, its architecture and the
/// threads that were chosen, what the environment has set, the memory's limit and margin in bytes, and what was changed since
/// (the limit, profiling, an overridden kernel). What the JSON does not say is that of `nvb_memory_options` alone. `text`,
/// `capacity` and `needed` as in `nvb_configuration_get`.
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
        unsafe { give(&json, text, capacity, needed) };
        Ok(())
    })
}

/// # Safety
/// `text` is NULL or valid for `capacity` bytes, `needed` NULL or valid.
unsafe fn give(value: &str, text: *mut c_char, capacity: usize, needed: *mut usize) {
    // SAFETY: the caller's contract.
    unsafe {
        let bytes = copy_text(value, text, capacity);
        if !needed.is_null() {
            needed.write(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::backend::{NVB_LOG_DEBUG, NVB_LOG_TRACE, NVB_LOG_WARNING};
    use crate::configuration::LogLevel;

    #[test]
    fn levels_are_those_of_the_abi() {
        assert_eq!(LogLevel::Warning as u32, NVB_LOG_WARNING);
        assert_eq!(LogLevel::Debug as u32, NVB_LOG_DEBUG);
        assert_eq!(LogLevel::Trace as u32, NVB_LOG_TRACE);
    }
}

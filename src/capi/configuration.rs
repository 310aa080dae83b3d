//! Configurations: everything a backend is created with, as an object with presets, text fields and JSON.

use super::prelude::*;
use crate::configuration::field::{find, Value};
use crate::configuration::{Configuration, Preset};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a backend runs with: the fields that `nvb_backend_options` starts from and overrides, and that
/// `nvb_backend_get_configuration_json` tells. Created by `nvb_configuration_create`. Fields, with their defaults:
///
/// - `device` ("auto"): "auto" is the best GPU, else the CPU; "cpu", "cuda" (device 0) or "cuda:N"
/// - `architecture` (0): an older one whose kernels to run, such as 80 on a 9.0 GPU; 0: the environment's NVB_FORCE_ARCH, else
///   the device's own
/// - `threads` (0): of the CPU, at most 4096; 0: one for each core that the process may run on
/// - `precision` ("auto"): "f32", "f16" or "bf16" is stored where a call leaves the dtype open (KV caches); "auto" is BF16 on a
///   GPU and F32 on the CPU
/// - `fp8`, `tensor_cores` ("auto"): "off" never uses them, "required" creates no backend on a device without. With `fp8` "off"
///   inputs of products with FP8 weights are never rounded to FP8, whatever `quantized_activations` says; FP8 stays a format
///   that weights are stored in, and calls that are handed FP8 values (`quantized_input`) or asked for them run with
///   them
/// - `attention` ("auto"): "plain" runs the kernels without Tensor Cores, for comparison
/// - `vendor_libraries` (true): whether cuBLASLt may run where it is present
/// - `quantized_activations` (false): whether large products with FP8 and INT8 weights may round their input to 8 bits
/// - `batch_invariant` (false): whether each row of a result of `nvb_linear`, `nvb_grouped_linear` and `nvb_matmul` is the same
///   to the bit whatever the number and the content of the other rows; slower, see docs/tuning.md
/// - `linear_kernel` (""): the kernel that products take where it can do them, a name of `nvb_kernel_get`; "": the tuned or the
///   default one
/// - `tuning_file` (""): where tuned choices are kept and read from; "": the environment's NVB_TUNING_FILE, else nowhere
/// - `memory.limit` (0): bytes that the memory manager may hold; 0: see `memory.limit_fraction`
/// - `memory.limit_fraction` (0): the same as a part, 0 to 1, of the device's memory, or with `memory.limit_of` "free" in place
///   of "total" of what is free at creation; 0: no limit on a GPU, all of main memory on the CPU
/// - `memory.margin` (0): bytes of the device that are left to others; "none", or 0: the library's choice
/// - `memory.initial_bytes` (0): taken at creation, so that the first allocations are fast
/// - `memory.growth` (true): false takes no more than `memory.initial_bytes`
/// - `memory.range_bytes` (0): addresses to reserve; 0: four times the device's memory
/// - `memory.pooling` (true): false makes every block an allocation of its own, as memory checkers want it
/// - `memory.thread_cache_bytes` (0): what each thread keeps for its next allocations; "none", or 0: the library's choice
/// - `memory.zero_on_free` (false): whether freed blocks are overwritten with zero
/// - `memory.leak_tracking` ("off"): "sampled" records the place of one allocation in every `memory.leak_sample_bytes` (0: 512
///   KiB), "full" that of each
/// - `memory.trace_events` (0): the newest events that the trace keeps, at most 2^24; 0: no trace
/// - `memory.wait_microseconds` (0): how long an allocation that found no memory waits for other threads to free some
/// - `memory.spill` ("never"): an allocation that finds no device memory fails, or gets page-locked host memory ("pinned") or
///   unified memory ("managed")
/// - `timing.profiling` (false): whether profiling is on from the start
/// - `logging.level` ("warning"): the most verbose records that are received: "off", "error", "warning", "info", "debug" or
///   "trace"
///
/// Bytes are given as a number or as text with a unit, kB to TB and KiB to TiB: "8GB" is 8 · 10⁹, "1.5GiB" is 1.5 · 2³⁰.
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

/// What the handle says now.
pub(super) fn copy_of(configuration: *const nvb_configuration) -> Result<Configuration> {
    Ok(lock(&*CONFIGURATIONS.get(configuration)?).clone())
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
        unsafe { write_out("configuration", configuration, handle) }
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
        unsafe { give_text(&value, text, capacity, needed) }
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
        unsafe { give_text(&json, text, capacity, needed) }
    })
}

/// Checks what no single field can be checked for: fields that do not go together.
/// Errors: `NVB_ERROR_CONFIGURATION`, whose text names both.
#[no_mangle]
pub unsafe extern "C" fn nvb_configuration_validate(configuration: *const nvb_configuration) -> nvb_status {
    guard!(nvb_configuration_validate, { lock(&*CONFIGURATIONS.get(configuration)?).validate() })
}

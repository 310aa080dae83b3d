//! What a backend is created with: options over a configuration or a preset, which become one configuration.

use super::configuration::{copy_of, nvb_configuration};
use super::memory_options::{apply, nvb_memory_options, NVB_MEMORY_DEVICE};
use super::prelude::*;
use crate::configuration::field::{find, Value};
use crate::configuration::{AttentionKernels, Configuration, LogLevel, Precision, Preset, Requirement};
use crate::memory::allocator::EngineAllocator;

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
pub const NVB_LOG_OFF: u32 = 0xffff_ffff;
pub const NVB_LOG_ERROR: u32 = 1;
pub const NVB_LOG_WARNING: u32 = 2;
/// One line for each backend and choice of device.
pub const NVB_LOG_INFO: u32 = 3;
/// Failing calls and library look-ups.
pub const NVB_LOG_DEBUG: u32 = 4;
/// Every allocation.
pub const NVB_LOG_TRACE: u32 = 5;

/// A field that is on or off: on; of `fp8` and `tensor_cores`: used where the device has it and it helps.
pub const NVB_SWITCH_ON: u32 = 1;
/// A field that is on or off: off.
pub const NVB_SWITCH_OFF: u32 = 2;
/// `fp8`, `tensor_cores`: no backend is created on a device without it.
pub const NVB_SWITCH_REQUIRED: u32 = 3;

/// `precision`: BF16 on a GPU, F32 on the CPU.
pub const NVB_PRECISION_AUTO: u32 = 1;
pub const NVB_PRECISION_F32: u32 = 2;
pub const NVB_PRECISION_F16: u32 = 3;
pub const NVB_PRECISION_BF16: u32 = 4;

/// `attention`: the fastest kernels that the shapes allow.
pub const NVB_ATTENTION_AUTO: u32 = 1;
/// `attention`: those without Tensor Cores, f32 products, for comparison.
pub const NVB_ATTENTION_PLAIN: u32 = 2;

/// Options of `nvb_backend_create`. A field that is not 0 or NULL overrides the field of the same name that
/// `nvb_configuration` lists and explains; the others are as `configuration` has them, or else `preset`. So all zero, after
/// `nvb_backend_options_init`, is the preset for inference, and a sensible choice. All of it is read before the call returns.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_backend_options {
    pub struct_size: usize,
    /// Where fields start from; NULL: `preset`. It stays the caller's, and later changes of it do not reach the backend.
    pub configuration: *const nvb_configuration,
    /// "auto" (the best GPU, else the CPU), "cpu", "cuda" (device 0) or "cuda:N". A backend runs on one device; several
    /// devices take a backend each.
    pub device: *const c_char,
    /// `NVB_PRESET_…`. Not together with `configuration`.
    pub preset: u32,
    /// CPU threads, at most 4096.
    pub threads: u32,
    /// Run kernels of an older architecture: 80 on a 9.0 GPU.
    pub architecture: u32,
    /// `NVB_PRECISION_…`
    pub precision: u32,
    /// `NVB_SWITCH_…`
    pub fp8: u32,
    /// `NVB_SWITCH_…`
    pub tensor_cores: u32,
    /// `NVB_ATTENTION_…`
    pub attention: u32,
    /// `NVB_SWITCH_…`; off: never call cuBLASLt, even where it is present.
    pub vendor_libraries: u32,
    /// `NVB_SWITCH_…`
    pub quantized_activations: u32,
    /// `NVB_SWITCH_…`
    pub batch_invariant: u32,
    /// The kernel that products take where it can do them, a name of `nvb_kernel_get`.
    pub linear_kernel: *const c_char,
    /// Where tuned choices are kept and read from. A file of another device, driver, cuBLASLt or build is ignored with one line
    /// in the log.
    pub tuning_file: *const c_char,
    /// Stands for `memory->limit` where nothing else of `memory` is needed. Not together with a limit there.
    pub memory_limit: u64,
    /// Describes the backend's own memory manager: its fields are those of the configuration under `memory`, and an
    /// engine's allocator, which is in no configuration. Its `space` is `NVB_MEMORY_DEVICE`.
    pub memory: *const nvb_memory_options,
    /// `NVB_SWITCH_…`: whether profiling is on from the start; `timing.profiling` of the configuration.
    pub profiling: u32,
    /// The most verbose records that are received, `NVB_LOG_…`; `logging.level` of the configuration.
    pub log_level: u32,
    /// Receives the records. NULL: records are written to standard error if the level is "info", "debug" or "trace", unless the
    /// environment's NVB_LOG says what is.
    pub log_callback: nvb_log_callback,
    /// Handed to `log_callback`.
    pub log_user_data: *mut c_void,
}
versioned!(nvb_backend_options { device, linear_kernel, tuning_file, memory, log_callback });

/// What options come to.
pub(super) struct Wanted {
    pub configuration: Configuration,
    pub allocator: Option<EngineAllocator>,
    pub log_callback: nvb_log_callback,
    pub log_user_data: *mut c_void,
}

/// # Safety
/// NULL, or a struct with its size set, whose strings end with NUL and whose structs have their sizes set.
pub(super) unsafe fn convert(options: *const nvb_backend_options) -> Result<Wanted> {
    let mut wanted = Wanted {
        configuration: Configuration::default(),
        allocator: None,
        log_callback: None,
        log_user_data: std::ptr::null_mut(),
    };
    if options.is_null() {
        return Ok(wanted);
    }
    // SAFETY: the caller's contract.
    let options = unsafe { read(options)? };
    wanted.configuration = base(&options)?;
    let configuration = &mut wanted.configuration;
    for (field, words) in
        [("device", options.device), ("linear_kernel", options.linear_kernel), ("tuning_file", options.tuning_file)]
    {
        // SAFETY: the caller's contract.
        set_text(configuration, field, unsafe { text(field, words)? })?;
    }
    set_number(configuration, "threads", options.threads.into())?;
    set_number(configuration, "architecture", options.architecture.into())?;
    set_choice(configuration, "precision", options.precision, Precision::NAMES)?;
    set_choice(configuration, "fp8", options.fp8, Requirement::NAMES)?;
    set_choice(configuration, "tensor_cores", options.tensor_cores, Requirement::NAMES)?;
    set_choice(configuration, "attention", options.attention, AttentionKernels::NAMES)?;
    set_switch(configuration, "vendor_libraries", options.vendor_libraries)?;
    set_switch(configuration, "quantized_activations", options.quantized_activations)?;
    set_switch(configuration, "batch_invariant", options.batch_invariant)?;
    set_switch(configuration, "timing.profiling", options.profiling)?;
    set_log_level(configuration, options.log_level)?;
    // SAFETY: the caller's contract.
    wanted.allocator = unsafe { apply_memory(configuration, &options)? };
    (wanted.log_callback, wanted.log_user_data) = (options.log_callback, options.log_user_data);
    Ok(wanted)
}

/// What the fields override.
fn base(options: &nvb_backend_options) -> Result<Configuration> {
    let preset = options.preset;
    if !options.configuration.is_null() {
        if preset != 0 {
            return Err(Error::new(
                Status::Configuration,
                format!("preset is {preset} and there is a configuration; one of them must be 0 or NULL"),
            )
            .with_advice("create the configuration from the preset"));
        }
        return copy_of(options.configuration);
    }
    let preset = Preset::from_code(preset).ok_or_else(|| {
        Error::new(Status::Configuration, format!("preset is {preset}; NVB_PRESET_… (0 to 4) is needed"))
    })?;
    Ok(preset.configuration())
}

/// # Safety
/// `options.memory` is NULL or a struct with its size set.
unsafe fn apply_memory(
    configuration: &mut Configuration,
    options: &nvb_backend_options,
) -> Result<Option<EngineAllocator>> {
    let limit = options.memory_limit;
    if options.memory.is_null() {
        if limit != 0 {
            configuration.memory.limit_fraction = 0.0;
        }
        return set_number(configuration, "memory.limit", limit).map(|()| None);
    }
    // SAFETY: the caller's contract.
    let mut memory = unsafe { read(options.memory)? };
    let wrong = |text: String| Err(Error::new(Status::Configuration, text));
    if memory.space != NVB_MEMORY_DEVICE {
        return wrong(format!("memory->space is {}; a backend's own manager has NVB_MEMORY_DEVICE", memory.space));
    }
    if limit != 0 && (memory.limit != 0 || memory.limit_fraction != 0.0) {
        return wrong(format!("memory_limit is {limit} and memory has a limit of its own; one of them must be 0"));
    }
    memory.limit |= limit;
    // SAFETY: the caller's contract.
    unsafe { apply(configuration, &memory) }
}

fn set_log_level(configuration: &mut Configuration, level: u32) -> Result<()> {
    configuration.logging.level = match level {
        0 => return Ok(()),
        NVB_LOG_OFF => LogLevel::Off,
        NVB_LOG_ERROR..=NVB_LOG_TRACE => LogLevel::ALL[level as usize],
        _ => {
            return Err(Error::new(
                Status::Configuration,
                format!("log_level is {level}; 0, {NVB_LOG_ERROR} to {NVB_LOG_TRACE} or NVB_LOG_OFF is needed"),
            ))
        }
    };
    Ok(())
}

fn set_text(configuration: &mut Configuration, field: &str, text: String) -> Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    find(field)?.set(configuration, Value::Text(text))
}

pub(super) fn set_number(configuration: &mut Configuration, field: &str, number: u64) -> Result<()> {
    if number == 0 {
        return Ok(());
    }
    find(field)?.set(configuration, Value::Integer(number))
}

/// The codes of a choice are 1, 2, … in the order of its names.
pub(super) fn set_choice(
    configuration: &mut Configuration,
    field: &str,
    code: u32,
    names: &'static [&'static str],
) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let name = names.get(code as usize - 1).ok_or_else(|| unknown(field, code, names.len()))?;
    find(field)?.set(configuration, Value::Text(name.to_string()))
}

pub(super) fn set_switch(configuration: &mut Configuration, field: &str, code: u32) -> Result<()> {
    match code {
        0 => Ok(()),
        NVB_SWITCH_ON | NVB_SWITCH_OFF => find(field)?.set(configuration, Value::Boolean(code == NVB_SWITCH_ON)),
        _ => Err(unknown(field, code, NVB_SWITCH_OFF as usize)),
    }
}

fn unknown(field: &str, code: u32, last: usize) -> Error {
    Error::new(Status::Configuration, format!("{field} is {code}; 0 to {last} is needed"))
        .with_limit(code.into(), last as u64)
}

#[cfg(test)]
mod tests {
    use super::super::memory_options::*;
    use super::*;
    use crate::configuration::memory::{LeakTracking, LimitOf, Spill};

    #[test]
    fn codes_are_the_places_of_the_names() {
        let place = |names: &[&str], code: u32| names[code as usize - 1].to_string();
        for (names, code, name) in [
            (Precision::NAMES, NVB_PRECISION_AUTO, "auto"),
            (Precision::NAMES, NVB_PRECISION_F32, "f32"),
            (Precision::NAMES, NVB_PRECISION_F16, "f16"),
            (Precision::NAMES, NVB_PRECISION_BF16, "bf16"),
            (Requirement::NAMES, NVB_SWITCH_ON, "auto"),
            (Requirement::NAMES, NVB_SWITCH_OFF, "off"),
            (Requirement::NAMES, NVB_SWITCH_REQUIRED, "required"),
            (AttentionKernels::NAMES, NVB_ATTENTION_AUTO, "auto"),
            (AttentionKernels::NAMES, NVB_ATTENTION_PLAIN, "plain"),
            (LimitOf::NAMES, NVB_LIMIT_OF_TOTAL, "total"),
            (LimitOf::NAMES, NVB_LIMIT_OF_FREE, "free"),
            (LeakTracking::NAMES, NVB_LEAK_TRACKING_OFF, "off"),
            (LeakTracking::NAMES, NVB_LEAK_TRACKING_SAMPLED, "sampled"),
            (LeakTracking::NAMES, NVB_LEAK_TRACKING_FULL, "full"),
            (Spill::NAMES, NVB_SPILL_NEVER, "never"),
            (Spill::NAMES, NVB_SPILL_PINNED, "pinned"),
            (Spill::NAMES, NVB_SPILL_MANAGED, "managed"),
        ] {
            assert_eq!(place(names, code), name);
        }
        for (level, code) in LogLevel::ALL[1..].iter().zip(NVB_LOG_ERROR..=NVB_LOG_TRACE) {
            assert_eq!(*level as u32, code);
        }
    }
}

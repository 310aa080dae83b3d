//! What a backend is created with, as one value: presets, JSON in and out, and a check that names the field.
//!
//! [`field::FIELDS`] lists every field once; JSON, text and validation all go through it.

pub mod field;
pub mod json;
pub mod preset;
pub mod size;

use crate::backend::BackendOptions;
use crate::device::{features::Features, DeviceInfo, DeviceKind};
use crate::error::{Error, Result, Status};
use crate::memory::options::{Limit, Margin, MemoryOptions, Spill};
use crate::tensor::DType;
pub use preset::Preset;

macro_rules! choice {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub enum $name {
            $($(#[$doc])* $variant,)+
        }

        impl $name {
            pub const NAMES: &'static [&'static str] = &[$($text),+];
            pub const ALL: &'static [$name] = &[$($name::$variant),+];

            pub fn name(self) -> &'static str {
                $name::NAMES[self as usize]
            }

            pub fn from_name(name: &str) -> Option<$name> {
                $name::ALL.iter().copied().find(|choice| choice.name() == name)
            }
        }
    };
}

choice! {
    /// What the library stores where the caller leaves the dtype open: KV caches.
    Precision {
        /// BF16 on a GPU, F32 on the CPU.
        #[default]
        Auto = "auto",
        F32 = "f32",
        F16 = "f16",
        Bf16 = "bf16",
    }
}

choice! {
    Requirement {
        /// Used where the device has it and it helps.
        #[default]
        Auto = "auto",
        /// Never used.
        Off = "off",
        /// No backend is created on a device without it.
        Required = "required",
    }
}

choice! {
    AttentionKernels {
        /// The fastest that the shapes allow.
        #[default]
        Auto = "auto",
        /// Those without Tensor Cores: f32 products, for comparison.
        Plain = "plain",
    }
}

choice! {
    LogLevel {
        Off = "off",
        Error = "error",
        #[default]
        Warning = "warning",
        Info = "info",
        Debug = "debug",
        Trace = "trace",
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Configuration {
    /// "auto", "cpu", "cuda" or "cuda:N"
    pub device: String,
    /// Kernels of an older architecture (80 on a 9.0 GPU); 0: the device's own.
    pub architecture: u64,
    /// CPU threads; 0: one a core.
    pub threads: u64,
    pub precision: Precision,
    /// Off keeps FP8 out of what the library computes with by itself; FP8 weights and inputs that came as FP8 codes stay.
    pub fp8: Requirement,
    pub tensor_cores: Requirement,
    pub attention: AttentionKernels,
    /// Whether cuBLASLt may run where it is present.
    pub vendor_libraries: bool,
    /// Whether large products with FP8 and INT8 weights may round their input to 8 bits, a scale a row.
    pub quantized_activations: bool,
    /// Whether each row of a product is the same to the bit whatever the other rows are.
    pub batch_invariant: bool,
    /// The kernel that products take where it can do them; "": the tuned or the default one.
    pub linear_kernel: String,
    /// Where tuned choices are kept; "": the environment's NVB_TUNING_FILE, else nowhere.
    pub tuning_file: String,
    pub memory: MemoryConfiguration,
    pub timing: TimingConfiguration,
    pub logging: LoggingConfiguration,
}

#[derive(Debug, Clone, PartialEq)]
pub struct MemoryConfiguration {
    /// Bytes taken from the device at creation.
    pub initial: u64,
    /// Whether the manager takes more than `initial` when that is used up.
    pub growth: bool,
    /// Bytes that the manager may hold; 0: no limit of its own.
    pub limit: u64,
    /// The same as a part of the device's memory; 0: none. Not together with `limit`.
    pub limit_fraction: f64,
    /// Bytes of the device that are left to others; 0: the manager's own choice; [`NO_MARGIN`]: none.
    pub margin: u64,
    /// Whether unified memory may serve what does not fit.
    pub unified: bool,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct TimingConfiguration {
    /// Whether the backend starts with profiling on.
    pub profiling: bool,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct LoggingConfiguration {
    pub level: LogLevel,
}

impl Default for Configuration {
    fn default() -> Configuration {
        Configuration {
            device: "auto".to_string(),
            architecture: 0,
            threads: 0,
            precision: Precision::default(),
            fp8: Requirement::default(),
            tensor_cores: Requirement::default(),
            attention: AttentionKernels::default(),
            vendor_libraries: true,
            quantized_activations: false,
            batch_invariant: false,
            linear_kernel: String::new(),
            tuning_file: String::new(),
            memory: MemoryConfiguration::default(),
            timing: TimingConfiguration::default(),
            logging: LoggingConfiguration::default(),
        }
    }
}

impl Default for MemoryConfiguration {
    fn default() -> MemoryConfiguration {
        MemoryConfiguration { initial: 0, growth: true, limit: 0, limit_fraction: 0.0, margin: 0, unified: false }
    }
}

impl Configuration {
    /// Each field by itself, then what does not go together.
    pub fn validate(&self) -> Result<()> {
        for field in field::FIELDS {
            field.check(&field.get(self))?;
        }
        let memory = &self.memory;
        if memory.limit != 0 && memory.limit_fraction != 0.0 {
            return Err(conflict(
                format!("memory.limit is {} and memory.limit_fraction {}", memory.limit, memory.limit_fraction),
                "one of them must be 0",
            ));
        }
        if memory.limit != 0 && memory.initial > memory.limit {
            return Err(conflict(
                format!("memory.initial is {} and memory.limit {}", memory.initial, memory.limit),
                "initial may be as large as the limit at most",
            )
            .with_limit(memory.initial, memory.limit));
        }
        if !memory.growth && memory.initial == 0 {
            return Err(conflict(
                "memory.growth is false and memory.initial 0".to_string(),
                "without growth, initial is all the memory there is",
            ));
        }
        if self.tensor_cores == Requirement::Off && self.fp8 == Requirement::Required {
            return Err(conflict(
                "tensor_cores is \"off\" and fp8 \"required\"".to_string(),
                "FP8 products run on Tensor Cores",
            ));
        }
        let below = |least: u64| self.architecture != 0 && self.architecture < least;
        if self.fp8 == Requirement::Required && below(89) {
            return Err(conflict(
                format!("fp8 is \"required\" and architecture {}", self.architecture),
                "FP8 needs 89 or more",
            ));
        }
        if self.tensor_cores == Requirement::Off && self.architecture > PLAIN_ARCHITECTURE {
            return Err(conflict(
                format!("tensor_cores is \"off\" and architecture {}", self.architecture),
                "without Tensor Cores the kernels of 75 run",
            ));
        }
        Ok(())
    }

    /// What the executor is created with.
    pub fn backend_options(&self) -> BackendOptions {
        BackendOptions {
            device: self.device.clone(),
            threads: self.threads as usize,
            force_architecture: self.architecture as u32,
            own_kernels_only: !self.vendor_libraries || self.tensor_cores == Requirement::Off,
            quantized_activations: self.quantized_activations,
            batch_invariant: self.batch_invariant,
            fp8_off: self.fp8 == Requirement::Off,
            linear_kernel: self.linear_kernel.clone(),
            tuning_file: self.tuning_file.clone(),
            tensor_cores_off: self.tensor_cores == Requirement::Off,
            plain_attention: self.attention == AttentionKernels::Plain,
            log_level: self.logging.level,
            ..BackendOptions::default()
        }
    }

    /// The other way round: what plain options say, with the defaults where they say nothing.
    pub fn of(options: &BackendOptions) -> Configuration {
        let off = |off: bool| if off { Requirement::Off } else { Requirement::Auto };
        let mut configuration = Configuration {
            device: if options.device.is_empty() { "auto".to_string() } else { options.device.clone() },
            architecture: options.force_architecture.into(),
            threads: options.threads as u64,
            fp8: off(options.fp8_off),
            tensor_cores: off(options.tensor_cores_off),
            vendor_libraries: !options.own_kernels_only,
            quantized_activations: options.quantized_activations,
            batch_invariant: options.batch_invariant,
            linear_kernel: options.linear_kernel.clone(),
            tuning_file: options.tuning_file.clone(),
            logging: LoggingConfiguration { level: options.log_level },
            ..Configuration::default()
        };
        if options.plain_attention {
            configuration.attention = AttentionKernels::Plain;
        }
        // Limit and margin are the memory manager's to tell, which has worked them out.
        configuration.memory.initial = options.memory.initial_bytes;
        configuration.memory.unified = options.memory.spill == Spill::Managed;
        configuration
    }

    /// Whether the chosen device has what is required.
    pub fn check_device(&self, device: &DeviceInfo) -> Result<()> {
        let lacks = |requirement: Requirement, feature: Features| {
            requirement == Requirement::Required && !device.features.has(feature)
        };
        let refuse = |field: &str, feature: &str, status: Status| {
            Err(Error::new(
                status,
                format!("{field} is \"required\"; {} ({}) has no {feature}", device.selector(), device.name),
            )
            .with_advice("choose another device, or set it to \"auto\""))
        };
        if lacks(self.fp8, Features::FP8) {
            return refuse("fp8", "FP8 products", Status::Fp8);
        }
        if lacks(self.tensor_cores, Features::TENSOR_CORES) {
            return refuse("tensor_cores", "Tensor Cores", Status::Unsupported);
        }
        Ok(())
    }

    /// What is stored where the caller leaves the dtype open.
    pub fn default_dtype(&self, kind: DeviceKind) -> DType {
        match (self.precision, kind) {
            (Precision::Auto, DeviceKind::Cpu) | (Precision::F32, _) => DType::F32,
            (Precision::Auto, DeviceKind::Cuda | DeviceKind::Tpu) | (Precision::Bf16, _) => DType::Bf16,
            (Precision::F16, _) => DType::F16,
        }
    }
}

impl MemoryConfiguration {
    /// As the memory manager takes them.
    pub fn options(&self) -> MemoryOptions {
        let limit = match (self.growth, self.limit, self.limit_fraction) {
            (false, ..) => Limit::Bytes(self.initial),
            (true, 0, 0.0) => Limit::None,
            (true, 0, part) => Limit::OfTotal(part),
            (true, bytes, _) => Limit::Bytes(bytes),
        };
        MemoryOptions {
            limit,
            margin: match self.margin {
                0 => Margin::Default,
                NO_MARGIN => Margin::Bytes(0),
                bytes => Margin::Bytes(bytes),
            },
            initial_bytes: self.initial,
            spill: if self.unified { Spill::Managed } else { Spill::Never },
            ..MemoryOptions::default()
        }
    }
}

/// `MemoryConfiguration::margin` where nothing is left to others, "none" as text.
pub const NO_MARGIN: u64 = u64::MAX;

/// The newest architecture whose kernels use no Tensor Cores.
const PLAIN_ARCHITECTURE: u64 = 75;

fn conflict(what: String, why: &str) -> Error {
    Error::new(Status::Configuration, format!("{what}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::choices::Rounding;

    fn refused(change: impl FnOnce(&mut Configuration)) -> String {
        let mut configuration = Configuration::default();
        change(&mut configuration);
        let error = configuration.validate().unwrap_err();
        assert_eq!(error.status, Status::Configuration);
        error.message
    }

    #[test]
    fn what_does_not_go_together_names_both_fields() {
        let text = refused(|c| (c.memory.limit, c.memory.limit_fraction) = (1 << 30, 0.5));
        assert!(text.contains("memory.limit is 1073741824") && text.contains("limit_fraction 0.5"), "{text}");
        assert!(refused(|c| (c.memory.initial, c.memory.limit) = (2, 1)).contains("memory.initial is 2"));
        assert!(refused(|c| c.memory.growth = false).contains("memory.growth is false"));
        let both = |c: &mut Configuration| (c.tensor_cores, c.fp8) = (Requirement::Off, Requirement::Required);
        assert!(refused(both).contains("tensor_cores"));
        assert!(refused(|c| (c.fp8, c.architecture) = (Requirement::Required, 80)).contains("architecture 80"));
        assert!(refused(|c| (c.tensor_cores, c.architecture) = (Requirement::Off, 90)).contains("architecture 90"));
        assert!(refused(|c| c.device = "gpu".into()).contains("\"gpu\""));
    }

    #[test]
    fn requirements_are_held_against_the_device() {
        let mut turing = DeviceInfo { name: "T4".into(), ..DeviceInfo::new(DeviceKind::Cuda, 1) };
        turing.features = Features::of_capability(75);
        let mut configuration = Configuration { fp8: Requirement::Required, ..Configuration::default() };
        let error = configuration.check_device(&turing).unwrap_err();
        assert_eq!(error.status, Status::Fp8);
        assert!(error.message.contains("cuda:1 (T4)"), "{error}");
        configuration.fp8 = Requirement::Auto;
        configuration.tensor_cores = Requirement::Required;
        configuration.check_device(&turing).unwrap();
        let cpu = DeviceInfo::new(DeviceKind::Cpu, 0);
        assert_eq!(configuration.check_device(&cpu).unwrap_err().status, Status::Unsupported);
    }

    #[test]
    fn options_and_configurations_say_the_same() {
        let configuration = Configuration {
            device: "cuda:2".into(),
            architecture: 75,
            threads: 3,
            fp8: Requirement::Off,
            tensor_cores: Requirement::Off,
            attention: AttentionKernels::Plain,
            vendor_libraries: false,
            quantized_activations: true,
            batch_invariant: true,
            linear_kernel: "linear_simt".into(),
            tuning_file: "choices.txt".into(),
            logging: LoggingConfiguration { level: LogLevel::Debug },
            ..Configuration::default()
        };
        assert_eq!(Configuration::of(&configuration.backend_options()), configuration);
        let unsaid = Configuration::of(&BackendOptions::default());
        assert_eq!(unsaid, Configuration::default());
        assert_eq!(Configuration::of(&unsaid.backend_options()), unsaid);
    }

    #[test]
    fn fp8_off_leaves_int8_to_quantized_activations() {
        let rounding = |fp8, quantized_activations| {
            let configuration = Configuration { fp8, quantized_activations, ..Configuration::default() };
            configuration.validate().unwrap();
            configuration.backend_options().rounding()
        };
        assert_eq!(rounding(Requirement::Auto, true), Rounding::Any);
        assert_eq!(rounding(Requirement::Required, true), Rounding::Any);
        assert_eq!(rounding(Requirement::Off, true), Rounding::NotToFp8);
        assert_eq!(rounding(Requirement::Off, false), Rounding::Never);
        assert_eq!(rounding(Requirement::Auto, false), Rounding::Never);
    }

    #[test]
    fn limits_are_bytes_a_part_or_what_was_taken_first() {
        let mut memory = MemoryConfiguration::default();
        assert_eq!(memory.options(), MemoryOptions::default());
        memory.limit_fraction = 0.5;
        assert_eq!(memory.options().limit, Limit::OfTotal(0.5));
        (memory.limit, memory.initial) = (700, 300);
        assert_eq!((memory.options().limit, memory.options().initial_bytes), (Limit::Bytes(700), 300));
        (memory.growth, memory.margin, memory.unified) = (false, 5, true);
        let options = memory.options();
        assert_eq!((options.limit, options.margin), (Limit::Bytes(300), Margin::Bytes(5)));
        assert_eq!(options.spill, Spill::Managed);
        memory.margin = NO_MARGIN;
        assert_eq!(memory.options().margin, Margin::Bytes(0));
    }

    #[test]
    fn open_dtypes_follow_the_precision() {
        let of = |precision, kind| Configuration { precision, ..Configuration::default() }.default_dtype(kind);
        assert_eq!(of(Precision::Auto, DeviceKind::Cpu), DType::F32);
        assert_eq!(of(Precision::Auto, DeviceKind::Cuda), DType::Bf16);
        assert_eq!(of(Precision::F16, DeviceKind::Cuda), DType::F16);
        assert_eq!(of(Precision::F32, DeviceKind::Cuda), DType::F32);
        assert_eq!(of(Precision::Bf16, DeviceKind::Cpu), DType::Bf16);
    }
}

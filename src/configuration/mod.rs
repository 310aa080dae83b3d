//! What a backend is created with, as one value: presets, JSON in and out, and a check that names the field.
//!
//! [`field::FIELDS`] lists every field once; JSON, text and validation all go through it.

use crate::device::{features::Features, DeviceInfo, DeviceKind};
use crate::error::{Error, Result, Status};
use crate::registry::choices::Rounding;
use crate::tensor::DType;

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

pub mod field;
pub mod json;
pub mod memory;
pub mod preset;
pub mod selector;
pub mod size;

pub use memory::MemoryConfiguration;
pub use preset::Preset;

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
        /// Kernels without Tensor Cores: f32 products, for comparison.
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
    /// Off keeps FP8 out of what the library computes with by itself; FP8 weights and inputs that came as FP8 values
    /// stay.
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

impl Configuration {
    /// Each field by itself, then what does not go together.
    pub fn validate(&self) -> Result<()> {
        for field in field::FIELDS {
            field.check(&field.get(self))?;
        }
        self.memory.validate()?;
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

    /// Whether only the library's own kernels run, also where cuBLASLt is present.
    pub fn own_kernels_only(&self) -> bool {
        !self.vendor_libraries || self.tensor_cores == Requirement::Off
    }

    /// Whether attention runs on the kernels without Tensor Cores.
    pub fn plain_attention(&self) -> bool {
        self.attention == AttentionKernels::Plain || self.tensor_cores == Requirement::Off
    }

    /// Which inputs of products may be rounded to 8 bits.
    pub fn rounding(&self) -> Rounding {
        match (self.quantized_activations, self.fp8 == Requirement::Off) {
            (false, _) => Rounding::Never,
            (true, true) => Rounding::NotToFp8,
            (true, false) => Rounding::Any,
        }
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

/// A number of bytes that is "none" as text, where 0 leaves it to the library.
pub const NONE: u64 = u64::MAX;

/// The newest architecture whose kernels use no Tensor Cores.
const PLAIN_ARCHITECTURE: u64 = 75;

fn conflict(what: String, why: &str) -> Error {
    Error::new(Status::Configuration, format!("{what}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(refused(|c| (c.memory.initial_bytes, c.memory.limit) = (2, 1)).contains("memory.initial_bytes is 2"));
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
    fn fp8_off_leaves_int8_to_quantized_activations() {
        let rounding = |fp8, quantized_activations| {
            let configuration = Configuration { fp8, quantized_activations, ..Configuration::default() };
            configuration.validate().unwrap();
            configuration.rounding()
        };
        assert_eq!(rounding(Requirement::Auto, true), Rounding::Any);
        assert_eq!(rounding(Requirement::Required, true), Rounding::Any);
        assert_eq!(rounding(Requirement::Off, true), Rounding::NotToFp8);
        assert_eq!(rounding(Requirement::Off, false), Rounding::Never);
        assert_eq!(rounding(Requirement::Auto, false), Rounding::Never);
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

//! Configurations to start from.

use super::memory::Spill;
use super::{Configuration, LogLevel, Precision, Requirement};
use crate::error::numbered;

numbered! {
    pub enum Preset: u32 {
        /// The defaults: everything that helps and costs no accuracy.
        Inference = 0,
        /// Answers come soon from the first request on: memory is taken at the start, nothing is measured or logged.
        LowLatency = 1,
        /// Many sequences at once: nearly all of the device's memory.
        Throughput = 2,
        /// Large activations: unified memory behind the device's own, no FP8.
        Training = 3,
        /// Everything is measured and said.
        Development = 4,
    }
}

impl Preset {
    pub const NAMES: &'static [&'static str] = &["inference", "low_latency", "throughput", "training", "development"];

    pub fn from_name(name: &str) -> Option<Preset> {
        Preset::NAMES.iter().position(|known| *known == name).map(|place| Preset::ALL[place])
    }

    pub fn configuration(self) -> Configuration {
        let mut configuration = Configuration::default();
        match self {
            Preset::Inference => {}
            Preset::LowLatency => {
                configuration.memory.initial_bytes = 256 << 20;
                configuration.logging.level = LogLevel::Error;
            }
            Preset::Throughput => configuration.memory.limit_fraction = 0.95,
            Preset::Training => {
                configuration.precision = Precision::Bf16;
                configuration.fp8 = Requirement::Off;
                configuration.memory.spill = Spill::Managed;
                configuration.memory.margin = 1 << 30;
            }
            Preset::Development => {
                configuration.timing.profiling = true;
                configuration.logging.level = LogLevel::Debug;
            }
        }
        configuration
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_valid_and_found_by_code_and_name() {
        for (place, preset) in Preset::ALL.into_iter().enumerate() {
            preset.configuration().validate().unwrap();
            assert_eq!(preset as usize, place);
            assert_eq!(Preset::from_code(place as u32), Some(preset));
            assert_eq!(Preset::from_name(Preset::NAMES[place]), Some(preset));
        }
        assert_eq!(Preset::from_code(5), None);
        assert_eq!(Preset::from_name("Inference"), None);
        assert_eq!(Preset::Inference.configuration(), Configuration::default());
    }
}

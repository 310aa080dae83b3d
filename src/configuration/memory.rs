//! The memory of a configuration: what a memory manager is created with, apart from an engine's allocator, which is code.

use super::{conflict, NONE};
use crate::error::Result;
use crate::memory::options::{self, Decided, Limit, Margin, MemoryOptions};
use std::time::Duration;

choice! {
    LimitOf {
        /// The limit is a fraction of all the device's memory.
        #[default]
        Total = "total",
        /// The limit is a fraction of what is free when the manager is created.
        Free = "free",
    }
}

choice! {
    LeakTracking {
        #[default]
        Off = "off",
        Sampled = "sampled",
        Full = "full",
    }
}

choice! {
    /// Where a block goes when the device is full.
    Spill {
        #[default]
        Never = "never",
        Pinned = "pinned",
        Managed = "managed",
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct MemoryConfiguration {
    /// Bytes that the manager may hold; 0: no limit of its own.
    pub limit: u64,
    /// The limit as a part of what `limit_of` names; 0: none. Not together with `limit`.
    pub limit_fraction: f64,
    pub limit_of: LimitOf,
    /// Bytes of the device that are left to others; 0: the manager's own choice; [`NONE`]: none.
    pub margin: u64,
    /// Bytes taken from the device at creation.
    pub initial_bytes: u64,
    /// Whether the manager takes more than `initial_bytes` when that is used up.
    pub growth: bool,
    /// Addresses to reserve; 0: four times the device's memory.
    pub range_bytes: u64,
    /// Off: every block is an allocation of its own.
    pub pooling: bool,
    /// Bytes that each thread keeps; 0: the manager's own choice; [`NONE`]: none.
    pub thread_cache_bytes: u64,
    pub zero_on_free: bool,
    pub leak_tracking: LeakTracking,
    /// One allocation in so many bytes is recorded where tracking samples; 0: the library's choice.
    pub leak_sample_bytes: u64,
    /// Events that the trace holds; 0: no trace.
    pub trace_events: u64,
    /// How long an allocation that found no memory waits for other threads to free some.
    pub wait_microseconds: u64,
    pub spill: Spill,
}

impl Default for MemoryConfiguration {
    fn default() -> MemoryConfiguration {
        MemoryConfiguration {
            limit: 0,
            limit_fraction: 0.0,
            limit_of: LimitOf::default(),
            margin: 0,
            initial_bytes: 0,
            growth: true,
            range_bytes: 0,
            pooling: true,
            thread_cache_bytes: 0,
            zero_on_free: false,
            leak_tracking: LeakTracking::default(),
            leak_sample_bytes: 0,
            trace_events: 0,
            wait_microseconds: 0,
            spill: Spill::default(),
        }
    }
}

/// `leak_sample_bytes` where it is 0.
const DEFAULT_SAMPLE_BYTES: u64 = 512 << 10;

impl MemoryConfiguration {
    /// What does not go together.
    pub(super) fn validate(&self) -> Result<()> {
        if self.limit != 0 && self.limit_fraction != 0.0 {
            return Err(conflict(
                format!("memory.limit is {} and memory.limit_fraction {}", self.limit, self.limit_fraction),
                "one of them must be 0",
            ));
        }
        if self.limit != 0 && self.initial_bytes > self.limit {
            return Err(conflict(
                format!("memory.initial_bytes is {} and memory.limit {}", self.initial_bytes, self.limit),
                "the first may be as large as the limit at most",
            )
            .with_limit(self.initial_bytes, self.limit));
        }
        if !self.growth && self.initial_bytes == 0 {
            return Err(conflict(
                "memory.growth is false and memory.initial_bytes 0".to_string(),
                "without growth, the initial bytes are all the memory there is",
            ));
        }
        self.options().validate()
    }

    /// The options in the form that the memory manager takes.
    pub fn options(&self) -> MemoryOptions {
        let limit = match (self.growth, self.limit, self.limit_fraction, self.limit_of) {
            (false, ..) => Limit::Bytes(self.initial_bytes),
            (true, 0, 0.0, _) => Limit::None,
            (true, 0, part, LimitOf::Total) => Limit::OfTotal(part),
            (true, 0, part, LimitOf::Free) => Limit::OfFree(part),
            (true, bytes, ..) => Limit::Bytes(bytes),
        };
        MemoryOptions {
            limit,
            margin: match self.margin {
                0 => Margin::Default,
                NONE => Margin::Bytes(0),
                bytes => Margin::Bytes(bytes),
            },
            initial_bytes: self.initial_bytes,
            range_bytes: self.range_bytes,
            pooling: self.pooling,
            thread_cache_bytes: match self.thread_cache_bytes {
                0 => None,
                NONE => Some(0),
                bytes => Some(usize::try_from(bytes).unwrap_or(usize::MAX)),
            },
            zero_on_free: self.zero_on_free,
            leak_tracking: match (self.leak_tracking, self.leak_sample_bytes) {
                (LeakTracking::Off, _) => options::LeakTracking::Off,
                (LeakTracking::Sampled, 0) => options::LeakTracking::Sampled(DEFAULT_SAMPLE_BYTES),
                (LeakTracking::Sampled, bytes) => options::LeakTracking::Sampled(bytes),
                (LeakTracking::Full, _) => options::LeakTracking::Full,
            },
            trace_events: self.trace_events as usize,
            wait: Duration::from_micros(self.wait_microseconds),
            spill: match self.spill {
                Spill::Never => options::Spill::Never,
                Spill::Pinned => options::Spill::Pinned,
                Spill::Managed => options::Spill::Managed,
            },
            allocator: None,
        }
    }

    /// This configuration with what a manager that was created with it has decided: it makes another manager like that
    /// one.
    pub fn running(&self, decided: &Decided) -> MemoryConfiguration {
        let bytes_or_none = |bytes: u64| if bytes == 0 { NONE } else { bytes };
        let limit = decided.limit.min(super::field::MOST_BYTES);
        // A manager without pools takes nothing at creation, and a limit that was lowered since leaves less to take.
        let initial_bytes = match (decided.pooling, limit) {
            (false, _) => 0,
            (true, 0) => self.initial_bytes,
            (true, limit) => self.initial_bytes.min(limit),
        };
        MemoryConfiguration {
            limit,
            limit_fraction: 0.0,
            limit_of: LimitOf::default(),
            margin: bytes_or_none(decided.margin),
            initial_bytes,
            growth: self.growth || initial_bytes == 0 || initial_bytes != limit,
            range_bytes: decided.range_bytes,
            pooling: decided.pooling,
            thread_cache_bytes: bytes_or_none(decided.thread_cache_bytes),
            ..self.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_bytes_a_part_or_what_was_taken_first() {
        let mut memory = MemoryConfiguration::default();
        assert_eq!(memory.options(), MemoryOptions::default());
        memory.limit_fraction = 0.5;
        assert_eq!(memory.options().limit, Limit::OfTotal(0.5));
        memory.limit_of = LimitOf::Free;
        assert_eq!(memory.options().limit, Limit::OfFree(0.5));
        (memory.limit, memory.initial_bytes) = (700, 300);
        assert_eq!((memory.options().limit, memory.options().initial_bytes), (Limit::Bytes(700), 300));
        (memory.growth, memory.margin, memory.spill) = (false, 5, Spill::Managed);
        let options = memory.options();
        assert_eq!((options.limit, options.margin), (Limit::Bytes(300), Margin::Bytes(5)));
        assert_eq!(options.spill, options::Spill::Managed);
        memory.margin = NONE;
        assert_eq!(memory.options().margin, Margin::Bytes(0));
    }

    #[test]
    fn every_option_of_a_manager_has_its_field() {
        let memory = MemoryConfiguration {
            range_bytes: 1 << 30,
            pooling: false,
            thread_cache_bytes: NONE,
            zero_on_free: true,
            leak_tracking: LeakTracking::Sampled,
            trace_events: 7,
            wait_microseconds: 9,
            spill: Spill::Pinned,
            ..MemoryConfiguration::default()
        };
        let expected = MemoryOptions {
            range_bytes: 1 << 30,
            pooling: false,
            thread_cache_bytes: Some(0),
            zero_on_free: true,
            leak_tracking: options::LeakTracking::Sampled(DEFAULT_SAMPLE_BYTES),
            trace_events: 7,
            wait: Duration::from_micros(9),
            spill: options::Spill::Pinned,
            ..MemoryOptions::default()
        };
        assert_eq!(memory.options(), expected);
        let full = MemoryConfiguration { leak_tracking: LeakTracking::Full, leak_sample_bytes: 3, ..memory.clone() };
        assert_eq!(full.options().leak_tracking, options::LeakTracking::Full);
        let often = MemoryConfiguration { leak_sample_bytes: 3, ..memory };
        assert_eq!(often.options().leak_tracking, options::LeakTracking::Sampled(3));
    }

    #[test]
    fn what_runs_can_be_asked_for_again() {
        let fixed = MemoryConfiguration {
            initial_bytes: 1 << 28,
            growth: false,
            limit_of: LimitOf::Free,
            ..MemoryConfiguration::default()
        };
        let decided = Decided { limit: 1 << 28, margin: 0, pooling: true, range_bytes: 1 << 30, thread_cache_bytes: 0 };
        let running = fixed.running(&decided);
        running.validate().unwrap();
        assert_eq!((running.growth, running.initial_bytes, running.limit), (false, 1 << 28, 1 << 28));
        assert_eq!((running.margin, running.thread_cache_bytes, running.limit_of), (NONE, NONE, LimitOf::Total));
        assert_eq!(running.options().limit, fixed.options().limit);
        for limit in [1 << 27, 1 << 29, u64::MAX] {
            let changed = fixed.running(&Decided { limit, ..decided.clone() });
            changed.validate().unwrap();
            assert_eq!(changed.options().limit, Limit::Bytes(limit.min(1 << 50)));
        }
        let unpooled = fixed.running(&Decided { pooling: false, range_bytes: 0, ..decided });
        unpooled.validate().unwrap();
        assert_eq!((unpooled.initial_bytes, unpooled.growth, unpooled.limit), (0, true, 1 << 28));
    }
}

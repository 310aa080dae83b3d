//! What a manager may be told at creation.

use super::allocator::EngineAllocator;
use super::page_table::UNIT_BYTES;
use crate::error::{Error, Result, Status};
use std::time::Duration;

/// Bytes that a manager may hold.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Limit {
    /// On a GPU what it has; on the host, whose system promises more than it has, the whole of main memory.
    #[default]
    None,
    Bytes(u64),
    /// A part of the device's memory, 0 to 1.
    OfTotal(f64),
    /// A part of what is free at creation, 0 to 1.
    OfFree(f64),
}

/// Bytes of the device that are left to others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Margin {
    /// On a GPU the larger of 512 MiB and a fiftieth of its memory, but at most a twentieth; none on the host, whose
    /// system keeps a margin of its own.
    #[default]
    Default,
    Bytes(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LeakTracking {
    #[default]
    Off,
    /// One allocation in about so many bytes.
    Sampled(u64),
    Full,
}

/// Where a block goes when the device is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Spill {
    /// Nowhere: the allocation fails.
    #[default]
    Never,
    /// Page-locked host memory that the device reads over the bus.
    Pinned,
    /// Unified memory, which the driver moves.
    Managed,
}

#[derive(Debug, Clone, PartialEq)]
pub struct MemoryOptions {
    pub limit: Limit,
    pub margin: Margin,
    /// Backed with memory at creation, so that the first requests are fast; nothing where blocks are allocated singly.
    pub initial_bytes: u64,
    /// Addresses to reserve; 0: four times the device's memory, since whole units are re-mapped rather than moved. See
    /// `regions.rs` for who gets which.
    pub range_bytes: u64,
    /// Off: every block is a plain allocation, as memory checkers want it.
    pub pooling: bool,
    /// Bytes that each thread keeps in its magazines; `None`: a 1024th of the device's memory, 8 to 64 MiB.
    pub thread_cache_bytes: Option<usize>,
    /// Freed blocks are overwritten with zero before anybody else gets them.
    pub zero_on_free: bool,
    pub leak_tracking: LeakTracking,
    /// Events that the trace holds; 0: no trace.
    pub trace_events: usize,
    /// How long an allocation that found no memory waits for other threads to free some.
    pub wait: Duration,
    pub spill: Spill,
    /// Allocates in place of the device; then every block is one of its own.
    pub allocator: Option<EngineAllocator>,
}

impl Default for MemoryOptions {
    fn default() -> MemoryOptions {
        MemoryOptions {
            limit: Limit::None,
            margin: Margin::Default,
            initial_bytes: 0,
            range_bytes: 0,
            pooling: true,
            thread_cache_bytes: None,
            zero_on_free: false,
            leak_tracking: LeakTracking::Off,
            trace_events: 0,
            wait: Duration::ZERO,
            spill: Spill::Never,
            allocator: None,
        }
    }
}

/// What a memory manager has made of its options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decided {
    pub limit: u64,
    pub margin: u64,
    pub pooling: bool,
    /// 0: no range is reserved.
    pub range_bytes: u64,
    pub thread_cache_bytes: u64,
}

/// Under a limit this small whole units are too coarse, so blocks are allocated singly and counted by the byte.
const LEAST_POOLED_LIMIT: u64 = 64 << 20;

impl MemoryOptions {
    pub fn validate(&self) -> Result<()> {
        let wrong = |text: String| Err(Error::new(Status::Configuration, text));
        match self.limit {
            Limit::OfTotal(part) | Limit::OfFree(part) if !(part > 0.0 && part <= 1.0) => {
                return wrong(format!("memory.limit_fraction is {part}; more than 0 and at most 1 is needed"));
            }
            _ => {}
        }
        if self.range_bytes > 0 && self.range_bytes < UNIT_BYTES as u64 {
            return wrong(format!("memory.range_bytes is {}; 0 or at least {UNIT_BYTES} is needed", self.range_bytes));
        }
        if self.trace_events > 1 << 24 {
            return wrong(format!("memory.trace_events is {}; at most {} is supported", self.trace_events, 1 << 24));
        }
        if self.leak_tracking == LeakTracking::Sampled(0) {
            return wrong("leak tracking samples every 0 bytes; at least 1 is needed, or full tracking".to_string());
        }
        Ok(())
    }

    /// In bytes, 0 for none.
    pub(super) fn limit_bytes(&self, free: u64, total: u64, host: bool) -> u64 {
        match self.limit {
            Limit::None if host => total,
            Limit::None => 0,
            Limit::Bytes(bytes) => bytes,
            // A part of nothing is nothing, and 0 would mean no limit.
            Limit::OfTotal(part) => ((total as f64 * part) as u64).max(1),
            Limit::OfFree(part) => ((free as f64 * part) as u64).max(1),
        }
    }

    pub(super) fn margin_bytes(&self, total: u64, host: bool) -> u64 {
        match self.margin {
            Margin::Bytes(bytes) => bytes,
            Margin::Default if host => 0,
            Margin::Default => (512 << 20).max(total / 50).min(total / 20),
        }
    }

    pub(super) fn thread_cache(&self, total: u64) -> usize {
        self.thread_cache_bytes.unwrap_or((total >> 10).clamp(8 << 20, 64 << 20) as usize)
    }

    pub(super) fn pools(&self, limit: u64) -> bool {
        self.pooling && (limit == 0 || limit >= LEAST_POOLED_LIMIT)
    }
}

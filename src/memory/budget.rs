//! How much the manager may hold. Bytes are counted before they are asked for and counted back when the asking fails,
//! so threads together never pass the limit.

use super::source::Source;
use crate::error::Error;
use std::sync::atomic::{AtomicU64, Ordering};

pub struct Budget {
    /// `u64::MAX`: none.
    limit: AtomicU64,
    /// Bytes of the device that are left to others.
    margin: AtomicU64,
    held: AtomicU64,
    peak: AtomicU64,
    /// What the device had free, and what of it others had taken, when it was asked last.
    device_free: AtomicU64,
    unaccounted: AtomicU64,
}

#[derive(Debug)]
pub enum Refusal {
    Limit,
    /// Less than the request and the margin is free on the device.
    Margin {
        free: u64,
    },
    Source(Error),
}

/// Bytes that have been admitted; they are counted back unless kept.
#[must_use]
pub struct Admission<'a> {
    budget: &'a Budget,
    bytes: u64,
}

impl Budget {
    pub fn new(limit: u64, margin: u64) -> Budget {
        let limit = if limit == 0 { u64::MAX } else { limit };
        let none = || AtomicU64::new(0);
        Budget {
            limit: limit.into(),
            margin: margin.into(),
            held: none(),
            peak: none(),
            device_free: none(),
            unaccounted: none(),
        }
    }

    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// 0: none. What is held already stays.
    pub fn set_limit(&self, limit: u64) {
        self.limit.store(if limit == 0 { u64::MAX } else { limit }, Ordering::Relaxed);
    }

    pub fn margin(&self) -> u64 {
        self.margin.load(Ordering::Relaxed)
    }

    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    pub fn reset_peak(&self) {
        self.peak.store(self.held(), Ordering::Relaxed);
    }

    /// (free, total) bytes of the device, which is asked.
    pub fn ask(&self, source: &dyn Source) -> crate::error::Result<(u64, u64)> {
        let (free, total) = source.memory_info()?;
        self.note_free(free, total, self.held());
        Ok((free, total))
    }

    /// `held`: what this manager held then.
    pub fn note_free(&self, free: u64, total: u64, held: u64) {
        self.device_free.store(free, Ordering::Relaxed);
        self.unaccounted.store(total.saturating_sub(free).saturating_sub(held), Ordering::Relaxed);
    }

    /// What the device had free at its last answer.
    pub fn device_free(&self) -> u64 {
        self.device_free.load(Ordering::Relaxed)
    }

    /// Bytes of the device that were neither free nor this manager's at the last answer.
    pub fn unaccounted(&self) -> u64 {
        self.unaccounted.load(Ordering::Relaxed)
    }

    /// Bytes that may still be taken, as far as is known without asking the device.
    pub fn room(&self) -> u64 {
        let below_limit = self.limit().saturating_sub(self.held());
        match self.device_free() {
            0 => below_limit,
            free => below_limit.min(free.saturating_sub(self.margin())),
        }
    }

    pub fn admit(&self, bytes: u64, source: &dyn Source) -> Result<Admission<'_>, Refusal> {
        // Not added first and checked then: statistics would show more than the limit for a moment.
        let add = |held: u64| held.checked_add(bytes).filter(|after| *after <= self.limit());
        let Ok(before) = self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) else {
            return Err(Refusal::Limit);
        };
        let admission = Admission { budget: self, bytes };
        let margin = self.margin();
        if margin > 0 {
            let (free, total) = source.memory_info().map_err(Refusal::Source)?;
            self.note_free(free, total, before);
            if free < bytes.saturating_add(margin) {
                return Err(Refusal::Margin { free });
            }
        }
        Ok(admission)
    }

    pub fn give_back(&self, bytes: u64) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Admission<'_> {
    pub fn keep(self) {
        self.budget.peak.fetch_max(self.budget.held(), Ordering::Relaxed);
        std::mem::forget(self);
    }
}

impl Drop for Admission<'_> {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::source::DeviceSource;
    use std::sync::Arc;

    #[test]
    fn the_limit_is_never_passed_even_for_a_moment() {
        let executor = Arc::new(crate::cpu::CpuExecutor::new(1).expect("one thread"));
        let source = DeviceSource::new(executor, None).expect("the host's memory");
        let budget = Budget::new(100, 0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        match budget.admit(60, &source) {
                            Ok(admission) => {
                                admission.keep();
                                budget.give_back(60);
                            }
                            Err(refusal) => assert!(matches!(refusal, Refusal::Limit)),
                        }
                    }
                });
            }
            for _ in 0..20_000 {
                assert!(budget.held() <= 100);
            }
        });
        assert_eq!((budget.held(), budget.peak()), (0, 60));
        assert!(matches!(budget.admit(u64::MAX, &source), Err(Refusal::Limit)));
    }
}

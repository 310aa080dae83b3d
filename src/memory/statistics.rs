//! Counting without locks. Each thread counts in its own cache lines and passes its balance on when it has grown, so
//! that bytes in use are a sum over threads, and the peak is exact for one thread and else misses at most
//! `FLUSH_BYTES` for each.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

/// The balance that a thread keeps to itself. Above the largest small block, so that a pair of calls passes nothing on.
const FLUSH_BYTES: i64 = 4 << 20;

/// Bytes and calls of an arena, or of all arenas of a manager.
#[derive(Default)]
pub struct Usage {
    bytes: AtomicI64,
    peak: AtomicI64,
    allocations: AtomicU64,
    frees: AtomicU64,
    failures: AtomicU64,
}

/// What one thread counted. Written by the holder of its cache's lock, read by anybody.
#[derive(Default)]
pub struct Counters {
    allocations: AtomicU64,
    frees: AtomicU64,
    balance: AtomicI64,
    /// The largest balance since it was last passed on.
    crest: AtomicI64,
}

/// Usages that a thread's balance is passed on to.
pub trait Totals {
    fn totals(&self) -> [&Usage; 2];
}

fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(amount), Relaxed);
}

impl Counters {
    #[inline]
    pub fn allocated(&self, bytes: u64, totals: &impl Totals) {
        add(&self.allocations, 1);
        let balance = self.balance.load(Relaxed) + bytes as i64;
        self.balance.store(balance, Relaxed);
        if balance > self.crest.load(Relaxed) {
            self.crest.store(balance, Relaxed);
            if balance > FLUSH_BYTES {
                self.flush(totals);
            }
        }
    }

    #[inline]
    pub fn freed(&self, bytes: u64, totals: &impl Totals) {
        add(&self.frees, 1);
        let balance = self.balance.load(Relaxed) - bytes as i64;
        self.balance.store(balance, Relaxed);
        if balance < -FLUSH_BYTES {
            self.flush(totals);
        }
    }

    /// Passes the balance on. Only the holder of the cache's lock calls this.
    pub fn flush(&self, totals: &impl Totals) {
        let (balance, crest) = (self.balance.load(Relaxed), self.crest.load(Relaxed));
        for usage in totals.totals() {
            let before = usage.bytes.fetch_add(balance, Relaxed);
            usage.raise_peak(before + crest);
        }
        self.balance.store(0, Relaxed);
        self.crest.store(0, Relaxed);
    }

    /// Passes everything on, so that the counters start again from zero.
    pub fn empty(&self, totals: &impl Totals) {
        self.flush(totals);
        for usage in totals.totals() {
            usage.allocations.fetch_add(self.allocations.load(Relaxed), Relaxed);
            usage.frees.fetch_add(self.frees.load(Relaxed), Relaxed);
        }
        self.allocations.store(0, Relaxed);
        self.frees.store(0, Relaxed);
    }
}

impl Usage {
    pub fn allocated(&self, bytes: u64) {
        self.allocations.fetch_add(1, Relaxed);
        let after = self.bytes.fetch_add(bytes as i64, Relaxed) + bytes as i64;
        self.raise_peak(after);
    }

    /// Mostly nothing changes, and looking costs less than an exchange.
    fn raise_peak(&self, bytes: i64) {
        if bytes > self.peak.load(Relaxed) {
            self.peak.fetch_max(bytes, Relaxed);
        }
    }

    pub fn freed(&self, bytes: u64) {
        self.frees.fetch_add(1, Relaxed);
        self.bytes.fetch_sub(bytes as i64, Relaxed);
    }

    pub fn failed(&self) {
        self.failures.fetch_add(1, Relaxed);
    }

    /// Starts again from zero, for another owner.
    pub fn reset(&self) {
        self.bytes.store(0, Relaxed);
        self.peak.store(0, Relaxed);
        self.allocations.store(0, Relaxed);
        self.frees.store(0, Relaxed);
        self.failures.store(0, Relaxed);
    }

    /// The sum of what was passed on and what threads still keep.
    pub fn sum<'a>(&self, threads: impl Iterator<Item = &'a Counters>) -> UsageStatistics {
        let passed_on = self.bytes.load(Relaxed);
        let (mut balances, mut above) = (0, 0);
        let mut allocations = self.allocations.load(Relaxed);
        let mut frees = self.frees.load(Relaxed);
        for counters in threads {
            let balance = counters.balance.load(Relaxed);
            balances += balance;
            above = above.max(counters.crest.load(Relaxed) - balance);
            allocations += counters.allocations.load(Relaxed);
            frees += counters.frees.load(Relaxed);
        }
        // Threads go on while this one reads, so a sum may be momentarily below zero.
        let allocated = (passed_on + balances).max(0);
        UsageStatistics {
            allocated: allocated as u64,
            peak: self.peak.load(Relaxed).max(allocated + above) as u64,
            blocks: allocations.saturating_sub(frees),
            allocations,
            frees,
            failures: self.failures.load(Relaxed),
        }
    }

    /// Takes over the peak that threads have counted and not passed on, before their counts lose it.
    pub fn keep_peak<'a>(&self, threads: impl Iterator<Item = &'a Counters>) {
        self.raise_peak(self.sum(threads).peak as i64);
    }

    /// The peak starts again at what is in use now.
    pub fn reset_peak<'a>(&self, threads: impl Iterator<Item = &'a Counters>) {
        let mut bytes = self.bytes.load(Relaxed);
        for counters in threads {
            let balance = counters.balance.load(Relaxed);
            counters.crest.store(balance, Relaxed);
            bytes += balance;
        }
        self.peak.store(bytes.max(0), Relaxed);
    }
}

/// Use of an arena or a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UsageStatistics {
    /// Bytes in live blocks, as requested.
    pub allocated: u64,
    pub peak: u64,
    pub blocks: u64,
    pub allocations: u64,
    pub frees: u64,
    pub failures: u64,
}

/// How often a recovery step of the out-of-memory ladder was tried, and how often the allocation then succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecoveryStepStatistics {
    pub tried: u64,
    pub helped: u64,
}

/// What a manager holds and has done. Taken without a lock, so numbers of a moment of much traffic may differ by the
/// calls under way.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MemoryStatistics {
    /// Bytes in live blocks, as requested.
    pub allocated: u64,
    /// The largest `allocated` so far.
    pub peak: u64,
    pub blocks: u64,
    pub allocations: u64,
    pub frees: u64,
    pub failures: u64,
    /// Bytes that the manager may hold; 0: none.
    pub limit: u64,
    /// Bytes of the device that the manager leaves alone.
    pub margin: u64,
    /// Bytes that the manager holds of the device.
    pub reserved: u64,
    pub peak_reserved: u64,
    /// Held bytes that no live block has: `reserved` − `allocated`.
    pub cached: u64,
    /// Held bytes in whole free units: `trim` gives them back, and any allocation may use them.
    pub free_pages: u64,
    /// The longest run of addresses that one block could get.
    pub largest_free: u64,
    /// The part of what is held that is neither allocated nor free in whole units: rounding, and free blocks of slabs
    /// that are partly in use. 0 to 1.
    pub fragmentation: f64,
    /// Bytes in blocks that were placed outside the device's memory because it was full.
    pub spilled: u64,
    /// Bytes in live blocks of pools that a capture has used: graphs name their addresses.
    pub captured: u64,
    /// Bytes of the device that were neither free nor this manager's when the driver was asked last: other managers and
    /// processes, contexts, libraries.
    pub unaccounted: u64,
    /// What the device had free then.
    pub device_free: u64,
    pub device_total: u64,
    pub recovery_steps: [RecoveryStepStatistics; super::ladder::RECOVERY_STEPS],
}

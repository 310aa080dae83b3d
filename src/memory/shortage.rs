//! What is there to be had, and the error when it is too little.

use super::core::Core;
use super::ladder::RecoveryStep;
use super::options::Spill;
use super::page_table::UNIT_BYTES;
use super::pages::{asleep, Shortage};
use super::size_class::{class_for, slab_units, GRANULE};
use crate::error::{Error, MemoryFailure, Result, Status};
use std::sync::atomic::Ordering;

/// What one block could be made of, without waiting for anybody.
struct Obtainable {
    /// Bytes of the longest free run that has memory behind it.
    run: u64,
    /// Bytes that can go behind other addresses.
    movable: u64,
    /// The longest free run of addresses.
    addresses: u64,
}

impl Core {
    fn obtainable(&self) -> Obtainable {
        let Some(pages) = &self.pages else { return Obtainable { run: 0, movable: 0, addresses: u64::MAX } };
        let (units, movable) = pages.obtainable();
        Obtainable {
            run: (units * UNIT_BYTES) as u64,
            // In a capture nothing is unmapped.
            movable: if self.captures.any() { 0 } else { movable },
            addresses: pages.largest_free_bytes(),
        }
    }

    /// Bytes that the device must have for a block of `bytes`.
    fn footprint(&self, bytes: u64) -> u64 {
        if self.pages.is_none() {
            return bytes;
        }
        let class = usize::try_from(bytes).ok().filter(|&bytes| bytes > 0).and_then(|bytes| class_for(bytes, GRANULE));
        match class {
            Some(class) => (slab_units(class) * UNIT_BYTES) as u64,
            None => bytes.checked_next_multiple_of(UNIT_BYTES as u64).unwrap_or(bytes),
        }
    }

    /// The error with everything that an engine's author wants to know; what is no lack of memory is told as it is.
    pub fn out_of_memory(&self, requested: u64, shortage: &Shortage, tried: &[RecoveryStep]) -> Error {
        if let Shortage::Fatal(error) = shortage {
            return error.clone();
        }
        let (held, limit, margin) = (self.budget.held(), self.budget.limit(), self.budget.margin());
        let allocated = self.usage().allocated;
        let cached = held.saturating_sub(allocated);
        let (device_free, device_total) = self.budget.ask(&*self.source).unwrap_or((0, self.device_total));
        let there = self.obtainable();
        let fixed = held.saturating_sub(there.movable);
        let room = limit.saturating_sub(fixed).min((device_free + there.movable).saturating_sub(margin));
        let largest_free = there.run.max(room.min(there.addresses));
        let footprint = self.footprint(requested);
        let others = device_total.saturating_sub(device_free).saturating_sub(held);
        let smaller = "use smaller weights, caches or batches";
        let reason = match shortage {
            Shortage::Limit => format!("the limit is {limit}"),
            Shortage::Margin { free } if margin > 0 => {
                format!("the device has {free} bytes free and {margin} of them are the safety margin")
            }
            Shortage::Margin { free } => format!("the device has {free} bytes free"),
            Shortage::Range => "no run of addresses is long enough".to_string(),
            Shortage::Device(error) | Shortage::Fatal(error) => error.message.clone(),
        };
        let advice = match shortage {
            _ if footprint > device_total => format!("no limit helps: {smaller}"),
            Shortage::Limit => match fixed.saturating_add(footprint).saturating_sub(limit) {
                0 => "free blocks, or raise the memory limit".to_string(),
                more => format!("free blocks, or raise the memory limit by at least {more} bytes"),
            },
            Shortage::Margin { .. } if margin > 0 => {
                "free blocks, end other users of the device, or lower the margin".to_string()
            }
            Shortage::Range => "free blocks, or reserve a larger range".to_string(),
            _ if others > 0 => {
                format!("{others} bytes of the device belong to others; free blocks or end other users of the device")
            }
            _ => format!("free blocks, or {smaller}"),
        };
        let names: Vec<&str> = tried.iter().map(|step| step.name()).collect();
        let names = if names.is_empty() { "nothing".to_string() } else { names.join(", ") };
        let mut error = Error::new(
            Status::OutOfMemory,
            format!(
                "{requested} bytes requested: {reason}; {allocated} allocated, {cached} cached, {held} held, largest \
                 block to be had {largest_free}, device {device_free} of {device_total} free; tried {names}"
            ),
        )
        .with_limit(requested, if limit == u64::MAX { device_free } else { limit })
        .with_advice(advice);
        error.cuda_code = if let Shortage::Device(cause) = shortage { cause.cuda_code } else { 0 };
        error.memory = Some(Box::new(MemoryFailure {
            requested,
            limit: if limit == u64::MAX { 0 } else { limit },
            allocated,
            reserved: held,
            cached,
            largest_free,
            device_free,
            device_total,
            recovery_steps_tried: tried.iter().fold(0, |mask, step| mask | 1 << *step as u32),
        }));
        error
    }

    /// Whether a block of `bytes` could be had now without waiting for anybody or asking callbacks.
    pub fn check_available(&self, bytes: u64) -> Result<()> {
        if self.pages.as_ref().is_some_and(|pages| pages.asleep.load(Ordering::Relaxed)) {
            return Err(asleep());
        }
        if bytes == 0 || self.options.spill != Spill::Never {
            return Ok(());
        }
        if bytes > self.device_total {
            let text = format!("the device has {} bytes in all", self.device_total);
            let shortage = Shortage::Device(Error::new(Status::OutOfMemory, text));
            return Err(self.out_of_memory(bytes, &shortage, &[]));
        }
        if self.find_out(bytes).is_ok() {
            return Ok(());
        }
        // Caches are emptied for nobody but who would fail without.
        self.empty_caches(true);
        self.find_out(bytes).map_err(|shortage| self.out_of_memory(bytes, &shortage, &[]))
    }

    fn find_out(&self, bytes: u64) -> std::result::Result<(), Shortage> {
        if self.has_free_block(bytes) {
            return Ok(());
        }
        let footprint = self.footprint(bytes);
        let there = self.obtainable();
        if there.run >= footprint {
            return Ok(());
        }
        // A block for which there are no addresses is allocated singly, and nothing moves for it.
        let movable = if there.addresses >= footprint { there.movable } else { 0 };
        let held = self.budget.held().saturating_sub(movable);
        if held.checked_add(footprint).is_none_or(|after| after > self.budget.limit()) {
            return Err(Shortage::Limit);
        }
        let (free, _) = self.budget.ask(&*self.source).map_err(Shortage::Fatal)?;
        if free.saturating_add(movable) < footprint.saturating_add(self.budget.margin()) {
            return Err(Shortage::Margin { free });
        }
        Ok(())
    }

    /// Whether a slab has a free block of this size.
    fn has_free_block(&self, bytes: u64) -> bool {
        let class = usize::try_from(bytes).ok().and_then(|bytes| class_for(bytes, GRANULE));
        let (Some(class), Some(pages)) = (class, &self.pages) else { return false };
        let mut blocks = Vec::new();
        self.main.class(class).take(pages, 1, &mut blocks);
        self.main.give_back(&blocks);
        !blocks.is_empty()
    }
}

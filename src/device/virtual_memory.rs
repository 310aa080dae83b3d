//! Addresses apart from the memory behind them.

use crate::error::Result;

/// The granularity of physical memory behind addresses: the smallest page that a GPU maps at its full speed.
pub const PAGE_BYTES: usize = 2 << 20;

/// Address space that is reserved at once and backed with physical memory piece by piece.
pub trait VirtualMemory: Send + Sync {
    /// Reserves `bytes` (a multiple of 2 MiB) at a multiple of 2 MiB, with no memory behind them.
    fn reserve(&self, bytes: usize) -> Result<usize>;
    /// # Safety
    /// The range is one of `reserve`'s, nothing is mapped in it, and it has not been released.
    unsafe fn release(&self, address: usize, bytes: usize);
    /// Puts physical memory behind the range. On failure nothing changed.
    ///
    /// # Safety
    /// The range lies inside a reservation, on 2 MiB boundaries, with nothing mapped.
    unsafe fn map(&self, address: usize, bytes: usize) -> Result<()>;
    /// Gives the physical memory back; the addresses stay reserved. On failure the memory may be gone or not: nobody uses
    /// the range before a later call has succeeded.
    ///
    /// # Safety
    /// The range is that of one `map`, or of an `unmap` that failed, and no work uses the memory.
    unsafe fn unmap(&self, address: usize, bytes: usize) -> Result<()>;
}

//! Host memory as a range: address space that costs nothing, pages that the system lends and takes back.

use crate::error::{Error, Result, Status};
use crate::executor::{VirtualMemory, PAGE_BYTES};
use std::ffi::c_void;

/// From this size on the machine's free memory is asked first: Linux grants more than it has, and ends the process
/// that uses it.
const CHECKED_BYTES: usize = 64 << 20;

/// Private anonymous pages. `available` says how many bytes the machine has left.
pub struct HostVirtualMemory {
    available: fn() -> Result<u64>,
}

impl HostVirtualMemory {
    pub fn new(available: fn() -> Result<u64>) -> HostVirtualMemory {
        HostVirtualMemory { available }
    }
}

fn system_error(doing: &str, bytes: usize) -> Error {
    let error = std::io::Error::last_os_error();
    let status =
        if error.raw_os_error() == Some(libc::ENOMEM) { Status::OutOfMemory } else { Status::MemoryAllocation };
    Error::new(status, format!("{doing} {bytes} bytes: {error}")).with_limit(bytes as u64, 0)
}

fn mmap(address: usize, bytes: usize, flags: libc::c_int) -> *mut c_void {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a fresh range, or with MAP_FIXED one that the callers own.
    unsafe { libc::mmap(address as *mut c_void, bytes, libc::PROT_NONE, flags, -1, 0) }
}

impl VirtualMemory for HostVirtualMemory {
    fn reserve(&self, bytes: usize) -> Result<usize> {
        let padded = bytes
            .checked_add(PAGE_BYTES)
            .ok_or_else(|| Error::new(Status::OutOfMemory, format!("{bytes} bytes of address space")))?;
        let start = mmap(0, padded, 0);
        if start == libc::MAP_FAILED {
            return Err(system_error("reserving address space of", bytes));
        }
        let address = (start as usize).next_multiple_of(PAGE_BYTES);
        let (before, after) = (address - start as usize, padded - bytes - (address - start as usize));
        // SAFETY: the two ends of the mapping made above, which nothing uses yet.
        unsafe {
            if before > 0 {
                libc::munmap(start, before);
            }
            if after > 0 {
                libc::munmap((address + bytes) as *mut c_void, after);
            }
            // Fewer page walks while a weight is streamed; a refusal costs speed only.
            #[cfg(target_os = "linux")]
            libc::madvise(address as *mut c_void, bytes, libc::MADV_HUGEPAGE);
        }
        Ok(address)
    }

    unsafe fn release(&self, address: usize, bytes: usize) {
        // SAFETY: the caller's contract.
        unsafe { libc::munmap(address as *mut c_void, bytes) };
    }

    unsafe fn map(&self, address: usize, bytes: usize) -> Result<()> {
        if bytes >= CHECKED_BYTES {
            let available = (self.available)()?;
            if bytes as u64 > available {
                return Err(Error::new(
                    Status::OutOfMemory,
                    format!("{bytes} bytes of host memory; {available} are available"),
                )
                .with_limit(bytes as u64, available));
            }
        }
        // SAFETY: the caller's contract: a reserved range of ours.
        if unsafe { libc::mprotect(address as *mut c_void, bytes, libc::PROT_READ | libc::PROT_WRITE) } != 0 {
            return Err(system_error("backing", bytes));
        }
        Ok(())
    }

    unsafe fn unmap(&self, address: usize, bytes: usize) -> Result<()> {
        // SAFETY: the caller's contract. Dropping the pages and then the permission keeps the one reservation's
        // advice, which a new mapping in its place would lose.
        let failed = unsafe {
            libc::madvise(address as *mut c_void, bytes, libc::MADV_DONTNEED) != 0
                || libc::mprotect(address as *mut c_void, bytes, libc::PROT_NONE) != 0
        };
        if failed {
            return Err(system_error("giving back", bytes));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plenty() -> Result<u64> {
        Ok(u64::MAX)
    }

    #[test]
    fn mapped_pages_hold_bytes_and_come_back_zero_after_unmap() {
        let memory = HostVirtualMemory::new(plenty);
        let bytes = 8 * PAGE_BYTES;
        let base = memory.reserve(bytes).unwrap();
        assert_eq!(base % PAGE_BYTES, 0);
        // SAFETY: inside the reservation, mapped before touched and unmapped once.
        unsafe {
            let at = base + 2 * PAGE_BYTES;
            memory.map(at, PAGE_BYTES).unwrap();
            (at as *mut u8).write_bytes(7, PAGE_BYTES);
            memory.unmap(at, PAGE_BYTES).unwrap();
            memory.map(at, PAGE_BYTES).unwrap();
            assert_eq!(*(at as *const u8), 0);
            memory.unmap(at, PAGE_BYTES).unwrap();
            memory.release(base, bytes);
        }
    }

    #[test]
    fn more_than_the_machine_has_is_refused() {
        let memory = HostVirtualMemory::new(|| Ok(1 << 20));
        let base = memory.reserve(CHECKED_BYTES).unwrap();
        // SAFETY: inside the reservation; nothing is mapped.
        unsafe {
            let error = memory.map(base, CHECKED_BYTES).unwrap_err();
            assert_eq!((error.status, error.limit), (Status::OutOfMemory, 1 << 20));
            memory.release(base, CHECKED_BYTES);
        }
    }

    #[test]
    fn too_much_address_space_is_an_error() {
        let memory = HostVirtualMemory::new(plenty);
        assert_eq!(memory.reserve(1 << 60).unwrap_err().status, Status::OutOfMemory);
        assert_eq!(memory.reserve(usize::MAX).unwrap_err().status, Status::OutOfMemory);
    }
}

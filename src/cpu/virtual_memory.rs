//! Host memory as a range: address space that costs nothing, pages that the system lends and takes back.

use crate::device::{VirtualMemory, PAGE_BYTES};
use crate::error::{Error, Result, Status};
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

/// From this size on it is worth asking which pages hold anything.
const SPARSE_BYTES: usize = 1 << 20;

/// Makes every byte 0. Pages that are not in memory are dropped instead of written: they were never touched, and then
/// writing would give each of them memory, or they lie in the swap, from which writing would fetch them first.
///
/// # Safety
/// The range is valid for writing, in private anonymous memory.
pub unsafe fn zero(start: *mut u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    if bytes >= SPARSE_BYTES {
        // SAFETY: the caller's contract.
        return unsafe { zero_sparse(start, bytes) };
    }
    // SAFETY: as above.
    unsafe { start.write_bytes(0, bytes) };
}

/// # Safety
/// The conditions of `zero` hold.
#[cfg(target_os = "linux")]
unsafe fn zero_sparse(start: *mut u8, bytes: usize) {
    /// Pages that one call asks about.
    const ASKED: usize = 4096;
    // SAFETY: asks for a number.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let (first, end) = ((start as usize).next_multiple_of(page), (start as usize + bytes) / page * page);
    let pointer = |address: usize| start.wrapping_add(address - start as usize);
    let write = |from: usize, to: usize| {
        // SAFETY: inside the caller's range.
        unsafe { pointer(from).write_bytes(0, to - from) };
    };
    write(start as usize, first);
    write(end, start as usize + bytes);
    let mut present = [0u8; ASKED];
    let mut chunk = first;
    while chunk < end {
        let pages = ((end - chunk) / page).min(ASKED);
        // SAFETY: whole pages of the caller's range, and a byte for each.
        if unsafe { libc::mincore(pointer(chunk).cast(), pages * page, present.as_mut_ptr()) } != 0 {
            present.fill(1);
        }
        let mut at = chunk;
        for run in present[..pages].chunk_by(|a, b| a & 1 == b & 1) {
            let bytes = run.len() * page;
            // Pages that are locked cannot be dropped.
            // SAFETY: as above. Private anonymous pages read as zero once they have been dropped.
            let dropped =
                run[0] & 1 == 0 && unsafe { libc::madvise(pointer(at).cast(), bytes, libc::MADV_DONTNEED) } == 0;
            if !dropped {
                write(at, at + bytes);
            }
            at += bytes;
        }
        chunk += pages * page;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn zeroing_writes_what_was_written_and_gives_the_rest_no_memory() {
        let bytes = 40_000 * 4096usize;
        let memory = HostVirtualMemory::new(plenty);
        let base = memory.reserve(bytes.next_multiple_of(PAGE_BYTES)).unwrap();
        let resident = |start: usize| {
            let mut present = vec![0u8; bytes / 4096];
            // SAFETY: whole pages of the reservation, and a byte for each.
            assert_eq!(unsafe { libc::mincore(start as *mut c_void, bytes, present.as_mut_ptr()) }, 0);
            present.iter().filter(|&&page| page & 1 != 0).count()
        };
        // SAFETY: inside the reservation, mapped before touched; freed once.
        unsafe {
            memory.map(base, bytes.next_multiple_of(PAGE_BYTES)).unwrap();
            libc::madvise(base as *mut c_void, bytes, libc::MADV_NOHUGEPAGE);
            let block = std::slice::from_raw_parts_mut(base as *mut u8, bytes);
            let written = [0, 4095, 4096, 5000, 100 << 20, (100 << 20) + 4095, bytes - 1];
            written.iter().for_each(|&at| block[at] = 7);
            let touched = resident(base);
            // From the second byte to the last but one: neither end is on a page.
            zero(block.as_mut_ptr().add(1), bytes - 2);
            assert_eq!(resident(base), touched);
            assert_eq!((block[0], block[bytes - 1]), (7, 7));
            assert!(written[1..6].iter().all(|&at| block[at] == 0));
            memory.release(base, bytes.next_multiple_of(PAGE_BYTES));
        }
    }

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

//! A file mapped into memory for reading.

use crate::error::{Error, Result, Status};
use std::os::fd::AsRawFd;
use std::path::Path;

pub struct Mapping {
    data: *mut libc::c_void,
    bytes: usize,
}

// SAFETY: memory that is only read.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Whoever shortens the file while it is mapped makes reads of what is gone fail with SIGBUS.
    pub fn open(path: &Path) -> Result<Mapping> {
        let failed =
            |what: &str, error: std::io::Error| Error::new(Status::Io, format!("{what} {}: {error}", path.display()));
        let (file, metadata) = crate::file::open(path).map_err(|error| failed("cannot open", error))?;
        let length = metadata.len();
        let bytes = usize::try_from(length).ok().filter(|&bytes| bytes > 0).ok_or_else(|| {
            Error::new(Status::Io, format!("{} has {length} bytes and cannot be mapped", path.display()))
        })?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let data =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0) };
        if data == libc::MAP_FAILED {
            return Err(failed("cannot map", std::io::Error::last_os_error()));
        }
        Ok(Mapping { data, bytes })
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: mapped with this length until `self` is dropped.
        unsafe { std::slice::from_raw_parts(self.data.cast(), self.bytes) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this object's mapping, of which no reference outlives it.
        unsafe { libc::munmap(self.data, self.bytes) };
    }
}

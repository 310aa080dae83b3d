//! Page-locked memory comes from the device's NUMA node: the fake driver keeps the memory policy under which it was asked.

use crate::driver::passes;
use crate::engine::{call, Engine};
use crate::fake::Fake;
use nvbackend::capi::memory::*;
use std::ffi::{c_int, CStr};
use std::path::Path;
use std::ptr::{null, null_mut};

const BYTES: usize = 5000;
const PAGE: usize = 4096;
const MPOL_DEFAULT: c_int = 0;

/// The mode of this thread's memory policy; `None` where the kernel has no such thing or does not let one be set.
fn policy() -> Option<c_int> {
    let mut mode = 0;
    // SAFETY: a valid pointer, and no nodes asked for.
    let asked = unsafe { libc::syscall(libc::SYS_get_mempolicy, &mut mode, null::<u64>(), 0usize, 0usize, 0usize) };
    // SAFETY: the default policy takes no nodes.
    let set = unsafe { libc::syscall(libc::SYS_set_mempolicy, MPOL_DEFAULT, null::<u64>(), 0usize) };
    (asked == 0 && set == 0).then_some(mode)
}

/// Gives this process a PCI bus of its own, on which the fake device lies at node 0.
fn place_the_device() -> Result<(), std::io::Error> {
    // SAFETY: this process has one thread, and NUL-terminated strings, here and below.
    let apart =
        unsafe { libc::unshare(libc::CLONE_NEWNS) == 0 || libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) == 0 };
    let mount = |kind: *const libc::c_char, target: &CStr, flags| {
        // SAFETY: as above.
        unsafe { libc::mount(kind, target.as_ptr(), kind, flags, null()) == 0 }
    };
    if !apart || !mount(null(), c"/", libc::MS_REC | libc::MS_PRIVATE) || !mount(c"tmpfs".as_ptr(), c"/sys/bus", 0) {
        return Err(std::io::Error::last_os_error());
    }
    let folder = "/sys/bus/pci/devices/0000:0f:00.0";
    std::fs::create_dir_all(folder)?;
    std::fs::write(format!("{folder}/numa_node"), "0\n")
}

pub fn page_locked(file: &Path) -> Result<String, String> {
    passes(|| {
        if policy().is_none() {
            println!("  page-locked memory's node: skipped, the kernel refuses memory policies");
            return Ok(());
        }
        if let Err(error) = place_the_device() {
            println!("  page-locked memory's node: skipped, no file system may be mounted here: {error}");
            return Ok(());
        }
        let fake = Fake::open(file);
        let engine = Engine::new().map_err(|failure| failure.to_string())?;
        let mut pointer = null_mut();
        call!(nvb_host_allocate(engine.backend.raw, BYTES, &mut pointer)).map_err(|failure| failure.to_string())?;
        // SAFETY: the type of fake_driver.h.
        let node: extern "C" fn() -> c_int = unsafe { fake.function(c"fake_host_node").unwrap() };
        call!(nvb_host_free(engine.backend.raw, pointer, BYTES)).map_err(|failure| failure.to_string())?;
        if !(pointer as usize).is_multiple_of(PAGE) {
            return Err(format!("{pointer:p} is no page, as the driver's memory is"));
        }
        match (node(), policy()) {
            (0, Some(MPOL_DEFAULT)) => Ok(()),
            (node, after) => Err(format!("asked under node {node}; the thread's policy is {after:?} afterwards")),
        }
    })?;
    Ok("node 0, and the thread's own policy afterwards".to_owned())
}

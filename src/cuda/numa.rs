//! Which part of main memory is nearest to a GPU, and taking pages from there: across sockets copies run at a third of
//! the speed (a GB200 reads near memory at 330 GB/s and far memory at 115; torchtitan pull request 3519).

use super::context::PrimaryContext;
use cust::sys;
use std::ffi::CStr;

/// The NUMA node of a device; `None` where there is one node only, or nobody knows.
pub fn node_of(ordinal: i32, context: &PrimaryContext) -> Option<u32> {
    let mut text = [0; 32];
    // SAFETY: the buffer's size is passed along, and the ordinal was listed.
    let result = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as i32, ordinal) };
    context.check(result, "asking for a device's place").ok()?;
    // SAFETY: the driver closed the string with a NUL.
    let bus = unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().ok()?.to_lowercase();
    let node = std::fs::read_to_string(format!("/sys/bus/pci/devices/{bus}/numa_node")).ok()?;
    // −1: the firmware does not say.
    node.trim().parse::<u32>().ok().filter(|node| *node < MAX_NODES)
}

const MAX_NODES: u32 = 1024;
const WORDS: usize = MAX_NODES as usize / 64;
const MPOL_PREFERRED: libc::c_int = 1;

/// While it lives, this thread's new pages come from one node where that has room.
pub struct PreferNode {
    mode: libc::c_int,
    nodes: [u64; WORDS],
    changed: bool,
}

impl PreferNode {
    pub fn enter(node: u32) -> PreferNode {
        let mut before = PreferNode { mode: 0, nodes: [0; WORDS], changed: false };
        let mut wanted = [0u64; WORDS];
        wanted[node as usize / 64] = 1 << (node % 64);
        // SAFETY: masks of MAX_NODES bits. A kernel that refuses leaves the policy alone, which costs speed only.
        unsafe {
            let (mode, nodes) = (&mut before.mode as *mut libc::c_int, before.nodes.as_mut_ptr());
            if libc::syscall(libc::SYS_get_mempolicy, mode, nodes, MAX_NODES as usize, 0usize, 0usize) == 0 {
                let set = libc::syscall(libc::SYS_set_mempolicy, MPOL_PREFERRED, wanted.as_ptr(), MAX_NODES as usize);
                before.changed = set == 0;
            }
        }
        before
    }
}

impl Drop for PreferNode {
    fn drop(&mut self) {
        if self.changed {
            // SAFETY: what `get_mempolicy` wrote.
            unsafe { libc::syscall(libc::SYS_set_mempolicy, self.mode, self.nodes.as_ptr(), MAX_NODES as usize) };
        }
    }
}

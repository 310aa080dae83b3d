//! `memory`: allocation, copies and fills of the executor.

use crate::run::{check, Failure, Outcome, Run};
use nvbackend::device::CopyKind;
use std::ffi::c_void;

fn copy(run: &Run, to: *mut c_void, from: *const c_void, bytes: usize, kind: CopyKind) -> Outcome {
    // SAFETY: the tests below copy within their blocks, and synchronise before a block goes.
    unsafe { run.executor().copy(to, from, bytes, kind, run.stream.raw()).map_err(Failure::from) }
}

#[test]
fn copies_and_fills() {
    let cases = [1usize, 2, 3, 255, 256, 257, 4095, 100_003, 1 << 22];
    check("memory copies", &cases, |run, &bytes| {
        let memory = run.device.backend.memory().clone();
        let raw = run.stream.raw();
        let (a, b) = (memory.allocate(bytes, raw)?, memory.allocate(bytes + 7, raw)?);
        if [a, b].iter().any(|&block| !(block as usize).is_multiple_of(256)) {
            return Err(format!("{a:p} and {b:p} are not aligned to 256 bytes").into());
        }
        let host = run.executor().host_allocate(bytes)?.cast::<u8>();
        // SAFETY: `host_allocate` gave this many bytes.
        let staged = unsafe { std::slice::from_raw_parts_mut(host, bytes) };
        staged.iter_mut().for_each(|byte| *byte = run.random.bits() as u8);
        let inside = b.cast::<u8>().wrapping_add(3);
        // SAFETY: the range is the block's.
        unsafe { run.executor().fill(b, 0x5a, bytes + 7, raw)? };
        copy(run, a, host.cast(), bytes, CopyKind::HostToDevice)?;
        copy(run, inside.cast(), a, bytes, CopyKind::DeviceToDevice)?;
        let mut back = vec![0u8; bytes + 7];
        copy(run, back.as_mut_ptr().cast(), b, bytes + 7, CopyKind::DeviceToHost)?;
        run.stream.synchronize()?;
        let right = back[3..bytes + 3] == *staged && back[..3] == [0x5a; 3] && back[bytes + 3..] == [0x5a; 4];
        // SAFETY: allocated above with this size; the copies have finished.
        unsafe { run.executor().host_free(host.cast(), bytes) };
        memory.free(a, raw)?;
        memory.free(b, raw)?;
        if right {
            return Ok(());
        }
        Err("the bytes came back changed".to_string().into())
    });
}

#[test]
fn the_device_knows_its_memory() {
    check("memory info", &[()], |run, _| {
        let (free, total) = run.executor().memory_info()?;
        let bytes = 1 << 20;
        let memory = run.device.backend.memory().clone();
        let block = memory.allocate(bytes, run.stream.raw())?;
        let last = block.cast::<u8>().wrapping_add(bytes - 1);
        let reachable = run.executor().can_access(block)? && run.executor().can_access(last.cast())?;
        let on_host = run.executor().can_access((&raw const free).cast())?;
        memory.free(block, run.stream.raw())?;
        if 0 < free && free <= total && reachable && (on_host || !run.device.is_cpu()) {
            return Ok(());
        }
        Err(format!("{free} of {total} bytes free, block reachable {reachable}, host reachable {on_host}").into())
    });
}

//! `pack_blocks` on CUDA: the launcher of csrc/pack_blocks.

use super::prelude::*;
use super::quantized::{block_code, QuantizedMatrix};
use crate::device::{CopyKind, Device};
use crate::operation::pack_blocks::PackBlocks;

mirror! {
    /// `nvb_pack_blocks_params` of csrc/pack_blocks/pack_blocks.h.
    #[repr(C)]
    struct Params of(op: &PackBlocks, matrix: QuantizedMatrix, unpack: bool, not_finite: *mut u32) {
        matrix: QuantizedMatrix,
        blocks: *mut c_void = op.blocks.cast(),
        not_finite: *mut u32,
        format: u32 = block_code(op.format),
        unpack: u32 = unpack.into(),
    }
}

extern "C" {
    fn nvb_cuda_pack_blocks(params: *const Params, launch: *const Launch) -> i32;
}

fn launch(
    executor: &CudaExecutor,
    op: &PackBlocks,
    unpack: bool,
    not_finite: *mut u32,
    stream: RawHandle,
) -> Result<()> {
    let matrix = QuantizedMatrix::of(&op.weight).expect("a quantised weight");
    let params = Params::of(op, matrix, unpack, not_finite);
    // SAFETY: the descriptor was validated, and the context is current.
    let code = unsafe { nvb_cuda_pack_blocks(&params, &executor.launch_on(stream)) };
    executor.check_launch(code, "pack_blocks")
}

/// Waits for the stream, because the caller wants to know whether all scales are finite.
pub(super) fn pack(executor: &CudaExecutor, op: &PackBlocks, stream: RawHandle) -> Result<bool> {
    let _guard = executor.enter()?;
    let scratch = executor.scratch(stream);
    // Who makes a weight allocates anyway.
    let mut scratch = scratch.lock_own(executor, stream);
    let on_device = scratch.get(WorkspaceUse::Kernel, size_of::<u32>())?;
    let mut not_finite = 0u32;
    // SAFETY: the scratch has these bytes, and the copy is waited for.
    unsafe {
        executor.fill(on_device, 0, size_of::<u32>(), stream)?;
        launch(executor, op, false, on_device.cast(), stream)?;
        let to = (&raw mut not_finite).cast();
        executor.copy(to, on_device, size_of::<u32>(), CopyKind::DeviceToHost, stream)?;
    }
    executor.stream_synchronize(stream)?;
    Ok(not_finite == 0)
}

pub(super) fn unpack(executor: &CudaExecutor, op: &PackBlocks, stream: RawHandle) -> Result<()> {
    let _guard = executor.enter()?;
    launch(executor, op, true, std::ptr::null_mut(), stream)
}

//! `block_rows` on CUDA: the launcher of csrc/block_rows.

use super::launch::integers;
use super::prelude::*;
use super::quantized::block_code;
use crate::operation::block_rows::{BlockRows, Direction};
use crate::tensor::MAX_RANK;

mirror! {
    /// `nvb_block_rows_params` of csrc/block_rows/block_rows.h.
    #[repr(C)]
    struct Params of(op: &BlockRows) {
        floats: *mut c_void = op.floats.data,
        blocks: *mut c_void = op.blocks.data,
        rows: *const i32 = op.rows.map_or(std::ptr::null(), |rows| rows.data.cast_const().cast()),
        shape: [i64; MAX_RANK] = integers(op.floats.shape),
        float_strides: [i64; MAX_RANK] = integers(op.floats.strides),
        block_strides: [i64; 3] = integers(op.blocks.strides),
        block_rows: i64 = op.blocks.shape[2] as i64,
        rows_shape: [i64; MAX_RANK] = integers(op.rows.map_or([1; MAX_RANK], |rows| rows.shape)),
        rows_strides: [i64; MAX_RANK] = integers(op.rows.map_or([0; MAX_RANK], |rows| rows.strides)),
        dtype: u32 = op.floats.dtype as u32,
        format: u32 = block_code(op.blocks.format),
        encode: u32 = (op.direction == Direction::Encode).into(),
        reserved: u32 = 0,
    }
}

extern "C" {
    fn nvb_cuda_block_rows(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &BlockRows, stream: RawHandle) -> Result<()> {
    if op.is_empty() {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let params = Params::of(op);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_block_rows(&params, &executor.launch_on(stream)) }, "block_rows")
}

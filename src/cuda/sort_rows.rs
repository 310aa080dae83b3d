//! `sort_rows` on CUDA: the launcher of csrc/sort_rows.

use super::launch::integers;
use super::prelude::*;
use crate::operation::sort_rows::SortRows;
use crate::tensor::MAX_RANK;

mirror! {
    /// `nvb_sort_rows_params` of csrc/sort_rows/sort_rows.h.
    #[repr(C)]
    struct Params of(op: &SortRows) {
        input: *const c_void = op.input.data,
        output: *mut i32 = op.output.data.cast(),
        shape: [i64; MAX_RANK] = integers(op.input.shape),
        input_strides: [i64; MAX_RANK] = integers(op.input.strides),
        output_strides: [i64; MAX_RANK] = integers(op.output.strides),
        count: i64 = op.count() as i64,
        input_dtype: u32 = op.input.dtype as u32,
        descending: u32 = op.descending.into(),
    }
}

extern "C" {
    fn nvb_cuda_sort_rows(params: *const Params, launch: *const Launch) -> i32;
}

pub(super) fn run(executor: &CudaExecutor, op: &SortRows, stream: RawHandle) -> Result<()> {
    if op.output.is_empty() {
        return Ok(());
    }
    let _guard = executor.enter()?;
    let params = Params::of(op);
    // SAFETY: the descriptor was validated, and the context is current.
    executor.check_launch(unsafe { nvb_cuda_sort_rows(&params, &executor.launch_on(stream)) }, "sort_rows")
}

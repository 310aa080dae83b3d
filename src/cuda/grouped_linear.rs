//! `grouped_linear` on CUDA: the launcher of csrc/grouped_linear. Many rows that name their experts go through
//! [`super::grouped_linear_by_id`], which sorts them.

use super::grouped_linear_by_id::SortedPlan;
use super::linear_quantized::{copy_input, ordered_stride};
use super::linear_workspace::input_bytes;
use super::prelude::*;
use super::quantized::{encoding_code, scale_code};
use crate::operation::access::{Extent, Region};
use crate::operation::grouped_linear::{GroupedLinear, Routing};
use crate::weight::WeightView;

mirror! {
    /// `nvb_grouped_linear_params` of csrc/grouped_linear/grouped_linear.h.
    #[repr(C)]
    pub(super) struct Params of(op: &GroupedLinear) {
        input: *const c_void = op.input.data,
        expert_offsets: *const c_void = if ids.is_none() { op.routing.tensor().data } else { std::ptr::null_mut() },
        expert_ids: *const c_void = ids.map_or(std::ptr::null_mut(), |ids| ids.data),
        weight: *const c_void = op.weight.data,
        scales: *const c_void,
        zero_points: *const c_void = op.weight.zero_points.cast(),
        bias: *const c_void = vector_of(op.bias),
        pub(super) order: *const i32 = std::ptr::null(),
        pub(super) workspace: *mut c_void = std::ptr::null_mut(),
        output: *mut c_void = op.output.data,
        second_weight: *const c_void = std::ptr::null(),
        second_output: *mut c_void = std::ptr::null_mut(),
        rows: i64 = op.output.rows as i64,
        input_rows: i64 = op.input.rows as i64,
        n: i64 = op.expert_rows() as i64,
        k: i64 = op.weight.columns as i64,
        input_stride: i64 = op.input.row_stride as i64,
        weight_stride: i64 = op.weight.kernel_stride() as i64,
        output_stride: i64 = op.output.row_stride as i64,
        pub(super) used: i64 = ids.map_or(0, |ids| ids.shape[1]) as i64,
        token_stride: i64 = ids.map_or(0, |ids| ids.strides[0]) as i64,
        used_stride: i64 = ids.map_or(0, |ids| ids.strides[1]) as i64,
        experts: i32 = op.experts as i32,
        pub(super) all_experts: i32 = op.experts as i32,
        input_dtype: u32 = op.input.dtype as u32,
        weight_dtype: u32 = op.weight.dtype().map_or(0, |dtype| dtype as u32),
        encoding: u32 = encoding_code(op.weight.encoding).unwrap_or(0),
        scale_kind: u32,
        group: u32,
        bias_dtype: u32 = vector_dtype_of(op.bias),
        output_dtype: u32 = op.output.dtype as u32,
        activation: u32 = op.activation as u32,
        gated: u32 = op.weight.gated.into(),
        one_order: u32 = 0,
    }
    with (scale_kind, group, scales) = scale_code(op.weight.scales);
    with ids = match op.routing { Routing::Ids(ids) => Some(ids), Routing::Offsets(_) => None };
}

extern "C" {
    fn nvb_cuda_grouped_linear(params: *const Params, launch: *const Launch) -> i32;
    fn nvb_cuda_grouped_linear_family(params: *const Params, launch: *const Launch) -> u32;
    fn nvb_cuda_grouped_linear_workspace(params: *const Params) -> i64;
}

/// `NVB_GROUPED_LINEAR_PLAIN` of csrc/grouped_linear/grouped_linear.h.
pub(super) const PLAIN_FAMILY: u32 = 0;
/// `NVB_GROUPED_LINEAR_BLOCKS`.
const BLOCKS_FAMILY: u32 = 4;
/// `NVB_GROUPED_LINEAR_SORTED_BLOCKS`.
pub(super) const SORTED_BLOCKS_FAMILY: u32 = 5;

pub(super) fn run(executor: &CudaExecutor, op: &GroupedLinear, stream: RawHandle) -> Result<()> {
    let _guard = executor.enter()?;
    if let Some(plan) = SortedPlan::of(executor, op) {
        return plan.run(executor, op, stream);
    }
    if !copies_input(executor, op) {
        return launch(executor, &params(executor, op), stream);
    }
    let scratch = executor.scratch(stream);
    let mut scratch = scratch.lock(executor, stream, || workspace(executor, op))?;
    let input = copy_input(executor, &op.input, std::ptr::null(), &mut scratch, stream)?;
    launch(executor, &params(executor, &GroupedLinear { input, ..*op }), stream)
}

/// Both products in one grid, as gate and up of a mixture's experts are. `false`, and nothing is queued, where they are not alike or
/// no kernel does that.
pub(super) fn run_two(
    executor: &CudaExecutor,
    first: &GroupedLinear,
    second: &GroupedLinear,
    stream: RawHandle,
) -> Result<bool> {
    if executor.batch_invariant || !are_alike(first, second) {
        return Ok(false);
    }
    let _guard = executor.enter()?;
    if SortedPlan::of(executor, first).is_some() {
        return Ok(false);
    }
    let both = Params { second_weight: second.weight.data, second_output: second.output.data, ..Params::of(first) };
    if family_of(executor, &both) != BLOCKS_FAMILY {
        return Ok(false);
    }
    launch(executor, &both, stream).map(|()| true)
}

/// Whether the two differ in the places of weight and output alone, and neither writes what the other touches. They share input
/// and ids, and each call's own checks keep those apart from its output.
fn are_alike(first: &GroupedLinear, second: &GroupedLinear) -> bool {
    let (Routing::Ids(ids), Routing::Ids(others)) = (first.routing, second.routing) else { return false };
    let weight = WeightView { data: first.weight.data, settled: first.weight.settled, ..second.weight };
    let output = Matrix { data: first.output.data, ..second.output };
    // Outputs whose rows interleave are not worth a kernel of their own, so whole spans are compared.
    let apart = |one: Region, other: Region| one.end() <= other.start || other.end() <= one.start;
    ids == others
        && first.input == second.input
        && weight == first.weight
        && output == first.output
        && first.experts == second.experts
        && first.activation == second.activation
        && first.bias.is_none()
        && second.bias.is_none()
        && apart(first.output.region(), second.output.region())
        && apart(second.output.region(), first.input.region())
        && apart(second.output.region(), Region::of_weight(&first.weight))
        && apart(first.output.region(), Region::of_weight(&second.weight))
}

/// What `run` keeps in scratch. The context is current.
pub(super) fn workspace(executor: &CudaExecutor, op: &GroupedLinear) -> Workspace {
    if let Some(plan) = SortedPlan::of(executor, op) {
        return plan.workspace(op);
    }
    match copies_input(executor, op) {
        true => Workspace::none().with(WorkspaceUse::Input, input_bytes(&op.input)),
        false => Workspace::none(),
    }
}

/// The family of kernels that the product takes. The context is current.
pub(super) fn family(executor: &CudaExecutor, op: &GroupedLinear) -> u32 {
    family_of(executor, &params(executor, op))
}

pub(super) fn family_of(executor: &CudaExecutor, params: &Params) -> u32 {
    // SAFETY: reads the two structs alone.
    unsafe { nvb_cuda_grouped_linear_family(params, &executor.launch_on(RawHandle::NULL)) }
}

/// Bytes of the workspace of a product of `SORTED_BLOCKS_FAMILY`.
pub(super) fn workspace_bytes(params: &Params) -> usize {
    // SAFETY: reads the struct alone.
    unsafe { nvb_cuda_grouped_linear_workspace(params) as usize }
}

fn params(executor: &CudaExecutor, op: &GroupedLinear) -> Params {
    Params { one_order: executor.batch_invariant.into(), ..Params::of(op) }
}

/// A weight has one order of sums in each family of kernels, whatever the rows and the tiles are. Which family it is must not
/// depend on where the input lies if rows are to be the same to the bit in every batch.
fn copies_input(executor: &CudaExecutor, op: &GroupedLinear) -> bool {
    let aligned = Matrix { data: std::ptr::null_mut(), row_stride: ordered_stride(&op.input), ..op.input };
    executor.batch_invariant
        && op.input.rows > 0
        && family(executor, &GroupedLinear { input: aligned, ..*op }) != family(executor, op)
}

pub(super) fn launch(executor: &CudaExecutor, params: &Params, stream: RawHandle) -> Result<()> {
    // SAFETY: the descriptor was validated, and the context is current.
    let code = unsafe { nvb_cuda_grouped_linear(params, &executor.launch_on(stream)) };
    executor.check_launch(code, "grouped linear")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::Activation;
    use crate::tensor::Tensor;
    use crate::weight::BlockFormat;

    #[test]
    fn two_products_are_alike_but_for_weight_and_output() {
        let at = |address: usize| address as *mut c_void;
        let make = |ids: usize, weight: usize, input: usize, output: usize| {
            let numbers = Tensor::new(at(ids), DType::I32, &[2, 4]);
            let view = WeightView::blocks(at(weight), BlockFormat::Q4K, 16 * 32, 256, 256);
            let (x, y) = (Tensor::new(at(input), DType::F32, &[2, 256]), Tensor::new(at(output), DType::F32, &[8, 32]));
            GroupedLinear::new(x, (Routing::Ids(numbers), 16), view, None, Activation::None, y).unwrap()
        };
        let first = make(0x10000, 0x20000, 0x80000, 0x90000);
        let alike = |second: &GroupedLinear| are_alike(&first, second);
        assert!(alike(&make(0x10000, 0x40000, 0x80000, 0xa0000)));
        assert!(!alike(&make(0x11000, 0x40000, 0x80000, 0xa0000)), "other experts");
        assert!(!alike(&make(0x10000, 0x40000, 0x81000, 0xa0000)), "another input");
        assert!(!alike(&make(0x10000, 0x40000, 0x80000, 0x90000)), "one output");
        assert!(!alike(&make(0x10000, 0x40000, 0x80000, 0x90200)), "an output within the other");
        assert!(!alike(&make(0x10000, 0x40000, 0x80000, 0x80400)), "it writes what the first reads");
        assert!(!alike(&make(0x10000, 0x40000, 0x80000, 0x20400)), "it writes the first one's weight");
        assert!(!alike(&make(0x10000, 0x90200, 0x80000, 0xc0000)), "the first writes its weight");
        let second = make(0x10000, 0x40000, 0x80000, 0xa0000);
        let other = WeightView::blocks(at(0x40000), BlockFormat::Q5K, 16 * 32, 256, 256);
        assert!(!alike(&GroupedLinear { weight: other, ..second }), "another format");
        assert!(!alike(&GroupedLinear { activation: Activation::Silu, ..second }), "another activation");
        let bias = Some(Tensor::new(at(0x1000), DType::F32, &[16 * 32]));
        assert!(!alike(&GroupedLinear { bias, ..second }), "a bias");
    }
}

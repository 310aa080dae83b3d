//! `linear` whose rows do not depend on each other, to the bit (`batch_invariant`): for a weight one order of sums over K,
//! whatever the number of rows, their content and where they lie.
//!
//! Float weights take the tiles of csrc/linear/sm80/linear_mma.cuh that go along K in one piece, those in 8 and 4 bits the
//! shapes of csrc/common/quantized_mma.cuh, whose two warps a sum share K alike in all. What tensor cores cannot
//! take goes to the plain kernels for every number of rows. Which of the two it is, the weight and the dtypes decide alone:
//! input that is not aligned is copied first. cuBLASLt, tuned entries and inputs rounded to 8 bits are left aside.

use super::linear_quantized::{in_order, ordered_stride};
use super::linear_workspace::input_bytes;
use super::prelude::*;
use super::{kernel_table, linear, linear_choice, linear_quantized};
use crate::device::{Device, DeviceKind};
use crate::operation::OperationKind;
use crate::registry::{find, KernelId};
use crate::weight::WeightView;
use std::sync::OnceLock;

/// Rows of one launch: the tiles of 64 that a grid has on its second axis.
const MOST_ROWS: usize = 64 * 65_535;

pub(super) fn run(executor: &CudaExecutor, op: &LinearProduct, stream: RawHandle) -> Result<()> {
    let _guard = executor.enter()?;
    if op.input.rows == 0 || op.weight.rows == 0 {
        return Ok(());
    }
    if !copies_input(executor, op) {
        return launch(executor, op, stream);
    }
    let scratch = executor.scratch(stream);
    let mut scratch = scratch.lock(executor, stream, || workspace(executor, op))?;
    let op = in_order(executor, op, &mut scratch, stream)?;
    launch(executor, &op, stream)
}

pub(super) fn workspace(executor: &CudaExecutor, op: &LinearProduct) -> Workspace {
    match copies_input(executor, op) {
        true => Workspace::none().with(WorkspaceUse::Input, input_bytes(&op.input)),
        false => Workspace::none(),
    }
}

/// The one kernel for the product; `None` for an empty one. The context is current.
pub(super) fn kernel(executor: &CudaExecutor, op: &LinearProduct) -> Option<KernelId> {
    (op.input.rows > 0 && op.weight.rows > 0).then(|| chosen(executor, &aligned(op)))
}

/// The product with its input in aligned rows in the weight's order.
fn aligned(op: &LinearProduct) -> LinearProduct {
    let input = Matrix { data: std::ptr::null_mut(), row_stride: ordered_stride(&op.input), ..op.input };
    LinearProduct { input, weight: WeightView { order: std::ptr::null(), ..op.weight }, ..*op }
}

/// The kernels of the families.
struct Kernels {
    float: [KernelId; 3],
    float_plain: KernelId,
    quantized: [KernelId; 3],
    quantized_plain: KernelId,
}

fn kernels() -> &'static Kernels {
    static KERNELS: OnceLock<Kernels> = OnceLock::new();
    let id = |name: &str| find(DeviceKind::Cuda, OperationKind::Linear, name).expect("a kernel of the registry");
    KERNELS.get_or_init(|| Kernels {
        float: ["linear_mma_16x32_ordered", "linear_mma_64x64", "linear_mma_128x128"].map(id),
        float_plain: id("linear_simt"),
        quantized: ["linear_quantized_mma16", "linear_quantized_mma32", "linear_quantized_mma64"].map(id),
        quantized_plain: id("linear_quantized_plain"),
    })
}

/// For a product that is `aligned`, so that only its weight, its dtypes and, within a family, its number of rows count.
fn chosen(executor: &CudaExecutor, op: &LinearProduct) -> KernelId {
    let (kernels, rows) = (kernels(), op.input.rows);
    let float = op.weight.dtype().is_some();
    let (family, plain) = match float {
        true => (&kernels.float, kernels.float_plain),
        false => (&kernels.quantized, kernels.quantized_plain),
    };
    // What the widest of a quantised family takes, and each of a float one, they all take in their numbers of rows.
    if !linear_choice::supports(executor, op, family[2]) {
        return plain;
    }
    // As where kernels are chosen by their time: the large tile once it fills three quarters of the device.
    let fills =
        || 4 * rows.div_ceil(128) * op.weight.rows.div_ceil(128) >= 3 * executor.info().multiprocessors as usize;
    match rows {
        ..=16 => family[0],
        _ if float && !fills() => family[1],
        ..=32 if !float => family[1],
        _ => family[2],
    }
}

/// Whether the chosen kernel cannot read the input where it lies.
fn copies_input(executor: &CudaExecutor, op: &LinearProduct) -> bool {
    !op.weight.order.is_null() || !linear_choice::supports(executor, op, chosen(executor, &aligned(op)))
}

fn launch(executor: &CudaExecutor, op: &LinearProduct, stream: RawHandle) -> Result<()> {
    let kernel = chosen(executor, &aligned(op));
    for first in (0..op.input.rows).step_by(MOST_ROWS) {
        let rows = MOST_ROWS.min(op.input.rows - first);
        let part = op.part(first, rows, op.output.part(first, rows));
        let row = kernel_table::row(kernel).expect("a kernel of the tables");
        match part.weight.dtype() {
            Some(dtype) => linear_choice::launch_float(executor, &linear::Params::of(&part, dtype), row, stream)?,
            None => linear_choice::launch_quantized(executor, &linear_quantized::Params::of(&part), row, stream)?,
        }
    }
    Ok(())
}

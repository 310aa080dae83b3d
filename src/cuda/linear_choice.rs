//! Products by name: the registry's kernels as the launchers and cuBLASLt know them.
//!
//! cuBLASLt may be missing, an algorithm may not fit the addresses at hand, the options may forbid rounded inputs: a choice
//! that cannot be followed is answered with `None`, and the executor's own choice follows.

use super::cublaslt::Pick;
use super::executor::CudaExecutor;
use super::launch::Launch;
use super::linear::{self, vendor, vendor_takes};
use super::linear_quantized;
use super::linear_quantized::{in_order, takes_own_kernel, with_dequantized_slices, Params as QuantizedParams};
use super::linear_rounded::{can_round, rounds_with_own, with_quantized_activations, By};
use super::scratch::{Purpose, ScratchGuard};
use super::{linear_invariant, linear_needs, linear_wgmma};
use crate::device::{DeviceKind, RawHandle};
use crate::error::Result;
use crate::operation::linear_product::LinearProduct;
use crate::registry::choices::{Algorithm, Choice};
use crate::registry::{find, kernels_of, KernelId, Way, LINEAR};
use crate::tensor::DType;
use std::cell::Cell;
use std::ffi::{c_char, CStr};
use std::sync::OnceLock;

extern "C" {
    fn nvb_cuda_linear_kernel_name(params: *const linear::Params, launch: *const Launch) -> *const c_char;
    fn nvb_cuda_linear_kernel_at(index: i32) -> *const c_char;
    fn nvb_cuda_linear_kernel_supports(index: i32, params: *const linear::Params, launch: *const Launch) -> i32;
    fn nvb_cuda_linear_launch(index: i32, params: *const linear::Params, launch: *const Launch) -> i32;
    fn nvb_cuda_linear_quantized_kernel_name(params: *const QuantizedParams, launch: *const Launch) -> *const c_char;
    fn nvb_cuda_linear_quantized_kernel_at(index: i32) -> *const c_char;
    fn nvb_cuda_linear_quantized_kernel_supports(
        index: i32,
        params: *const QuantizedParams,
        launch: *const Launch,
    ) -> i32;
    fn nvb_cuda_linear_quantized_kernel_workspace(index: i32, params: *const QuantizedParams) -> usize;
    fn nvb_cuda_linear_quantized_launch(index: i32, params: *const QuantizedParams, launch: *const Launch) -> i32;
}

/// The kernels' names in csrc/linear, in the order of each table.
pub(crate) fn tables() -> [(Way, Vec<String>); 2] {
    let names = |at: unsafe extern "C" fn(i32) -> *const c_char| {
        (0..)
            // SAFETY: any index may be asked for.
            .map(|index| unsafe { at(index) })
            .take_while(|name| !name.is_null())
            .map(text)
            .collect()
    };
    [
        (Way::FloatKernel, names(nvb_cuda_linear_kernel_at)),
        (Way::QuantizedKernel, names(nvb_cuda_linear_quantized_kernel_at)),
    ]
}

fn text(name: *const c_char) -> String {
    // SAFETY: the launchers return static strings.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// The kernel's row in its table.
pub(super) fn row(kernel: KernelId) -> Option<i32> {
    static ROWS: OnceLock<Vec<Option<i32>>> = OnceLock::new();
    let rows = ROWS.get_or_init(|| {
        let tables = tables();
        let row = |id: KernelId| {
            let kernel = id.kernel();
            let (_, names) = tables.iter().find(|(way, _)| *way == kernel.way)?;
            names.iter().position(|name| name == kernel.name).map(|row| row as i32)
        };
        (0..).map_while(KernelId::from_index).map(row).collect()
    });
    rows[kernel.index()]
}

pub(super) fn can(executor: &CudaExecutor, op: &LinearProduct, id: KernelId) -> bool {
    let launch = executor.launch_on(RawHandle::NULL);
    let vendor_there = || executor.cublaslt().is_some();
    match (id.kernel().way, op.weight.dtype()) {
        (Way::FloatKernel, Some(dtype)) => row(id).is_some_and(|row| {
            // SAFETY: reads the two structs alone.
            unsafe { nvb_cuda_linear_kernel_supports(row, &linear::params(op, dtype), &launch) != 0 }
        }),
        (Way::QuantizedKernel, None) => row(id).is_some_and(|row| {
            // SAFETY: as above.
            unsafe { nvb_cuda_linear_quantized_kernel_supports(row, &linear_quantized::params(op), &launch) != 0 }
        }),
        (Way::Vendor, Some(dtype)) => vendor_takes(op, dtype) && vendor_there(),
        (Way::Dequantized, None) => op.weight.columns > 0,
        (Way::Wgmma, Some(dtype)) => {
            op.input.rows > 0
                && linear_wgmma::Params::of(op, dtype).is_some_and(|params| linear_wgmma::can(executor, &params))
        }
        (Way::RoundedInput, None) => can_round(executor, op, false),
        (Way::RoundedWgmma, None) => can_round(executor, op, true),
        _ => false,
    }
}

/// What `linear` would do, cuBLASLt taken to have an algorithm.
pub(super) fn default(executor: &CudaExecutor, op: &LinearProduct) -> Option<Choice> {
    let _guard = executor.enter().ok()?;
    if op.input.rows == 0 || op.weight.rows == 0 {
        return None;
    }
    if executor.batch_invariant {
        return linear_invariant::kernel(executor, op).map(Choice::of);
    }
    let launch = executor.launch_on(RawHandle::NULL);
    let by_way = |way: Way| kernels_of(DeviceKind::Cuda).find(|(_, kernel)| kernel.way == way).map(|(id, _)| id);
    let can_by = |way: Way| by_way(way).is_some_and(|id| can(executor, op, id));
    // SAFETY: the two calls read their structs alone.
    let id = match op.weight.dtype() {
        Some(_) if linear::prefers_wgmma(op) && can_by(Way::Wgmma) => by_way(Way::Wgmma),
        Some(dtype) if linear::prefers_vendor(op, dtype) && executor.cublaslt().is_some() => by_way(Way::Vendor),
        Some(_) if linear_wgmma::has_many_rows(op) && can_by(Way::Wgmma) => by_way(Way::Wgmma),
        Some(dtype) => named(unsafe { nvb_cuda_linear_kernel_name(&linear::params(op, dtype), &launch) }),
        None => {
            let params = linear_quantized::params(op);
            let way = if rounds_with_own(executor, op) { Way::RoundedWgmma } else { Way::RoundedInput };
            let rounded = || by_way(way).filter(|id| can(executor, op, *id));
            match takes_own_kernel(executor, op, &params, RawHandle::NULL) {
                true => named(unsafe { nvb_cuda_linear_quantized_kernel_name(&params, &launch) }),
                false => rounded().or_else(|| by_way(Way::Dequantized)),
            }
        }
    };
    id.map(Choice::of)
}

fn named(name: *const c_char) -> Option<KernelId> {
    find(DeviceKind::Cuda, LINEAR, &text(name)).ok()
}

pub(super) fn run(
    executor: &CudaExecutor,
    op: &LinearProduct,
    choice: &Choice,
    stream: RawHandle,
) -> Result<Option<Choice>> {
    let _guard = executor.enter()?;
    match op.weight.dtype() {
        Some(dtype) => take_float(executor, op, dtype, choice, stream),
        None => take_quantized(executor, op, choice, stream),
    }
}

/// A product with a float weight by this choice. The context is current.
pub(super) fn take_float(
    executor: &CudaExecutor,
    op: &LinearProduct,
    dtype: DType,
    choice: &Choice,
    stream: RawHandle,
) -> Result<Option<Choice>> {
    if !can(executor, op, choice.kernel) {
        return Ok(None);
    }
    if choice.kernel.kernel().way == Way::Wgmma {
        let ran = linear_wgmma::run(executor, linear_wgmma::Params::of(op, dtype), stream)?;
        return Ok(ran.then_some(*choice));
    }
    let Some(row) = row(choice.kernel) else {
        let scratch = executor.scratch(stream);
        let mut scratch = scratch.lock(executor, stream, || linear_needs::vendor(executor, op, dtype))?;
        return picked(choice, |pick| vendor(executor, op, dtype, pick, &mut scratch, stream));
    };
    launch_float(executor, &linear::params(op, dtype), row, stream).map(|()| Some(*choice))
}

/// The product by a row of the table of float kernels. The context is current.
pub(super) fn launch_float(
    executor: &CudaExecutor,
    params: &linear::Params,
    row: i32,
    stream: RawHandle,
) -> Result<()> {
    // SAFETY: of a validated descriptor, and the context is current.
    let code = unsafe { nvb_cuda_linear_launch(row, params, &executor.launch_on(stream)) };
    executor.check_launch(code, "linear")
}

/// The same with a weight in 8 or 4 bits.
pub(super) fn take_quantized(
    executor: &CudaExecutor,
    op: &LinearProduct,
    choice: &Choice,
    stream: RawHandle,
) -> Result<Option<Choice>> {
    let in_place = op.weight.order.is_null() || op.input.rows == 0;
    if in_place {
        if !can(executor, op, choice.kernel) {
            return Ok(None);
        }
        let params = linear_quantized::params(op);
        if let Some(row) = row(choice.kernel).filter(|&row| workspace_bytes(row, &params) == 0) {
            return launch_quantized(executor, &params, row, stream).map(|()| Some(*choice));
        }
    }
    let scratch = executor.scratch(stream);
    let mut scratch = scratch.lock(executor, stream, || linear_needs::by_choice(executor, op, choice))?;
    let op = if in_place { *op } else { in_order(executor, op, &mut scratch, stream)? };
    if !can(executor, &op, choice.kernel) {
        return Ok(None);
    }
    let Some(row) = row(choice.kernel) else {
        return with_strategy(executor, &op, choice, &mut scratch, stream);
    };
    let mut params = linear_quantized::params(&op);
    params.workspace = scratch.get(Purpose::Workspace, workspace_bytes(row, &params))?;
    launch_quantized(executor, &params, row, stream).map(|()| Some(*choice))
}

pub(super) fn workspace_bytes(row: i32, params: &QuantizedParams) -> usize {
    // SAFETY: reads the struct alone.
    unsafe { nvb_cuda_linear_quantized_kernel_workspace(row, params) }
}

/// The same of the quantised kernels.
pub(super) fn launch_quantized(
    executor: &CudaExecutor,
    params: &QuantizedParams,
    row: i32,
    stream: RawHandle,
) -> Result<()> {
    // SAFETY: the descriptor was validated, the workspace is as large as asked, and the context is current.
    let code = unsafe { nvb_cuda_linear_quantized_launch(row, params, &executor.launch_on(stream)) };
    executor.check_launch(code, "quantised linear")
}

fn with_strategy(
    executor: &CudaExecutor,
    op: &LinearProduct,
    choice: &Choice,
    scratch: &mut ScratchGuard<'_>,
    stream: RawHandle,
) -> Result<Option<Choice>> {
    match choice.kernel.kernel().way {
        Way::RoundedInput => {
            picked(choice, |pick| with_quantized_activations(executor, op, By::Vendor(pick), scratch, stream))
        }
        Way::RoundedWgmma => {
            let ran = with_quantized_activations(executor, op, By::Own, scratch, stream)?;
            Ok(ran.then_some(*choice))
        }
        _ => picked(choice, |pick| with_dequantized_slices(executor, op, pick, scratch, stream)),
    }
}

/// Runs a product of cuBLASLt with the choice's algorithm, and writes down which one a rank stands for.
fn picked(choice: &Choice, run: impl FnOnce(Pick) -> Result<bool>) -> Result<Option<Choice>> {
    let taken = Cell::new(None);
    let pick = match choice.algorithm {
        Algorithm::Default => Pick::First,
        Algorithm::Rank(rank) => Pick::Rank(rank, &taken),
        Algorithm::Kept(algorithm) => Pick::Kept(algorithm),
    };
    if !run(pick)? {
        return Ok(None);
    }
    let algorithm = taken.get().map_or(choice.algorithm, Algorithm::Kept);
    Ok(Some(Choice { algorithm, ..*choice }))
}

/// The plain kernels: f32 arithmetic without Tensor Cores.
pub(super) fn reference(executor: &CudaExecutor, op: &LinearProduct, stream: RawHandle) -> Result<()> {
    let name = if op.weight.encoding.is_float() { "linear_simt" } else { "linear_quantized_plain" };
    let plain = Choice::of(find(DeviceKind::Cuda, LINEAR, name)?);
    run(executor, op, &plain, stream).map(drop)
}

/// Names and limits against the tables, which are code of the host: no GPU is needed.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::Activation;
    use crate::tensor::Tensor;
    use crate::weight::{Encoding, Scales, WeightView};

    #[test]
    fn what_a_kernel_takes_lies_within_its_limits() {
        let at = |offset: usize| (4096 + offset) as *mut std::ffi::c_void;
        for (m, k, offset, capability, dtype) in [1usize, 3, 8, 9, 16, 17, 32, 33, 200]
            .into_iter()
            .flat_map(|m| [4usize, 8, 60, 64, 4096].map(|k| (m, k)))
            .flat_map(|(m, k)| [0usize, 8].map(|offset| (m, k, offset)))
            .flat_map(|(m, k, offset)| [75, 80, 90].map(|capability| (m, k, offset, capability)))
            .flat_map(|(m, k, offset, capability)| DType::FLOATS.map(|dtype| (m, k, offset, capability, dtype)))
        {
            let launch = Launch {
                stream: std::ptr::null_mut(),
                capability,
                multiprocessors: 132,
                shared_bytes_per_block: 232_448,
                l2_bytes: 50 << 20,
            };
            let x = Tensor::new(at(offset), dtype, &[m, k]);
            let y = Tensor::new(at(0), dtype, &[m, 4096]);
            let op = |weight: WeightView| LinearProduct::new(x, weight, None, Activation::None, y).unwrap();
            let float = op(WeightView::float(at(0), dtype, 4096, k, k, false));
            let codes = |encoding, scales, row_stride| {
                let weight = WeightView::float(at(0), dtype, 4096, k, row_stride, false);
                op(WeightView { encoding, scales, ..weight })
            };
            let int8 = codes(Encoding::Int8, Scales::Rows(at(0).cast()), k.next_multiple_of(16));
            let groups = Scales::Groups { size: 32, data: at(0).cast() };
            let int4 = codes(Encoding::Int4, groups, k.next_multiple_of(64));
            let mut taken = 0;
            for (id, kernel) in kernels_of(DeviceKind::Cuda) {
                for op in [&float, &int8, &int4] {
                    let takes = match (kernel.way, op.weight.dtype(), row(id)) {
                        // SAFETY: the calls read their structs alone.
                        (Way::FloatKernel, Some(dtype), Some(row)) => unsafe {
                            nvb_cuda_linear_kernel_supports(row, &linear::params(op, dtype), &launch) != 0
                        },
                        // SAFETY: as above.
                        (Way::QuantizedKernel, None, Some(row)) => unsafe {
                            nvb_cuda_linear_quantized_kernel_supports(row, &linear_quantized::params(op), &launch) != 0
                        },
                        _ => false,
                    };
                    if !takes {
                        continue;
                    }
                    taken += 1;
                    let limits = kernel.limits;
                    let what = format!("{} with m {m}, k {k}, {dtype} at +{offset}, {capability}", kernel.name);
                    assert!(kernel.inputs.contains(&dtype) && kernel.encodings.contains(&op.weight.encoding), "{what}");
                    assert!(capability >= limits.capability && (limits.rows == 0 || m <= limits.rows), "{what}");
                    assert!(k % limits.depth_multiple == 0 && offset % limits.alignment == 0, "{what}");
                }
            }
            assert!(taken >= 3, "each product has a kernel");
        }
    }

    /// Just on both sides of each condition of csrc/linear/linear.cu for few rows.
    #[test]
    fn few_rows_have_these_defaults() {
        const RING: &str = "linear_skinny_ring";
        const SKINNY: &str = "linear_skinny";
        const GEMV: &str = "linear_gemv";
        let launch = Launch {
            stream: std::ptr::null_mut(),
            capability: 90,
            multiprocessors: 132,
            shared_bytes_per_block: 232_448,
            l2_bytes: 50 << 20,
        };
        let at = 4096 as *mut std::ffi::c_void;
        // Rows and columns of the weight, the kernel of 2 rows and that of 3 to 8.
        for (n, k, two, more) in [
            (10240, 2560, RING, RING),
            (10239, 2560, GEMV, SKINNY),
            (26214, 2560, RING, RING),
            (26215, 2560, GEMV, RING),
            (262_144, 2560, GEMV, RING),
            (12801, 2048, RING, RING),
            (13000, 2040, GEMV, SKINNY),
            (14336, 4096, RING, RING),
            (8192, 5120, RING, RING),
            (8192, 5128, GEMV, SKINNY),
            (8000, 8184, GEMV, SKINNY),
            (8192, 8192, GEMV, RING),
            (8193, 8192, GEMV, SKINNY),
            (2560, 10240, GEMV, RING),
            (2559, 10240, GEMV, SKINNY),
            (2560, 10248, GEMV, SKINNY),
            (4096, 2560, SKINNY, SKINNY),
            (4095, 2560, GEMV, SKINNY),
            (4096, 4096, SKINNY, SKINNY),
            (4097, 4096, GEMV, SKINNY),
            (13824, 1152, SKINNY, SKINNY),
            (16384, 1024, SKINNY, SKINNY),
            (16384, 1016, GEMV, SKINNY),
        ] {
            for (m, kernel) in [(2, two), (3, more), (8, more), (9, "linear_mma_16x32")] {
                for dtype in [DType::F16, DType::Bf16] {
                    let x = Tensor::new(at, dtype, &[m, k]);
                    let y = Tensor::new(at, dtype, &[m, n]);
                    let weight = WeightView::float(at, dtype, n, k, k, false);
                    let op = LinearProduct::new(x, weight, None, Activation::None, y).unwrap();
                    // SAFETY: the call reads its structs alone.
                    let chosen = text(unsafe { nvb_cuda_linear_kernel_name(&linear::params(&op, dtype), &launch) });
                    assert_eq!(chosen, kernel, "{m} rows, {n} x {k}, {dtype}");
                }
            }
        }
    }
}

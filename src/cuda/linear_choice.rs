//! Products by name: the registry's kernels as the launchers and cuBLASLt know them.
//!
//! cuBLASLt may be missing, an algorithm may not fit the addresses at hand, the options may forbid rounded inputs: a choice
//! that cannot be followed is answered with `None`, and the executor's own choice follows.

use super::cublaslt::LibraryAlgorithm;
use super::kernel_table::{row, text};
use super::linear::{self, vendor_supports};
use super::linear_quantized;
use super::linear_quantized::Params as QuantizedParams;
use super::linear_rounded::supports_rounding;
use super::linear_wgmma;
use super::prelude::*;
use crate::device::DeviceKind;
use crate::operation::OperationKind;
use crate::registry::choices::{Algorithm, Choice};
use crate::registry::{find, Family, KernelId};
use std::cell::Cell;
use std::ffi::c_char;

extern "C" {
    fn nvb_cuda_linear_kernel_name(params: *const linear::Params, launch: *const Launch) -> *const c_char;
    fn nvb_cuda_linear_kernel_supports(index: i32, params: *const linear::Params, launch: *const Launch) -> i32;
    fn nvb_cuda_linear_launch(index: i32, params: *const linear::Params, launch: *const Launch) -> i32;
    fn nvb_cuda_linear_quantized_kernel_name(params: *const QuantizedParams, launch: *const Launch) -> *const c_char;
    fn nvb_cuda_linear_quantized_kernel_supports(
        index: i32,
        params: *const QuantizedParams,
        launch: *const Launch,
    ) -> i32;
    fn nvb_cuda_linear_quantized_kernel_workspace(index: i32, params: *const QuantizedParams) -> usize;
    fn nvb_cuda_linear_quantized_launch(index: i32, params: *const QuantizedParams, launch: *const Launch) -> i32;
}

pub(super) fn supports(executor: &CudaExecutor, op: &LinearProduct, id: KernelId) -> bool {
    let launch = executor.launch_on(RawHandle::NULL);
    let vendor_there = || executor.cublaslt().is_some();
    match (id.kernel().family, op.weight.dtype()) {
        (Family::FloatKernel, Some(dtype)) => row(id).is_some_and(|row| {
            // SAFETY: reads the two structs alone.
            unsafe { nvb_cuda_linear_kernel_supports(row, &linear::Params::of(op, dtype), &launch) != 0 }
        }),
        (Family::QuantizedKernel, None) => row(id).is_some_and(|row| {
            // SAFETY: as above.
            unsafe { nvb_cuda_linear_quantized_kernel_supports(row, &linear_quantized::Params::of(op), &launch) != 0 }
        }),
        (Family::Vendor, Some(dtype)) => vendor_supports(op, dtype) && vendor_there(),
        (Family::Dequantized, None) => op.weight.columns > 0,
        (Family::Wgmma, Some(dtype)) => {
            op.input.rows > 0
                && linear_wgmma::Params::of_floats(op, dtype)
                    .is_some_and(|params| linear_wgmma::supports(executor, &params))
        }
        (Family::RoundedInput, None) => supports_rounding(executor, op, false),
        (Family::RoundedWgmma, None) => supports_rounding(executor, op, true),
        _ => false,
    }
}

/// The kernel that the launcher's table has for the shape.
pub(super) fn kernel_of_table(executor: &CudaExecutor, op: &LinearProduct) -> Option<KernelId> {
    let launch = executor.launch_on(RawHandle::NULL);
    // SAFETY: the two calls read their structs alone.
    named(match op.weight.dtype() {
        Some(dtype) => unsafe { nvb_cuda_linear_kernel_name(&linear::Params::of(op, dtype), &launch) },
        None => unsafe { nvb_cuda_linear_quantized_kernel_name(&linear_quantized::Params::of(op), &launch) },
    })
}

fn named(name: *const c_char) -> Option<KernelId> {
    find(DeviceKind::Cuda, OperationKind::Linear, &text(name)).ok()
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

pub(super) fn workspace_bytes(row: i32, params: &QuantizedParams) -> usize {
    // SAFETY: reads the struct alone.
    unsafe { nvb_cuda_linear_quantized_kernel_workspace(row, params) }
}

/// The product by a row of the table of quantised kernels. The context is current.
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

/// Runs a product of cuBLASLt with the choice's algorithm, and writes down which one a rank stands for.
pub(super) fn with_algorithm(
    choice: &Choice,
    run: impl FnOnce(LibraryAlgorithm) -> Result<bool>,
) -> Result<Option<Choice>> {
    let taken = Cell::new(None);
    let algorithm = match choice.algorithm {
        Algorithm::Default => LibraryAlgorithm::First,
        Algorithm::Rank(rank) => LibraryAlgorithm::Rank(rank, &taken),
        Algorithm::Cached(algorithm) => LibraryAlgorithm::Cached(algorithm),
    };
    if !run(algorithm)? {
        return Ok(None);
    }
    let algorithm = taken.get().map_or(choice.algorithm, Algorithm::Cached);
    Ok(Some(Choice { algorithm, ..*choice }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::Activation;
    use crate::registry::kernels_of;
    use crate::tensor::{DType, Tensor};
    use crate::weight::{Encoding, Scales, WeightView};

    #[test]
    fn what_a_kernel_supports_lies_within_its_limits() {
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
            let quantized = |encoding, scales, row_stride| {
                let weight = WeightView::float(at(0), dtype, 4096, k, row_stride, false);
                op(WeightView { encoding, scales, ..weight })
            };
            let int8 = quantized(Encoding::Int8, Scales::Rows(at(0).cast()), k.next_multiple_of(16));
            let groups = Scales::Groups { size: 32, data: at(0).cast() };
            let int4 = quantized(Encoding::Int4, groups, k.next_multiple_of(64));
            let mut taken = 0;
            for (id, kernel) in kernels_of(DeviceKind::Cuda) {
                for op in [&float, &int8, &int4] {
                    let supported = match (kernel.family, op.weight.dtype(), row(id)) {
                        // SAFETY: the calls read their structs alone.
                        (Family::FloatKernel, Some(dtype), Some(row)) => unsafe {
                            nvb_cuda_linear_kernel_supports(row, &linear::Params::of(op, dtype), &launch) != 0
                        },
                        // SAFETY: as above.
                        (Family::QuantizedKernel, None, Some(row)) => unsafe {
                            nvb_cuda_linear_quantized_kernel_supports(row, &linear_quantized::Params::of(op), &launch)
                                != 0
                        },
                        _ => false,
                    };
                    if !supported {
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
                    let chosen = text(unsafe { nvb_cuda_linear_kernel_name(&linear::Params::of(&op, dtype), &launch) });
                    assert_eq!(chosen, kernel, "{m} rows, {n} x {k}, {dtype}");
                }
            }
        }
    }
}

//! What tuning tries of a product on CUDA: the registry's kernels, cuBLASLt's algorithms, and variations of these.

use super::cublaslt::{AlgorithmBytes, LibraryAlgorithm, RANKS, RANKS_WITH_EPILOGUE};
use super::linear::{self, vendor_supports};
use super::linear_choice::supports;
use super::prelude::*;
use super::{linear_invariant, linear_plan, linear_wgmma};
use crate::device::DeviceKind;
use crate::operation::Activation;
use crate::registry::choices::{Algorithm, Choice};
use crate::registry::{kernels_of, Family};

/// From here on the GPU has clusters of blocks, which variations are about.
const VARIED_CAPABILITY: i32 = 90;

pub(super) fn candidates(executor: &CudaExecutor, op: &LinearProduct) -> Vec<Choice> {
    let Ok(_guard) = executor.enter() else { return Vec::new() };
    if op.input.rows == 0 || op.weight.rows == 0 {
        return Vec::new();
    }
    if executor.batch_invariant {
        return linear_invariant::kernel(executor, op).map(Choice::of).into_iter().collect();
    }
    let mut found = Vec::new();
    let seen = linear_plan::seen(op);
    for (id, kernel) in kernels_of(DeviceKind::Cuda).filter(|(id, _)| supports(executor, &seen, *id)) {
        match kernel.family {
            Family::Vendor | Family::Dequantized | Family::RoundedInput if executor.cublaslt().is_some() => {
                let ranks = 0..ranks(op, kernel.family);
                found.extend(ranks.map(|rank| Choice { kernel: id, algorithm: Algorithm::Rank(rank) }));
            }
            _ => found.push(Choice::of(id)),
        }
    }
    found
}

/// How many of cuBLASLt's algorithms there are to try, at most.
fn ranks(op: &LinearProduct, family: Family) -> u8 {
    let epilogue = op.bias.is_some() || op.activation != Activation::None;
    match family {
        Family::Vendor | Family::Dequantized if epilogue && linear::fused_by_library(op) => RANKS_WITH_EPILOGUE,
        _ => RANKS,
    }
}

/// Further algorithms of cuBLASLt, as in `Executor::linear_variations`, for products of many rows that it does at once.
pub(super) fn variations(executor: &CudaExecutor, op: &LinearProduct, fastest: &[Choice]) -> Vec<Choice> {
    let (Ok(_guard), Some(dtype)) = (executor.enter(), op.weight.dtype()) else { return Vec::new() };
    let capability = executor.launch_on(RawHandle::NULL).capability;
    let many = linear_wgmma::has_many_rows(op) && op.weight.rows > 0 && vendor_supports(op, dtype);
    if executor.batch_invariant || capability < VARIED_CAPABILITY || !many {
        return Vec::new();
    }
    let vendor = kernels_of(DeviceKind::Cuda).find(|(_, kernel)| kernel.family == Family::Vendor);
    let product = linear::library_product(op, dtype, LibraryAlgorithm::First);
    let (Some(cublaslt), Some((id, _)), Some(product)) = (executor.cublaslt(), vendor, product) else {
        return Vec::new();
    };
    let of_library = |choice: &Choice| match choice.algorithm {
        Algorithm::Cached(algorithm) if choice.kernel == id => Some(algorithm),
        _ => None,
    };
    let algorithms: Vec<AlgorithmBytes> = fastest.iter().filter_map(of_library).collect();
    if algorithms.is_empty() && !fastest.is_empty() {
        return Vec::new();
    }
    let varied = cublaslt.variations(&product, &algorithms).unwrap_or_else(|error| {
        log::debug!(target: "nvbackend::cuda", "no variations of cuBLASLt's algorithms: {error}");
        Vec::new()
    });
    varied.into_iter().map(|algorithm| Choice { kernel: id, algorithm: Algorithm::Cached(algorithm) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{DType, Tensor};
    use crate::weight::WeightView;

    #[test]
    fn an_epilogue_of_the_library_has_the_plain_products_algorithms_to_try_as_well() {
        let at = 4096 as *mut std::ffi::c_void;
        let product = |bias: Option<DType>, activation: Activation, gated: bool| {
            let x = Tensor::new(at, DType::Bf16, &[64, 256]);
            let y = Tensor::new(at, DType::Bf16, &[64, if gated { 64 } else { 128 }]);
            let bias = bias.map(|dtype| Tensor::new(at, dtype, &[128]));
            let weight = WeightView::float(at, DType::Bf16, 128, 256, 256, gated);
            LinearProduct::new(x, weight, bias, activation, y).unwrap()
        };
        let (same, none, gelu) = (Some(DType::Bf16), Activation::None, Activation::GeluTanh);
        for (op, expected) in [
            (product(None, none, false), RANKS),
            (product(same, none, false), RANKS_WITH_EPILOGUE),
            (product(None, gelu, false), RANKS_WITH_EPILOGUE),
            (product(same, gelu, false), RANKS_WITH_EPILOGUE),
            // Not cuBLASLt's: it makes a plain product there, and a kernel follows.
            (product(Some(DType::F32), gelu, false), RANKS),
            (product(same, Activation::Silu, false), RANKS),
            (product(None, gelu, true), RANKS),
        ] {
            assert_eq!(ranks(&op, Family::Vendor), expected, "{op:?}");
            assert_eq!(ranks(&op, Family::Dequantized), expected, "{op:?}");
            assert_eq!(ranks(&op, Family::RoundedInput), RANKS, "{op:?}");
        }
        let residual =
            product(None, none, false).with_residual(Some(Tensor::new(at, DType::Bf16, &[64, 128]))).unwrap();
        assert_eq!(ranks(&residual, Family::Vendor), RANKS);
    }
}

//! Which of the device, the options and the product's shape keeps a kernel from a product that lies within its limits.

use super::linear_rounded::oldest_capability;
use super::prelude::*;
use crate::device::Device;
use crate::executor::Executor;
use crate::hardware;
use crate::registry::choices::Rounding;
use crate::registry::{Family, KernelId};

pub(super) fn of(executor: &CudaExecutor, op: &LinearProduct, id: KernelId) -> String {
    let (kernel, family) = (id.kernel(), id.kernel().family);
    let rounds = matches!(family, Family::RoundedInput | Family::RoundedWgmma);
    if rounds && !executor.choices().may_round_input(op) {
        // What the options forbid is forbidden on every device.
        match executor.choices().rounding() {
            Rounding::Never => return "options: quantized_activations is not set".to_string(),
            rounding if !rounding.allows(op.weight.encoding) => return "options: fp8 is off".to_string(),
            _ => {}
        }
    }
    let needed = kernel.limits.capability.max(if rounds { oldest_capability(op).unwrap_or(0) } else { 0 });
    if let Some(obstacle) = of_capability(executor, needed, kernel.limits.exact) {
        return obstacle;
    }
    if matches!(family, Family::Vendor | Family::RoundedInput) {
        if executor.own_kernels_only {
            return "options: vendor libraries are off".to_string();
        }
        let there = executor.enter().is_ok_and(|_guard| executor.cublaslt().is_some());
        if !there {
            return "device: cuBLASLt was not found on this machine".to_string();
        }
    }
    let what = if rounds {
        "the scales of the weight, its dtypes or k"
    } else if family == Family::Vendor {
        "input and weight of different dtypes, or k of 0"
    } else {
        "m, n, k, the strides or the epilogue"
    };
    format!("shape: {what}")
}

/// Compute capabilities of the GPU, of what the options leave of it, and of the newest kernels in this library.
fn of_capability(executor: &CudaExecutor, needed: i32, exact: bool) -> Option<String> {
    let version = |capability: i32| format!("{}.{}", capability / 10, capability % 10);
    let suits = |capability: i32| if exact { capability == needed } else { capability >= needed };
    let used = executor.info().compute_capability;
    let kernels = executor.launch_on(RawHandle::NULL).capability;
    if needed == 0 || suits(kernels) {
        return None;
    }
    let own = hardware::gpu_at(executor.info().ordinal).map_or(used, |gpu| gpu.compute_capability);
    let wanted = format!("compute capability {}{}", version(needed), if exact { "" } else { " or newer" });
    Some(if !suits(own) {
        format!("device: {wanted}; this one has {}", version(own))
    } else if !suits(used) {
        format!("options: {wanted}; the architecture in use is {}", version(used))
    } else {
        format!("device: {wanted}; this library's newest kernels for it are of {}", version(kernels))
    })
}

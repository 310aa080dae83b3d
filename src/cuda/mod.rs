//! The CUDA executor: one device's primary context, its memory pool, and a launcher an operation.
//!
//! The kernels go through the statically linked CUDA runtime, which shares the primary context.

mod all_work;
mod argmax;
mod attention;
mod attention_plan;
mod attention_prefix;
mod block_rows;
mod captured_list;
mod context;
mod cublaslt;
mod dequantize;
mod embedding;
mod grouped_linear;
mod grouped_linear_by_id;
mod kernel_table;
mod kv_placement;
mod launch;
mod linear;
mod linear_candidates;
mod linear_choice;
mod linear_invariant;
mod linear_obstacle;
mod linear_plan;
mod linear_quantized;
mod linear_quantized_input;
mod linear_quantized_output;
mod linear_rounded;
mod linear_wgmma;
mod linear_workspace;
mod managed;
mod matmul;
mod memory_pool;
mod norm;
mod numa;
mod operation;
mod pack_blocks;
mod peer;
mod pinned;
mod plan;
mod pointer;
mod prelude;
mod quantize;
mod quantize_tokens;
mod quantized;
mod rope;
mod rotary_embedding;
mod sample;
mod scatter_rows;
mod scratch;
mod sort_rows;
mod virtual_memory;
mod workspace;
crate::plain_operations!(operation_modules);

pub mod executor;

use crate::configuration::{Configuration, Requirement};
use crate::device::DeviceInfo;
use crate::driver::usable::{built_architectures, check_usable, newest_kernels, OLDEST};
use crate::error::{Error, Result, Status};
use crate::executor::Executor;
use crate::operation_modules;
use std::sync::Arc;

pub use executor::CudaExecutor;
#[cfg(test)]
pub(crate) use kernel_table::tables as kernel_tables;

/// The largest number that names an architecture.
const NEWEST: u32 = 999;
/// The newest compute capability whose kernels use no Tensor Cores.
const PLAIN: i32 = 75;

/// Retains the primary context of the device and prepares it for work.
pub fn create_executor(device: &DeviceInfo, configuration: &Configuration) -> Result<Arc<dyn Executor>> {
    check_usable(device)?;
    let capability = device.compute_capability;
    let forced = forced_architecture(configuration.architecture as u32)?;
    if forced > capability {
        return Err(Error::new(
            Status::InvalidArchitecture,
            format!("kernels of architecture {forced} were asked for; {} runs up to {capability}", device.name),
        )
        .with_limit(forced as u64, capability as u64));
    }
    let built = newest_kernels(built_architectures(), capability).expect("checked to be usable");
    let mut device = device.clone();
    if forced != 0 {
        device.compute_capability = forced;
    }
    if configuration.tensor_cores == Requirement::Off {
        device.compute_capability = device.compute_capability.min(PLAIN);
    }
    let kernels = device.compute_capability.min(built);
    let attention = if configuration.plain_attention() { PLAIN.min(kernels) } else { kernels };
    Ok(Arc::new(CudaExecutor::new(device, kernels, attention, configuration)?))
}

/// What the configuration says, else NVB_FORCE_ARCH, else 0.
fn forced_architecture(configured: u32) -> Result<i32> {
    if configured != 0 {
        return check_architecture("architecture", configured);
    }
    let Ok(text) = std::env::var("NVB_FORCE_ARCH") else { return Ok(0) };
    match text.parse() {
        Ok(value) => check_architecture("NVB_FORCE_ARCH", value),
        Err(_) => Err(Error::new(
            Status::Configuration,
            format!("NVB_FORCE_ARCH is \"{text}\"; a number such as 80 is needed"),
        )),
    }
}

fn check_architecture(name: &str, value: u32) -> Result<i32> {
    if (OLDEST as u32..=NEWEST).contains(&value) {
        return Ok(value as i32);
    }
    Err(Error::new(
        Status::Configuration,
        format!("{name} is {value}; 0 or a number from {OLDEST} to {NEWEST} is needed (80 for compute capability 8.0)"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_that_are_none_are_named_with_what_is_allowed() {
        assert_eq!(check_architecture("architecture", 999).unwrap(), 999);
        for value in [1, 69, 1000, u32::MAX] {
            let error = check_architecture("architecture", value).unwrap_err();
            assert_eq!(error.status, Status::Configuration);
            let text = format!("architecture is {value}; 0 or a number from 70 to 999 is needed");
            assert!(error.message.starts_with(&text), "{error}");
        }
    }
}

//! The passes that optimise a recorded list: one table, and a file for each.
//!
//! A pass looks for operations that one other operation can do as well and says how exact that is; [`List`] refuses what the
//! level does not allow, what would change a result that somebody reads, and what the device cannot run.

mod conversion;
mod dead_work;
mod epilogue;
mod gate_up;
mod linear_activation;
mod linear_bias;
mod linear_residual;
mod merged_copies;
mod norm_residual;
mod norm_sum;
mod post_norm;
mod repeated_work;
mod rope_attention;
mod scale;
#[cfg(test)]
pub(in crate::graph) mod testing;

use super::list::List;
use super::report::Exactness;
use crate::device::DeviceKind;
use crate::error::Result;
use crate::executor::Executor;
use crate::tensor::DType;

pub struct Pass {
    /// What switches and reports call it.
    pub name: &'static str,
    /// A sentence.
    pub summary: &'static str,
    /// The best that its rewrites can be; each says for itself what it is.
    pub exactness: Exactness,
    pub run: fn(&mut List) -> Result<()>,
}

/// All passes, in the order in which they run.
pub const ALL: &[Pass] = &[
    dead_work::PASS,
    repeated_work::PASS,
    merged_copies::PASS,
    scale::PASS,
    linear_bias::PASS,
    linear_activation::PASS,
    linear_residual::PASS,
    gate_up::PASS,
    norm_residual::PASS,
    post_norm::PASS,
    norm_sum::PASS,
    rope_attention::PASS,
    conversion::PASS,
];

/// How exact it is that values of this dtype are no longer stored and read again between two parts of one operation.
///
/// On the CPU both parts compute as the operations do that they replace, whatever stands beside them. GPUs' kernels may contract a
/// product and a sum that meet in one kernel, and another epilogue may come with another kernel.
fn without_store(executor: &dyn Executor, stored: DType) -> Exactness {
    match (executor.info().kind, stored) {
        (DeviceKind::Cpu, DType::F32) => Exactness::Exact,
        _ => Exactness::Rounding,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_apart_and_can_be_listed() {
        for (place, pass) in ALL.iter().enumerate() {
            assert!(!ALL[..place].iter().any(|other| other.name == pass.name), "{}", pass.name);
            assert!(pass.name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{}", pass.name);
            assert!(pass.summary.ends_with('.') && pass.name.len() < 32 && pass.summary.len() < 256, "{}", pass.name);
        }
    }
}

//! Reaching the memory of another GPU.

use super::context::PrimaryContext;
use super::executor::CudaExecutor;
use crate::error::{Error, Result};
use crate::executor::{DeviceKind, Executor};
use cust::sys::{self, cudaError_enum};
use std::sync::{Mutex, PoisonError};

/// `peers`: the contexts of devices whose memory the executor may reach, kept alive for that.
pub(super) fn enable_access(
    executor: &CudaExecutor,
    peers: &Mutex<Vec<(i32, PrimaryContext)>>,
    peer: &dyn Executor,
) -> Result<()> {
    let (ordinal, other) = (executor.device().ordinal, peer.device());
    let unreachable = || {
        Error::unsupported(format!("cuda:{ordinal} cannot reach the memory of {} directly", other.name))
            .with_advice("copy through host memory")
    };
    if other.kind != DeviceKind::Cuda {
        return Err(unreachable());
    }
    if other.ordinal == ordinal {
        return Ok(());
    }
    let mut peers = peers.lock().unwrap_or_else(PoisonError::into_inner);
    if peers.iter().all(|(known, _)| *known != other.ordinal) {
        let mut accessible = 0;
        // SAFETY: a valid pointer and two listed devices.
        executor.check(
            unsafe { sys::cuDeviceCanAccessPeer(&mut accessible, ordinal, other.ordinal) },
            "cuDeviceCanAccessPeer",
        )?;
        if accessible == 0 {
            return Err(unreachable());
        }
        let context = PrimaryContext::retain(other.ordinal)?;
        let _guard = executor.enter()?;
        // SAFETY: the peer's context is retained for as long as it stays in `peers`.
        match unsafe { sys::cuCtxEnablePeerAccess(context.raw(), 0) } {
            cudaError_enum::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {}
            result => executor.check(result, "cuCtxEnablePeerAccess")?,
        }
        peers.push((other.ordinal, context));
    }
    peer.share_memory_with(ordinal)
}

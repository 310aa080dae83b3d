//! Reaching the memory of another GPU.

use super::context::PrimaryContext;
use super::executor::CudaExecutor;
use crate::device::{Device, DeviceKind};
use crate::error::{Error, Result};
use cust::sys::{self, cudaError_enum};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The contexts of devices whose memory an executor may reach, kept alive for that.
#[derive(Default)]
pub(super) struct Peers(Mutex<Vec<(i32, PrimaryContext)>>);

impl Peers {
    fn lock(&self) -> MutexGuard<'_, Vec<(i32, PrimaryContext)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether plain allocations of the device may be reached.
    pub fn include(&self, ordinal: i32) -> bool {
        self.lock().iter().any(|(known, _)| *known == ordinal)
    }

    /// `executor`: whose peers these are.
    pub fn enable_access(&self, executor: &CudaExecutor, peer: &dyn Device) -> Result<()> {
        let (ordinal, other) = (executor.info().ordinal, peer.info());
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
        let mut peers = self.lock();
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
}

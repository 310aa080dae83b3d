//! Which GPU reaches which other's memory.

use crate::error::{Error, Result, Status};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PeerAccess {
    /// Whether loads, stores and copies can go directly from one to the other.
    pub accessible: bool,
    /// The driver's order of the links, 0 the fastest.
    pub performance_rank: i32,
    pub native_atomics: bool,
}

/// How CUDA device `ordinal` reaches the memory of `peer`. A device reaches its own.
pub fn peer_access(ordinal: i32, peer: i32) -> Result<PeerAccess> {
    let devices = super::gpus()?.len();
    for (name, value) in [("device", ordinal), ("peer", peer)] {
        if !usize::try_from(value).is_ok_and(|index| index < devices) {
            return Err(Error::new(
                Status::Device,
                format!("{name} is CUDA device {value}; this machine has {devices}"),
            )
            .with_limit(value.max(0) as u64, devices as u64));
        }
    }
    if ordinal == peer {
        return Ok(PeerAccess { accessible: true, performance_rank: 0, native_atomics: true });
    }
    ask(ordinal, peer)
}

#[cfg(feature = "cuda")]
fn ask(ordinal: i32, peer: i32) -> Result<PeerAccess> {
    use crate::driver::check;
    use cust::sys::{self, CUdevice_P2PAttribute_enum as Attribute};
    let attribute = |attribute: Attribute| -> Result<i32> {
        let mut value = 0;
        // SAFETY: a valid pointer and two listed devices.
        check(
            unsafe { sys::cuDeviceGetP2PAttribute(&mut value, attribute, ordinal, peer) },
            "cuDeviceGetP2PAttribute",
        )?;
        Ok(value)
    };
    Ok(PeerAccess {
        accessible: attribute(Attribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)? != 0,
        performance_rank: attribute(Attribute::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK)?,
        native_atomics: attribute(Attribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)? != 0,
    })
}

#[cfg(not(feature = "cuda"))]
fn ask(_ordinal: i32, _peer: i32) -> Result<PeerAccess> {
    Err(Error::new(Status::CudaNotAvailable, "this libnvbackend was built without CUDA"))
}

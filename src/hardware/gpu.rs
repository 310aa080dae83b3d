//! Everything that the driver says about a GPU. No context is created, so other users of it notice nothing.

use super::system::System;
use crate::device::features::{architecture_name, Features};
use crate::device::DeviceInfo;
use crate::driver::{check, devices, usable};
use crate::error::Result;
use cust::sys::{self, cudaError_enum, CUdevice_attribute as Attribute};

/// Every GPU, or why there is none to describe.
pub fn list() -> Result<Vec<DeviceInfo>> {
    let system = System::live();
    devices::list()?.into_iter().map(|info| describe(info, &system)).collect()
}

/// Completes what the list of devices says.
fn describe(info: DeviceInfo, system: &System) -> Result<DeviceInfo> {
    let attribute = |attribute: Attribute| attribute_or_0(info.ordinal, attribute);
    let flag = |name: Attribute| attribute(name).map(|value| value != 0);
    let features = Features::of_capability(info.compute_capability)
        .with(Features::COOPERATIVE_LAUNCH, flag(Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)?)
        .with(Features::MANAGED_MEMORY, flag(Attribute::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY)?)
        .with(Features::CONCURRENT_MANAGED_ACCESS, flag(Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS)?)
        .with(Features::PAGEABLE_MEMORY_ACCESS, flag(Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS)?)
        .with(Features::MEMORY_POOLS, flag(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)?)
        .with(Features::VIRTUAL_MEMORY, flag(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)?)
        .with(Features::UNIFIED_ADDRESSING, flag(Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)?)
        .with(Features::HOST_NATIVE_ATOMICS, flag(Attribute::CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED)?)
        .with(Features::ECC, flag(Attribute::CU_DEVICE_ATTRIBUTE_ECC_ENABLED)?)
        .with(Features::INTEGRATED, flag(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)?)
        .with(Features::GPU_DIRECT_RDMA, flag(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)?)
        .with(Features::STREAM_PRIORITIES, flag(Attribute::CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED)?);
    let memory_khz = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?;
    let bus_bits = attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?;
    let pci_bus_id = format!(
        "{:04x}:{:02x}:{:02x}.0",
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?
    );
    const PROHIBITED: i32 = 2;
    let obstacle = match usable::check_usable(&info) {
        Err(error) => error.message,
        Ok(()) if attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)? == PROHIBITED => {
            "its compute mode is prohibited (nvidia-smi -c 0 changes it)".to_string()
        }
        Ok(()) => String::new(),
    };
    Ok(DeviceInfo {
        architecture: architecture_name(info.compute_capability).to_string(),
        uuid: uuid(info.ordinal)?,
        numa_node: system.number(&format!("sys/bus/pci/devices/{pci_bus_id}/numa_node")).unwrap_or(-1),
        pci_bus_id,
        peak_bandwidth: peak_bandwidth(memory_khz, bus_bits),
        features,
        clock_mhz: attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)? / 1000,
        memory_clock_mhz: memory_khz / 1000,
        memory_bus_bits: bus_bits,
        shared_memory_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        shared_memory_per_multiprocessor: attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
        )?,
        registers_per_multiprocessor: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)?,
        threads_per_multiprocessor: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
        warp_size: attribute(Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE)?,
        copy_engines: attribute(Attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT)?,
        obstacle,
        ..info
    })
}

/// An attribute that an older driver does not know is one that the device does not offer.
fn attribute_or_0(ordinal: i32, attribute: Attribute) -> Result<i32> {
    let mut value = 0;
    // SAFETY: a valid pointer; the device was listed, and for CUDA devices handle and ordinal are the same number.
    match unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, ordinal) } {
        cudaError_enum::CUDA_ERROR_INVALID_VALUE => Ok(0),
        result => check(result, "describing a device").map(|()| value),
    }
}

fn uuid(ordinal: i32) -> Result<String> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: as in `attribute_or_0`.
    check(unsafe { sys::cuDeviceGetUuid(&mut uuid, ordinal) }, "asking for a device's UUID")?;
    let hex: String = uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    Ok(format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]))
}

/// All of NVIDIA's memories move data on both edges of the clock that the driver reports.
fn peak_bandwidth(memory_khz: i32, bus_bits: i32) -> u64 {
    2 * memory_khz.max(0) as u64 * 1000 * (bus_bits.max(0) as u64 / 8)
}

#[cfg(test)]
mod tests {
    use super::peak_bandwidth;

    #[test]
    fn bandwidth_follows_from_clock_and_bus() {
        assert_eq!(peak_bandwidth(1_593_000, 5120), 2_039_040_000_000, "A100 80GB: 2,039 GB/s published");
        assert_eq!(peak_bandwidth(-1, 5120), 0);
    }
}

//! A device's address ranges, and physical memory mapped behind parts of them (cuMemAddressReserve, cuMemCreate,
//! cuMemMap).

use super::context::PrimaryContext;
use super::driver;
use crate::error::Result;
use crate::executor::{VirtualMemory, PAGE_BYTES};
use cust::sys::{self, cudaError_enum, CUresult};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub struct CudaVirtualMemory {
    ordinal: i32,
    mapped: Mutex<Mapped>,
    context: PrimaryContext,
}

/// What devices may reach: this one, and peers that asked.
#[derive(Default)]
struct Mapped {
    peers: Vec<i32>,
    /// Address and bytes.
    ranges: BTreeMap<u64, usize>,
}

impl CudaVirtualMemory {
    /// `None` where the driver or the device cannot map memory (Windows' display driver model, some virtual GPUs).
    pub fn new(ordinal: i32) -> Option<CudaVirtualMemory> {
        if !driver::has_virtual_memory_functions() {
            return None;
        }
        let mut supported = 0;
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED;
        // SAFETY: a valid pointer and a listed device.
        let result = unsafe { sys::cuDeviceGetAttribute(&mut supported, attribute, ordinal) };
        if result != cudaError_enum::CUDA_SUCCESS || supported == 0 {
            return None;
        }
        let memory =
            CudaVirtualMemory { ordinal, mapped: Mutex::default(), context: PrimaryContext::retain(ordinal).ok()? };
        (memory.granularity().ok()? <= PAGE_BYTES).then_some(memory)
    }

    fn check(&self, result: CUresult, doing: &str) -> Result<()> {
        self.context.check(result, doing)
    }

    fn location(&self) -> sys::CUmemLocation {
        sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.ordinal }
    }

    fn properties(&self) -> sys::CUmemAllocationProp {
        sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: self.location(),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: Default::default(),
        }
    }

    fn granularity(&self) -> Result<usize> {
        let _guard = self.context.enter()?;
        let mut granularity = 0;
        let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: valid pointers.
        let result = unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, &self.properties(), option) };
        self.check(result, "asking for the granularity of memory")?;
        Ok(granularity)
    }

    fn lock(&self) -> MutexGuard<'_, Mapped> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens all memory, that of later mappings included, to another device. The context is current.
    pub fn share_with(&self, peer: i32) -> Result<()> {
        let mut mapped = self.lock();
        for (&address, &bytes) in &mapped.ranges {
            self.open(address, bytes, &[peer])?;
        }
        if !mapped.peers.contains(&peer) {
            mapped.peers.push(peer);
        }
        Ok(())
    }

    fn open(&self, address: u64, bytes: usize, devices: &[i32]) -> Result<()> {
        let access: Vec<_> = devices
            .iter()
            .map(|&device| sys::CUmemAccessDesc {
                location: sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device },
                flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            })
            .collect();
        // SAFETY: a mapped range, and as many descriptions as are said.
        let result = unsafe { sys::cuMemSetAccess(address, bytes, access.as_ptr(), access.len()) };
        self.check(result, "opening device memory")
    }

    /// Maps one handle and opens it to the device and its peers; undone on failure.
    fn map_handle(&self, address: u64, bytes: usize, handle: u64) -> Result<()> {
        let mut mapped = self.lock();
        // SAFETY: a reserved range with nothing mapped, and a live handle of its size.
        self.check(unsafe { sys::cuMemMap(address, bytes, 0, handle, 0) }, "mapping device memory")?;
        let devices: Vec<i32> = std::iter::once(self.ordinal).chain(mapped.peers.iter().copied()).collect();
        self.open(address, bytes, &devices).inspect_err(|_| {
            if !self.context.is_lost() {
                // SAFETY: mapped just now; nothing uses it yet.
                unsafe { sys::cuMemUnmap(address, bytes) };
            }
        })?;
        mapped.ranges.insert(address, bytes);
        Ok(())
    }
}

/// Lets this thread map memory while another one captures a graph, which CUDA's strictest mode forbids.
struct RelaxedCapture(sys::CUstreamCaptureMode);

impl RelaxedCapture {
    fn enter() -> RelaxedCapture {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a valid pointer, which receives the mode before. A failure leaves the mode alone, and putting it back
        // then does nothing.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        RelaxedCapture(mode)
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.0) };
    }
}

impl VirtualMemory for CudaVirtualMemory {
    fn reserve(&self, bytes: usize) -> Result<usize> {
        let _guard = self.context.enter()?;
        let mut address = 0;
        // SAFETY: a valid pointer; 0 lets the driver choose.
        let result = unsafe { sys::cuMemAddressReserve(&mut address, bytes, PAGE_BYTES, 0, 0) };
        self.check(result, "reserving device addresses")?;
        Ok(address as usize)
    }

    unsafe fn release(&self, address: usize, bytes: usize) {
        let Some(_guard) = self.context.enter_to_release() else { return };
        // SAFETY: the caller's contract.
        if let Err(error) = self.check(unsafe { sys::cuMemAddressFree(address as u64, bytes) }, "releasing addresses") {
            log::warn!(target: "nvbackend::cuda", "{error}");
        }
    }

    unsafe fn map(&self, address: usize, bytes: usize) -> Result<u64> {
        let _guard = self.context.enter()?;
        let _relaxed = RelaxedCapture::enter();
        let mut handle = 0;
        // SAFETY: valid pointers.
        let result = unsafe { sys::cuMemCreate(&mut handle, bytes, &self.properties(), 0) };
        self.check(result, "creating device memory")?;
        self.map_handle(address as u64, bytes, handle).inspect_err(|_| {
            if !self.context.is_lost() {
                // SAFETY: created above and not mapped.
                unsafe { sys::cuMemRelease(handle) };
            }
        })?;
        Ok(handle)
    }

    unsafe fn unmap(&self, address: usize, bytes: usize, handle: u64) -> Result<()> {
        let _guard = self.context.enter()?;
        let _relaxed = RelaxedCapture::enter();
        let mut mapped = self.lock();
        // SAFETY: the caller's contract.
        self.check(unsafe { sys::cuMemUnmap(address as u64, bytes) }, "unmapping device memory")?;
        mapped.ranges.remove(&(address as u64));
        drop(mapped);
        // SAFETY: the handle's only mapping is gone.
        self.check(unsafe { sys::cuMemRelease(handle) }, "releasing device memory")
    }
}

//! A device's address ranges, and physical memory mapped behind parts of them (cuMemAddressReserve, cuMemCreate,
//! cuMemMap).

use super::context::PrimaryContext;
use crate::device::{VirtualMemory, PAGE_BYTES};
use crate::driver::{self, exit};
use crate::error::Result;
use cust::sys::{self, cudaError_enum, CUresult};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

pub struct CudaVirtualMemory {
    ordinal: i32,
    mapped: Mutex<Mapped>,
    context: PrimaryContext,
}

/// The device's memory of this kind, made when it is first asked for; `None`: the device or the driver has none.
#[derive(Default)]
pub struct Ranges(OnceLock<Option<Arc<CudaVirtualMemory>>>);

impl Ranges {
    pub fn get(&self, ordinal: i32) -> Result<Option<Arc<CudaVirtualMemory>>> {
        if self.0.get().is_none() {
            let memory = CudaVirtualMemory::new(ordinal)?.map(Arc::new);
            self.0.get_or_init(|| memory);
        }
        Ok(self.0.get().cloned().flatten())
    }
}

/// What devices may reach: this one, and peers that asked.
#[derive(Default)]
struct Mapped {
    peers: Vec<i32>,
    /// Address and bytes.
    ranges: BTreeMap<u64, usize>,
    /// What could not be given back when `map` failed half-way, by address.
    leftovers: BTreeMap<u64, Leftover>,
}

#[derive(Clone, Copy)]
struct Leftover {
    bytes: usize,
    /// The memory's handle, if it is still to be released; the mapping is alive then.
    handle: Option<u64>,
}

impl CudaVirtualMemory {
    /// `None` where the driver or the device cannot map memory (Windows' display driver model, some virtual GPUs).
    pub fn new(ordinal: i32) -> Result<Option<CudaVirtualMemory>> {
        if !driver::has_virtual_memory_functions() {
            return Ok(None);
        }
        let context = PrimaryContext::retain(ordinal)?;
        let mut supported = 0;
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED;
        // SAFETY: a valid pointer and a listed device.
        match unsafe { sys::cuDeviceGetAttribute(&mut supported, attribute, ordinal) } {
            // A driver that does not know the attribute.
            cudaError_enum::CUDA_ERROR_INVALID_VALUE => {}
            result => context.check(result, "asking for virtual memory management")?,
        }
        if supported == 0 {
            return Ok(None);
        }
        let memory = CudaVirtualMemory { ordinal, mapped: Mutex::default(), context };
        Ok((memory.granularity()? <= PAGE_BYTES).then_some(memory))
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

    /// Puts new memory behind the range and opens it; undone on failure. The memory's handle goes at once, so that unmapping
    /// alone gives the memory back; while it is mapped the handle's number cannot come to mean other memory.
    fn map_new(&self, mapped: &mut Mapped, address: u64, bytes: usize) -> Result<()> {
        let mut handle = 0;
        // SAFETY: valid pointers.
        let result = unsafe { sys::cuMemCreate(&mut handle, bytes, &self.properties(), 0) };
        self.check(result, "creating device memory")?;
        // SAFETY: a reserved range with nothing mapped, and a live handle of its size.
        let result = self.check(unsafe { sys::cuMemMap(address, bytes, 0, handle, 0) }, "mapping device memory");
        if let Err(error) = result {
            // Without a mapping the number may have another meaning by the time of a second attempt.
            let released = self.context.refuse_lost().and_then(|()| {
                // SAFETY: created above, and used for nothing.
                self.check(unsafe { sys::cuMemRelease(handle) }, "releasing device memory")
            });
            released.unwrap_or_else(|error| log::warn!(target: "nvbackend::cuda", "{error}"));
            return Err(error);
        }
        let released = self.release_handle(false, handle);
        let devices: Vec<i32> = std::iter::once(self.ordinal).chain(mapped.peers.iter().copied()).collect();
        let outcome = released.clone().and_then(|()| self.open(address, bytes, &devices));
        if outcome.is_err() && (released.is_err() || self.unmap_range(false, address, bytes).is_err()) {
            mapped.leftovers.insert(address, Leftover { bytes, handle: released.err().map(|_| handle) });
        }
        outcome
    }

    /// The handle of memory that is mapped, and used for nothing else.
    fn release_handle(&self, again: bool, handle: u64) -> Result<()> {
        // SAFETY: created by `map_new`.
        self.give_back(again, "releasing a handle of device memory", || unsafe { sys::cuMemRelease(handle) })
    }

    /// Makes a call that gives something back, and once more if it fails. One that fails may have done its work
    /// nevertheless, as the driver reports errors of earlier work anywhere: the next one finds nothing then, and so does
    /// the first if an earlier attempt failed (`again`).
    fn give_back(&self, mut again: bool, doing: &str, call: impl Fn() -> CUresult) -> Result<()> {
        loop {
            self.context.refuse_lost()?;
            match call() {
                cudaError_enum::CUDA_ERROR_INVALID_VALUE if again => return Ok(()),
                result => match self.check(result, doing) {
                    Err(error) if !again => log::debug!(target: "nvbackend::cuda", "{error}; trying again"),
                    result => return result,
                },
            }
            again = true;
        }
    }

    fn unmap_range(&self, again: bool, address: u64, bytes: usize) -> Result<()> {
        // SAFETY: a range that nothing uses.
        self.give_back(again, "unmapping device memory", || unsafe { sys::cuMemUnmap(address, bytes) })
    }

    /// Gives back what earlier failures have left.
    fn clear_leftovers(&self, mapped: &mut Mapped) -> Result<()> {
        while let Some((&address, leftover)) = mapped.leftovers.iter_mut().next() {
            if let Some(handle) = leftover.handle {
                self.release_handle(true, handle)?;
                leftover.handle = None;
            }
            let bytes = leftover.bytes;
            self.unmap_range(true, address, bytes)?;
            mapped.leftovers.remove(&address);
        }
        Ok(())
    }
}

impl Drop for CudaVirtualMemory {
    /// The last time that leftovers can be given back, whatever the driver says of their handles.
    fn drop(&mut self) {
        let leftovers = std::mem::take(&mut self.lock().leftovers);
        let Some(_guard) = (if leftovers.is_empty() { None } else { self.context.enter_to_release() }) else { return };
        for (address, Leftover { bytes, handle }) in leftovers {
            let released = handle.map_or(Ok(()), |handle| self.release_handle(true, handle));
            if let Err(error) = released.and(self.unmap_range(true, address, bytes)) {
                log::warn!(target: "nvbackend::cuda", "{bytes} bytes are lost: {error}");
            }
        }
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
        let released = self.clear_leftovers(&mut self.lock()).and_then(|()| {
            // SAFETY: the caller's contract.
            self.check(unsafe { sys::cuMemAddressFree(address as u64, bytes) }, "releasing device addresses")
        });
        if let Err(error) = released {
            log::warn!(target: "nvbackend::cuda", "{error}");
        }
    }

    unsafe fn map(&self, address: usize, bytes: usize) -> Result<()> {
        let _guard = self.context.enter()?;
        let _relaxed = self.context.relax_capture()?;
        let mut mapped = self.lock();
        self.clear_leftovers(&mut mapped)?;
        self.map_new(&mut mapped, address as u64, bytes)?;
        mapped.ranges.insert(address as u64, bytes);
        Ok(())
    }

    unsafe fn unmap(&self, address: usize, bytes: usize) -> Result<()> {
        let _guard = self.context.enter_to_release();
        if exit::is_closed() {
            return Ok(());
        }
        // Tried twice as well; what is missed matters only while another thread captures.
        let _relaxed = self.context.relax_capture().or_else(|_| self.context.relax_capture());
        let mut mapped = self.lock();
        let again = mapped.ranges.remove(&(address as u64)).is_none();
        self.unmap_range(again, address as u64, bytes)?;
        // A failure leaves them for another time.
        let _ = self.clear_leftovers(&mut mapped);
        Ok(())
    }
}

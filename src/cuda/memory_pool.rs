//! Stream-ordered plain allocations (cuMemAllocFromPoolAsync), for devices without address ranges and for blocks that are
//! not pooled. The pool is our own, since the device's default pool is the engine's to configure, and made with the first
//! such block: on an H200 it takes 64 µs, half of what a backend may take.

use super::context::PrimaryContext;
use super::prelude::*;
use crate::device::Device;
use cust::sys::{self, cudaError_enum};
use std::sync::{Mutex, OnceLock, PoisonError};

pub struct MemoryPool {
    /// `false`: the device or the driver has no pools, and plain allocations serve.
    available: bool,
    raw: OnceLock<Raw>,
    /// Devices that may reach the pool's memory.
    peers: Mutex<Vec<i32>>,
}

#[derive(Clone, Copy)]
struct Raw(sys::CUmemoryPool);

// SAFETY: a pool's handle may be used from any thread.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl MemoryPool {
    pub fn new(available: bool) -> MemoryPool {
        MemoryPool { available, raw: OnceLock::new(), peers: Mutex::default() }
    }

    /// The pool, if it was made.
    pub fn raw(&self) -> Option<sys::CUmemoryPool> {
        self.raw.get().map(|raw| raw.0)
    }

    /// The pool, made now if need be; `None` where there are none. The context is current.
    pub fn get(&self, context: &PrimaryContext, ordinal: i32) -> Result<Option<sys::CUmemoryPool>> {
        if self.raw().is_some() || !self.available {
            return Ok(self.raw());
        }
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if self.raw().is_none() {
            let raw = create(context, ordinal)?;
            let opened = peers.iter().try_for_each(|&peer| open(raw, peer, context));
            opened.inspect_err(|_| {
                if !context.is_lost() {
                    // SAFETY: made just now, and nobody else knows it.
                    unsafe { sys::cuMemPoolDestroy(raw) };
                }
            })?;
            let _ = self.raw.set(Raw(raw));
        }
        Ok(self.raw())
    }

    /// Opens the pool's memory to another device, now or when it is made.
    pub fn share_with(&self, ordinal: i32, context: &PrimaryContext) -> Result<()> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(raw) = self.raw() {
            open(raw, ordinal, context)?;
        }
        if !peers.contains(&ordinal) {
            peers.push(ordinal);
        }
        Ok(())
    }
}

fn open(pool: sys::CUmemoryPool, ordinal: i32, context: &PrimaryContext) -> Result<()> {
    let access = sys::CUmemAccessDesc {
        location: sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal },
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: a live pool and one description.
    context.check(unsafe { sys::cuMemPoolSetAccess(pool, &access, 1) }, "cuMemPoolSetAccess")
}

/// Freed memory stays in the pool for reuse.
fn create(context: &PrimaryContext, ordinal: i32) -> Result<sys::CUmemoryPool> {
    let properties = sys::CUmemPoolProps {
        allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        handleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal },
        win32SecurityAttributes: std::ptr::null_mut(),
        reserved: [0; 64],
    };
    let mut pool = std::ptr::null_mut();
    let mut threshold = u64::MAX;
    // SAFETY: valid pointers; the attribute's value is a u64 by the driver's documentation; a pool that is not handed on
    // is destroyed.
    unsafe {
        context.check(sys::cuMemPoolCreate(&mut pool, &properties), "cuMemPoolCreate")?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let value = (&mut threshold as *mut u64).cast();
        let result = context.check(sys::cuMemPoolSetAttribute(pool, attribute, value), "cuMemPoolSetAttribute");
        result.inspect_err(|_| {
            if !context.is_lost() {
                sys::cuMemPoolDestroy(pool);
            }
        })?;
    }
    Ok(pool)
}

/// A plain allocation, from `pool` in the stream's order where there is one. The context is current.
pub(super) fn allocate(
    executor: &CudaExecutor,
    pool: Option<sys::CUmemoryPool>,
    bytes: usize,
    stream: RawHandle,
) -> Result<*mut c_void> {
    let mut pointer = 0;
    // SAFETY: a valid pointer, this context's pool and stream.
    let result = unsafe {
        match pool {
            None => sys::cuMemAlloc_v2(&mut pointer, bytes),
            Some(pool) => sys::cuMemAllocFromPoolAsync(&mut pointer, bytes, pool, stream.0.cast()),
        }
    };
    if result == cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY {
        let (free, total) = executor.memory_info().unwrap_or((0, 0));
        let text = format!("{bytes} bytes requested; cuda:{} has {free} of {total} free", executor.info().ordinal);
        let error = Error::new(Status::OutOfMemory, text).with_cuda_code(result as i32);
        return Err(error.with_limit(bytes as u64, free));
    }
    executor.check(result, "allocating device memory")?;
    Ok(pointer as *mut c_void)
}

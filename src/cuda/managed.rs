//! Unified memory: one address for host and device, pages that the driver moves.

use super::context::PrimaryContext;
use super::prelude::*;
use crate::device::ManagedAdvice;
use crate::driver;
use cust::sys::{self, cudaError_enum, CUmem_advise_enum as Advice};

/// The driver's number for main memory.
const HOST: i32 = -1;

pub fn allocate(bytes: usize, context: &PrimaryContext) -> Result<*mut c_void> {
    driver::require(c"cuMemAllocManaged")?;
    let mut pointer = 0;
    const ATTACH_GLOBAL: u32 = 1;
    // SAFETY: a valid pointer.
    match unsafe { sys::cuMemAllocManaged(&mut pointer, bytes, ATTACH_GLOBAL) } {
        cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY => {
            Err(Error::new(Status::OutOfMemory, format!("{bytes} bytes of unified memory"))
                .with_cuda_code(cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY as i32)
                .with_limit(bytes as u64, 0))
        }
        code => context.check(code, "allocating unified memory").map(|()| pointer as *mut c_void),
    }
}

pub fn advise(
    pointer: *mut c_void,
    bytes: usize,
    advice: ManagedAdvice,
    device: i32,
    context: &PrimaryContext,
) -> Result<()> {
    driver::require(c"cuMemAdvise")?;
    let advices: &[(Advice, i32)] = match advice {
        ManagedAdvice::ReadMostly => &[(Advice::CU_MEM_ADVISE_SET_READ_MOSTLY, device)],
        ManagedAdvice::PreferDevice => &[(Advice::CU_MEM_ADVISE_SET_PREFERRED_LOCATION, device)],
        ManagedAdvice::PreferHost => &[(Advice::CU_MEM_ADVISE_SET_PREFERRED_LOCATION, HOST)],
        ManagedAdvice::AccessedByDevice => &[(Advice::CU_MEM_ADVISE_SET_ACCESSED_BY, device)],
        ManagedAdvice::Nothing => &[
            (Advice::CU_MEM_ADVISE_UNSET_READ_MOSTLY, device),
            (Advice::CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, device),
            (Advice::CU_MEM_ADVISE_UNSET_ACCESSED_BY, device),
        ],
    };
    for &(advice, device) in advices {
        // SAFETY: the caller checked that the range lies inside a block of unified memory.
        context.check(unsafe { sys::cuMemAdvise(pointer as u64, bytes, advice, device) }, "advising unified memory")?;
    }
    Ok(())
}

pub fn prefetch(
    pointer: *mut c_void,
    bytes: usize,
    to_host: bool,
    device: i32,
    stream: RawHandle,
    context: &PrimaryContext,
) -> Result<()> {
    driver::require(c"cuMemPrefetchAsync")?;
    let target = if to_host { HOST } else { device };
    // SAFETY: as for `advise`; the stream belongs to the current context.
    let result = unsafe { sys::cuMemPrefetchAsync(pointer as u64, bytes, target, stream.0.cast()) };
    context.check(result, "prefetching unified memory")
}

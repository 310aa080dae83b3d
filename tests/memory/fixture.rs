//! A manager over the simulated device, for tests that need no model.

use super::sequence::executor;
use super::simulated::Simulated;
use nvbackend::device::RawHandle;
use nvbackend::executor::Executor;
use nvbackend::memory::options::Margin;
use nvbackend::memory::{MemoryManager, MemoryOptions};
use nvbackend::stream::Stream;
use std::ffi::c_void;
use std::sync::Arc;

pub const MIB: usize = 1 << 20;

pub struct Fixture {
    pub device: Arc<Simulated>,
    pub manager: Arc<MemoryManager>,
    pub executor: Arc<dyn Executor>,
}

impl Fixture {
    pub fn new(total: usize, options: MemoryOptions) -> Fixture {
        Fixture::over(Simulated::new(total as u64), options)
    }

    pub fn over(device: Simulated, options: MemoryOptions) -> Fixture {
        let (device, executor) = (Arc::new(device), executor());
        let options = MemoryOptions { margin: Margin::Bytes(0), ..options };
        let manager = MemoryManager::with_source(executor.clone(), device.clone(), options).expect("a manager");
        Fixture { device, manager: Arc::new(manager), executor }
    }

    pub fn stream(&self, number: usize) -> Stream {
        Stream::wrap(&self.executor, RawHandle((0x100 * (number + 1)) as *mut c_void))
    }

    pub fn allocate(&self, bytes: usize, stream: &Stream) -> *mut c_void {
        let pointer = self.manager.allocate(bytes, stream.raw()).expect("enough memory");
        self.device.expect_usable(stream.raw(), pointer as usize, bytes);
        pointer
    }

    pub fn free(&self, pointer: *mut c_void, stream: &Stream) {
        self.manager.free(pointer, stream.raw()).expect("a live block");
    }

    /// How often a recovery step was tried and helped.
    pub fn step(&self, step: nvbackend::memory::ladder::RecoveryStep) -> (u64, u64) {
        let statistics = self.manager.get_statistics().recovery_steps[step as usize];
        (statistics.tried, statistics.helped)
    }
}

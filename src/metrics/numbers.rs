//! Numbers of device memory, copied to the host while the stream passes by.

use crate::device::CopyKind;
use crate::error::Result;
use crate::executor::Executor;
use crate::stream::{Event, Stream};
use crate::tensor::Tensor;
use std::ffi::c_void;
use std::sync::Arc;

/// Page-locked memory with a copy of an I32 vector, which has no gaps.
pub(super) struct HostNumbers {
    executor: Arc<dyn Executor>,
    memory: *mut c_void,
    bytes: usize,
    /// How many numbers the last copy has.
    count: usize,
    /// Recorded behind the last copy.
    copied: Event,
}

// SAFETY: host memory of this object's own, and an executor that any thread may use.
unsafe impl Send for HostNumbers {}

impl HostNumbers {
    /// Whether there is room for the vector.
    pub fn holds(&self, tensor: &Tensor) -> bool {
        tensor.span_bytes() <= self.bytes
    }

    /// Queues the copy, into `spare` if there is one, which holds the vector.
    pub fn copy(spare: Option<HostNumbers>, tensor: &Tensor, stream: &Stream) -> Result<HostNumbers> {
        let bytes = tensor.span_bytes();
        let mut numbers = match spare {
            Some(spare) => spare,
            None => HostNumbers::new(stream.executor(), bytes.next_power_of_two().max(64))?,
        };
        numbers.count = tensor.shape[0];
        if bytes > 0 {
            // SAFETY: the memory has room for `bytes` and lives until the copy has been passed (`drop`); the operation reads
            // the same range of the tensor.
            unsafe {
                let to = numbers.memory;
                numbers.executor.copy(to, tensor.data, bytes, CopyKind::DeviceToHost, stream.raw())?;
            }
            if let Err(error) = numbers.copied.record(stream) {
                // Nothing tells of the copy's end, and the memory goes with this error.
                stream.synchronize()?;
                return Err(error);
            }
        }
        Ok(numbers)
    }

    fn new(executor: &Arc<dyn Executor>, bytes: usize) -> Result<HostNumbers> {
        let copied = Event::new(executor)?;
        let memory = executor.host_allocate(bytes)?;
        Ok(HostNumbers { executor: executor.clone(), memory, bytes, count: 0, copied })
    }

    /// The stream has passed the copy.
    pub fn read(&self) -> Vec<i32> {
        let numbers = self.memory.cast::<i32>();
        // SAFETY: the copy wrote these elements, and memory of `host_allocate` is aligned for them.
        (0..self.count).map(|index| unsafe { numbers.add(index).read() }).collect()
    }
}

impl Drop for HostNumbers {
    fn drop(&mut self) {
        // The copy may still be under way, if its call was never asked about. On a lost device nothing is.
        if let Err(error) = self.copied.synchronize() {
            log::debug!(target: "nvbackend::metrics", "waiting for copied numbers: {error}");
        }
        // SAFETY: of `host_allocate` with as many bytes, freed once.
        unsafe { self.executor.host_free(self.memory, self.bytes) };
    }
}

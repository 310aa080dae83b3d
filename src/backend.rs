//! The backend: one chosen device with its executor, its memory and a default stream.

use crate::cpu::CpuExecutor;
use crate::error::{Error, Result, Status};
use crate::executor::{DeviceInfo, DeviceKind, Executor};
use crate::memory::options::Limit;
use crate::memory::{MemoryManager, MemoryOptions};
use crate::stream::{RawHandle, Stream};
use crate::tensor::Tensor;
use std::ffi::c_void;
use std::sync::{Arc, PoisonError, RwLock, Weak};

#[derive(Debug, Clone, Default, PartialEq)]
pub struct BackendOptions {
    /// "auto", "cpu", "cuda" (ordinal 0) or "cuda:N"
    pub device: String,
    /// Bytes that the memory manager may hold at a time; 0: no limit of its own
    pub memory_limit: u64,
    /// CPU threads; 0: one for each core this process may run on
    pub threads: usize,
    /// 0: the device's own; else kernels of an older architecture, such as 80 on a 9.0 GPU
    pub force_architecture: i32,
    /// Skips cuBLASLt even where it is present, so that only the library's own kernels run.
    pub own_kernels_only: bool,
    /// `memory_limit` replaces its limit where that is not 0.
    pub memory: MemoryOptions,
}

pub struct Backend {
    executor: Arc<dyn Executor>,
    memory: Arc<MemoryManager>,
    /// Managers of the engine's own over the same device, whose blocks operations take as well.
    other_memory: RwLock<Vec<Weak<MemoryManager>>>,
    default_stream: Arc<Stream>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    Auto,
    Cpu,
    Cuda(i32),
}

fn parse_device(text: &str) -> Result<Choice> {
    match text {
        "" | "auto" => return Ok(Choice::Auto),
        "cpu" => return Ok(Choice::Cpu),
        "cuda" => return Ok(Choice::Cuda(0)),
        _ => {}
    }
    let ordinal = text.strip_prefix("cuda:").and_then(|digits| digits.parse::<u16>().ok());
    ordinal.map(|ordinal| Choice::Cuda(ordinal.into())).ok_or_else(|| {
        Error::new(
            Status::Configuration,
            format!("device is \"{text}\"; \"auto\", \"cpu\", \"cuda\" or \"cuda:N\" is needed"),
        )
    })
}

impl Backend {
    pub fn new(options: &BackendOptions) -> Result<Backend> {
        let executor = match parse_device(&options.device)? {
            Choice::Cpu => cpu_executor(options)?,
            Choice::Cuda(ordinal) => cuda_executor(ordinal, options)?,
            Choice::Auto => match best_cuda_device().and_then(|ordinal| cuda_executor(ordinal, options)) {
                Ok(executor) => executor,
                Err(error) => {
                    log::info!(target: "nvbackend::backend", "device auto: {error}; using the CPU");
                    cpu_executor(options)?
                }
            },
        };
        let mut memory = options.memory.clone();
        if options.memory_limit != 0 {
            memory.limit = Limit::Bytes(options.memory_limit);
        }
        let memory = MemoryManager::new(executor.clone(), memory)?;
        Backend::with_memory(executor, memory)
    }

    /// A backend over an executor of the caller's, as tests use it.
    pub fn with_executor(executor: Arc<dyn Executor>, memory_limit: u64) -> Result<Backend> {
        let options = MemoryOptions { limit: Limit::Bytes(memory_limit), ..MemoryOptions::default() };
        let memory = MemoryManager::new(executor.clone(), options)?;
        Backend::with_memory(executor, memory)
    }

    fn with_memory(executor: Arc<dyn Executor>, memory: MemoryManager) -> Result<Backend> {
        let memory = Arc::new(memory);
        let default_stream = Arc::new(Stream::new(&executor, 0)?);
        let device = executor.device();
        log::info!(
            target: "nvbackend::backend",
            "backend on {} ({}), compute capability {}.{}, {} MiB, {} multiprocessors",
            device_name(device), device.name, device.compute_capability / 10, device.compute_capability % 10,
            device.total_memory >> 20, device.multiprocessors
        );
        Ok(Backend { executor, memory, other_memory: RwLock::default(), default_stream })
    }

    pub fn executor(&self) -> &Arc<dyn Executor> {
        &self.executor
    }

    pub fn memory(&self) -> &Arc<MemoryManager> {
        &self.memory
    }

    /// A manager of its own over the device's memory, independent of `memory`.
    pub fn create_memory_manager(&self, options: MemoryOptions) -> Result<Arc<MemoryManager>> {
        let memory = Arc::new(MemoryManager::new(self.executor.clone(), options)?);
        let mut others = self.other_memory.write().unwrap_or_else(PoisonError::into_inner);
        others.retain(|other| other.strong_count() > 0);
        others.push(Arc::downgrade(&memory));
        Ok(memory)
    }

    /// The same over main memory, which on a GPU no operation takes.
    pub fn create_host_memory_manager(&self, options: MemoryOptions) -> Result<Arc<MemoryManager>> {
        if self.device().kind == DeviceKind::Cpu {
            return self.create_memory_manager(options);
        }
        // One thread: it only copies and fills.
        Ok(Arc::new(MemoryManager::new(Arc::new(CpuExecutor::new(1)?), options)?))
    }

    /// Whether the range lies inside a live block of a manager of this device.
    fn owns(&self, pointer: *const c_void, bytes: usize) -> bool {
        self.memory.owns(pointer, bytes) || {
            let others = self.other_memory.read().unwrap_or_else(PoisonError::into_inner);
            others.iter().filter_map(Weak::upgrade).any(|other| other.owns(pointer, bytes))
        }
    }

    pub fn device(&self) -> &DeviceInfo {
        self.executor.device()
    }

    /// The stream of calls that name none.
    pub fn default_stream(&self) -> &Arc<Stream> {
        &self.default_stream
    }

    /// Refuses a tensor whose memory the device cannot reach or that runs past its block.
    pub fn check_memory(&self, name: &str, tensor: &Tensor) -> Result<()> {
        let bytes = tensor.span_bytes();
        if bytes == 0 || self.owns(tensor.data, bytes) {
            return Ok(());
        }
        if self.owns(tensor.data, 1) {
            return Err(Error::invalid(format!(
                "tensor `{name}` {tensor} spans {bytes} bytes and runs past the end of its memory block"
            )));
        }
        if self.executor.can_access(tensor.data)? {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "tensor `{name}` {tensor} is at {:p}, which is not memory of {}",
            tensor.data,
            device_name(self.device())
        ))
        .with_advice("allocate it with nvb_memory_allocate, or copy it to the device first"))
    }

    /// Waits for the default stream, because the caller frees next what its work may still read.
    pub fn finish(&self) {
        if let Err(error) = self.default_stream.synchronize() {
            log::warn!(target: "nvbackend::backend", "while the backend was destroyed: {error}");
        }
    }

    pub fn wrap_stream(&self, raw: RawHandle) -> Stream {
        Stream::wrap(&self.executor, raw)
    }
}

fn device_name(device: &DeviceInfo) -> String {
    match device.kind {
        DeviceKind::Cpu => "cpu".to_string(),
        DeviceKind::Cuda => format!("cuda:{}", device.ordinal),
    }
}

fn cpu_executor(options: &BackendOptions) -> Result<Arc<dyn Executor>> {
    Ok(Arc::new(CpuExecutor::new(options.threads)?))
}

#[cfg(feature = "cuda")]
fn cuda_executor(ordinal: i32, options: &BackendOptions) -> Result<Arc<dyn Executor>> {
    crate::cuda::create_executor(ordinal, options)
}

#[cfg(not(feature = "cuda"))]
fn cuda_executor(_ordinal: i32, _options: &BackendOptions) -> Result<Arc<dyn Executor>> {
    Err(built_without_cuda())
}

/// The GPU with the highest compute capability, then the most memory.
pub fn best_cuda_device() -> Result<i32> {
    let devices = cuda_devices()?;
    let best = devices.iter().max_by_key(|device| (device.compute_capability, device.total_memory));
    best.map(|device| device.ordinal)
        .ok_or_else(|| Error::new(Status::CudaNotAvailable, "the driver works and lists no CUDA device"))
}

/// Every CUDA device, or why there is none to ask.
#[cfg(feature = "cuda")]
pub fn cuda_devices() -> Result<Vec<DeviceInfo>> {
    crate::cuda::device::list()
}

#[cfg(not(feature = "cuda"))]
pub fn cuda_devices() -> Result<Vec<DeviceInfo>> {
    Err(built_without_cuda())
}

#[cfg(not(feature = "cuda"))]
fn built_without_cuda() -> Error {
    Error::new(Status::CudaNotAvailable, "this libnvbackend was built without CUDA (--no-default-features)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_are_parsed_exactly() {
        assert_eq!(parse_device("auto").unwrap(), Choice::Auto);
        assert_eq!(parse_device("cuda:3").unwrap(), Choice::Cuda(3));
        for wrong in ["gpu", "cuda:", "cuda:-1", "cuda:x", "CPU", "cuda:99999999"] {
            assert_eq!(parse_device(wrong).unwrap_err().status, Status::Configuration, "{wrong}");
        }
    }
}

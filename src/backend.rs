//! The backend: one chosen device with its executor, its memory and a default stream.

use crate::configuration::selector::Selector;
use crate::configuration::{AttentionKernels, Configuration, MemoryConfiguration, Precision};
use crate::cpu::CpuExecutor;
use crate::device::{features::Features, DeviceInfo, DeviceKind, RawHandle};
use crate::error::{Error, Result, Status};
use crate::executor::Executor;
use crate::hardware::{
    self,
    recommend::{recommend, Workload},
};
use crate::memory::allocator::EngineAllocator;
use crate::memory::{expect_awake, MemoryManager, MemoryOptions};
use crate::metrics::{nvtx, Metrics};
use crate::operation::{Operation, OperationKind};
use crate::stream::{Owner, Stream};
use crate::tensor::{DType, Tensor};
use crate::tuning::case::Case;
use crate::tuning::tuner::{Options, Progress, Report};
use crate::tuning::{Clock, Tuning};
use std::ffi::c_void;
use std::ops::ControlFlow;
use std::sync::{Arc, PoisonError, RwLock, Weak};

pub struct Backend {
    executor: Arc<dyn Executor>,
    memory: Arc<MemoryManager>,
    /// Managers of the engine's own over the same device, whose blocks operations take as well.
    other_memory: RwLock<Vec<Weak<MemoryManager>>>,
    default_stream: Arc<Stream>,
    metrics: Metrics,
    configuration: Configuration,
    tuning: Tuning,
}

impl Backend {
    pub fn new(configuration: Configuration) -> Result<Backend> {
        Backend::with_allocator(configuration, None)
    }

    /// `allocator` is where its memory manager takes the device's memory from, in place of the device.
    pub fn with_allocator(configuration: Configuration, allocator: Option<EngineAllocator>) -> Result<Backend> {
        configuration.validate()?;
        let executor = choose_executor(&configuration)?;
        configuration.check_device(executor.info())?;
        let options = MemoryOptions { allocator, ..configuration.memory.options() };
        let memory = MemoryManager::new(executor.clone(), options)?;
        Backend::assemble(executor, memory, configuration)
    }

    /// A backend over an executor of the caller's, as tests use it.
    pub fn with_executor(executor: Arc<dyn Executor>, memory_limit: u64) -> Result<Backend> {
        let memory = MemoryConfiguration { limit: memory_limit, ..MemoryConfiguration::default() };
        let manager = MemoryManager::new(executor.clone(), memory.options())?;
        Backend::assemble(executor, manager, Configuration { memory, ..Configuration::default() })
    }

    fn assemble(executor: Arc<dyn Executor>, memory: MemoryManager, configuration: Configuration) -> Result<Backend> {
        let tuning = Tuning::open(&*executor, &configuration)?;
        let default_stream = Arc::new(Stream::new(&executor, 0)?);
        let metrics = Metrics::default();
        metrics.set_enabled(configuration.timing.profiling);
        log::info!(target: "nvbackend::backend", "{}", summary(executor.info()));
        Ok(Backend {
            executor,
            memory: Arc::new(memory),
            other_memory: RwLock::default(),
            default_stream,
            metrics,
            configuration,
            tuning,
        })
    }

    pub fn executor(&self) -> &Arc<dyn Executor> {
        &self.executor
    }

    /// Queues an operation that names memory of its caller's alone on a stream of this backend.
    #[inline]
    pub fn queue(&self, op: impl Into<Operation>, stream: &Stream) -> Result<()> {
        self.queue_with(op, None, stream)
    }

    /// Queues an operation, with the owner of the weight or the cache that it names: a recorded one outlives their handles.
    #[inline]
    pub fn queue_with(&self, op: impl Into<Operation>, owner: Option<Owner>, stream: &Stream) -> Result<()> {
        let op = op.into();
        op.expect_apart()?;
        if op.computes() {
            stream.expect_awake()?;
        }
        if let Some(sink) = stream.sink() {
            return sink.take(op, owner);
        }
        let _range = nvtx::range(op.kind().label());
        self.metrics.queue(&op, stream)
    }

    /// The configuration that the backend runs with.
    pub fn configuration(&self) -> &Configuration {
        &self.configuration
    }

    /// What runs: the chosen device, what the environment has set, and what was changed since the backend was created. What
    /// was left to the library is said as it was decided. A configuration of this makes a backend like this one.
    pub fn running_configuration(&self) -> Configuration {
        let device = self.device();
        let mut running = self.configuration.clone();
        running.device = device.selector();
        running.architecture = device.compute_capability as u64;
        if device.kind == DeviceKind::Cpu {
            running.threads = device.multiprocessors as u64;
        }
        running.precision = match self.default_dtype() {
            DType::F16 => Precision::F16,
            DType::Bf16 => Precision::Bf16,
            _ => Precision::F32,
        };
        let kernel = self.executor.choices().overridden(OperationKind::Linear);
        running.linear_kernel = kernel.map_or(String::new(), |id| id.kernel().name.to_string());
        let path = self.tuning.path();
        running.tuning_file = path.map_or(String::new(), |path| path.to_string_lossy().into_owned());
        // Without Tensor Cores neither cuBLASLt nor the kernels of attention that need them run.
        running.vendor_libraries = !self.configuration.own_kernels_only();
        if self.configuration.plain_attention() {
            running.attention = AttentionKernels::Plain;
        }
        running.memory = self.configuration.memory.running(&self.memory.decided());
        running.timing.profiling = self.metrics.is_enabled();
        running
    }

    /// The dtype of what the library stores where the caller leaves it open.
    pub fn default_dtype(&self) -> DType {
        self.configuration.default_dtype(self.device().kind)
    }

    /// Where tuned choices are kept.
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// As `Tuning::tune` does.
    pub fn tune(
        &self,
        cases: &[Case],
        options: Options,
        clock: Clock,
        progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<(Report, Option<Error>)> {
        self.tuning.tune(&self.executor, &self.memory, cases, options, clock, progress)
    }

    pub fn metrics(&self) -> &Metrics {
        &self.metrics
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

    /// Creates a memory manager over main memory, which on a GPU no operation takes.
    pub fn create_host_memory_manager(&self, options: MemoryOptions) -> Result<Arc<MemoryManager>> {
        if self.device().kind == DeviceKind::Cpu {
            return self.create_memory_manager(options);
        }
        // One thread: it only copies and fills.
        Ok(Arc::new(MemoryManager::new(Arc::new(CpuExecutor::new(1)?), options)?))
    }

    /// Bytes from the address to the end of the live block that it lies in, of a manager of this device.
    fn room(&self, pointer: *const c_void) -> Option<usize> {
        self.memory.room(pointer).or_else(|| {
            let others = self.other_memory.read().unwrap_or_else(PoisonError::into_inner);
            others.iter().filter_map(Weak::upgrade).find_map(|other| other.room(pointer))
        })
    }

    pub fn device(&self) -> &DeviceInfo {
        self.executor.info()
    }

    /// The stream of calls that name none.
    pub fn default_stream(&self) -> &Arc<Stream> {
        &self.default_stream
    }

    /// Refuses a tensor whose memory the device cannot reach or that runs past its block.
    #[inline]
    pub fn check_memory(&self, name: &str, tensor: &Tensor) -> Result<()> {
        self.check_range(|| format!("tensor `{name}` {tensor}"), tensor.data, tensor.span_bytes())
    }

    /// Refuses a range that the device cannot reach or that runs past its block; `what` names it.
    #[inline]
    pub fn check_range(&self, what: impl Fn() -> String, data: *const c_void, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        expect_awake(data)?;
        match self.room(data) {
            Some(room) if bytes <= room => Ok(()),
            room => self.expect_reach(&what, data, bytes, room),
        }
    }

    #[cold]
    fn expect_reach(
        &self,
        what: &dyn Fn() -> String,
        data: *const c_void,
        bytes: usize,
        room: Option<usize>,
    ) -> Result<()> {
        if room.is_some() {
            let what = what();
            return Err(Error::invalid(format!(
                "{what} spans {bytes} bytes and runs past the end of its memory block"
            )));
        }
        if self.executor.can_access(data)? {
            return Ok(());
        }
        let (what, device) = (what(), self.device().selector());
        Err(Error::invalid(format!("{what} is at {data:p}, which is not memory of {device}")).with_advice(
            "allocate it with nvb_memory_allocate, copy it to the device first, or enable access to the GPU that has it",
        ))
    }

    /// Waits for the default stream, because the caller frees next what its work may still read.
    pub fn finish(&self) {
        if let Err(error) = self.executor.stream_synchronize(self.default_stream.raw()) {
            log::warn!(target: "nvbackend::backend", "while the backend was destroyed: {error}");
        }
    }

    pub fn wrap_stream(&self, raw: RawHandle) -> Stream {
        Stream::wrap(&self.executor, raw)
    }
}

/// The line in the log for each backend.
fn summary(device: &DeviceInfo) -> String {
    let yes_or_no = |feature| if device.features.has(feature) { "yes" } else { "no" };
    let place = match device.kind {
        DeviceKind::Cpu => format!("{}, {} threads", device.architecture, device.multiprocessors),
        _ => format!(
            "{}, compute capability {}.{}, {} multiprocessors, {} GPUs in the machine",
            device.architecture,
            device.compute_capability / 10,
            device.compute_capability % 10,
            device.multiprocessors,
            hardware::gpus().map_or(0, |gpus| gpus.len())
        ),
    };
    format!(
        "backend on {} ({}): {place}, {} MiB, BF16 {}, FP8 {}",
        device.selector(),
        device.name,
        device.total_memory >> 20,
        yes_or_no(Features::BF16),
        yes_or_no(Features::FP8)
    )
}

fn choose_executor(configuration: &Configuration) -> Result<Arc<dyn Executor>> {
    match Selector::parse(&configuration.device)? {
        Selector::Cpu => cpu_executor(configuration),
        Selector::Cuda(ordinal) => cuda_executor(ordinal, configuration),
        Selector::Tpu(_) => {
            let device = &configuration.device;
            Err(Error::unsupported(format!("device is \"{device}\"; there is no executor for TPUs yet"))
                .with_advice("choose \"cpu\" or a CUDA device"))
        }
        Selector::Auto => {
            best_cuda_device().and_then(|ordinal| cuda_executor(ordinal, configuration)).or_else(|no_gpu| {
                log::info!(target: "nvbackend::backend", "device auto: {no_gpu}; using the CPU");
                cpu_executor(configuration).map_err(|error| error.caused_by(no_gpu))
            })
        }
    }
}

fn cpu_executor(configuration: &Configuration) -> Result<Arc<dyn Executor>> {
    Ok(Arc::new(CpuExecutor::new(configuration.threads as usize)?))
}

#[cfg(feature = "cuda")]
fn cuda_executor(ordinal: i32, configuration: &Configuration) -> Result<Arc<dyn Executor>> {
    // While no context exists: a driver that fails here has nothing to give back.
    crate::cuda::create_executor(hardware::gpu_at(ordinal)?, configuration)
}

#[cfg(not(feature = "cuda"))]
fn cuda_executor(_ordinal: i32, _configuration: &Configuration) -> Result<Arc<dyn Executor>> {
    Err(hardware::built_without_cuda())
}

/// The GPU that `hardware::recommend` puts first for decoding, which most engines do most; one that can run before any
/// that cannot.
fn best_cuda_device() -> Result<i32> {
    best_of(hardware::gpus()?)
        .ok_or_else(|| Error::new(Status::CudaNotAvailable, "the driver works and lists no CUDA device"))
}

fn best_of(gpus: &[DeviceInfo]) -> Option<i32> {
    let order = recommend(gpus, Workload::Decode);
    let usable = order.iter().find(|place| gpus[place.index].obstacle.is_empty());
    usable.or(order.first()).map(|place| gpus[place.index].ordinal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::configuration::{LogLevel, NONE};
    use crate::registry::kernels_of;

    #[test]
    fn the_line_for_a_backend_names_what_was_chosen() {
        let gpu = DeviceInfo {
            name: "H200".into(),
            architecture: "Hopper".into(),
            compute_capability: 90,
            multiprocessors: 132,
            total_memory: 141 << 30,
            features: Features::of_capability(90),
            ..DeviceInfo::new(DeviceKind::Cuda, 0)
        };
        let line = summary(&gpu);
        assert!(line.starts_with("backend on cuda:0 (H200): Hopper, compute capability 9.0, 132 multi"), "{line}");
        assert!(line.ends_with("144384 MiB, BF16 yes, FP8 yes"), "{line}");
        let cpu =
            DeviceInfo { architecture: "aarch64".into(), multiprocessors: 8, ..DeviceInfo::new(DeviceKind::Cpu, 0) };
        assert_eq!(summary(&cpu), "backend on cpu (): aarch64, 8 threads, 0 MiB, BF16 no, FP8 no");
    }

    #[test]
    fn auto_takes_the_gpu_that_decodes_fastest() {
        let gpu = |ordinal, compute_capability, bandwidth: u64| DeviceInfo {
            compute_capability,
            peak_bandwidth: bandwidth * 1_000_000_000,
            ..DeviceInfo::new(DeviceKind::Cuda, ordinal)
        };
        let mut gpus = [gpu(0, 120, 448), gpu(1, 90, 4800), gpu(2, 89, 300)];
        assert_eq!(best_of(&gpus), Some(1), "not the highest compute capability");
        gpus[1].obstacle = "its compute mode is prohibited".into();
        assert_eq!(best_of(&gpus), Some(0));
        gpus.iter_mut().for_each(|gpu| gpu.obstacle = "the driver is too old".into());
        assert_eq!(best_of(&gpus), Some(1), "so that the error is that of the best");
        assert_eq!(best_of(&[]), None);
    }

    #[test]
    fn a_configuration_reaches_the_backend() {
        let mut configuration = Configuration { device: "cpu".into(), threads: 1, ..Configuration::default() };
        configuration.precision = crate::configuration::Precision::F16;
        configuration.timing.profiling = true;
        configuration.memory.limit = 4096;
        let backend = Backend::new(configuration.clone()).unwrap();
        assert_eq!(backend.configuration(), &configuration);
        assert_eq!((backend.default_dtype(), backend.metrics().is_enabled()), (DType::F16, true));
        assert_eq!(backend.device().multiprocessors, 1);
        assert_eq!(backend.memory().allocate(8192, RawHandle::NULL).unwrap_err().status, Status::OutOfMemory);
        configuration.fp8 = crate::configuration::Requirement::Required;
        assert_eq!(Backend::new(configuration.clone()).err().unwrap().status, Status::Fp8);
        configuration.memory.limit_fraction = 2.0;
        assert_eq!(Backend::new(configuration).err().unwrap().status, Status::Configuration);
    }

    #[test]
    fn the_running_configuration_says_what_was_decided_and_changed() {
        let mut configuration =
            Configuration { device: "cpu".into(), threads: 3, vendor_libraries: false, ..Configuration::default() };
        configuration.memory.limit = 1 << 30;
        configuration.logging.level = LogLevel::Error;
        let backend = Backend::new(configuration).unwrap();
        let running = backend.running_configuration();
        assert_eq!((running.device.as_str(), running.threads, running.architecture), ("cpu", 3, 0));
        assert_eq!((running.precision, running.vendor_libraries), (Precision::F32, false));
        assert_eq!((running.memory.limit, running.memory.margin), (1 << 30, NONE));
        assert_eq!((running.logging.level, running.timing.profiling), (LogLevel::Error, false));
        running.validate().unwrap();
        let again = Backend::new(running.clone()).unwrap();
        assert_eq!(again.running_configuration(), running);
        backend.metrics().set_enabled(true);
        backend.memory().set_limit(1 << 29);
        let (_, kernel) = kernels_of(DeviceKind::Cpu).next().unwrap();
        backend.executor().choices().set_override(OperationKind::Linear, kernel.name).unwrap();
        let changed = backend.running_configuration();
        assert_eq!((changed.timing.profiling, changed.memory.limit), (true, 1 << 29));
        assert_eq!((running.linear_kernel.as_str(), changed.linear_kernel.as_str()), ("", kernel.name));
        let open = Configuration { threads: 0, device: "cpu".into(), ..Configuration::default() };
        let backend = Backend::new(open).unwrap();
        let running = backend.running_configuration();
        assert_eq!(running.threads, backend.device().multiprocessors as u64);
        assert_eq!(running.memory.limit, backend.memory().get_statistics().limit);
        assert_ne!(running.memory.limit, 0, "the host has a limit");
    }

    #[test]
    fn a_tpu_has_no_executor() {
        let configuration = Configuration { device: "tpu:0".into(), ..Configuration::default() };
        let error = Backend::new(configuration).err().unwrap();
        assert_eq!(error.status, Status::Unsupported);
        assert!(error.message.contains("\"tpu:0\"; there is no executor for TPUs yet"), "{error}");
    }
}

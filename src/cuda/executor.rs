//! The CUDA executor: what it owns, and its list of operations, which are in the files of their names.

mod device;

use super::all_work::NoWait;
use super::context::{runtime_error, ContextGuard, PrimaryContext, RelaxedCapture};
use super::cublaslt::CublasLt;
use super::launch::Launch;
use super::memory_pool::MemoryPool;
use super::peer::Peers;
use super::scratch::{expect_room, Scratch, StreamScratch};
use super::virtual_memory::Ranges;
use crate::configuration::Configuration;
use crate::device::{wait_past_captures, DeviceInfo, DeviceKind, RawHandle};
use crate::driver::{self, exit};
use crate::error::{Result, Status};
use crate::executor::{CapturedList, Executor, Plan};
use crate::operation::dequantize::Dequantize;
use crate::operation::linear_product::LinearProduct;
use crate::operation::pack_blocks::PackBlocks;
use crate::operation::quantize::{Quantize, Quantized};
use crate::operation::Operation;
use crate::registry::choices::{Choice, Choices};
use crate::registry::KernelId;
use crate::weight::{Format, WeightLayout};
use cust::sys::{self, CUresult};
use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

pub struct CudaExecutor {
    device: DeviceInfo,
    launch: Launch,
    attention_capability: i32,
    pool: MemoryPool,
    ranges: Ranges,
    scratch: Scratch,
    /// Where page-locked memory should lie; asked for with the first block of it.
    numa_node: OnceLock<Option<u32>>,
    /// Opened with the first product that is to use it.
    cublaslt: OnceLock<Option<Arc<CublasLt>>>,
    /// The configuration keeps vendor libraries away.
    pub(super) own_kernels_only: bool,
    /// Each row of a product is to be the same whatever the other rows are.
    pub(super) batch_invariant: bool,
    choices: Choices,
    peers: Peers,
    // Last: everything above belongs to it.
    context: PrimaryContext,
}

impl CudaExecutor {
    /// Kernels are chosen by `capability`, those of attention by `attention_capability`, vendor libraries by the device's.
    pub fn new(
        device: DeviceInfo,
        capability: i32,
        attention_capability: i32,
        configuration: &Configuration,
    ) -> Result<CudaExecutor> {
        let context = PrimaryContext::retain(device.ordinal)?;
        let guard = context.enter()?;
        let attribute = |attribute: sys::CUdevice_attribute| -> Result<i32> {
            let mut value = 0;
            // SAFETY: the ordinal was listed, and for CUDA devices handle and ordinal are the same number.
            let result = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device.ordinal) };
            context.check(result, "cuDeviceGetAttribute").map(|()| value)
        };
        let launch = Launch {
            stream: std::ptr::null_mut(),
            capability,
            multiprocessors: device.multiprocessors,
            shared_bytes_per_block: attribute(
                sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
            l2_bytes: device.l2_bytes as i32,
        };
        let pools = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0;
        drop(guard);
        if !configuration.own_kernels_only() {
            CublasLt::find();
        }
        Ok(CudaExecutor {
            device,
            launch,
            attention_capability,
            pool: MemoryPool::new(pools && driver::has_pool_functions()),
            ranges: Ranges::default(),
            scratch: Scratch::default(),
            numa_node: OnceLock::new(),
            cublaslt: OnceLock::new(),
            own_kernels_only: configuration.own_kernels_only(),
            batch_invariant: configuration.batch_invariant,
            choices: Choices::new(DeviceKind::Cuda, configuration.rounding(), configuration.batch_invariant),
            peers: Peers::default(),
            context,
        })
    }

    /// Every call starts here: nothing touches CUDA after a sticky error.
    pub(super) fn enter(&self) -> Result<ContextGuard<'_>> {
        self.context.enter()
    }

    pub(super) fn launch_on(&self, stream: RawHandle) -> Launch {
        self.launch.on(stream)
    }

    pub(super) fn launch_attention_on(&self, stream: RawHandle) -> Launch {
        Launch { capability: self.attention_capability, ..self.launch.on(stream) }
    }

    /// The context is current.
    pub(super) fn cublaslt(&self) -> Option<&CublasLt> {
        let open = || {
            if self.own_kernels_only {
                return None;
            }
            // The stream may be in a capture, where the library could not allocate what it needs for itself.
            let _relaxed = self.context.relax_capture();
            self.context.refuse_lost().ok().and_then(|()| CublasLt::of_device(self.device.ordinal))
        };
        self.cublaslt.get_or_init(open).as_deref()
    }

    /// As `PrimaryContext::enter_to_release` does.
    pub(super) fn enter_to_release(&self) -> Option<ContextGuard<'_>> {
        self.context.enter_to_release()
    }

    /// While the answer lives no other thread waits for all work of the device, which would end what this one captures.
    pub(super) fn hold_off_waits(&self) -> NoWait<'_> {
        self.context.hold_off_waits()
    }

    /// As `PrimaryContext::relax_capture` does.
    pub(super) fn relax_capture(&self) -> Result<RelaxedCapture<'_>> {
        self.context.relax_capture()
    }

    pub(super) fn check(&self, result: CUresult, doing: &str) -> Result<()> {
        self.context.check(result, doing)
    }

    /// The result of a call that has nobody to report to.
    pub(super) fn log_failure(&self, result: CUresult, doing: &str) {
        if let Err(error) = self.check(result, doing) {
            log::warn!(target: "nvbackend::cuda", "{error}");
        }
    }

    /// Before memory goes that any stream's work may use. The context is current; a failure has nobody to report to.
    pub(super) fn wait_for_all_work(&self) {
        if let Err(error) = wait_past_captures(|| self.context.wait_for_all_work()) {
            log::warn!(target: "nvbackend::cuda", "{error}");
        }
    }

    /// A launcher's `cudaError_t`.
    pub(super) fn check_launch(&self, code: i32, doing: &str) -> Result<()> {
        if code == 0 {
            exit::RUNTIME.have_begun();
            return Ok(());
        }
        let mut error = self.context.latch(runtime_error(code, doing));
        if error.status == Status::Device {
            error.status = Status::KernelLaunch;
        }
        Err(error)
    }

    /// Refuses an operation for which the workspace that the caller has set for the stream is too small, before anything is
    /// queued.
    pub(super) fn expect_workspace(&self, op: &Operation, stream: RawHandle) -> Result<()> {
        let Some(given) = self.scratch.callers_bytes(stream) else { return Ok(()) };
        let _guard = self.enter()?;
        expect_room(super::workspace::bytes(self, op), given)
    }

    /// Operations that `queue` queues on the stream take their workspace from these bytes, and later ones as before. The bytes are
    /// memory that the device reaches, and stay as long as what is queued may run.
    pub(super) fn with_workspace(
        &self,
        stream: RawHandle,
        (data, bytes): (*mut c_void, usize),
        queue: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let before = self.scratch.callers(stream);
        self.scratch.set_callers(stream, data, bytes, self)?;
        let queued = queue();
        self.scratch.put_back_callers(stream, before);
        queued
    }

    /// The stream's workspace; lock it until the launch that uses it is queued.
    pub(super) fn scratch(&self, stream: RawHandle) -> Arc<StreamScratch> {
        self.scratch.of(stream)
    }
}

impl Drop for CudaExecutor {
    fn drop(&mut self) {
        if let Some(_guard) = self.context.enter_to_release() {
            self.wait_for_all_work();
            self.scratch.release_all(self);
            if let (Some(pool), false) = (self.pool.raw(), self.context.is_lost()) {
                // SAFETY: destroyed once; the driver keeps the pool's memory until its last block is free.
                self.log_failure(unsafe { sys::cuMemPoolDestroy(pool) }, "destroying the memory pool");
            }
            if !self.context.is_lost() {
                self.cublaslt.take();
            }
        }
        // On a lost device not even a vendor library may clean up.
        std::mem::forget(self.cublaslt.take());
    }
}

impl Executor for CudaExecutor {
    fn plan(&self, op: &Operation) -> Result<Plan> {
        super::plan::of(self, op)
    }

    unsafe fn stream_set_workspace(&self, stream: RawHandle, data: *mut c_void, bytes: usize) -> Result<()> {
        let _guard = self.enter()?;
        self.scratch.set_callers(stream, data, bytes, self)
    }

    fn run(&self, op: &Operation, stream: RawHandle) -> Result<()> {
        super::operation::run(self, op, stream)
    }

    fn capture_workspace(&self, operations: &[&Operation]) -> Result<usize> {
        super::captured_list::workspace(self, operations)
    }

    fn capture(
        self: Arc<Self>,
        operations: &[&Operation],
        workspace: (*mut c_void, usize),
    ) -> Result<Option<Box<dyn CapturedList>>> {
        super::captured_list::capture(self, operations, workspace)
    }

    fn capture_onto(
        &self,
        operations: &[&Operation],
        workspace: (*mut c_void, usize),
        stream: RawHandle,
    ) -> Result<()> {
        super::captured_list::capture_onto(self, operations, workspace, stream)
    }

    fn choices(&self) -> &Choices {
        &self.choices
    }

    fn attention_candidates(&self, op: &Operation) -> Result<Vec<KernelId>> {
        let _guard = self.enter()?;
        Ok(super::attention_plan::candidates(self, op))
    }

    fn attention_with(&self, op: &Operation, kernel: KernelId, stream: RawHandle) -> Result<()> {
        super::attention::with(self, op, kernel, stream)
    }

    fn linear_candidates(&self, op: &LinearProduct) -> Vec<Choice> {
        super::linear_candidates::candidates(self, op)
    }

    fn linear_obstacle(&self, op: &LinearProduct, kernel: KernelId) -> String {
        super::linear_obstacle::of(self, op, kernel)
    }

    fn linear_variations(&self, op: &LinearProduct, fastest: &[Choice]) -> Vec<Choice> {
        super::linear_candidates::variations(self, op, fastest)
    }

    fn linear_default(&self, op: &LinearProduct) -> Option<Choice> {
        super::linear_plan::default(self, op)
    }

    fn linear_with(&self, op: &LinearProduct, choice: &Choice, stream: RawHandle) -> Result<Option<Choice>> {
        super::linear_plan::run_by(self, op, choice, stream)
    }

    fn linear_reference(&self, op: &LinearProduct, stream: RawHandle) -> Result<()> {
        super::linear_plan::reference(self, op, stream)
    }

    fn dequantize(&self, op: &Dequantize, stream: RawHandle) -> Result<bool> {
        super::dequantize::run(self, op, stream)
    }

    fn can_quantize(&self, format: &Format, parts: usize) -> bool {
        super::quantize::supports(format, parts)
    }

    fn quantize(&self, op: &Quantize, stream: RawHandle) -> Result<Quantized> {
        super::quantize::run(self, op, stream)
    }

    fn pack_blocks(&self, op: &PackBlocks, stream: RawHandle) -> Result<bool> {
        super::pack_blocks::pack(self, op, stream)
    }

    fn unpack_blocks(&self, op: &PackBlocks, stream: RawHandle) -> Result<()> {
        super::pack_blocks::unpack(self, op, stream)
    }

    fn weight_layout(&self) -> WeightLayout {
        WeightLayout::FragmentTiles
    }
}

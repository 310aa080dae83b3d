//! The CPU executor: every operation on the machine's own cores, and the oracle of the other executors.
//!
//! A call has finished when it returns, so a stream is a name only and an event a point in time. The result of an
//! operation does not depend on the number of threads, and that of a row not on the rows beside it.

mod activation;
pub mod argmax;
pub mod attention;
#[cfg(target_arch = "x86_64")]
mod bf16_tile;
mod dequantize;
mod dot_tile;
pub mod embedding;
pub mod grouped_linear;
#[cfg(target_arch = "x86_64")]
mod int4_tile;
pub mod linear;
pub mod linear_codes;
mod linear_quantized;
mod linear_to_codes;
mod machine;
pub mod matmul;
mod memory;
mod norm;
mod outer_tile;
mod quantized_rows;
mod quantized_tile;
pub mod rope;
mod row;
pub mod sample;
pub mod simd;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod testing_quantized;
pub mod threads;
mod virtual_memory;
crate::plain_operations!(operation_modules);

use crate::device::{DeviceInfo, DeviceKind};
use crate::error::{Error, Result, Status};
use crate::executor::{CopyKind, Executor, VirtualMemory};
use crate::hardware;
use crate::operation::{match_operation, Operation};
use crate::ops::linear::Linear;
use crate::ops::linear_codes::LinearCodes;
use crate::ops::linear_to_codes::LinearProduct;
use crate::registry::choices::{Choice, Choices, Rounding};
use crate::registry::{kernels_of, KernelId, Way};
use crate::stream::RawHandle;
use crate::weight::WeightLayout;
use crate::{operation_modules, plain_operations};
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use threads::Threads;
use virtual_memory::HostVirtualMemory;

pub struct CpuExecutor {
    device: DeviceInfo,
    threads: Threads,
    /// Partial results of attention over long caches.
    workspace: Mutex<Vec<f32>>,
    streams: AtomicUsize,
    choices: Choices,
}

/// When the event was last recorded.
type EventTime = Mutex<Option<Instant>>;

impl CpuExecutor {
    /// `threads`: how many compute, the caller's own included; 0: one for each core this process may run on.
    pub fn new(threads: usize) -> Result<CpuExecutor> {
        let threads = Threads::new(threads)
            .map_err(|error| Error::new(Status::Configuration, format!("cannot start the CPU threads: {error}")))?;
        let device = DeviceInfo {
            multiprocessors: threads.count() as i32,
            total_memory: machine::memory()?.1,
            ..hardware::cpu_device().clone()
        };
        Ok(CpuExecutor {
            device,
            threads,
            workspace: Mutex::new(Vec::new()),
            streams: AtomicUsize::new(1),
            choices: Choices::new(DeviceKind::Cpu, Rounding::Never, false),
        })
    }

    fn linear(&self, op: &Linear) {
        let columns = self.choices.of(op).find_map(|choice| task_columns(op, &choice));
        linear::linear_in_columns(&self.threads, op, columns.unwrap_or(0));
    }

    fn linear_codes(&self, op: &LinearCodes) -> Result<()> {
        linear_codes::linear_codes(op, |op| {
            self.linear(op);
            Ok(())
        })
    }
}

/// Columns of a task by this choice; `None` if it is none of the CPU's, or the product has no tasks that wide.
fn task_columns(op: &Linear, choice: &Choice) -> Option<usize> {
    match choice.kernel.kernel().way {
        Way::Columns(columns) => (columns <= linear::most_task_columns(op)).then_some(columns),
        _ => None,
    }
}

fn event_time(event: RawHandle) -> Result<Instant> {
    // SAFETY: events come from `event_create` and live until `event_destroy`.
    let time = unsafe { &*event.0.cast::<EventTime>() };
    let time = *time.lock().unwrap_or_else(PoisonError::into_inner);
    time.ok_or_else(|| Error::invalid("the event has not been recorded"))
}

impl Executor for CpuExecutor {
    fn device(&self) -> &DeviceInfo {
        &self.device
    }

    fn memory_info(&self) -> Result<(u64, u64)> {
        machine::memory()
    }

    fn allocate(&self, bytes: usize, _stream: RawHandle) -> Result<*mut c_void> {
        memory::allocate(bytes)
    }

    unsafe fn free(&self, pointer: *mut c_void, bytes: usize, _stream: RawHandle) {
        memory::free(pointer, bytes)
    }

    unsafe fn copy(
        &self,
        to: *mut c_void,
        from: *const c_void,
        bytes: usize,
        _kind: CopyKind,
        _stream: RawHandle,
    ) -> Result<()> {
        // The ranges may overlap: all memory is one.
        std::ptr::copy(from.cast::<u8>(), to.cast::<u8>(), bytes);
        Ok(())
    }

    unsafe fn fill(&self, to: *mut c_void, byte: u8, bytes: usize, _stream: RawHandle) -> Result<()> {
        std::ptr::write_bytes(to.cast::<u8>(), byte, bytes);
        Ok(())
    }

    unsafe fn zero(&self, to: *mut c_void, bytes: usize, _stream: RawHandle) -> Result<()> {
        virtual_memory::zero(to.cast(), bytes);
        Ok(())
    }

    fn can_access(&self, _pointer: *const c_void) -> Result<bool> {
        Ok(true)
    }

    fn weight_layout(&self) -> WeightLayout {
        WeightLayout::Rows
    }

    fn host_allocate(&self, bytes: usize) -> Result<*mut c_void> {
        memory::allocate(bytes)
    }

    unsafe fn host_free(&self, pointer: *mut c_void, bytes: usize) {
        memory::free(pointer, bytes)
    }

    fn virtual_memory(&self) -> Result<Option<Arc<dyn VirtualMemory>>> {
        Ok(Some(Arc::new(HostVirtualMemory::new(|| machine::memory().map(|(available, _)| available)))))
    }

    fn managed_allocate(&self, bytes: usize) -> Result<*mut c_void> {
        memory::allocate(bytes)
    }

    unsafe fn managed_free(&self, pointer: *mut c_void, bytes: usize) {
        memory::free(pointer, bytes)
    }

    fn stream_create(&self, _priority: i32) -> Result<RawHandle> {
        Ok(RawHandle(self.streams.fetch_add(1, Ordering::Relaxed) as *mut c_void))
    }

    fn stream_destroy(&self, _stream: RawHandle) {}

    fn stream_synchronize(&self, _stream: RawHandle) -> Result<()> {
        Ok(())
    }

    fn stream_query(&self, _stream: RawHandle) -> Result<bool> {
        Ok(true)
    }

    fn stream_wait_event(&self, _stream: RawHandle, _event: RawHandle) -> Result<()> {
        Ok(())
    }

    fn event_create(&self) -> Result<RawHandle> {
        Ok(RawHandle(Box::into_raw(Box::<EventTime>::default()).cast()))
    }

    fn event_destroy(&self, event: RawHandle) {
        // SAFETY: the box of `event_create`, which nobody uses any more.
        drop(unsafe { Box::from_raw(event.0.cast::<EventTime>()) });
    }

    fn event_record(&self, event: RawHandle, _stream: RawHandle) -> Result<()> {
        // SAFETY: as in `event_time`.
        let time = unsafe { &*event.0.cast::<EventTime>() };
        *time.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        Ok(())
    }

    fn event_query(&self, _event: RawHandle) -> Result<bool> {
        Ok(true)
    }

    fn event_synchronize(&self, _event: RawHandle) -> Result<()> {
        Ok(())
    }

    fn event_elapsed(&self, start: RawHandle, end: RawHandle) -> Result<f32> {
        let (start, end) = (event_time(start)?, event_time(end)?);
        let milliseconds = |from: Instant, to: Instant| to.duration_since(from).as_secs_f32() * 1e3;
        Ok(if end >= start { milliseconds(start, end) } else { -milliseconds(end, start) })
    }

    fn run(&self, op: &Operation, _stream: RawHandle) -> Result<()> {
        macro_rules! run {
            ($name:ident, $op:ident) => {
                $name::$name(&self.threads, $op)
            };
        }
        plain_operations!(match_operation, op, run, {
            Operation::Embedding(op) => return embedding::embedding(&self.threads, op),
            Operation::Rope(op) => return rope::rope(&self.threads, op),
            Operation::AttentionPrefill(op) => return attention::prefill::prefill(&self.threads, op),
            Operation::AttentionDecode(op) => {
                let mut workspace = self.workspace.lock().unwrap_or_else(PoisonError::into_inner);
                return attention::decode::decode(&self.threads, op, &mut workspace);
            }
            Operation::Linear(op) => self.linear(op),
            Operation::LinearCodes(op) => return self.linear_codes(op),
            Operation::LinearToCodes(op) => {
                return linear_to_codes::linear_to_codes(&self.threads, op, |product| match product {
                    LinearProduct::Floats(op) => {
                        self.linear(op);
                        Ok(())
                    }
                    LinearProduct::Codes(op) => self.linear_codes(op),
                })
            }
            Operation::GroupedLinear(op) => return grouped_linear::grouped_linear(&self.threads, op),
            Operation::Matmul(op) => matmul::matmul(&self.threads, op),
            Operation::Argmax(op) => argmax::argmax(&self.threads, op),
            Operation::Sample(op) => return sample::sample(&self.threads, op),
        });
        Ok(())
    }

    fn choices(&self) -> &Choices {
        &self.choices
    }

    fn linear_candidates(&self, op: &Linear) -> Vec<Choice> {
        let all = kernels_of(DeviceKind::Cpu).map(|(id, _)| Choice::of(id));
        all.filter(|choice| task_columns(op, choice).is_some()).collect()
    }

    fn linear_obstacle(&self, op: &Linear, _kernel: KernelId) -> String {
        format!("shape: the product is cut into tasks of at most {} columns", linear::most_task_columns(op))
    }

    fn linear_default(&self, op: &Linear) -> Option<Choice> {
        let suggested = self.linear_candidates(op).into_iter().find(|choice| task_columns(op, choice) == Some(0));
        suggested.filter(|_| op.input.rows > 0)
    }

    fn linear_with(&self, op: &Linear, choice: &Choice, _stream: RawHandle) -> Result<Option<Choice>> {
        let Some(columns) = task_columns(op, choice) else { return Ok(None) };
        linear::linear_in_columns(&self.threads, op, columns);
        Ok(Some(*choice))
    }

    fn linear_reference(&self, op: &Linear, _stream: RawHandle) -> Result<()> {
        linear::reference(op);
        Ok(())
    }
}

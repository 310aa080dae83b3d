//! The CPU executor: every operation on the machine's own cores, and the oracle of the other executors.
//!
//! A call has finished when it returns, so a stream is a name only and an event a point in time. The result of an
//! operation does not depend on the number of threads, and that of a row not on the rows beside it.

mod activation;
pub mod argmax;
pub mod attention;
#[cfg(target_arch = "x86_64")]
mod bf16_outer_tile;
#[cfg(target_arch = "x86_64")]
mod bf16_tile;
pub mod block_rows;
mod dequantize;
mod device;
mod dot_tile;
pub mod embedding;
pub mod grouped_linear;
#[cfg(target_arch = "x86_64")]
mod int4_tile;
pub mod linear;
mod linear_quantized;
pub mod linear_quantized_input;
mod linear_quantized_output;
mod machine;
pub mod matmul;
mod mean;
mod memory;
mod norm;
mod outer_tile;
mod pack_blocks;
mod quantized_rows;
mod quantized_tile;
pub mod rope;
pub mod rotary_embedding;
mod row;
pub mod sample;
pub mod scatter_rows;
pub mod sort_rows;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod testing_quantized;
pub mod threads;
mod virtual_memory;
crate::plain_operations!(operation_modules);

use crate::device::{DeviceInfo, DeviceKind, RawHandle};
use crate::error::{Error, Result, Status};
use crate::executor::{Executor, Plan};
use crate::hardware;
use crate::operation::linear::{Linear, LinearInput};
use crate::operation::linear_product::LinearProduct;
use crate::operation::pack_blocks::PackBlocks;
use crate::operation::{match_operation, Operation};
use crate::registry::choices::{Choice, Choices, Rounding};
use crate::registry::{kernels_of, Family, KernelId};
use crate::tensor::{DType, Matrix};
use crate::weight::WeightLayout;
use crate::{operation_modules, plain_operations};
use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, PoisonError};
use threads::Threads;

pub struct CpuExecutor {
    device: DeviceInfo,
    threads: Threads,
    /// Partial results of attention over long caches.
    workspace: Mutex<Vec<f32>>,
    streams: AtomicUsize,
    choices: Choices,
}

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

    fn linear(&self, op: &Linear) -> Result<()> {
        let product = |first, output: Matrix| {
            let product = op.product(first, output.rows, output);
            match op.input.part(first, output.rows) {
                LinearInput::Floats(_) => self.product(&product),
                LinearInput::Quantized(rows) => {
                    return linear_quantized_input::linear_quantized_input(&rows, &product, |product| {
                        self.product(product)
                    })
                }
            }
            Ok(())
        };
        match (&op.quantized_output, op.output) {
            (Some(rows), _) => linear_quantized_output::linear_quantized_output(&self.threads, op, rows, product),
            (None, Some(output)) => product(0, output),
            (None, None) => unreachable!("a validated descriptor has an output"),
        }
    }

    fn product(&self, op: &LinearProduct) {
        let columns = self.choices.of(op).find_map(|choice| task_columns(op, &choice));
        linear::linear_in_columns(&self.threads, op, columns.unwrap_or(0));
    }
}

/// Columns of a task by this choice; `None` if it is none of the CPU's, or the product has no tasks that wide.
fn task_columns(op: &LinearProduct, choice: &Choice) -> Option<usize> {
    match choice.kernel.kernel().family {
        Family::Columns(columns) => (columns <= linear::most_task_columns(op)).then_some(columns),
        _ => None,
    }
}

impl Executor for CpuExecutor {
    fn run(&self, op: &Operation, stream: RawHandle) -> Result<()> {
        macro_rules! run {
            ($name:ident, $op:ident) => {
                $name::$name(&self.threads, $op)
            };
        }
        plain_operations!(match_operation, op, run, {
            Operation::Embedding(op) => return embedding::embedding(&self.threads, op),
            Operation::Rope(op) => return rope::rope(&self.threads, op),
            Operation::BlockRows(op) => return block_rows::block_rows(&self.threads, op),
            Operation::RotaryEmbedding(op) => return rotary_embedding::rotary_embedding(&self.threads, op),
            Operation::ScatterRows(op) => return scatter_rows::scatter_rows(&self.threads, op),
            Operation::SortRows(op) => sort_rows::sort_rows(&self.threads, op),
            Operation::AttentionPrefill(op) => return attention::prefill::prefill(&self.threads, op),
            Operation::AttentionDecode(op) => {
                let mut workspace = self.workspace.lock().unwrap_or_else(PoisonError::into_inner);
                return attention::any_decode(&self.threads, op, &mut workspace);
            }
            Operation::Linear(op) => return self.linear(op),
            Operation::MemoryCopy(op) => return op.run(self, stream),
            Operation::MemoryFill(op) => return op.run(self, stream),
            Operation::GroupedLinear(op) => return grouped_linear::grouped_linear(&self.threads, op),
            Operation::Matmul(op) => matmul::matmul(&self.threads, op),
            Operation::Argmax(op) => argmax::argmax(&self.threads, op),
            Operation::Sample(op) => return sample::sample(&self.threads, op),
        });
        Ok(())
    }

    fn plan(&self, op: &Operation) -> Result<Plan> {
        Ok(match op {
            Operation::Linear(linear) => {
                let (rows, columns) = linear.output_size();
                let output = linear.output.unwrap_or(Matrix::without_memory(DType::F32, rows, columns));
                Plan::of_product(self, &linear.product(0, rows, output))
            }
            Operation::AttentionPrefill(prefill) => {
                let parameters = attention::prefill_parameters(prefill, self.threads.count());
                Plan::of_only(op).with_parameters(&parameters)
            }
            Operation::AttentionDecode(decode) => {
                Plan::of_only(op).with_parameters(&attention::decode_parameters(decode))
            }
            _ => Plan::of_only(op),
        })
    }

    fn choices(&self) -> &Choices {
        &self.choices
    }

    fn linear_candidates(&self, op: &LinearProduct) -> Vec<Choice> {
        let all = kernels_of(DeviceKind::Cpu).map(|(id, _)| Choice::of(id));
        all.filter(|choice| task_columns(op, choice).is_some()).collect()
    }

    fn linear_obstacle(&self, op: &LinearProduct, _kernel: KernelId) -> String {
        format!("shape: the product is cut into tasks of at most {} columns", linear::most_task_columns(op))
    }

    fn linear_default(&self, op: &LinearProduct) -> Option<Choice> {
        let suggested = self.linear_candidates(op).into_iter().find(|choice| task_columns(op, choice) == Some(0));
        suggested.filter(|_| op.input.rows > 0)
    }

    fn linear_with(&self, op: &LinearProduct, choice: &Choice, _stream: RawHandle) -> Result<Option<Choice>> {
        let Some(columns) = task_columns(op, choice) else { return Ok(None) };
        linear::linear_in_columns(&self.threads, op, columns);
        Ok(Some(*choice))
    }

    fn linear_reference(&self, op: &LinearProduct, _stream: RawHandle) -> Result<()> {
        linear::reference(op);
        Ok(())
    }

    fn pack_blocks(&self, op: &PackBlocks, _stream: RawHandle) -> Result<bool> {
        Ok(pack_blocks::pack_blocks(op))
    }

    fn unpack_blocks(&self, op: &PackBlocks, _stream: RawHandle) -> Result<()> {
        pack_blocks::unpack_blocks(op);
        Ok(())
    }

    fn weight_layout(&self) -> WeightLayout {
        WeightLayout::Rows
    }
}

//! What runs operations on a device: one method takes any of them, and the others are about products and weights.
//!
//! Descriptors arrive validated.

use crate::device::{Device, RawHandle};
use crate::error::{Error, Result};
use crate::operation::dequantize::Dequantize;
use crate::operation::linear_product::LinearProduct;
use crate::operation::pack_blocks::PackBlocks;
use crate::operation::quantize::{Quantize, Quantized};
use crate::operation::{Operation, OperationKind};
use crate::registry::choices::{Choice, Choices};
use crate::registry::KernelId;
use crate::weight::{Format, WeightLayout};
use std::ffi::c_void;
use std::sync::Arc;

/// The most parameters of a plan.
const PARAMETERS: usize = 6;

/// Parameters of attention's plans, which `nvb_attention_plan` has as fields.
pub const TILE_ROWS: &str = "query rows of a tile";
pub const TILE_KEYS: &str = "keys of a tile";
pub const SPLITS: &str = "splits of the keys";
pub const STAGES: &str = "stages";

/// How an executor would run an operation: a plain value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan {
    /// The kernel, or the strategy where several work together; the registry has it where there is one to choose. "": nothing
    /// runs, since the operation is empty.
    pub kernel: &'static str,
    pub reason: Reason,
    /// How the kernel divides the work, by names; the others are `("", 0)`.
    pub parameters: [(&'static str, usize); PARAMETERS],
    /// Bytes of workspace with which the operation runs as it would be chosen now; it runs with no less if a workspace is
    /// set for its stream.
    pub workspace: usize,
}

/// Why a kernel runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The executor has no other for the operation.
    Only,
    Default,
    Override,
    Tuned,
    /// `batch_invariant` leaves no choice.
    BatchInvariant,
}

impl Plan {
    pub const EMPTY: Plan =
        Plan { kernel: "", reason: Reason::Default, parameters: [("", 0); PARAMETERS], workspace: 0 };

    /// Of the one kernel that an executor has for the operation.
    pub fn of_only(op: &Operation) -> Plan {
        Plan { kernel: op.kind().name(), reason: Reason::Only, ..Plan::EMPTY }
    }

    /// Of attention, whose kernel divides the work so.
    pub fn with_parameters(self, parameters: &[(&'static str, usize)]) -> Plan {
        let mut plan = self;
        plan.parameters[..parameters.len()].copy_from_slice(parameters);
        plan
    }

    /// 0 where the plan has none of this name.
    pub fn parameter(&self, name: &str) -> usize {
        self.parameters.iter().find(|parameter| parameter.0 == name).map_or(0, |parameter| parameter.1)
    }

    /// Of the product of floats: the override, the tuned entry or the default, the first that can do it.
    pub fn of_product(executor: &dyn Executor, op: &LinearProduct) -> Plan {
        let choices = executor.choices();
        let supported =
            |kernel: &KernelId| executor.linear_candidates(op).iter().any(|choice| choice.kernel == *kernel);
        let overridden =
            || choices.overridden(OperationKind::Linear).filter(supported).map(|id| (id, Reason::Override));
        let tuned =
            || choices.tuned(op).map(|entry| entry.choice.kernel).filter(supported).map(|id| (id, Reason::Tuned));
        let default = if choices.are_fixed() { Reason::BatchInvariant } else { Reason::Default };
        let (kernel, reason) = executor.linear_default(op).map_or(("", default), |choice| {
            let (id, reason) = overridden().or_else(tuned).unwrap_or((choice.kernel, default));
            (id.kernel().name, reason)
        });
        Plan { kernel, reason, ..Plan::EMPTY }
    }
}

/// A list of operations that an executor made ready to run as one. It keeps its executor.
pub trait CapturedList: Send + Sync {
    /// Queues the list on a stream; the caller keeps launches of one list from overlapping on the host.
    fn launch(&self, stream: RawHandle) -> Result<()>;
}

pub trait Executor: Device {
    /// Queues the operation on the stream, as planned.
    fn run(&self, op: &Operation, stream: RawHandle) -> Result<()>;
    /// How `run` would do the operation now. Nothing is queued and no memory touched: of the descriptor's addresses their
    /// alignment counts alone.
    fn plan(&self, op: &Operation) -> Result<Plan>;

    /// Bytes of workspace that `capture` needs for these operations; 0: none.
    fn capture_workspace(&self, _operations: &[&Operation]) -> Result<usize> {
        Ok(0)
    }
    /// Makes the operations, which run in this order, ready to be launched as one; nothing of them runs. `None`: the executor
    /// runs such a list an operation after the other. `workspace`: as many bytes as `capture_workspace` says, which no work uses
    /// now and which stay until the last launch has finished; launches of lists with the same workspace do not overlap.
    fn capture(
        self: Arc<Self>,
        _operations: &[&Operation],
        _workspace: (*mut c_void, usize),
    ) -> Result<Option<Box<dyn CapturedList>>> {
        Ok(None)
    }
    /// Queues operations that `capture` took, on a stream that the caller captures: they become a part of what that captures.
    /// `workspace` as for `capture`, but work may use it: it stays as long as the caller's graph may run, and the caller orders that.
    fn capture_onto(
        &self,
        _operations: &[&Operation],
        _workspace: (*mut c_void, usize),
        _stream: RawHandle,
    ) -> Result<()> {
        Err(Error::unsupported("this executor's streams are not captured"))
    }

    /// What was chosen among the kernels that this executor has for products.
    fn choices(&self) -> &Choices;
    /// The kernels that can do the product, of the registry, each of a vendor library's algorithms by its rank. The memory
    /// behind the descriptor is not touched.
    fn linear_candidates(&self, op: &LinearProduct) -> Vec<Choice>;
    /// Why a kernel that is none of the candidates, though the product lies within its limits, cannot do it: which of the
    /// device, the options and the product's own shape ("device: …") is in the way.
    fn linear_obstacle(&self, op: &LinearProduct, kernel: KernelId) -> String;
    /// Further algorithms of a vendor library for the product, beyond those that it names itself: without `fastest` some of
    /// every kind, else those that differ little from the first of these, which ran. Some may be candidates as well.
    fn linear_variations(&self, _op: &LinearProduct, _fastest: &[Choice]) -> Vec<Choice> {
        Vec::new()
    }
    /// What a product takes where nothing was chosen; `None` for an empty product. The memory is not touched.
    fn linear_default(&self, op: &LinearProduct) -> Option<Choice>;
    /// The product by this choice: what it came to, with an algorithm's rank as what the library knows it by; `None`, and nothing
    /// queued that changes the output, where it cannot do the product.
    fn linear_with(&self, op: &LinearProduct, choice: &Choice, stream: RawHandle) -> Result<Option<Choice>>;
    /// The product by the plainest means that the executor has, which other kernels are held against. Slow.
    fn linear_reference(&self, op: &LinearProduct, stream: RawHandle) -> Result<()>;

    /// The kernels that can do an attention, of the registry, the one to be preferred first. Empty: there is no choice.
    fn attention_candidates(&self, _op: &Operation) -> Result<Vec<KernelId>> {
        Ok(Vec::new())
    }
    /// The attention by this kernel, a candidate.
    fn attention_with(&self, op: &Operation, _kernel: KernelId, stream: RawHandle) -> Result<()> {
        self.run(op, stream)
    }

    /// `false`: the executor has no kernel, and the weight's host side dequantises.
    fn dequantize(&self, _op: &Dequantize, _stream: RawHandle) -> Result<bool> {
        Ok(false)
    }
    /// Whether `quantize` makes this format of as many parts; otherwise the weight's host side does.
    fn can_quantize(&self, _format: &Format, _parts: usize) -> bool {
        false
    }
    /// Waits for the stream.
    fn quantize(&self, _op: &Quantize, _stream: RawHandle) -> Result<Quantized> {
        Err(Error::unsupported("this executor quantises on the host"))
    }
    /// Writes the weight from its blocks and waits for the stream. `false`: a scale is not finite, and what was written is
    /// worthless.
    fn pack_blocks(&self, _op: &PackBlocks, _stream: RawHandle) -> Result<bool> {
        Err(Error::unsupported("this executor keeps blocks as they are"))
    }
    /// Queues the writing of the blocks from their weight.
    fn unpack_blocks(&self, _op: &PackBlocks, _stream: RawHandle) -> Result<()> {
        Err(Error::unsupported("this executor keeps blocks as they are"))
    }

    /// From now on the operations on `stream` take their workspace from these bytes and allocate none; NULL: as before. An
    /// executor whose operations need no workspace ignores it.
    ///
    /// # Safety
    /// `data` is NULL, or memory that the device reaches, 256-byte aligned, which nobody else uses until it is replaced or
    /// the stream released, and what is queued until then has run. One thread at a time queues work on the stream.
    unsafe fn stream_set_workspace(&self, _stream: RawHandle, _data: *mut c_void, _bytes: usize) -> Result<()> {
        Ok(())
    }

    /// How this executor reads Int4 weights.
    fn weight_layout(&self) -> WeightLayout;
}

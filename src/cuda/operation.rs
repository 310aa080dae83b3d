//! Which file's launch an operation comes to.

use super::executor::CudaExecutor;
use super::{
    argmax, attention, elementwise, embedding, gated_activation, grouped_linear, layer_norm, linear, matmul, rms_norm,
    rope, sample, softmax,
};
use crate::device::RawHandle;
use crate::error::Result;
use crate::operation::Operation;

pub(super) fn run(executor: &CudaExecutor, op: &Operation, stream: RawHandle) -> Result<()> {
    // An operation that needs no workspace is not held up by a look at the stream's.
    let has_room = || executor.expect_workspace(op, stream);
    match op {
        Operation::Embedding(op) => embedding::run(executor, op, stream),
        Operation::RmsNorm(op) => rms_norm::run(executor, op, stream),
        Operation::LayerNorm(op) => layer_norm::run(executor, op, stream),
        Operation::GatedActivation(op) => gated_activation::run(executor, op, stream),
        Operation::Rope(op) => rope::run(executor, op, stream),
        Operation::AttentionPrefill(op) => attention::prefill(executor, op, stream),
        Operation::AttentionDecode(op) => has_room().and_then(|()| attention::decode(executor, op, stream)),
        Operation::Softmax(op) => softmax::run(executor, op, stream),
        Operation::Elementwise(op) => elementwise::run(executor, op, stream),
        Operation::Linear(op) => has_room().and_then(|()| linear::run(executor, op, stream)),
        Operation::GroupedLinear(op) => has_room().and_then(|()| grouped_linear::run(executor, op, stream)),
        Operation::Matmul(op) => has_room().and_then(|()| matmul::run(executor, op, stream)),
        Operation::Argmax(op) => has_room().and_then(|()| argmax::run(executor, op, stream)),
        Operation::Sample(op) => has_room().and_then(|()| sample::run(executor, op, stream)),
    }
}

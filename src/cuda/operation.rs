//! Which file's launch an operation comes to.

use super::prelude::*;
use super::{
    argmax, attention, block_rows, embedding, grouped_linear, linear, matmul, rope, rotary_embedding, sample,
    scatter_rows, sort_rows,
};
use crate::operation::{match_operation, Operation};
use crate::plain_operations;

pub(super) fn run(executor: &CudaExecutor, op: &Operation, stream: RawHandle) -> Result<()> {
    // An operation that needs no workspace is not held up by a look at the stream's.
    let has_room = || executor.expect_workspace(op, stream);
    macro_rules! run {
        ($name:ident, $op:ident) => {
            super::$name::run(executor, $op, stream)
        };
    }
    plain_operations!(match_operation, op, run, {
        Operation::Embedding(op) => embedding::run(executor, op, stream),
        Operation::Rope(op) => rope::run(executor, op, stream),
        Operation::BlockRows(op) => block_rows::run(executor, op, stream),
        Operation::RotaryEmbedding(op) => rotary_embedding::run(executor, op, stream),
        Operation::ScatterRows(op) => scatter_rows::run(executor, op, stream),
        Operation::AttentionPrefill(op) => attention::prefill(executor, op, stream),
        Operation::AttentionDecode(op) => has_room().and_then(|()| attention::decode(executor, op, stream)),
        Operation::Linear(op) => has_room().and_then(|()| linear::run(executor, op, stream)),
        Operation::MemoryCopy(op) => op.run(executor, stream),
        Operation::MemoryFill(op) => op.run(executor, stream),
        Operation::GroupedLinear(op) => has_room().and_then(|()| grouped_linear::run(executor, op, stream)),
        Operation::Matmul(op) => has_room().and_then(|()| matmul::run(executor, op, stream)),
        Operation::Argmax(op) => has_room().and_then(|()| argmax::run(executor, op, stream)),
        Operation::SortRows(op) => has_room().and_then(|()| sort_rows::run(executor, op, stream)),
        Operation::Sample(op) => has_room().and_then(|()| sample::run(executor, op, stream)),
    })
}

//! The workspace that an operation asks of a stream's scratch: the same sums size a query's answer and carve a caller's workspace.

use super::executor::CudaExecutor;
use super::scratch::{WorkspaceUse, ALIGNMENT};
use super::{argmax, attention, grouped_linear, linear_workspace, matmul, sample, sort_rows};
use crate::operation::Operation;

/// The first bytes of a caller's workspace: counters, which stay zero between operations whatever else the workspace
/// holds, also when a graph that was captured with it is replayed in between. Enough for 3,855 query heads of a batch;
/// what needs more has its counters beside its other workspace, and zeroes them in each call.
pub const COUNTER_BYTES: usize = 256 << 10;

/// Bytes for each use, at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Workspace([usize; WorkspaceUse::ALL.len()]);

impl Workspace {
    pub fn none() -> Workspace {
        Workspace::default()
    }

    pub fn with(mut self, usage: WorkspaceUse, bytes: usize) -> Workspace {
        self.0[usage as usize] = bytes;
        self
    }

    pub fn of(&self, usage: WorkspaceUse) -> usize {
        self.0[usage as usize]
    }

    /// The workspace of an operation that may run by either of two kernels.
    pub fn or(mut self, other: Workspace) -> Workspace {
        self.0.iter_mut().zip(other.0).for_each(|(bytes, other)| *bytes = other.max(*bytes));
        self
    }

    /// Bytes behind the counters' fixed place.
    pub fn carved(&self) -> usize {
        WorkspaceUse::ALL.iter().map(|&usage| self.room(usage)).fold(0, usize::saturating_add)
    }

    /// The bytes of a workspace for an operation that needs this; 0 if it needs none.
    pub fn total(&self) -> usize {
        self.total_with(&[])
    }

    /// The bytes of a workspace that has further sets of blocks, `StreamScratch::lock_inputs`' and `lock_outputs`'.
    pub fn total_with(&self, further: &[Workspace]) -> usize {
        if further.iter().chain([self]).all(|workspace| *workspace == Workspace::none()) {
            return 0;
        }
        further.iter().map(Workspace::carved).fold(COUNTER_BYTES.saturating_add(self.carved()), usize::saturating_add)
    }

    /// From the first carved byte to those of this use.
    pub fn offset(&self, usage: WorkspaceUse) -> usize {
        WorkspaceUse::ALL[..usage as usize].iter().map(|&before| self.room(before)).sum()
    }

    fn room(&self, usage: WorkspaceUse) -> usize {
        match self.of(usage) {
            bytes if usage == WorkspaceUse::Counters && bytes <= COUNTER_BYTES => 0,
            bytes => bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX),
        }
    }
}

/// The bytes of a workspace for this operation. The context is current.
pub(super) fn bytes(executor: &CudaExecutor, op: &Operation) -> usize {
    match op {
        Operation::Linear(op) => linear_workspace::bytes(executor, op),
        Operation::GroupedLinear(op) => grouped_linear::workspace(executor, op).total(),
        Operation::Matmul(op) => matmul::workspace(executor, op).total(),
        Operation::AttentionPrefill(op) => attention::prefill_workspace_bytes(executor, op),
        Operation::AttentionDecode(op) => attention::decode_workspace_bytes(executor, op),
        Operation::Argmax(op) => argmax::workspace(executor, op).total(),
        Operation::Sample(op) => sample::workspace(executor, op).total(),
        Operation::SortRows(op) => sort_rows::workspace(op).total(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_purpose_has_its_room_and_a_boundary() {
        let workspace = Workspace::none()
            .with(WorkspaceUse::Kernel, 1)
            .with(WorkspaceUse::Weight, 300)
            .with(WorkspaceUse::Input, 256);
        assert_eq!(workspace.carved(), 256 + 512 + 256);
        assert_eq!(workspace.offset(WorkspaceUse::Kernel), 0);
        assert_eq!((workspace.offset(WorkspaceUse::Weight), workspace.offset(WorkspaceUse::Input)), (256, 768));
        assert_eq!(workspace.total(), COUNTER_BYTES + 1024);
        assert_eq!(workspace.total_with(&[Workspace::none().with(WorkspaceUse::Input, 5)]), COUNTER_BYTES + 1280);
        assert_eq!(Workspace::none().total_with(&[workspace]), workspace.total());
    }

    #[test]
    fn counters_have_their_place_until_they_are_many() {
        let few = Workspace::none().with(WorkspaceUse::Counters, COUNTER_BYTES).with(WorkspaceUse::Kernel, 256);
        assert_eq!((few.total(), few.carved()), (COUNTER_BYTES + 256, 256));
        let many = few.with(WorkspaceUse::Counters, COUNTER_BYTES + 1);
        assert_eq!((many.offset(WorkspaceUse::Counters), many.carved()), (256, 256 + COUNTER_BYTES + 256));
        assert_eq!(Workspace::none().total(), 0);
    }

    #[test]
    fn one_way_or_the_other_fits() {
        let first = Workspace::none().with(WorkspaceUse::Kernel, 100).with(WorkspaceUse::Input, 7);
        let second = Workspace::none().with(WorkspaceUse::Kernel, 50).with(WorkspaceUse::Product, 9);
        let both = first.or(second);
        assert_eq!(WorkspaceUse::ALL.map(|usage| both.of(usage)), [100, 9, 0, 7, 0]);
    }

    #[test]
    fn what_no_memory_holds_is_a_number_all_the_same() {
        assert_eq!(Workspace::none().with(WorkspaceUse::Weight, usize::MAX).total(), usize::MAX);
    }
}

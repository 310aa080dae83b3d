//! What an operation keeps in a stream's scratch: the same sums size a query's answer and carve a caller's workspace.

use super::executor::CudaExecutor;
use super::scratch::{Purpose, ALIGNMENT};
use super::{argmax, attention, grouped_linear, linear_needs, matmul, sample};
use crate::operation::Operation;

/// The first bytes of a caller's workspace: counters, which stay zero between operations whatever else the workspace
/// holds, also when a graph that was captured with it is replayed in between. Enough for 3,855 query heads of a batch;
/// what needs more has its counters beside its other workspace, and zeroes them in each call.
pub const COUNTER_BYTES: usize = 256 << 10;

/// Bytes for each purpose, at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Needs([usize; Purpose::ALL.len()]);

impl Needs {
    pub fn none() -> Needs {
        Needs::default()
    }

    pub fn with(mut self, purpose: Purpose, bytes: usize) -> Needs {
        self.0[purpose as usize] = bytes;
        self
    }

    pub fn of(&self, purpose: Purpose) -> usize {
        self.0[purpose as usize]
    }

    /// What an operation needs that goes one of two ways.
    pub fn or(mut self, other: Needs) -> Needs {
        self.0.iter_mut().zip(other.0).for_each(|(bytes, other)| *bytes = other.max(*bytes));
        self
    }

    /// Bytes behind the counters' fixed place.
    pub fn carved(&self) -> usize {
        Purpose::ALL.iter().map(|&purpose| self.room(purpose)).fold(0, usize::saturating_add)
    }

    /// The bytes of a workspace for an operation that needs this; 0 if it needs none.
    pub fn total(&self) -> usize {
        self.total_with(&[])
    }

    /// The bytes of a workspace that has further sets of blocks, `StreamScratch::lock_inputs`' and `lock_outputs`'.
    pub fn total_with(&self, further: &[Needs]) -> usize {
        if further.iter().chain([self]).all(|needs| *needs == Needs::none()) {
            return 0;
        }
        further.iter().map(Needs::carved).fold(COUNTER_BYTES.saturating_add(self.carved()), usize::saturating_add)
    }

    /// From the first carved byte to the purpose's.
    pub fn offset(&self, purpose: Purpose) -> usize {
        Purpose::ALL[..purpose as usize].iter().map(|&before| self.room(before)).sum()
    }

    fn room(&self, purpose: Purpose) -> usize {
        match self.of(purpose) {
            bytes if purpose == Purpose::Counters && bytes <= COUNTER_BYTES => 0,
            bytes => bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX),
        }
    }
}

/// The bytes of a workspace for this operation. The context is current.
pub(super) fn bytes(executor: &CudaExecutor, op: &Operation) -> usize {
    match op {
        Operation::Linear(op) => linear_needs::bytes(executor, op),
        Operation::GroupedLinear(op) => grouped_linear::needs(executor, op).total(),
        Operation::Matmul(op) => matmul::needs(executor, op).total(),
        Operation::AttentionDecode(op) => attention::decode_needs(executor, op).total(),
        Operation::Argmax(op) => argmax::needs(executor, op).total(),
        Operation::Sample(op) => sample::needs(executor, op).total(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_purpose_has_its_room_and_a_boundary() {
        let needs = Needs::none().with(Purpose::Workspace, 1).with(Purpose::Weight, 300).with(Purpose::Input, 256);
        assert_eq!(needs.carved(), 256 + 512 + 256);
        assert_eq!(needs.offset(Purpose::Workspace), 0);
        assert_eq!((needs.offset(Purpose::Weight), needs.offset(Purpose::Input)), (256, 768));
        assert_eq!(needs.total(), COUNTER_BYTES + 1024);
        assert_eq!(needs.total_with(&[Needs::none().with(Purpose::Input, 5)]), COUNTER_BYTES + 1280);
        assert_eq!(Needs::none().total_with(&[needs]), needs.total());
    }

    #[test]
    fn counters_have_their_place_until_they_are_many() {
        let few = Needs::none().with(Purpose::Counters, COUNTER_BYTES).with(Purpose::Workspace, 256);
        assert_eq!((few.total(), few.carved()), (COUNTER_BYTES + 256, 256));
        let many = few.with(Purpose::Counters, COUNTER_BYTES + 1);
        assert_eq!((many.offset(Purpose::Counters), many.carved()), (256, 256 + COUNTER_BYTES + 256));
        assert_eq!(Needs::none().total(), 0);
    }

    #[test]
    fn one_way_or_the_other_fits() {
        let first = Needs::none().with(Purpose::Workspace, 100).with(Purpose::Input, 7);
        let second = Needs::none().with(Purpose::Workspace, 50).with(Purpose::Product, 9);
        let both = first.or(second);
        assert_eq!(Purpose::ALL.map(|purpose| both.of(purpose)), [100, 9, 0, 7, 0]);
    }

    #[test]
    fn what_no_memory_holds_is_a_number_all_the_same() {
        assert_eq!(Needs::none().with(Purpose::Weight, usize::MAX).total(), usize::MAX);
    }
}

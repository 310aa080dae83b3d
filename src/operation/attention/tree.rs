//! The query rows of a sequence as a tree of draft tokens (SpecInfer, Miao et al. 2023; Medusa, Cai et al. 2024): each row sees the
//! keys before the tree, its own and those of its ancestors.
//!
//! With n rows and L keys of a sequence, row j's key is L − n + j. `parents[j]` below j is the row that j follows, −1 none. What
//! stands for a position is the first row's plus the number of a row's ancestors, so that a window is that of the text that
//! ends with the row.

use super::{AttentionConfig, AttentionPrefill};
use crate::error::{Error, Result, Status};
use crate::tensor::{DType, Tensor};
use std::ffi::c_void;

/// Rows of a tree, at most: what a word of ancestors has room for.
pub const MAX_TREE_ROWS: usize = 64;

/// i32, as many as there are query rows, in their order, contiguous. A tensor's shape and strides would make every operation larger.
#[derive(Debug, Clone, Copy)]
pub struct Tree {
    parents: *mut c_void,
    rows: usize,
}

// SAFETY: a view carries an address, and every dereference is an unsafe act of an executor that was handed the view.
unsafe impl Send for Tree {}
// SAFETY: as above; the view itself is immutable.
unsafe impl Sync for Tree {}

impl Tree {
    pub fn parents(&self) -> Tensor {
        Tensor::new(self.parents, DType::I32, &[self.rows])
    }

    pub fn address(&mut self) -> &mut *mut c_void {
        &mut self.parents
    }

    /// A bit for each row of the sequence that its row `row` sees, whose first row is number `first` of all; of rows that do not come
    /// before their own none is an ancestor. For an executor that computes on the host.
    pub fn ancestors(&self, first: usize, row: usize) -> u64 {
        let mut seen = 0;
        let mut next = row as i32;
        let mut last = next + 1;
        while (0..last).contains(&next) && next < MAX_TREE_ROWS as i32 {
            seen |= 1 << next;
            last = next;
            // SAFETY: a validated tensor with an entry for each row, in host memory.
            next = unsafe { self.parents.cast::<i32>().add(first + next as usize).read() };
        }
        seen
    }
}

impl AttentionPrefill {
    pub fn with_tree(mut self, parents: Option<Tensor>) -> Result<AttentionPrefill> {
        let Some(parents) = parents else { return Ok(self) };
        let unsupported =
            |what: String| Err(Error::new(Status::Attention, format!("`tree_parents` is given, and {what}")));
        let AttentionConfig { causal, window, chunk, sink_tokens, .. } = self.config;
        if !causal {
            return unsupported("the attention is bidirectional".into());
        }
        if window > 0 && window < MAX_TREE_ROWS {
            return unsupported(format!("the window is {window}; {MAX_TREE_ROWS} or more is supported"));
        }
        if chunk > 0 || sink_tokens > 0 || self.terms.slopes.is_some() {
            return unsupported("chunks, sink tokens and slopes are not supported with it".into());
        }
        if self.sequences.iter().any(|span| span.prefix > 0) {
            return unsupported("so is `prefix_lengths`".into());
        }
        let most = match &self.lengths {
            Some(lengths) => lengths.max_rows,
            None => self.sequences.iter().map(|span| span.query_count).max().unwrap_or(0),
        };
        if most > MAX_TREE_ROWS {
            return Err(Error::new(
                Status::Attention,
                format!("a sequence has {most} query rows; a tree has up to {MAX_TREE_ROWS}"),
            )
            .with_limit(most as u64, MAX_TREE_ROWS as u64));
        }
        parents.expect_dtype("tree_parents", DType::I32)?;
        match self.is_dense() {
            true => parents.expect_shape("tree_parents", &[self.blocks, self.query.tokens])?,
            false => parents.expect_shape("tree_parents", &[self.query.tokens])?,
        }
        parents.expect_readable("tree_parents")?;
        if !parents.is_contiguous() {
            return Err(Error::invalid("tensor `tree_parents` is strided; a contiguous one is needed"));
        }
        self.tree = Some(Tree { parents: parents.data, rows: parents.elements() });
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ancestors_end_at_the_root_and_where_a_parent_does_not_come_before() {
        let mut parents = [9, -1, 0, 1, 1, 4, 5, -7, 64];
        let tree = Tree { parents: parents.as_mut_ptr().cast(), rows: 9 };
        // Rows 4 and 5 name themselves.
        let seen: Vec<u64> = (0..8).map(|row| tree.ancestors(1, row)).collect();
        assert_eq!(seen, [0b1, 0b11, 0b111, 0b1011, 1 << 4, 1 << 5, 1 << 6, 1 << 7]);
    }
}

//! Other memory for a recorded list: addresses of a range become those of another one, and shapes and order stay.

use super::optimize::Subject;
use super::{passes, Graph, Lists, Node, Optimization, Recorded};
use crate::allocation::with_room;
use crate::error::{Error, Result};
use crate::operation::access::{Access, Each, Region};
use crate::operation::Operation;
use std::ops::Range;
use std::sync::Arc;

/// What both addresses have in common, so that kernels find the alignment that they were chosen for.
const ALIGNMENT: usize = 16;

impl Graph {
    /// From now on launches use the memory at `to` in the place of the bytes of `from`, wherever tensors, copies and fills name
    /// them. The passes of the last optimisation run again, since memory may overlap now what it did not. Marks of internal memory
    /// move too. After an error the graph is as before.
    pub fn rebind(&self, from: Range<usize>, to: usize) -> Result<()> {
        if from.is_empty() || from.start.abs_diff(to) % ALIGNMENT != 0 {
            return Err(Error::invalid(format!(
                "{} bytes at {:#x} cannot become those at {to:#x}: at least one byte is needed, and addresses that are a multiple \
                 of {ALIGNMENT} bytes apart",
                from.len(),
                from.start
            )));
        }
        let lists = self.expect_lists()?;
        let mut nodes = with_room(lists.recorded.nodes.len(), "a graph's nodes")?;
        let mut found = false;
        for (index, node) in lists.recorded.nodes.iter().enumerate() {
            let named = |error: Error| error.context(format_args!("node {index}, {}", node.op.kind().name()));
            let moved = moved(node, &from, to).map_err(named)?;
            found |= moved.is_some();
            nodes.push(moved.unwrap_or_else(|| node.clone()));
        }
        if !found {
            return Err(Error::invalid(format!("no node names the {} bytes at {:#x}", from.len(), from.start)));
        }
        let internal = super::Ranges::of(self.internal().iter().flat_map(|range| pieces(range, &from, to)).collect());
        let recorded = Arc::new(Recorded::of(nodes)?);
        let lists = match lists.optimization {
            None => Lists { launched: recorded.clone(), recorded, optimization: None },
            Some(Optimization { level, choice, .. }) => {
                let subject = Subject {
                    recorded: &recorded,
                    internal: &internal,
                    executor: self.executor(),
                    passes: passes::ALL,
                };
                let optimized = subject.by_choice(level, choice)?;
                let launched = Arc::new(Recorded::of(optimized.nodes)?);
                let (choice, report) = (optimized.choice, Arc::new(optimized.report));
                Lists { recorded, launched, optimization: Some(Optimization { level, choice, report }) }
            }
        };
        self.set(lists);
        *self.internal.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = internal;
        Ok(())
    }
}

/// A range with the part of it that lies in `from` moved.
fn pieces(range: &Range<usize>, from: &Range<usize>, to: usize) -> Vec<Range<usize>> {
    let (start, end) = (range.start.max(from.start), range.end.min(from.end));
    if start >= end {
        return vec![range.clone()];
    }
    let moved = start - from.start + to;
    vec![range.start..start, moved..moved + (end - start), end..range.end]
        .into_iter()
        .filter(|range| !range.is_empty())
        .collect()
}

fn accesses_of(op: &Operation) -> Vec<Access> {
    let mut accesses = Vec::new();
    op.accesses(&mut Each(|access| accesses.push(access)));
    accesses
}

/// The node on other memory; `None`: it does not use the range.
fn moved(node: &Node, from: &Range<usize>, to: usize) -> Result<Option<Node>> {
    let touches = |region: &Region| !region.is_empty() && region.start < from.end && from.start < region.end();
    if !node.accesses.iter().any(|access| touches(&access.region)) {
        return Ok(None);
    }
    if let Some(access) = node
        .accesses
        .iter()
        .find(|access| touches(&access.region) && (access.region.start < from.start || access.region.end() > from.end))
    {
        return Err(Error::invalid(format!("`{}` lies only in part in the range", access.name)));
    }
    let mut op = node.op.clone();
    op.for_each_address(&mut |address, _| {
        if from.contains(&(*address as usize)) {
            *address = (*address as usize - from.start + to) as *mut _;
        }
    });
    let accesses = accesses_of(&op);
    let is_moved = |(before, after): (&Access, &Access)| {
        !touches(&before.region) || after.region.start == before.region.start - from.start + to
    };
    if let Some((before, _)) = node.accesses.iter().zip(&accesses).find(|&pair| !is_moved(pair)) {
        return Err(Error::invalid(format!(
            "`{}` is a weight's or a cache's memory, or keys and values of a prefill, which cannot be replaced",
            before.name
        )));
    }
    op.expect_apart()?;
    Ok(Some(Node { op, accesses, dependencies: Vec::new(), ..node.clone() }))
}

//! Other memory for a recorded list: addresses of a range become those of another one, and shapes and order stay.

use super::fp8::Conversion;
use super::{Graph, Lists, Node, Recorded};
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
        if from.is_empty() || !from.start.abs_diff(to).is_multiple_of(ALIGNMENT) {
            return Err(Error::invalid(format!(
                "{} bytes at {:#x} cannot become those at {to:#x}: at least one byte is needed, and addresses that are a multiple \
                 of {ALIGNMENT} bytes apart",
                from.len(),
                from.start
            )));
        }
        let lists = self.expect_lists()?;
        let Some(recorded) = moved_list(&lists.recorded, &from, to)? else {
            return Err(Error::invalid(format!("no node names the {} bytes at {:#x}", from.len(), from.start)));
        };
        let conversion = match lists.conversion.as_deref() {
            None => None,
            Some(conversion) => {
                let list = moved_list(&conversion.list, &from, to)?.map_or(conversion.list.clone(), Arc::new);
                Some(Arc::new(Conversion { list, ..conversion.clone() }))
            }
        };
        let internal = super::Ranges::of(self.internal().iter().flat_map(|range| pieces(range, &from, to)).collect());
        let mut lists = Lists { conversion, optimization: lists.optimization, ..Lists::of(Arc::new(recorded)) };
        lists.launched = lists.first().clone();
        self.set(self.again(lists, &internal)?);
        *self.internal.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = internal;
        Ok(())
    }
}

/// The list on other memory; `None`: it does not use the range.
fn moved_list(list: &Recorded, from: &Range<usize>, to: usize) -> Result<Option<Recorded>> {
    let mut nodes = with_room(list.nodes.len(), "a graph's nodes")?;
    let mut found = false;
    for (index, node) in list.nodes.iter().enumerate() {
        let named = |error: Error| error.context(format_args!("node {index}, {}", node.op.kind().name()));
        let moved = moved(node, from, to).map_err(named)?;
        found |= moved.is_some();
        nodes.push(moved.unwrap_or_else(|| node.clone()));
    }
    if found {
        Recorded::of(nodes).map(Some)
    } else {
        Ok(None)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuExecutor;
    use crate::executor::Executor;
    use crate::graph::optimize::{Level, Options};
    use crate::operation::elementwise::{Elementwise, ElementwiseKind};
    use crate::stream::Stream;
    use crate::tensor::Tensor;

    /// 16-byte aligned, as all memory of the library's is.
    #[repr(align(64))]
    struct Values([f32; 16]);

    /// Records `twice` = 2 · x and y = 3 · `twice`.
    fn recorded(x: &mut Values, twice: &mut Values, y: &mut Values) -> (Graph, Arc<Stream>) {
        let executor: Arc<dyn Executor> = Arc::new(CpuExecutor::new(1).unwrap());
        let (stream, graph) = (Arc::new(Stream::new(&executor, 0).unwrap()), Graph::on(&executor));
        let [x, twice, y] = [x, twice, y].map(|values| Tensor::of(&mut values.0, &[2, 8]));
        graph.begin(&stream).unwrap();
        for (factor, input, output) in [(2.0, x, twice), (3.0, twice, y)] {
            let op = Elementwise::new(ElementwiseKind::Scale(factor), input, None, output).unwrap();
            stream.sink().unwrap().take(op.into(), None).unwrap();
        }
        graph.end(&stream).unwrap();
        (graph, stream)
    }

    fn range(values: &Values) -> Range<usize> {
        let start = values.0.as_ptr() as usize;
        start..start + size_of_val(&values.0)
    }

    #[test]
    fn launches_use_the_new_memory_and_leave_the_old() {
        let [mut x, mut twice, mut y, mut other] = [1.0, 0.0, 0.0, 5.0].map(|value| Values([value; 16]));
        let (graph, stream) = recorded(&mut x, &mut twice, &mut y);
        graph.launch(&stream).unwrap();
        assert_eq!(y.0, [6.0; 16]);
        graph.rebind(range(&x), range(&other).start).unwrap();
        y.0 = [0.0; 16];
        graph.launch(&stream).unwrap();
        assert_eq!((y.0, x.0), ([30.0; 16], [1.0; 16]));
        // Nobody names x any more.
        assert!(graph.rebind(range(&x), range(&other).start).unwrap_err().message.contains("no node names"));
        std::hint::black_box(&mut other).0 = [1.0; 16];
        graph.launch(&stream).unwrap();
        assert_eq!(y.0, [6.0; 16]);
    }

    #[test]
    fn passes_and_marks_go_to_the_new_memory() {
        let [mut x, mut twice, mut y, other] = [1.0, 0.0, 0.0, 0.0].map(|value| Values([value; 16]));
        let (graph, stream) = recorded(&mut x, &mut twice, &mut y);
        graph.mark_internal(range(&twice));
        let options = Options { maximum_error: 1.0, ..Options::of(Level::O3) };
        graph.optimize(&options, &stream).unwrap();
        assert_eq!(graph.recorded().unwrap().nodes.len(), 1, "one factor of 6");
        graph.rebind(range(&twice), range(&other).start).unwrap();
        assert_eq!(graph.recorded().unwrap().nodes.len(), 1);
        // In the place of x the intermediate value is the first operation's own input, and an output of the next launch's.
        graph.rebind(range(&other), range(&x).start).unwrap();
        assert_eq!(graph.recorded().unwrap().nodes.len(), 2);
        graph.launch(&stream).unwrap();
        assert_eq!((x.0, y.0), ([2.0; 16], [6.0; 16]));
    }

    #[test]
    fn what_cannot_be_replaced_is_refused_and_changes_nothing() {
        let [mut x, mut twice, mut y] = [1.0, 0.0, 0.0].map(|value| Values([value; 16]));
        let (graph, stream) = recorded(&mut x, &mut twice, &mut y);
        let refused = |from: Range<usize>, to: usize, reason: &str| {
            let error = graph.rebind(from, to).unwrap_err();
            assert!(error.message.contains(reason), "{error}");
        };
        let x_range = range(&x);
        refused(x_range.start..x_range.start, range(&y).start, "at least one byte");
        refused(x_range.clone(), range(&y).start + 4, "a multiple of 16");
        refused(x_range.start..x_range.start + 16, range(&y).start, "only in part");
        refused(x_range.clone(), range(&twice).start + 32, "overlaps");
        graph.launch(&stream).unwrap();
        assert_eq!(y.0, [6.0; 16]);
        let empty = Graph::on(graph.executor());
        assert!(empty.rebind(x_range, range(&y).start).is_err());
    }
}

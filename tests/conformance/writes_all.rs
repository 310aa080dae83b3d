//! Whether an operation that says that it writes all of its outputs (`Operation::writes_all`) does: run on outputs that hold one
//! byte everywhere and then another, it leaves the same. Passes of graphs leave out work whose result such an operation would
//! replace.
//!
//! Every operation of every case passes here before it runs (`Run::executor`, `Run::call`), so a new one is looked at as soon as
//! it has a case.

use nvbackend::capi::backend::nvb_backend;
use nvbackend::capi::graph::{
    nvb_graph, nvb_graph_begin, nvb_graph_create, nvb_graph_destroy, nvb_graph_end, operations_of,
};
use nvbackend::capi::status::{nvb_status, NVB_OK};
use nvbackend::capi::stream::{nvb_stream, nvb_stream_create, nvb_stream_destroy};
use nvbackend::device::{CopyKind, RawHandle};
use nvbackend::error::{Error, Result, Status};
use nvbackend::executor::Executor;
use nvbackend::operation::access::{Access, Each, Effect, Region};
use nvbackend::operation::Operation;
use std::ops::{Deref, Range};
use std::ptr::null_mut;

/// Larger operations are many times what a case of them needs, and run the code of smaller ones.
const MOST_OPERATIONS: f64 = 3e7;
const PATTERNS: [u8; 2] = [0x00, 0x5a];

/// The executor of a case, whose operations are looked at before they run.
#[derive(Clone, Copy)]
pub struct Checked<'a>(pub &'a (dyn Executor + 'static));

impl Deref for Checked<'_> {
    type Target = dyn Executor;

    fn deref(&self) -> &Self::Target {
        self.0
    }
}

impl Checked<'_> {
    pub fn run(&self, op: &Operation, stream: RawHandle) -> Result<()> {
        self.expect_writes_all(op, op.writes_all(), stream)?;
        self.0.run(op, stream)
    }

    /// What the function queues is looked at, and not run. `false`: it cannot be recorded, or is refused.
    pub fn look_at(
        &self,
        backend: *const nvb_backend,
        function: &dyn Fn(*const nvb_backend, *mut nvb_stream) -> nvb_status,
    ) -> Result<bool> {
        let (mut graph, mut stream): (*mut nvb_graph, *mut nvb_stream) = (null_mut(), null_mut());
        // SAFETY: live handles, and places for new ones.
        let recorded = unsafe {
            nvb_stream_create(backend, 0, &mut stream) == NVB_OK
                && nvb_graph_create(backend, &mut graph) == NVB_OK
                && nvb_graph_begin(graph, stream) == NVB_OK
                && function(backend, stream) == NVB_OK
                && nvb_graph_end(graph, stream) == NVB_OK
        };
        let looked = || -> Result<()> {
            let operations = if recorded { operations_of(graph)? } else { Vec::new() };
            let raw = self.0.stream_create(0)?;
            let looked = operations.iter().try_for_each(|op| self.expect_writes_all(op, op.writes_all(), raw));
            self.0.stream_destroy(raw);
            looked
        }();
        // SAFETY: made above, or NULL.
        unsafe {
            nvb_graph_destroy(graph);
            nvb_stream_destroy(stream);
        }
        looked.map(|()| recorded)
    }

    /// An error where the operation leaves a part of its outputs as it was, though `said` says otherwise. The memory is then as
    /// before.
    fn expect_writes_all(&self, op: &Operation, said: bool, stream: RawHandle) -> Result<()> {
        let on_host = matches!(op, Operation::MemoryCopy(copy) if copy.kind != CopyKind::DeviceToDevice);
        if !said || on_host || op.cost().operations > MOST_OPERATIONS {
            return Ok(());
        }
        let mut accesses: Vec<Access> = Vec::new();
        op.accesses(&mut Each(|access| accesses.push(access)));
        accesses.retain(|access| !access.region.is_empty());
        let (written, read): (Vec<_>, Vec<_>) = accesses.into_iter().partition(|access| access.effect == Effect::Write);
        let apart = |a: &Region, b: &Region| a.end() <= b.start || b.end() <= a.start;
        // In place, what was there is an input.
        let is_output =
            |access: &&Access| access.region.exact && read.iter().all(|input| apart(&access.region, &input.region));
        let before =
            written.iter().map(|access| self.download(&span(&access.region), stream)).collect::<Result<Vec<_>>>()?;
        let restore = || {
            written.iter().zip(&before).try_for_each(|(access, bytes)| self.upload(access.region.start, bytes, stream))
        };
        let after = |pattern: u8| -> Result<Vec<Vec<u8>>> {
            restore()?;
            for (access, bytes) in written.iter().zip(&before).filter(|(access, _)| is_output(access)) {
                let mut bytes = bytes.clone();
                for row in 0..access.region.rows {
                    bytes[row * access.region.stride..][..access.region.row_bytes].fill(pattern);
                }
                self.upload(access.region.start, &bytes, stream)?;
            }
            self.0.run(op, stream)?;
            written.iter().map(|access| self.download(&span(&access.region), stream)).collect()
        };
        let results = PATTERNS.map(after);
        restore()?;
        // What is refused is refused again when the case runs it.
        let [Ok(first), Ok(second)] = results else { return Ok(()) };
        match written.iter().zip(first.iter().zip(&second)).find(|(_, (first, second))| first != second) {
            None => Ok(()),
            Some((access, _)) => Err(Error::new(
                Status::Internal,
                format!(
                    "{} says that it writes all of its outputs (writes_all in src/operation/operands.rs), and leaves a part of \
                     `{}` as it was",
                    op.kind().name(),
                    access.name
                ),
            )),
        }
    }

    fn download(&self, range: &Range<usize>, stream: RawHandle) -> Result<Vec<u8>> {
        let mut bytes = vec![0u8; range.len()];
        // SAFETY: what the operation writes is memory of the case, and the wait is before the buffer goes.
        unsafe {
            self.0.copy(bytes.as_mut_ptr().cast(), range.start as _, bytes.len(), CopyKind::DeviceToHost, stream)?
        };
        self.0.stream_synchronize(stream)?;
        Ok(bytes)
    }

    fn upload(&self, to: usize, bytes: &[u8], stream: RawHandle) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.0.copy(to as _, bytes.as_ptr().cast(), bytes.len(), CopyKind::HostToDevice, stream)? };
        self.0.stream_synchronize(stream)
    }
}

fn span(region: &Region) -> Range<usize> {
    region.start..region.end()
}

/// A scatter of one row of two leaves the other, and the check finds it out if it is told otherwise.
#[test]
fn an_operation_that_leaves_a_part_is_found() {
    use crate::run::{check, PLAIN};
    use nvbackend::operation::scatter_rows::ScatterRows;
    use nvbackend::tensor::DType;
    check("a wrong writes_all", &[()], |run, ()| {
        let input = run.tensor(DType::F32, &[1, 4], PLAIN, &[1.0; 4])?;
        let rows = run.integers(&[1])?;
        let output = run.output(DType::F32, &[2, 4], PLAIN)?;
        let op: Operation = ScatterRows::new(input, rows, output)?.into();
        let executor = run.executor();
        let (true_word, wrong) = (op.writes_all(), executor.expect_writes_all(&op, true, run.stream.raw()));
        match (true_word, wrong) {
            (false, Err(error)) if error.message.contains("leaves a part of `output`") => Ok(()),
            found => Err(format!("{found:?}").into()),
        }
    });
}

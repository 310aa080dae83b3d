//! The kernels that can do an attention, measured on the caller's own tensors.

use super::timer::{EventTimer, Timer};
use super::LEAD_BYTES;
use crate::allocation::{collected, push};
use crate::device::DeviceKind;
use crate::error::Result;
use crate::executor::Executor;
use crate::memory::MemoryManager;
use crate::operation::Operation;
use crate::registry::choices::Choice;
use crate::registry::{kernels, KernelId};
use crate::stream::Stream;
use std::sync::Arc;

/// One kernel's time.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    pub kernel: &'static str,
    /// Median of a launch.
    pub seconds: f64,
    /// Whether it is what runs.
    pub is_chosen: bool,
}

/// Launches between two looks at the clock take about so many seconds, and are so many at most.
const BATCH_SECONDS: f64 = 2e-3;
const MOST_LAUNCHES: usize = 32;

/// Every candidate, in the order in which they are preferred, with `rounds` timed rounds in turns. Each writes the operation's
/// outputs, of which the last launch's remain. Empty: nothing runs, since there are no rows.
pub fn benchmark(
    executor: &Arc<dyn Executor>,
    memory: &Arc<MemoryManager>,
    op: &Operation,
    stream: &Stream,
    rounds: usize,
) -> Result<Vec<Measured>> {
    let chosen = executor.plan(op)?.kernel;
    if chosen.is_empty() {
        return Ok(Vec::new());
    }
    let candidates: Vec<Option<KernelId>> = match executor.attention_candidates(op)? {
        // The executor has no choice: what runs is all that there is.
        none if none.is_empty() => vec![None],
        found => collected(found.into_iter().map(Some), "the candidates of a benchmark")?,
    };
    let run = |candidate: Option<KernelId>| match candidate {
        Some(kernel) => executor.attention_with(op, kernel, stream.raw()),
        None => executor.run(op, stream.raw()),
    };
    let lead = match executor.info().kind {
        DeviceKind::Cpu => None,
        DeviceKind::Cuda | DeviceKind::Tpu => Some(memory.allocate_owned(LEAD_BYTES, stream.raw())?),
    };
    let mut timer = EventTimer::new(stream, lead)?;
    // The timer asks for a choice to tell scripts of tests what they time; it reads nothing of it.
    let label = Choice::of(kernels().next().expect("there are kernels").0);
    let mut launches = Vec::new();
    let mut times: Vec<Vec<f64>> = Vec::new();
    for &candidate in &candidates {
        // The first launch loads the kernel and takes workspace.
        run(candidate)?;
        let once = timer.time(&label, stream, 1, &mut |_| run(candidate))?;
        let count = (BATCH_SECONDS / once.max(1e-9)).clamp(1.0, MOST_LAUNCHES as f64) as usize;
        push(&mut launches, count, "the candidates of a benchmark")?;
        push(&mut times, Vec::new(), "the candidates of a benchmark")?;
    }
    for _ in 0..rounds {
        for (at, &candidate) in candidates.iter().enumerate() {
            let seconds = timer.time(&label, stream, launches[at], &mut |_| run(candidate))?;
            push(&mut times[at], seconds, "the times of a benchmark")?;
        }
    }
    let measured = candidates.iter().zip(times).map(|(candidate, mut times)| {
        times.sort_by(f64::total_cmp);
        let kernel = candidate.map_or(chosen, |kernel| kernel.kernel().name);
        Measured { kernel, seconds: times[times.len() / 2], is_chosen: kernel == chosen }
    });
    collected(measured, "the candidates of a benchmark")
}

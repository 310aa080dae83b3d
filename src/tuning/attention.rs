//! The kernels that can do an attention, measured on the caller's own tensors, and the choice among them.

use super::timer::{EventTimer, HostTimer, Timer};
use super::tuner::{Options, Outcome, Progress, Report, WORTHWHILE};
use super::{Clock, LEAD_BYTES};
use crate::allocation::{collected, filled, push};
use crate::device::CopyKind;
use crate::device::DeviceKind;
use crate::error::{Error, Result, Status};
use crate::executor::Executor;
use crate::memory::MemoryManager;
use crate::operation::Operation;
use crate::registry::attention_key::AttentionKey;
use crate::registry::choices::{Choice, Entry};
use crate::registry::{kernels, KernelId};
use crate::stream::Stream;
use crate::tensor::{DType, Element, Heads};
use half::{bf16, f16};
use std::ops::ControlFlow;
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

/// Output rows that candidates are compared by, spread over those that there are.
const COMPARED_ROWS: usize = 32;
/// ‖output − plainest‖ / ‖plainest‖ up to which a kernel is right: twice what FP8 queries and keys differ by among kernels, whose
/// weights some round to 8 bits.
const LARGEST_DIFFERENCE: f64 = 6e-2;

/// What the key of the attention is; `None` of another operation.
pub(super) fn key_of(op: &Operation) -> Option<AttentionKey> {
    match op {
        Operation::AttentionPrefill(op) => Some(AttentionKey::of_prefill(op)),
        Operation::AttentionDecode(op) => Some(AttentionKey::of_decode(op)),
        _ => None,
    }
}

/// The output's rows, and how many there are of all sequences.
fn output_of(op: &Operation) -> Option<(Heads, usize)> {
    match op {
        Operation::AttentionPrefill(op) => Some((op.output, op.output.tokens)),
        Operation::AttentionDecode(op) => Some((op.output, op.output.tokens)),
        _ => None,
    }
}

/// Measures the candidates for this attention, of which those that give what the plainest gives may be chosen, and says which is
/// to run from now on, with its key. Each writes the operation's outputs. `None`: nothing runs, there is no choice, or the caller
/// ended it.
pub fn tune(
    executor: &Arc<dyn Executor>,
    memory: &Arc<MemoryManager>,
    op: &Operation,
    stream: &Stream,
    (options, clock): (Options, Clock),
    progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> Result<(Report, Option<(AttentionKey, Entry)>)> {
    if executor.choices().are_fixed() {
        let text = "batch_invariant is set, under which choices of kernels are left aside: there is nothing to tune";
        return Err(Error::new(Status::Configuration, text).with_advice("tune with a backend without it"));
    }
    let mut report = Report::default();
    let candidates = executor.attention_candidates(op)?;
    let (Some(key), Some(&plainest), Some(&default)) = (key_of(op), candidates.last(), candidates.first()) else {
        return Ok((report, None));
    };
    let mut timer: Box<dyn Timer> = match clock {
        Clock::Host => Box::new(HostTimer),
        Clock::Events => Box::new(EventTimer::new(stream, Some(memory.allocate_owned(LEAD_BYTES, stream.raw())?))?),
    };
    executor.attention_with(op, plainest, stream.raw())?;
    let expected = output_rows(op, stream)?;

    // Each runs once, which loads it and takes workspace, and again by the clock for the number of launches of a round.
    let mut right: Vec<Candidate> = Vec::new();
    let tell = |index: usize, outcome: Outcome, report: &mut Report, progress: &mut dyn FnMut(&Progress) -> _| {
        let (case, cases, candidates, choice) = (0, 1, candidates.len(), &Choice::of(candidates[index]));
        let told = Progress { case, cases, candidate: index, candidates, choice, outcome: &outcome };
        if progress(&told) == ControlFlow::Break(()) {
            report.stopped = true;
        }
    };
    for (index, &kernel) in candidates.iter().enumerate() {
        if report.stopped {
            return Ok((report, None));
        }
        let ran = executor.attention_with(op, kernel, stream.raw()).and_then(|()| output_rows(op, stream));
        let difference = match ran {
            Ok(rows) => difference(&expected, &rows),
            Err(error) => {
                report.failed += 1;
                tell(index, Outcome::Failed(error.message), &mut report, progress);
                continue;
            }
        };
        if !is_right(difference) {
            report.wrong += 1;
            let why = format!("its output is {difference:.2e} from that of {}", plainest.kernel().name);
            tell(index, Outcome::Wrong(why), &mut report, progress);
            continue;
        }
        report.measured += 1;
        let choice = Choice::of(kernel);
        let once = timer.time(&choice, stream, 1, &mut |_| executor.attention_with(op, kernel, stream.raw()))?;
        let launches = (BATCH_SECONDS / once.max(1e-9)).clamp(1.0, MOST_LAUNCHES as f64) as usize;
        push(&mut right, Candidate { index, kernel, launches, times: Vec::new() }, "the candidates of attention")?;
    }
    for _ in 0..options.rounds.max(1) {
        for Candidate { kernel, launches, times, .. } in &mut right {
            let mut run = |_| executor.attention_with(op, *kernel, stream.raw());
            let seconds = timer.time(&Choice::of(*kernel), stream, *launches, &mut run)?;
            push(times, seconds, "the times of attention")?;
        }
    }
    for candidate in &mut right {
        candidate.times.sort_by(f64::total_cmp);
        tell(candidate.index, Outcome::Measured(candidate.median()), &mut report, progress);
        if report.stopped {
            return Ok((report, None));
        }
    }
    let Some((chosen, entry)) = choose(&right, default) else { return Ok((report, None)) };
    report.tuned = 1;
    report.changed = usize::from(entry.choice.kernel != default);
    report.default_seconds = entry.default_seconds;
    report.chosen_seconds = entry.seconds;
    log::info!(
        target: "nvbackend::tuning",
        "{key}: {} takes {:.2} us, {} {:.2} us",
        entry.choice.label(), entry.seconds * 1e6, default.kernel().name, entry.default_seconds * 1e6
    );
    tell(chosen, Outcome::Chosen(entry.seconds), &mut report, progress);
    Ok((report, Some((key, entry))))
}

/// A kernel that is right, with its times in ascending order once it is measured.
struct Candidate {
    index: usize,
    kernel: KernelId,
    launches: usize,
    times: Vec<f64>,
}

impl Candidate {
    fn median(&self) -> f64 {
        self.times[self.times.len() / 2]
    }
}

/// The fastest, or the default where that is hardly slower, with its place among the candidates; `None`: none is right.
fn choose(right: &[Candidate], default: KernelId) -> Option<(usize, Entry)> {
    let fastest = right.iter().min_by(|a, b| a.median().total_cmp(&b.median()))?;
    let usual = right.iter().find(|candidate| candidate.kernel == default);
    let chosen = usual.filter(|usual| usual.median() <= WORTHWHILE * fastest.median()).unwrap_or(fastest);
    let entry = Entry {
        choice: Choice::of(chosen.kernel),
        seconds: chosen.median(),
        // Without a default that is right there is nothing to compare with.
        default_seconds: usual.map_or(chosen.median(), Candidate::median),
        fastest_seconds: fastest.median(),
        candidates: right.len() as u32,
    };
    Some((chosen.index, entry))
}

/// Rows of the output, evenly spread, as floats. Waits for the stream.
fn output_rows(op: &Operation, stream: &Stream) -> Result<Vec<f32>> {
    const WHAT: &str = "rows of an attention to compare";
    let Some((output, rows)) = output_of(op) else { return Ok(Vec::new()) };
    let count = rows.min(COMPARED_ROWS);
    let bytes = output.head_dim * output.dtype.size();
    let mut raw = filled(0u8, count * output.heads * bytes, WHAT)?;
    for (at, place) in raw.chunks_exact_mut(bytes.max(1)).enumerate() {
        let (row, head) = (at / output.heads * rows / count, at % output.heads);
        let from = row * output.token_stride + head * output.head_stride;
        let from = output.data.wrapping_byte_add(from * output.dtype.size());
        // SAFETY: a row and head of the output, into as many bytes, which live until the stream has passed the copies.
        unsafe {
            let to = place.as_mut_ptr().cast();
            stream.executor().copy(to, from, bytes, CopyKind::DeviceToHost, stream.raw())?;
        }
    }
    stream.synchronize()?;
    let pair = |pair: &[u8]| u16::from_le_bytes([pair[0], pair[1]]);
    match output.dtype {
        DType::F16 => collected(raw.chunks_exact(2).map(|bits| f16::from_bits(pair(bits)).to_f32()), WHAT),
        DType::Bf16 => collected(raw.chunks_exact(2).map(|bits| Element::to_f32(bf16::from_bits(pair(bits)))), WHAT),
        _ => {
            let value = |bits: &[u8]| f32::from_le_bytes([bits[0], bits[1], bits[2], bits[3]]);
            collected(raw.chunks_exact(4).map(value), WHAT)
        }
    }
}

/// A NaN is not.
fn is_right(difference: f64) -> bool {
    difference <= LARGEST_DIFFERENCE
}

/// ‖b − a‖ / ‖a‖, 0 where both are alike; a NaN of one alone makes it NaN.
fn difference(a: &[f32], b: &[f32]) -> f64 {
    let (mut error, mut norm) = (0f64, 0f64);
    for (&a, &b) in a.iter().zip(b).filter(|(a, b)| !(a.is_nan() && b.is_nan()) && a != b) {
        error += (f64::from(b) - f64::from(a)).powi(2);
    }
    for &a in a.iter().filter(|a| a.is_finite()) {
        norm += f64::from(a).powi(2);
    }
    if error == 0.0 {
        0.0
    } else {
        (error / norm.max(f64::MIN_POSITIVE)).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::OperationKind;
    use crate::registry::find;

    fn candidate(index: usize, name: &str, times: &[f64]) -> Candidate {
        let kernel = find(DeviceKind::Cuda, OperationKind::AttentionDecode, name).unwrap();
        Candidate { index, kernel, launches: 1, times: times.to_vec() }
    }

    #[test]
    fn the_fastest_is_chosen_unless_the_default_is_hardly_slower() {
        let [ring, mma, simt] = ["attention_decode_ring", "attention_decode_mma", "attention_decode_simt"];
        let right = |of_ring: f64, of_mma: f64| {
            vec![
                candidate(0, ring, &[1.0, of_ring, 9.0]),
                candidate(1, mma, &[0.1, of_mma, 8.0]),
                candidate(3, simt, &[7.0, 7.5, 8.0]),
            ]
        };
        let default = right(2.0, 2.0)[0].kernel;
        let chosen = |of_ring, of_mma| {
            let (index, entry) = choose(&right(of_ring, of_mma), default).unwrap();
            (index, entry.choice.kernel.kernel().name, entry.seconds, entry.default_seconds, entry.fastest_seconds)
        };
        assert_eq!(chosen(3.0, 2.0), (1, mma, 2.0, 3.0, 2.0));
        assert_eq!(chosen(2.03, 2.0), (0, ring, 2.03, 2.03, 2.0));
        assert_eq!(chosen(2.05, 2.0), (1, mma, 2.0, 2.05, 2.0));
        // The default gave a wrong output.
        let (index, entry) = choose(&right(1.5, 2.0)[1..], default).unwrap();
        assert_eq!((index, entry.seconds, entry.default_seconds, entry.candidates), (1, 2.0, 2.0, 2));
        assert!(choose(&[], default).is_none());
    }

    #[test]
    fn outputs_are_compared_by_their_norm() {
        assert_eq!(difference(&[], &[]), 0.0);
        assert_eq!(difference(&[3.0, 4.0], &[3.0, 4.5]), 0.1);
        assert_eq!(difference(&[0.0, f32::NAN, f32::INFINITY], &[0.0, f32::NAN, f32::INFINITY]), 0.0);
        assert!(difference(&[0.0, 1.0], &[f32::NAN, 1.0]).is_nan());
        assert!(difference(&[f32::NAN, 1.0], &[0.0, 1.0]).is_nan());
        for [a, b] in [[0.0, 1.0], [1.0, f32::NAN], [f32::INFINITY, 1.0], [1.0, 1.1]] {
            assert!(!is_right(difference(&[a], &[b])), "{a} and {b}");
        }
        assert!(is_right(difference(&[1.0], &[1.05])));
    }
}

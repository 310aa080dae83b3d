//! Profiling on demand: how often each operation ran, for how long, and what it moved and computed meanwhile.
//!
//! Off, a call costs one relaxed load. On, an event is recorded before and after the operation on its stream, and read
//! when it has finished, so measuring never waits; a stretch between two events on a GPU holds the launch gap too. Calls
//! on a stream under capture do not run and are not counted. Measuring that fails leaves a call without its time and does
//! not keep it from running.
//!
//! What an operation must read may depend on numbers in device memory (`numbers.rs`): they are copied to the host before the
//! first of the events, which leaves the copy out of the time.

mod numbers;
pub mod nvtx;

use crate::error::{Error, Result};
use crate::operation::Cost;
use crate::operation::{CostOf, Operation, OperationKind};
use crate::stream::{Event, Stream};
use numbers::HostNumbers;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

const KINDS: usize = OperationKind::ALL.len();
/// Stretches whose end is awaited; further calls are counted without their time.
const MAX_PENDING: usize = 4096;
/// How many new stretches there are between two looks at which have finished.
const COLLECT_EVERY: usize = 128;

/// Sums of one operation since the metrics were switched on or reset.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct OperationMetrics {
    /// Calls that were queued without an error.
    pub calls: u64,
    /// Calls whose time is in the figures below.
    pub timed: u64,
    pub seconds: f64,
    pub shortest: f64,
    pub longest: f64,
    /// Arithmetic operations of the timed calls, by `cost()`.
    pub operations: f64,
    /// Bytes that the timed calls have to move, by `cost()`.
    pub bytes: f64,
}

impl OperationMetrics {
    /// Bytes per second; 0 without a timed call.
    pub fn bandwidth(&self) -> f64 {
        rate(self.bytes, self.seconds)
    }

    /// Operations per second; 0 likewise.
    pub fn throughput(&self) -> f64 {
        rate(self.operations, self.seconds)
    }

    fn add(&mut self, cost: Cost, seconds: f64) {
        self.shortest = if self.timed == 0 { seconds } else { self.shortest.min(seconds) };
        self.longest = self.longest.max(seconds);
        self.timed += 1;
        self.seconds += seconds;
        self.operations += cost.operations;
        self.bytes += cost.bytes;
    }
}

fn rate(amount: f64, seconds: f64) -> f64 {
    if seconds > 0.0 {
        amount / seconds
    } else {
        0.0
    }
}

#[derive(Default)]
pub struct Metrics {
    enabled: AtomicBool,
    /// Whether a failure to measure was logged as a warning.
    warned: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    sums: [OperationMetrics; KINDS],
    pending: Vec<Stretch>,
    /// Pairs of events for the next stretches.
    spare: Vec<(Event, Event)>,
    /// Likewise memory for copied numbers.
    spare_numbers: Vec<HostNumbers>,
    /// Stretches begun since the last look at the pending ones.
    begun: usize,
    /// Grows with every reset: a stretch of an earlier one is not counted.
    generation: u64,
}

/// What a stretch's call had to do.
enum Measured {
    Known(Cost),
    /// Known once the numbers have been copied.
    ByContent(HostNumbers, CostOf),
}

/// A pair of events, and what was copied before the first.
type Begun = ((Event, Event), Option<(HostNumbers, CostOf)>);

struct Stretch {
    kind: OperationKind,
    cost: Measured,
    events: (Event, Event),
    generation: u64,
}

impl Metrics {
    pub fn set_enabled(&self, enabled: bool) {
        self.warned.fetch_and(!enabled, Ordering::Relaxed);
        self.enabled.store(enabled, Ordering::Relaxed);
    }

    pub fn is_enabled(&self) -> bool {
        self.enabled.load(Ordering::Relaxed)
    }

    /// Forgets all figures, also those of work still running.
    pub fn reset(&self) {
        let mut state = self.state();
        state.sums = Default::default();
        state.generation += 1;
    }

    /// Figures of the work that has finished by now. Does not wait; readable after a sticky error too.
    pub fn get(&self, kind: OperationKind) -> OperationMetrics {
        let mut state = self.state();
        if let Err(error) = state.collect() {
            log::debug!(target: "nvbackend::metrics", "the last stretches have no time: {error}");
        }
        state.sums[kind as usize]
    }

    /// Queues `op` and, when switched on, measures it.
    pub fn queue(&self, op: &Operation, stream: &Stream) -> Result<()> {
        let run = || stream.executor().run(op, stream.raw());
        if !self.is_enabled() {
            return run();
        }
        let begun = match stream.executor().stream_is_capturing(stream.raw()) {
            Ok(true) => return run(),
            Ok(false) => self.begin(op, stream),
            Err(error) => Err(error),
        };
        // What stands in the way of measuring does not stand in the way of the operation.
        let begun = self.unless_failed(begun).flatten();
        run()?;
        let begun = begun.and_then(|begun| self.unless_failed(begun.0 .1.record(stream)).map(|()| begun));
        let mut state = self.state();
        state.sums[op.kind() as usize].calls += 1;
        if let Some((events, numbers)) = begun {
            let generation = state.generation;
            let cost = numbers
                .map_or_else(|| Measured::Known(op.cost()), |(numbers, cost)| Measured::ByContent(numbers, cost));
            state.pending.push(Stretch { kind: op.kind(), cost, events, generation });
        }
        Ok(())
    }

    /// A pair of events for one stretch, the first recorded, behind a copy of what decides on the cost; `None` when too many
    /// are pending.
    fn begin(&self, op: &Operation, stream: &Stream) -> Result<Option<Begun>> {
        let mut state = self.state();
        state.begun += 1;
        if state.begun >= COLLECT_EVERY || state.pending.len() >= MAX_PENDING {
            state.begun = 0;
            self.unless_failed(state.collect());
        }
        if state.pending.len() >= MAX_PENDING {
            return Ok(None);
        }
        let spare = state.spare.pop();
        let content = op.cost_by_content();
        let spare_numbers = content.as_ref().and_then(|(tensor, _)| {
            let place = state.spare_numbers.iter().position(|numbers| numbers.holds(tensor))?;
            Some(state.spare_numbers.swap_remove(place))
        });
        drop(state);
        let numbers = match content {
            Some((tensor, cost)) => Some((HostNumbers::copy(spare_numbers, &tensor, stream)?, cost)),
            None => None,
        };
        let events = match spare {
            Some(events) => events,
            None => (Event::new(stream.executor())?, Event::new(stream.executor())?),
        };
        events.0.record(stream)?;
        Ok(Some((events, numbers)))
    }

    /// The value, or a line in the log: a warning for the first failure since profiling was switched on.
    fn unless_failed<T>(&self, outcome: Result<T>) -> Option<T> {
        let note = |error: Error| {
            let level = if self.warned.swap(true, Ordering::Relaxed) { log::Level::Debug } else { log::Level::Warn };
            log::log!(target: "nvbackend::metrics", level, "calls are counted without their time: {error}");
        };
        outcome.map_err(note).ok()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Adds up the stretches that have finished, in whatever order their streams finish. What cannot be asked for now
    /// stays for the next time.
    fn collect(&mut self) -> Result<()> {
        let mut place = 0;
        while place < self.pending.len() {
            let (start, end) = &self.pending[place].events;
            if !end.query()? {
                place += 1;
                continue;
            }
            let milliseconds = end.milliseconds_since(start)?;
            let stretch = self.pending.swap_remove(place);
            let cost = match stretch.cost {
                Measured::Known(cost) => cost,
                Measured::ByContent(numbers, cost) => {
                    let cost = cost(&numbers.read());
                    self.spare_numbers.push(numbers);
                    cost
                }
            };
            if stretch.generation == self.generation {
                self.sums[stretch.kind as usize].add(cost, f64::from(milliseconds) / 1e3);
            }
            self.spare.push(stretch.events);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Backend;
    use crate::cpu::CpuExecutor;
    use crate::kv_cache::{KvCache, KvCacheOptions};
    use crate::operation::attention::{AttentionConfig, AttentionDecode, DecodeRows};
    use crate::operation::softmax::Softmax;
    use crate::tensor::{DType, Tensor};
    use std::sync::Arc;

    fn backend() -> Backend {
        Backend::with_executor(Arc::new(CpuExecutor::new(1).unwrap()), 0).unwrap()
    }

    fn softmax(values: &mut [f32]) -> Softmax {
        let tensor = Tensor::new(values.as_mut_ptr().cast(), DType::F32, &[4, 16]);
        Softmax::new(tensor, tensor, 1.0).unwrap()
    }

    #[test]
    fn calls_are_counted_only_while_switched_on() {
        let backend = backend();
        let mut values = [1.0f32; 64];
        let op = softmax(&mut values);
        backend.queue(op, backend.default_stream()).unwrap();
        assert_eq!(backend.metrics().get(OperationKind::Softmax), OperationMetrics::default());
        backend.metrics().set_enabled(true);
        for _ in 0..300 {
            backend.queue(op, backend.default_stream()).unwrap();
        }
        let metrics = backend.metrics().get(OperationKind::Softmax);
        assert_eq!((metrics.calls, metrics.timed), (300, 300));
        assert_eq!(metrics.bytes, 300.0 * op.cost().bytes);
        assert!(metrics.seconds > 0.0 && metrics.shortest <= metrics.longest);
        assert!((metrics.bandwidth() * metrics.seconds / metrics.bytes - 1.0).abs() < 1e-9);
        assert_eq!(backend.metrics().get(OperationKind::Linear), OperationMetrics::default());
        backend.metrics().reset();
        let metrics = backend.metrics().get(OperationKind::Softmax);
        assert_eq!((metrics, metrics.bandwidth(), metrics.throughput()), (OperationMetrics::default(), 0.0, 0.0));
    }

    #[test]
    fn decode_counts_the_keys_that_its_positions_make_visible() {
        let backend = backend();
        backend.metrics().set_enabled(true);
        let stream = backend.default_stream();
        let options = KvCacheOptions {
            layers: 1,
            sequences: 3,
            kv_heads: 2,
            head_dim: 8,
            capacity: 1024,
            dtype: DType::F32,
            ..KvCacheOptions::default()
        };
        let cache = KvCache::new(backend.memory(), options, stream).unwrap();
        let config = |window| {
            let config = AttentionConfig {
                query_heads: 4,
                kv_heads: 2,
                head_dim: 8,
                scale: 0.0,
                soft_cap: 0.0,
                window,
                causal: true,
                ..AttentionConfig::default()
            };
            AttentionConfig::new(config).unwrap()
        };
        let (mut query, mut output) = ([1f32; 96], [0f32; 96]);
        let mut positions = [0i32, 9, 499];
        let mut total = OperationMetrics::default();
        for (window, keys) in [(0, 1 + 10 + 500), (4, 1 + 4 + 4)] {
            let op = AttentionDecode::new(
                config(window),
                Tensor::new(query.as_mut_ptr().cast(), DType::F32, &[3, 4, 8]),
                cache.layer(0).unwrap(),
                Tensor::new(output.as_mut_ptr().cast(), DType::F32, &[3, 4, 8]),
                None,
                DecodeRows {
                    per_sequence: 1,
                    positions: Tensor::new(positions.as_mut_ptr().cast(), DType::I32, &[3]),
                    sequences: None,
                    max_kv_length: 0,
                },
            )
            .unwrap();
            for _ in 0..2 {
                backend.queue(op, stream).unwrap();
            }
            let metrics = backend.metrics().get(OperationKind::AttentionDecode);
            // Keys and values of two heads, queries and outputs of four, and the positions.
            let bytes = keys * 2 * 2 * 8 * 4 + 2 * 3 * 4 * 8 * 4 + 3 * 4;
            assert_eq!(metrics.bytes - total.bytes, 2.0 * f64::from(bytes), "window {window}");
            assert_eq!(metrics.operations - total.operations, 2.0 * 4.0 * f64::from(keys) * 8.0 * 4.0);
            assert!(op.cost().bytes > f64::from(bytes), "the capacity is an upper bound");
            total = metrics;
        }
        assert_eq!(total.timed, 4);
    }

    #[test]
    fn threads_measure_at_once() {
        let backend = backend();
        backend.metrics().set_enabled(true);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mut values = [1.0f32; 64];
                    let op = softmax(&mut values);
                    for _ in 0..100 {
                        backend.queue(op, backend.default_stream()).unwrap();
                    }
                });
            }
        });
        assert_eq!(backend.metrics().get(OperationKind::Softmax).timed, 400);
    }
}

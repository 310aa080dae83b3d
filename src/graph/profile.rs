//! Times of every node: an instrumented replay, as a table and as a Chrome trace.
//!
//! The nodes run one after the other with an event before the first and behind each. On a GPU the stream is held back by a
//! callback while the host queues a stretch of them, so that what lies between two events is the device's work and not the host's.
//! Beside them stand whole launches, which alone tell what a change is worth.

use super::measure::Measured;
use super::{Node, Recorded};
use crate::allocation::{push, with_room};
use crate::device::{DeviceInfo, DeviceKind};
use crate::error::{Error, Result};
use crate::operation::{Cost, OperationKind};
use crate::stream::{Event, Stream};
use std::ffi::c_void;
use std::fmt::Write as _;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

const WHAT: &str = "a graph's profile";
/// Nodes that are queued while the stream is held back; the driver's queue holds some thousand launches, of which a node makes few.
const STRETCH: usize = 64;
/// After so long a stream that is held back goes on by itself: should queueing wait for the device, it is not waited for forever.
const LONGEST_HOLD: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Text,
    Json,
    ChromeTrace,
}

pub struct NodeTime {
    pub kind: OperationKind,
    pub cost: Cost,
    /// Since the start of the instrumented replay; stretches follow each other without what lies between them.
    pub start: f64,
    pub seconds: f64,
}

pub struct Profile {
    device: String,
    is_gpu: bool,
    launches: usize,
    /// Of the instrumented replay whose sum is the median.
    pub nodes: Vec<NodeTime>,
    /// Median of whole launches.
    pub launch: f64,
}

/// Holds a stream back until it is told to go on.
struct Hold(Arc<(Mutex<bool>, Condvar)>);

unsafe extern "C" fn wait_to_go(user_data: *mut c_void) {
    // SAFETY: made by `Arc::into_raw` in `Hold::begin`, and taken back here once.
    let state = unsafe { Arc::from_raw(user_data.cast::<(Mutex<bool>, Condvar)>()) };
    let going = state.0.lock().unwrap_or_else(PoisonError::into_inner);
    drop(state.1.wait_timeout_while(going, LONGEST_HOLD, |going| !*going));
}

impl Hold {
    /// `None` on the CPU, where a callback runs at once and an operation with its call.
    fn begin(stream: &Stream) -> Result<Option<Hold>> {
        if stream.executor().info().kind == DeviceKind::Cpu {
            return Ok(None);
        }
        let state = Arc::new((Mutex::new(false), Condvar::new()));
        let given = Arc::into_raw(state.clone());
        // SAFETY: the callback calls neither the library nor CUDA, and owns what it is given.
        let queued = unsafe { stream.executor().stream_callback(stream.raw(), wait_to_go, given as *mut c_void) };
        if let Err(error) = queued {
            // SAFETY: a callback that was refused does not run.
            drop(unsafe { Arc::from_raw(given) });
            return Err(error);
        }
        Ok(Some(Hold(state)))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        *self.0 .0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0 .1.notify_all();
    }
}

/// Seconds of every node in one replay, in order.
fn instrumented(nodes: &[Node], stream: &Stream, events: &[Event]) -> Result<Vec<f64>> {
    let executor = stream.executor();
    let mut seconds = with_room(nodes.len(), WHAT)?;
    for (stretch, some) in nodes.chunks(STRETCH).enumerate() {
        let hold = Hold::begin(stream)?;
        events[0].record(stream)?;
        for (index, node) in some.iter().enumerate() {
            let place = stretch * STRETCH + index;
            let named = |error: Error| error.context(format_args!("node {place}, {}", node.op.kind().name()));
            executor.run(&node.op, stream.raw()).map_err(named)?;
            events[index + 1].record(stream)?;
        }
        drop(hold);
        stream.synchronize()?;
        for index in 0..some.len() {
            let milliseconds = events[index + 1].milliseconds_since(&events[index])?;
            push(&mut seconds, f64::from(milliseconds) / 1e3, WHAT)?;
        }
    }
    Ok(seconds)
}

/// Profiles `launched` on the memory that `measured` saved, and puts that back.
pub fn profile(launched: &Recorded, measured: &Measured, stream: &Stream, launches: usize) -> Result<Profile> {
    let nodes = &launched.nodes;
    let count = STRETCH.min(nodes.len()).max(1) + 1;
    let mut events = with_room(count, WHAT)?;
    for _ in 0..count {
        events.push(Event::new(stream.executor())?);
    }
    let mut replays: Vec<Vec<f64>> = Vec::new();
    let mut whole = Vec::new();
    let ran = (|| -> Result<()> {
        // The first round prepares the list and is not counted.
        for round in 0..=launches {
            let replay = instrumented(nodes, stream, &events)?;
            let launch = measured.time_of(launched, (&events[0], &events[1]))?;
            if round > 0 {
                push(&mut replays, replay, WHAT)?;
                push(&mut whole, launch, WHAT)?;
            }
        }
        Ok(())
    })();
    measured.put_back()?;
    ran?;
    replays.sort_by(|a, b| f64::total_cmp(&a.iter().sum(), &b.iter().sum()));
    whole.sort_unstable_by(f64::total_cmp);
    let median = replays.swap_remove(launches / 2);
    let info: &DeviceInfo = stream.executor().info();
    let mut profile = Profile {
        device: info.name.clone(),
        is_gpu: info.kind != DeviceKind::Cpu,
        launches,
        nodes: with_room(nodes.len(), WHAT)?,
        launch: whole[launches / 2],
    };
    let mut start = 0.0;
    for (node, seconds) in nodes.iter().zip(median) {
        profile.nodes.push(NodeTime { kind: node.op.kind(), cost: node.op.cost(), start, seconds });
        start += seconds;
    }
    Ok(profile)
}

/// Per second; 0 for work that took no time that the clock tells.
fn rate(amount: f64, seconds: f64) -> f64 {
    if seconds > 0.0 {
        amount / seconds
    } else {
        0.0
    }
}

impl Profile {
    pub fn sum(&self) -> f64 {
        self.nodes.iter().map(|node| node.seconds).sum()
    }

    pub fn describe(&self, format: Format) -> String {
        match format {
            Format::Text => self.text(),
            Format::Json => self.json(),
            Format::ChromeTrace => self.chrome_trace(),
        }
    }

    /// Why the sum of the nodes is not the time of a launch.
    fn caution(&self) -> &'static str {
        match self.is_gpu {
            true => {
                "The sum is no launch: an event between two kernels costs time and keeps the later one from beginning under the \
                 tail of the earlier, and what a kernel finds in the caches differs. A node of a small share may hide the start of \
                 the next. Judge a change by whole launches."
            }
            false => {
                "The sum is no launch: reading the clock between two operations costs time too, and what an operation finds in the \
                 caches depends on the one before. Judge a change by whole launches."
            }
        }
    }

    fn text(&self) -> String {
        let sum = self.sum();
        let mut text = format!(
            "{} nodes on {}: {:.3} us in sum (the median of {} instrumented replays), {:.3} us a launch (median of as many)\n{}\n\n",
            self.nodes.len(),
            self.device,
            sum * 1e6,
            self.launches,
            self.launch * 1e6,
            self.caution()
        );
        let row = |text: &mut String, name: &str, seconds: f64, cost: Cost| {
            let _ = writeln!(
                text,
                "{name:<28} {:>11.3} {:>6.1} {:>9.1} {:>10.1}",
                seconds * 1e6,
                100.0 * rate(seconds, sum),
                rate(cost.bytes, seconds) / 1e9,
                rate(cost.operations, seconds) / 1e9
            );
        };
        let heading = |first: &str| format!("{first:<28} {:>11} {:>6} {:>9} {:>10}\n", "us", "%", "GB/s", "GFLOP/s");
        text += &heading("node");
        for (index, node) in self.nodes.iter().enumerate() {
            row(&mut text, &format!("{index} {}", node.kind.name()), node.seconds, node.cost);
        }
        text.push('\n');
        text += &heading("operation");
        let mut kinds: Vec<(OperationKind, usize, f64, Cost)> = Vec::new();
        for node in &self.nodes {
            let place = kinds.iter().position(|kind| kind.0 == node.kind).unwrap_or_else(|| {
                kinds.push((node.kind, 0, 0.0, Cost::default()));
                kinds.len() - 1
            });
            let (_, count, seconds, cost) = &mut kinds[place];
            (*count, *seconds) = (*count + 1, *seconds + node.seconds);
            (cost.operations, cost.bytes) = (cost.operations + node.cost.operations, cost.bytes + node.cost.bytes);
        }
        kinds.sort_by(|a, b| b.2.total_cmp(&a.2));
        for (kind, count, seconds, cost) in kinds {
            row(&mut text, &format!("{count} {}", kind.name()), seconds, cost);
        }
        text
    }

    fn json(&self) -> String {
        let node = |(index, node): (usize, &NodeTime)| {
            format!(
                r#"{{"index":{index},"operation":"{}","start_seconds":{},"seconds":{},"operations":{},"bytes":{}}}"#,
                node.kind.name(),
                node.start,
                node.seconds,
                node.cost.operations,
                node.cost.bytes
            )
        };
        let nodes: Vec<String> = self.nodes.iter().enumerate().map(node).collect();
        format!(
            "{{\"launches\":{},\"launch_seconds\":{},\"sum_seconds\":{},\"note\":\"{}\",\n\"nodes\":[\n{}\n]}}\n",
            self.launches,
            self.launch,
            self.sum(),
            self.caution(),
            nodes.join(",\n")
        )
    }

    /// The trace event format, which chrome://tracing and Perfetto show; its times are microseconds.
    fn chrome_trace(&self) -> String {
        let event = |(index, node): (usize, &NodeTime)| {
            format!(
                r#"{{"name":"{index} {}","cat":"{}","ph":"X","pid":0,"tid":0,"ts":{:.3},"dur":{:.3},"args":{{"operations":{},"bytes":{}}}}}"#,
                node.kind.name(),
                node.kind.name(),
                node.start * 1e6,
                node.seconds * 1e6,
                node.cost.operations,
                node.cost.bytes
            )
        };
        let events: Vec<String> = self.nodes.iter().enumerate().map(event).collect();
        format!(
            "{{\"displayTimeUnit\":\"ns\",\"otherData\":{{\"launch_microseconds\":\"{:.3}\",\"note\":\"{}\"}},\n\"traceEvents\":[\n{}\n]}}\n",
            self.launch * 1e6,
            self.caution(),
            events.join(",\n")
        )
    }
}

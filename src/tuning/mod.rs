//! Choosing kernels by measurement: the tuner, the file that keeps its choices, and the words for why a kernel runs.
//!
//! Executors know none of this: they ask their [`Choices`], which this fills.
//!
//! [`Choices`]: crate::registry::choices::Choices

pub mod attention;
pub mod case;
pub mod explain;
pub mod explain_operation;
pub mod file;
pub mod header;
pub mod store;
pub mod timer;
mod trial;
pub mod tuner;
pub mod validate;
mod variations;
pub mod workload;

use crate::configuration::Configuration;
use crate::device::DeviceKind;
use crate::error::{Error, Result, Status};
use crate::executor::Executor;
use crate::memory::MemoryManager;
use crate::operation::{Operation, OperationKind};
use crate::registry::choices::Found;
use crate::stream::Stream;
use case::Case;
use header::Header;
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use timer::{EventTimer, HostTimer, Timer};
use tuner::{Options, Own, Progress, Report, Tuner};

/// Where a backend's choices are kept.
pub struct Tuning {
    device: DeviceKind,
    /// Path and header; `None`: in memory alone.
    file: Option<(PathBuf, Header)>,
}

/// Bytes that are filled before the launches on a GPU, so that the host is ahead of it.
const LEAD_BYTES: usize = 128 << 20;

/// What measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Clock {
    #[default]
    Events,
    Host,
}

impl Tuning {
    /// Follows the configuration, and loads the file into the executor's choices.
    pub fn open(executor: &dyn Executor, configuration: &Configuration) -> Result<Tuning> {
        executor.choices().set_override(OperationKind::Linear, &configuration.linear_kernel)?;
        let path = match configuration.tuning_file.as_str() {
            "" => std::env::var_os("NVB_TUNING_FILE").map(PathBuf::from).filter(|path| !path.as_os_str().is_empty()),
            path => Some(PathBuf::from(path)),
        };
        let device = executor.info().kind;
        let file = path.map(|path| (path, Header::of(executor.info(), configuration)));
        let tuning = Tuning { device, file };
        if let Some((path, header)) = &tuning.file {
            if let Some(found) = load(path, header, device) {
                executor.choices().extend(found);
            }
        }
        Ok(tuning)
    }

    /// Where the choices are kept.
    pub fn path(&self) -> Option<&Path> {
        self.file.as_ref().map(|(path, _)| path.as_path())
    }

    /// Adds the entries to those in the file.
    pub fn keep(&self, entries: &Found) -> Result<()> {
        let Some((path, header)) = &self.file else { return Ok(()) };
        store::replace(path, |present| {
            let mut found = present.and_then(|text| file::parse(text, header, self.device).ok()).unwrap_or_default();
            let Found { products, attention } = &mut found;
            products.try_reserve(entries.products.len()).map_err(|_| ErrorKind::OutOfMemory)?;
            products.extend(entries.products.iter().map(|(key, entry)| (*key, *entry)));
            attention.try_reserve(entries.attention.len()).map_err(|_| ErrorKind::OutOfMemory)?;
            attention.extend(entries.attention.iter().map(|(key, entry)| (*key, *entry)));
            file::print(header, &found)
        })
    }

    /// Tunes one attention on the caller's tensors and stream; its choice holds from then on and is kept in the file, as `tune`
    /// says.
    pub fn tune_attention(
        &self,
        memory: &Arc<MemoryManager>,
        op: &Operation,
        stream: &Stream,
        options: (Options, Clock),
        progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<(Report, Option<Error>)> {
        let executor = stream.executor();
        let (report, chosen) = attention::tune(executor, memory, op, stream, options, progress)?;
        let Some(entry) = chosen else { return Ok((report, None)) };
        let found = Found { attention: [entry].into(), ..Found::default() };
        let unkept = self.keep(&found).err();
        executor.choices().extend(found);
        if let Some(error) = &unkept {
            log::warn!(target: "nvbackend::tuning", "{error}");
        }
        Ok((report, unkept))
    }

    /// Tunes the cases on a stream of its own. Choices hold from the end of their case on; they are kept in the file likewise,
    /// and where that fails the report comes with the error.
    pub fn tune(
        &self,
        executor: &Arc<dyn Executor>,
        memory: &Arc<MemoryManager>,
        cases: &[Case],
        options: Options,
        clock: Clock,
        progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<(Report, Option<Error>)> {
        if executor.choices().are_fixed() {
            let text = "batch_invariant is set, under which products have one kernel each: there is nothing to tune";
            return Err(Error::new(Status::Configuration, text).with_advice("tune with a backend without it"));
        }
        let stream = Stream::new(executor, 0)?;
        let mut timer: Box<dyn Timer> = match clock {
            Clock::Host => Box::new(HostTimer),
            Clock::Events => {
                let lead = match executor.info().kind {
                    DeviceKind::Cpu => None,
                    DeviceKind::Cuda | DeviceKind::Tpu => Some(memory.allocate_owned(LEAD_BYTES, stream.raw())?),
                };
                Box::new(EventTimer::new(&stream, lead)?)
            }
        };
        let mut unkept = None;
        let mut tuner =
            Tuner { memory, products: &Own(&**executor), timer: &mut *timer, stream: &stream, options, progress };
        let report = tuner.tune(cases, &mut |products| {
            let found = Found::from(products);
            if unkept.is_none() {
                unkept = self.keep(&found).err();
            }
            executor.choices().extend(found);
        })?;
        if let Some(error) = &unkept {
            log::warn!(target: "nvbackend::tuning", "{error}");
        }
        Ok((report, unkept))
    }
}

/// The file's entries; a file that cannot be used is one line in the log.
fn load(path: &Path, header: &Header, device: DeviceKind) -> Option<Found> {
    let read = store::read(path).map_err(|error| error.to_string());
    match read.and_then(|text| text.map(|text| file::parse(&text, header, device)).transpose()) {
        Ok(None) => {
            log::debug!(target: "nvbackend::tuning", "{} is not there yet", path.display());
            None
        }
        Ok(Some(found)) => {
            log::info!(target: "nvbackend::tuning", "{}: {} tuned shapes", path.display(), found.len());
            Some(found)
        }
        Err(why) => {
            log::warn!(target: "nvbackend::tuning", "{} is not used: {why}", path.display());
            None
        }
    }
}

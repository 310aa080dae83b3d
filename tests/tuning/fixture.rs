//! Backends with a tuning file, a scripted timer and products that can be told to be wrong.

use nvbackend::backend::Backend;
use nvbackend::configuration::Configuration;
use nvbackend::device::RawHandle;
use nvbackend::error::{Error, Result};
use nvbackend::operation::linear_product::LinearProduct;
use nvbackend::operation::Activation;
use nvbackend::registry::choices::{Choice, Entry, Table};
use nvbackend::registry::key::ProductKey;
use nvbackend::stream::Stream;
use nvbackend::tensor::DType;
use nvbackend::tuning::case::{Case, CaseWeight};
use nvbackend::tuning::timer::Timer;
use nvbackend::tuning::tuner::{Options, Outcome, Own, Products, Progress, Report, Tuner};
use nvbackend::weight::{Arrangement, Encoding, Format, Granularity};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once};

/// A folder that goes with the test.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("nvb-tuning-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn file(&self) -> PathBuf {
        self.0.join("tuning.json")
    }

    pub fn names(&self) -> Vec<String> {
        let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<String> = std::fs::read_dir(&self.0).unwrap().map(name).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn options(file: Option<&Path>) -> Configuration {
    let tuning_file = file.map_or(String::new(), |path| path.to_str().unwrap().to_string());
    Configuration { device: "cpu".into(), threads: 1, tuning_file, ..Configuration::default() }
}

pub fn backend(file: Option<&Path>) -> Backend {
    Backend::new(options(file)).unwrap()
}

/// [rows, 96] · [256, 96]ᵀ in Int8.
pub fn case(backend: &Backend, rows: usize) -> Case {
    let format = Format::new(Encoding::Int8, Granularity::Rows, false, false).unwrap();
    case_of(backend, rows, format)
}

pub fn case_of(backend: &Backend, rows: usize, format: Format) -> Case {
    let weight = CaseWeight::described(&**backend.executor(), format, Arrangement::Stacked, 256, 96).unwrap();
    Case {
        rows,
        input: DType::F32,
        output: DType::F32,
        activation: Activation::None,
        bias: false,
        residual: false,
        weight,
    }
}

pub fn key(backend: &Backend, case: &Case) -> ProductKey {
    backend.executor().choices().key(&case.shape().unwrap())
}

/// Seconds by the kernel's name; 1 for those that are not named.
pub struct Script(HashMap<&'static str, f64>);

impl Script {
    pub fn new<const N: usize>(times: [(&'static str, f64); N]) -> Script {
        Script(times.into())
    }
}

impl Timer for Script {
    fn time(
        &mut self,
        choice: &Choice,
        _stream: &Stream,
        launches: usize,
        launch: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<f64> {
        (0..launches.min(2)).try_for_each(launch)?;
        Ok(self.0.get(choice.kernel.kernel().name).copied().unwrap_or(1.0))
    }
}

/// The backend's products, of which some are spoiled.
pub struct Spoiled<'a> {
    pub own: Own<'a>,
    /// Adds to one element of the output.
    pub wrong: Vec<&'static str>,
    /// Leaves the output as it was.
    pub lazy: Vec<&'static str>,
    pub failing: Vec<&'static str>,
    /// Adds to one element of the output, but not the first time.
    pub wrong_later: Vec<&'static str>,
    pub runs: AtomicUsize,
    /// What is a candidate, instead of all.
    pub listed: Option<Vec<&'static str>>,
    /// Offered as variations, first without and then with the fastest.
    pub varied: [Vec<&'static str>; 2],
    /// What the fastest were.
    pub fastest: Mutex<Vec<&'static str>>,
}

impl<'a> Spoiled<'a> {
    pub fn new(backend: &'a Backend) -> Spoiled<'a> {
        Spoiled {
            own: Own(&**backend.executor()),
            wrong: Vec::new(),
            lazy: Vec::new(),
            failing: Vec::new(),
            wrong_later: Vec::new(),
            runs: AtomicUsize::new(0),
            listed: None,
            varied: [Vec::new(), Vec::new()],
            fastest: Mutex::default(),
        }
    }
}

impl Products for Spoiled<'_> {
    fn candidates(&self, op: &LinearProduct) -> Vec<Choice> {
        let listed =
            |choice: &Choice| self.listed.as_ref().is_none_or(|listed| listed.contains(&choice.kernel.kernel().name));
        self.own.candidates(op).into_iter().filter(listed).collect()
    }

    fn variations(&self, op: &LinearProduct, fastest: &[Choice]) -> Vec<Choice> {
        let offered = &self.varied[usize::from(!fastest.is_empty())];
        self.fastest.lock().unwrap().extend(fastest.iter().map(|choice| choice.kernel.kernel().name));
        let all = self.own.candidates(op);
        let named = |name: &&str| all.iter().find(|choice| choice.kernel.kernel().name == *name).copied();
        offered.iter().filter_map(named).collect()
    }

    fn default(&self, op: &LinearProduct) -> Option<Choice> {
        self.own.default(op)
    }

    fn run(&self, op: &LinearProduct, choice: &Choice, stream: RawHandle) -> Result<Option<Choice>> {
        let name = choice.kernel.kernel().name;
        if self.failing.contains(&name) {
            return Err(Error::unsupported("it never works"));
        }
        if self.lazy.contains(&name) {
            return Ok(Some(*choice));
        }
        let ran = self.own.run(op, choice, stream)?;
        let later = self.wrong_later.contains(&name) && self.runs.fetch_add(1, Ordering::Relaxed) > 0;
        if self.wrong.contains(&name) || later {
            // SAFETY: the output's last element, in host memory.
            unsafe {
                let last = (op.output.rows - 1) * op.output.row_stride + op.output.columns - 1;
                *op.output.data.cast::<f32>().add(last) += 30.0;
            }
        }
        Ok(ran)
    }

    fn reference(&self, op: &LinearProduct, stream: RawHandle) -> Result<()> {
        self.own.reference(op, stream)
    }
}

/// Tunes with the script; the outcomes by name, and what was found.
pub fn tune(
    backend: &Backend,
    products: &dyn Products,
    mut script: Script,
    cases: &[Case],
) -> (Report, Vec<(String, Outcome)>, Table) {
    let stream = Stream::new(backend.executor(), 0).unwrap();
    let (mut outcomes, mut found) = (Vec::new(), Table::new());
    let mut progress = |progress: &Progress| {
        assert!(progress.case < progress.cases && progress.candidate < progress.candidates);
        outcomes.push((progress.choice.label(), progress.outcome.clone()));
        ControlFlow::Continue(())
    };
    let mut tuner = Tuner {
        memory: backend.memory(),
        products,
        timer: &mut script,
        stream: &stream,
        options: Options { rounds: 3 },
        progress: &mut progress,
    };
    let report = tuner
        .tune(cases, &mut |table| {
            backend.tuning().keep(&table.clone().into()).unwrap();
            backend.executor().choices().extend(table.clone().into());
            found.extend(table);
        })
        .unwrap();
    (report, outcomes, found)
}

/// What tuning found, without measuring.
pub fn entry(backend: &Backend, rows: usize, kernel: &str) -> (ProductKey, Entry) {
    let id =
        nvbackend::registry::find(backend.device().kind, nvbackend::operation::OperationKind::Linear, kernel).unwrap();
    let entry =
        Entry { choice: Choice::of(id), seconds: 1e-6, default_seconds: 2e-6, fastest_seconds: 1e-6, candidates: 3 };
    (key(backend, &case(backend, rows)), entry)
}

static RECORDS: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Recorder;

impl log::Log for Recorder {
    fn enabled(&self, _metadata: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.level() <= log::Level::Warn {
            RECORDS.lock().unwrap().push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// The warnings so far that name the file.
pub fn warnings(file: &Path) -> Vec<String> {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_logger(&Recorder).unwrap();
        log::set_max_level(log::LevelFilter::Warn);
    });
    let name = file.to_str().unwrap();
    RECORDS.lock().unwrap().iter().filter(|record| record.contains(name)).cloned().collect()
}

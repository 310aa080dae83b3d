//! Every field of a configuration by its path: how to read and write it, and what it may be.

use super::memory::{LeakTracking, LimitOf, Spill};
use super::selector::Selector;
use super::size::parse_size;
use super::{AttentionKernels, Configuration, LogLevel, Precision, Requirement, NONE};
use crate::error::{Error, Result, Status};
use crate::operation::OperationKind;
use crate::registry::kernels;
use std::fmt;

#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Text(String),
    Integer(u64),
    Number(f64),
    Boolean(bool),
}

impl fmt::Display for Value {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Text(text) => write!(formatter, "{text:?}"),
            Value::Integer(number) => write!(formatter, "{number}"),
            Value::Number(number) => write!(formatter, "{number}"),
            Value::Boolean(truth) => write!(formatter, "{truth}"),
        }
    }
}

enum Allowed {
    Device,
    Choice(&'static [&'static str]),
    /// 0, or from the first to the second.
    Integer(u64, u64),
    /// At most `MOST_BYTES`, as a number or as text with a unit.
    Bytes,
    /// At most `MOST_BYTES` in the form of `Bytes`, or "none", which is kept as `NONE`.
    BytesOrNone,
    /// The name of one of any device's kernels, or "".
    LinearKernel,
    /// A path, or "".
    Path,
    /// 0 to 1
    Fraction,
    Boolean,
}

pub struct Field {
    /// "memory.limit"
    pub path: &'static str,
    allowed: Allowed,
    get: fn(&Configuration) -> Value,
    /// Called with a value that `allowed` admits.
    set: fn(&mut Configuration, Value),
}

/// A field that is a choice, or with what it may be and the variant of `Value` that holds it.
macro_rules! field {
    ($path:literal, $($field:ident).+ => $choice:ident) => {
        Field {
            path: $path,
            allowed: Allowed::Choice($choice::NAMES),
            get: |configuration| Value::Text(configuration.$($field).+.name().to_string()),
            set: |configuration, value| {
                if let Value::Text(name) = value {
                    configuration.$($field).+ = $choice::from_name(&name).unwrap_or_default();
                }
            },
        }
    };
    ($path:literal, $($field:ident).+, $allowed:expr, $variant:ident) => {
        Field {
            path: $path,
            allowed: $allowed,
            get: |configuration| Value::$variant(configuration.$($field).+.clone()),
            set: |configuration, value| {
                if let Value::$variant(value) = value {
                    configuration.$($field).+ = value;
                }
            },
        }
    };
}

/// CPU threads: more than any machine has, and far less than a process may start.
const MOST_THREADS: u64 = 4096;
pub(super) const MOST_BYTES: u64 = 1 << 50;
/// Events of a trace, which take 48 bytes each.
const MOST_EVENTS: u64 = 1 << 24;
/// An hour.
const MOST_MICROSECONDS: u64 = 3_600_000_000;
const NONE_TEXT: &str = "none";

pub const FIELDS: &[Field] = &[
    field!("device", device, Allowed::Device, Text),
    field!("architecture", architecture, Allowed::Integer(70, 999), Integer),
    field!("threads", threads, Allowed::Integer(0, MOST_THREADS), Integer),
    field!("precision", precision => Precision),
    field!("fp8", fp8 => Requirement),
    field!("tensor_cores", tensor_cores => Requirement),
    field!("attention", attention => AttentionKernels),
    field!("vendor_libraries", vendor_libraries, Allowed::Boolean, Boolean),
    field!("quantized_activations", quantized_activations, Allowed::Boolean, Boolean),
    field!("batch_invariant", batch_invariant, Allowed::Boolean, Boolean),
    field!("linear_kernel", linear_kernel, Allowed::LinearKernel, Text),
    field!("tuning_file", tuning_file, Allowed::Path, Text),
    field!("memory.limit", memory.limit, Allowed::Bytes, Integer),
    field!("memory.limit_fraction", memory.limit_fraction, Allowed::Fraction, Number),
    field!("memory.limit_of", memory.limit_of => LimitOf),
    field!("memory.margin", memory.margin, Allowed::BytesOrNone, Integer),
    field!("memory.initial_bytes", memory.initial_bytes, Allowed::Bytes, Integer),
    field!("memory.growth", memory.growth, Allowed::Boolean, Boolean),
    field!("memory.range_bytes", memory.range_bytes, Allowed::Bytes, Integer),
    field!("memory.pooling", memory.pooling, Allowed::Boolean, Boolean),
    field!("memory.thread_cache_bytes", memory.thread_cache_bytes, Allowed::BytesOrNone, Integer),
    field!("memory.zero_on_free", memory.zero_on_free, Allowed::Boolean, Boolean),
    field!("memory.leak_tracking", memory.leak_tracking => LeakTracking),
    field!("memory.leak_sample_bytes", memory.leak_sample_bytes, Allowed::Bytes, Integer),
    field!("memory.trace_events", memory.trace_events, Allowed::Integer(0, MOST_EVENTS), Integer),
    field!("memory.wait_microseconds", memory.wait_microseconds, Allowed::Integer(0, MOST_MICROSECONDS), Integer),
    field!("memory.spill", memory.spill => Spill),
    field!("timing.profiling", timing.profiling, Allowed::Boolean, Boolean),
    field!("logging.level", logging.level => LogLevel),
];

/// The field of this path, or an error that lists those near it.
pub fn find(path: &str) -> Result<&'static Field> {
    if let Some(field) = FIELDS.iter().find(|field| field.path == path) {
        return Ok(field);
    }
    let parent = path.rsplit_once('.').map_or("", |(parent, _)| parent);
    let siblings = FIELDS.iter().filter(|field| !parent.is_empty() && field.path.starts_with(&format!("{parent}.")));
    let mut names: Vec<&str> = siblings.map(|field| field.path).collect();
    if names.is_empty() {
        names = FIELDS.iter().map(|field| field.path).collect();
    }
    Err(wrong(format!("{path:?} is no field of a configuration; there are {}", names.join(", "))))
}

/// Refuses an object of this path that no field lies in.
pub(super) fn check_folder(path: &str) -> Result<()> {
    if FIELDS.iter().any(|field| field.path.strip_prefix(path).is_some_and(|rest| rest.starts_with('.'))) {
        return Ok(());
    }
    if path != "preset" {
        find(path)?;
    }
    Err(wrong(format!("{path} is an object; a single value is needed")))
}

impl Field {
    pub fn get(&self, configuration: &Configuration) -> Value {
        match (&self.allowed, (self.get)(configuration)) {
            (Allowed::BytesOrNone, Value::Integer(NONE)) => Value::Text(NONE_TEXT.to_string()),
            (_, value) => value,
        }
    }

    /// Leaves the configuration alone if the value is not allowed.
    pub fn set(&self, configuration: &mut Configuration, value: Value) -> Result<()> {
        // A whole number is a number too, and may have been written as one: 8e9.
        let value = match (&self.allowed, value) {
            (Allowed::Fraction, Value::Integer(number)) => Value::Number(number as f64),
            (Allowed::Integer(..) | Allowed::Bytes | Allowed::BytesOrNone, Value::Number(number))
                if is_whole(number) =>
            {
                Value::Integer(number as u64)
            }
            (Allowed::Bytes | Allowed::BytesOrNone, Value::Text(text)) => {
                parse_size(&text).map_or(Value::Text(text), Value::Integer)
            }
            (_, value) => value,
        };
        self.check(&value)?;
        let value = match (&self.allowed, value) {
            (Allowed::BytesOrNone, Value::Text(_)) => Value::Integer(NONE),
            (_, value) => value,
        };
        (self.set)(configuration, value);
        Ok(())
    }

    /// From text, as `get` prints it; texts without quotation marks.
    pub fn set_text(&self, configuration: &mut Configuration, text: &str) -> Result<()> {
        let value = match self.allowed {
            // `set` reads sizes, which JSON too may give as text.
            Allowed::Device
            | Allowed::Choice(_)
            | Allowed::LinearKernel
            | Allowed::Path
            | Allowed::Bytes
            | Allowed::BytesOrNone => Value::Text(text.to_string()),
            Allowed::Integer(..) => text.parse().map_or_else(|_| Value::Text(text.to_string()), Value::Integer),
            Allowed::Fraction => text.parse().map_or_else(|_| Value::Text(text.to_string()), Value::Number),
            Allowed::Boolean => text.parse().map_or_else(|_| Value::Text(text.to_string()), Value::Boolean),
        };
        self.set(configuration, value)
    }

    /// Names the field, the value and what is allowed.
    pub fn check(&self, value: &Value) -> Result<()> {
        let admitted = match (&self.allowed, value) {
            (Allowed::Device, Value::Text(text)) => Selector::parse(text).map(|_| true)?,
            (Allowed::Choice(names), Value::Text(text)) => names.contains(&text.as_str()),
            (Allowed::LinearKernel, Value::Text(text)) => {
                text.is_empty()
                    || kernels().any(|(_, kernel)| kernel.operation == OperationKind::Linear && kernel.name == text)
            }
            (Allowed::Path, Value::Text(text)) => !text.contains('\0'),
            (Allowed::Integer(first, last), Value::Integer(number)) => *number == 0 || (first..=last).contains(&number),
            (Allowed::Bytes | Allowed::BytesOrNone, Value::Integer(number)) => *number <= MOST_BYTES,
            (Allowed::BytesOrNone, Value::Text(text)) => text == NONE_TEXT,
            (Allowed::Fraction, Value::Number(number)) => (0.0..=1.0).contains(number),
            (Allowed::Boolean, Value::Boolean(_)) => true,
            _ => false,
        };
        if admitted {
            return Ok(());
        }
        let error = wrong(format!("{} is {value}; {} is needed", self.path, self.allowed));
        Err(match (&self.allowed, value) {
            (Allowed::Integer(_, last), Value::Integer(number)) => error.with_limit(*number, *last),
            (Allowed::Bytes | Allowed::BytesOrNone, Value::Integer(number)) => error.with_limit(*number, MOST_BYTES),
            _ => error,
        })
    }
}

impl fmt::Display for Allowed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Allowed::Device => formatter.write_str("\"auto\", \"cpu\", \"cuda\" or \"cuda:N\""),
            Allowed::Choice(names) => {
                let (last, others) = names.split_last().expect("a choice has names");
                let others: Vec<String> = others.iter().map(|name| format!("\"{name}\"")).collect();
                write!(formatter, "{} or \"{last}\"", others.join(", "))
            }
            Allowed::LinearKernel => {
                let names: Vec<&str> = kernels().map(|(_, kernel)| kernel.name).collect();
                write!(formatter, "\"\" or one of {}", names.join(", "))
            }
            Allowed::Path => formatter.write_str("a path"),
            Allowed::Integer(0, last) => write!(formatter, "a whole number from 0 to {last}"),
            Allowed::Integer(first, last) => write!(formatter, "0 or a whole number from {first} to {last}"),
            Allowed::Bytes => {
                write!(formatter, "a size of 0 to {MOST_BYTES} bytes such as 8000000000, \"8GB\" or \"8GiB\"")
            }
            Allowed::BytesOrNone => write!(formatter, "\"{NONE_TEXT}\" or {}", Allowed::Bytes),
            Allowed::Fraction => formatter.write_str("a number from 0 to 1"),
            Allowed::Boolean => formatter.write_str("true or false"),
        }
    }
}

fn is_whole(number: f64) -> bool {
    number.fract() == 0.0 && (0.0..u64::MAX as f64).contains(&number)
}

pub(super) fn wrong(message: String) -> Error {
    Error::new(Status::Configuration, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_takes_what_it_gives() {
        let configuration = super::super::Preset::Training.configuration();
        for field in FIELDS {
            let mut copy = Configuration::default();
            field.set(&mut copy, field.get(&configuration)).unwrap();
            assert_eq!(field.get(&copy), field.get(&configuration), "{}", field.path);
            let text = match field.get(&configuration) {
                Value::Text(text) => text,
                other => other.to_string(),
            };
            let mut copy = Configuration::default();
            field.set_text(&mut copy, &text).unwrap();
            assert_eq!(field.get(&copy), field.get(&configuration), "{}", field.path);
        }
    }

    #[test]
    fn a_wrong_value_is_named_with_its_field_and_what_is_allowed() {
        let cases = [
            ("device", "gpu", "device is \"gpu\"; \"auto\", \"cpu\", \"cuda\" or \"cuda:N\" is needed"),
            ("device", "", "device is \"\"; "),
            ("architecture", "8", "architecture is 8; 0 or a whole number from 70 to 999 is needed"),
            ("threads", "-1", "threads is \"-1\"; a whole number from 0 to 4096 is needed"),
            ("precision", "F16", "precision is \"F16\"; \"auto\", \"f32\", \"f16\" or \"bf16\" is needed"),
            ("memory.limit_fraction", "1.5", "memory.limit_fraction is 1.5; a number from 0 to 1 is needed"),
            ("memory.limit_fraction", "NaN", "memory.limit_fraction is NaN; "),
            ("memory.growth", "yes", "memory.growth is \"yes\"; true or false is needed"),
            ("memory.limit", "99999999999999999", "memory.limit is 99999999999999999; "),
            ("memory.limit", "none", "memory.limit is \"none\"; a size of 0 to "),
            ("memory.limit", "2000TB", "memory.limit is 2000000000000000; "),
            (
                "memory.limit",
                "8G",
                "memory.limit is \"8G\"; a size of 0 to 1125899906842624 bytes such as 8000000000, \"8GB\" or \"8GiB\" is",
            ),
            ("memory.margin", "no", "memory.margin is \"no\"; \"none\" or a size of 0 to 1125899906842624 bytes"),
            ("memory.margin", "18446744073709551615", "memory.margin is 18446744073709551615; "),
        ];
        for (path, text, message) in cases {
            let mut configuration = Configuration::default();
            let error = find(path).unwrap().set_text(&mut configuration, text).unwrap_err();
            assert!(error.message.starts_with(message), "{error}");
            assert_eq!(error.status, Status::Configuration);
            assert_eq!(configuration, Configuration::default(), "a refused value changes nothing");
        }
    }

    #[test]
    fn sizes_may_have_units_as_text_and_in_json() {
        let mut configuration = Configuration::default();
        find("memory.limit").unwrap().set_text(&mut configuration, "8GB").unwrap();
        configuration.apply_json(r#"{"memory": {"initial_bytes": "1.5 GiB", "margin": "256MiB"}}"#).unwrap();
        let memory = &configuration.memory;
        assert_eq!((memory.limit, memory.initial_bytes, memory.margin), (8_000_000_000, 3 << 29, 256 << 20));
        // They are given as numbers, which any JSON reader takes.
        assert_eq!(find("memory.limit").unwrap().get(&configuration), Value::Integer(8_000_000_000));
    }

    #[test]
    fn no_margin_has_a_name() {
        let mut configuration = Configuration::default();
        let field = find("memory.margin").unwrap();
        field.set_text(&mut configuration, "none").unwrap();
        assert_eq!(configuration.memory.margin, NONE);
        assert_eq!(field.get(&configuration), Value::Text("none".to_string()));
        configuration.validate().unwrap();
        let mut copy = Configuration::default();
        copy.apply_json(&configuration.to_json()).unwrap();
        assert_eq!(copy, configuration);
        copy.apply_json(r#"{"memory": {"margin": 1e3}}"#).unwrap();
        assert_eq!(copy.memory.margin, 1000);
    }

    #[test]
    fn an_unknown_field_is_answered_with_its_neighbours() {
        let near = find("memory.size").err().unwrap().message;
        assert!(near.contains("memory.initial_bytes") && !near.contains("precision"), "{near}");
        assert!(find("memry.limit").err().unwrap().message.contains("precision"));
    }
}

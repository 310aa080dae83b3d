//! The text of a tuning file: a JSON object with the header's fields and one entry a key. Whatever is not exactly that is no
//! tuning file: half of a file is not better than none.

use super::header::Header;
use crate::allocation::Text;
use crate::device::DeviceKind;
use crate::operation::OperationKind;
use crate::registry::choices::{Algorithm, Choice, Entry, Table};
use crate::registry::find;
use crate::registry::key::ProductKey;

/// The operation whose choices a file has.
const LINEAR: OperationKind = OperationKind::Linear;
use serde_json::{Map, Value};
use std::io::{ErrorKind, Write as _};

/// How every tuning file begins: what tells a damaged one from a file of somebody else's.
pub const MARK: &str = "{\n  \"file\": \"nvbackend tuning\",\n";

/// Larger than any that tuning writes.
pub const MOST_BYTES: u64 = 64 << 20;

pub fn print(header: &Header, table: &Table) -> std::io::Result<Vec<u8>> {
    let mut text = Text::default();
    text.write_all(MARK.as_bytes())?;
    for (name, value) in &header.fields {
        writeln!(text, "  \"{name}\": {},", Value::from(value.as_str()))?;
    }
    let mut lines: Vec<String> = Vec::new();
    lines.try_reserve_exact(table.len()).map_err(|_| ErrorKind::OutOfMemory)?;
    lines.extend(table.iter().map(|(key, entry)| line(key, entry)));
    lines.sort_unstable();
    writeln!(text, "  \"{}\": {{", LINEAR.name())?;
    for (i, line) in lines.iter().enumerate() {
        write!(text, "{}{line}", if i == 0 { "" } else { ",\n" })?;
    }
    writeln!(text, "\n  }}\n}}")?;
    Ok(text.bytes)
}

fn line(key: &ProductKey, entry: &Entry) -> String {
    let mut fields = Map::new();
    fields.insert("kernel".into(), entry.choice.kernel.kernel().name.into());
    if let Algorithm::Cached(words) = entry.choice.algorithm {
        fields.insert("algorithm".into(), words.map(|word| format!("{word:016x}")).concat().into());
    }
    fields.insert("seconds".into(), entry.seconds.into());
    fields.insert("default_seconds".into(), entry.default_seconds.into());
    fields.insert("fastest_seconds".into(), entry.fastest_seconds.into());
    fields.insert("candidates".into(), entry.candidates.into());
    format!("    \"{key}\": {}", Value::from(fields))
}

/// The entries, or why the text is not a tuning file of this header.
pub fn parse(text: &str, header: &Header, device: DeviceKind) -> Result<Table, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let root = value.as_object().ok_or("it is no object")?;
    if root.get("file").and_then(Value::as_str) != Some("nvbackend tuning") {
        return Err("it is no tuning file".into());
    }
    for (name, ours) in &header.fields {
        match root.get(*name).and_then(Value::as_str) {
            Some(theirs) if theirs == ours => {}
            Some(theirs) => return Err(format!("its {name} is {theirs:?}, here it is {ours:?}")),
            None => return Err(format!("it names no {name}")),
        }
    }
    let entries =
        root.get(LINEAR.name()).and_then(Value::as_object).ok_or_else(|| format!("it has no {}", LINEAR.name()))?;
    if root.len() != header.fields.len() + 2 {
        return Err("it has entries that this version does not know".into());
    }
    let mut table = Table::new();
    table.try_reserve(entries.len()).map_err(|_| format!("there is no memory for its {} entries", entries.len()))?;
    for (key, value) in entries {
        let wrong = || format!("the entry {key:?} is damaged");
        table.insert(key.parse().map_err(|_| wrong())?, entry(value, device).ok_or_else(wrong)?);
    }
    Ok(table)
}

fn entry(value: &Value, device: DeviceKind) -> Option<Entry> {
    let kernel = find(device, LINEAR, value.get("kernel")?.as_str()?).ok()?;
    let algorithm = match value.get("algorithm") {
        None => Algorithm::Default,
        Some(text) => Algorithm::Cached(words(text.as_str()?)?),
    };
    let time = |name: &str| value.get(name)?.as_f64().filter(|time| time.is_finite() && *time >= 0.0);
    Some(Entry {
        choice: Choice { kernel, algorithm },
        seconds: time("seconds")?,
        default_seconds: time("default_seconds")?,
        fastest_seconds: time("fastest_seconds")?,
        candidates: value.get("candidates")?.as_u64()?.try_into().ok()?,
    })
}

fn words(text: &str) -> Option<[u64; 8]> {
    if text.len() != 128 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut words = [0; 8];
    for (word, digits) in words.iter_mut().zip(text.as_bytes().chunks_exact(16)) {
        *word = u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> Header {
        Header { fields: vec![("format", "1".into()), ("device", "a \"GPU\"".into())] }
    }

    fn table() -> Table {
        let choice =
            |name: &str, algorithm| Choice { kernel: find(DeviceKind::Cuda, LINEAR, name).unwrap(), algorithm };
        let entry = |choice| Entry {
            choice,
            seconds: 1.25e-5,
            default_seconds: 2e-5,
            fastest_seconds: 1.125e-5,
            candidates: 9,
        };
        let words = [1, 2, u64::MAX, 0, 5, 6, 7, 0xfeed];
        Table::from([
            (
                "m16 n4 k8 bf16 int4 groups32 bf16".parse().unwrap(),
                entry(choice("linear_quantized_mma32", Algorithm::Default)),
            ),
            (
                "m1024 n4 k8 bf16 bf16 f32 gated".parse().unwrap(),
                entry(choice("linear_cublaslt", Algorithm::Cached(words))),
            ),
        ])
    }

    #[test]
    fn tables_go_through_text() {
        let text = printed(&table());
        assert_eq!(parse(&text, &header(), DeviceKind::Cuda).unwrap(), table(), "{text}");
        assert_eq!(parse(&printed(&Table::new()), &header(), DeviceKind::Cuda).unwrap(), Table::new());
        assert!(text.starts_with(MARK));
    }

    #[test]
    fn a_header_that_differs_is_named() {
        let text = printed(&table());
        let mut other = header();
        other.fields[1].1 = "another".into();
        let why = parse(&text, &other, DeviceKind::Cuda).unwrap_err();
        assert_eq!(why, "its device is \"a \\\"GPU\\\"\", here it is \"another\"");
        other.fields[1].0 = "driver";
        assert_eq!(parse(&text, &other, DeviceKind::Cuda).unwrap_err(), "it names no driver");
        // A newer version's field, and a kernel of another device.
        other.fields.pop();
        assert!(parse(&text, &other, DeviceKind::Cuda).is_err());
        assert!(parse(&text, &header(), DeviceKind::Cpu).unwrap_err().contains("is damaged"));
    }

    #[test]
    fn every_truncation_is_refused() {
        let text = printed(&table());
        for length in 0..text.trim_end().len() {
            assert!(parse(&text[..length], &header(), DeviceKind::Cuda).is_err(), "{length}");
        }
    }

    fn printed(table: &Table) -> String {
        String::from_utf8(print(&header(), table).unwrap()).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_changed_byte_panics(place in any::<prop::sample::Index>(), byte in 0x20..0x7fu8) {
            let mut text = printed(&table()).into_bytes();
            let place = place.index(text.len());
            text[place] = byte;
            let _ = parse(std::str::from_utf8(&text).unwrap(), &header(), DeviceKind::Cuda);
        }
    }
}

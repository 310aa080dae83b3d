//! The text of a tuning file: a JSON object with the header's fields, and for products and attention one entry a key. Whatever is not exactly that is no
//! tuning file: half of a file is not better than none.

use super::header::Header;
use crate::allocation::Text;
use crate::device::DeviceKind;
use crate::operation::OperationKind;
use crate::registry::attention_key::AttentionKey;
use crate::registry::choices::{Algorithm, Choice, Entry, Found};
use crate::registry::find;
use crate::registry::key::ProductKey;

use serde_json::{Map, Value};
use std::collections::HashMap;
use std::fmt::Display;
use std::hash::Hash;
use std::io::{ErrorKind, Write as _};

/// The operation whose choices are the file's first part.
const LINEAR: OperationKind = OperationKind::Linear;
/// The part of both operations of attention.
const ATTENTION: &str = "attention";

/// How every tuning file begins: what tells a damaged one from a file of somebody else's.
pub const MARK: &str = "{\n  \"file\": \"nvbackend tuning\",\n";

/// Larger than any that tuning writes.
pub const MOST_BYTES: u64 = 64 << 20;

pub fn print(header: &Header, found: &Found) -> std::io::Result<Vec<u8>> {
    let mut text = Text::default();
    text.write_all(MARK.as_bytes())?;
    for (name, value) in &header.fields {
        writeln!(text, "  \"{name}\": {},", Value::from(value.as_str()))?;
    }
    print_part(&mut text, LINEAR.name(), &found.products)?;
    writeln!(text, ",")?;
    print_part(&mut text, ATTENTION, &found.attention)?;
    writeln!(text, "\n}}")?;
    Ok(text.bytes)
}

fn print_part<K: Display>(text: &mut Text, name: &str, table: &HashMap<K, Entry>) -> std::io::Result<()> {
    let mut lines: Vec<String> = Vec::new();
    lines.try_reserve_exact(table.len()).map_err(|_| ErrorKind::OutOfMemory)?;
    lines.extend(table.iter().map(|(key, entry)| line(key, entry)));
    lines.sort_unstable();
    writeln!(text, "  \"{name}\": {{")?;
    for (i, line) in lines.iter().enumerate() {
        write!(text, "{}{line}", if i == 0 { "" } else { ",\n" })?;
    }
    write!(text, "\n  }}")
}

fn line(key: &impl Display, entry: &Entry) -> String {
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
pub fn parse(text: &str, header: &Header, device: DeviceKind) -> Result<Found, String> {
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
    let products = parse_part(root, LINEAR.name(), |_: &ProductKey| LINEAR, device)?;
    let attention = parse_part(root, ATTENTION, AttentionKey::operation, device)?;
    if root.len() != header.fields.len() + 3 {
        return Err("it has entries that this version does not know".into());
    }
    Ok(Found { products, attention })
}

/// `operation`: whose kernels the entry of a key may name.
fn parse_part<K: std::str::FromStr + Eq + Hash>(
    root: &Map<String, Value>,
    name: &str,
    operation: impl Fn(&K) -> OperationKind,
    device: DeviceKind,
) -> Result<HashMap<K, Entry>, String> {
    let entries = root.get(name).and_then(Value::as_object).ok_or_else(|| format!("it has no {name}"))?;
    let mut table = HashMap::new();
    table.try_reserve(entries.len()).map_err(|_| format!("there is no memory for its {} entries", entries.len()))?;
    for (text, value) in entries {
        let wrong = || format!("the entry {text:?} is damaged");
        let key: K = text.parse().map_err(|_| wrong())?;
        let entry = entry(value, operation(&key), device).ok_or_else(wrong)?;
        table.insert(key, entry);
    }
    Ok(table)
}

fn entry(value: &Value, operation: OperationKind, device: DeviceKind) -> Option<Entry> {
    let kernel = find(device, operation, value.get("kernel")?.as_str()?).ok()?;
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

    fn table() -> Found {
        let choice = |name: &str, algorithm| {
            let kernel = [LINEAR, OperationKind::AttentionPrefill, OperationKind::AttentionDecode]
                .into_iter()
                .find_map(|operation| find(DeviceKind::Cuda, operation, name).ok());
            Choice { kernel: kernel.unwrap(), algorithm }
        };
        let entry = |choice| Entry {
            choice,
            seconds: 1.25e-5,
            default_seconds: 2e-5,
            fastest_seconds: 1.125e-5,
            candidates: 9,
        };
        let words = [1, 2, u64::MAX, 0, 5, 6, 7, 0xfeed];
        let products = [
            (
                "m16 n4 k8 bf16 int4 groups32 bf16".parse().unwrap(),
                entry(choice("linear_quantized_mma32", Algorithm::Default)),
            ),
            (
                "m1024 n4 k8 bf16 bf16 f32 gated".parse().unwrap(),
                entry(choice("linear_cublaslt", Algorithm::Cached(words))),
            ),
        ];
        let attention = [
            (
                "attention_prefill b1 r512 k8192 w0 h32 g8 d128 v128 pages16 bf16 bf16 bf16".parse().unwrap(),
                entry(choice("attention_prefill_mma", Algorithm::Default)),
            ),
            (
                "attention_decode b32 r1 k8192 w0 h32 g8 d128 v128 contiguous bf16 bf16 bf16 sinks".parse().unwrap(),
                entry(choice("attention_decode_simt", Algorithm::Default)),
            ),
        ];
        Found { products: products.into(), attention: attention.into() }
    }

    #[test]
    fn tables_go_through_text() {
        let text = printed(&table());
        assert_eq!(parse(&text, &header(), DeviceKind::Cuda).unwrap(), table(), "{text}");
        assert_eq!(parse(&printed(&Found::default()), &header(), DeviceKind::Cuda).unwrap(), Found::default());
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
        // A kernel of the other operation of attention.
        let other = text.replace("attention_decode_simt", "attention_prefill_simt");
        assert!(parse(&other, &header(), DeviceKind::Cuda).unwrap_err().contains("attention_decode b32"));
    }

    #[test]
    fn every_truncation_is_refused() {
        let text = printed(&table());
        for length in 0..text.trim_end().len() {
            assert!(parse(&text[..length], &header(), DeviceKind::Cuda).is_err(), "{length}");
        }
    }

    fn printed(found: &Found) -> String {
        String::from_utf8(print(&header(), found).unwrap()).unwrap()
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

//! The header of a GGUF file (versions 2 and 3, little-endian): metadata and the table of tensors. Source: ggml's
//! docs/gguf.md.
//!
//! Every count, length, offset and type is checked against the file's bytes before it is used; nothing is allocated for a
//! count that the file is too short for.

use crate::allocation::{push, with_room};
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::ops::Range;

/// Types of metadata values, by their numbers in the file.
pub const TYPE_BOOL: u32 = 7;
pub const TYPE_STRING: u32 = 8;
pub const TYPE_ARRAY: u32 = 9;

/// Bytes of a value of fixed size.
fn value_size(kind: u32) -> Option<usize> {
    match kind {
        0 | 1 | TYPE_BOOL => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Integers and booleans; unsigned ones past i64's range wrap.
    Integer(i64),
    Real(f64),
    /// Bytes of the file, UTF-8 by convention.
    Text(Range<usize>),
    /// Elements of fixed size, one after the other from any address on.
    Array {
        kind: u32,
        count: usize,
        data: Range<usize>,
    },
    Texts(Vec<Range<usize>>),
    /// Arrays of arrays are checked and passed over.
    Nested {
        count: usize,
    },
}

#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    pub key: String,
    /// The number of its type in the file.
    pub kind: u32,
    pub content: Content,
}

#[derive(Debug, Clone, PartialEq)]
pub struct TensorEntry {
    pub name: String,
    /// The number of its ggml type in the file.
    pub kind: u32,
    /// Outermost first; the innermost is contiguous.
    pub shape: Vec<usize>,
    /// Its bytes in the file; empty at its first byte where the type is not known.
    pub data: Range<usize>,
}

#[derive(Debug)]
pub struct GgufFile {
    pub version: u32,
    pub alignment: usize,
    pub values: Vec<Value>,
    pub tensors: Vec<TensorEntry>,
    /// Trees, whose nodes are small: the file decides how many there are.
    keys: BTreeMap<String, usize>,
    names: BTreeMap<String, usize>,
}

/// Elements and bytes of a block of a ggml type (ggml.c's type traits).
pub fn block_size(kind: u32) -> Option<(usize, usize)> {
    Some(match kind {
        0 | 26 => (1, 4),
        1 | 25 | 30 => (1, 2),
        24 => (1, 1),
        27 | 28 => (1, 8),
        2 => (32, 18),
        3 => (32, 20),
        6 => (32, 22),
        7 => (32, 24),
        8 => (32, 34),
        9 => (32, 36),
        10 => (256, 84),
        11 => (256, 110),
        12 => (256, 144),
        13 => (256, 176),
        14 => (256, 210),
        15 => (256, 292),
        16 => (256, 66),
        17 => (256, 74),
        18 => (256, 98),
        19 => (256, 50),
        20 => (32, 18),
        21 => (256, 110),
        22 => (256, 82),
        23 => (256, 136),
        29 => (256, 56),
        34 => (256, 54),
        35 => (256, 66),
        39 => (32, 17),
        _ => return None,
    })
}

const MAX_RANK: usize = 4;
/// The longest name or key, half of what the format allows.
const MOST_NAME_BYTES: usize = 32 << 10;
const DEFAULT_ALIGNMENT: usize = 32;
/// Arrays in arrays; deeper ones are no metadata that anybody writes.
const MAX_DEPTH: usize = 4;

impl GgufFile {
    pub fn parse(bytes: &[u8]) -> Result<GgufFile> {
        let mut reader = Reader { bytes, at: 0 };
        if reader.take(4, "the magic")? != b"GGUF" {
            return Err(Error::invalid("these bytes do not begin with \"GGUF\""));
        }
        let version = reader.u32("the version")?;
        if version != 2 && version != 3 {
            let why = if (1..=3).contains(&version.swap_bytes()) { "a big-endian file" } else { "this GGUF version" };
            return Err(Error::invalid(format!("{why} is not supported: version {version}; 2 or 3 is needed")));
        }
        let tensor_count = reader.count("the number of tensors", 24)?;
        let value_count = reader.count("the number of metadata values", 13)?;
        let mut file = GgufFile {
            version,
            alignment: DEFAULT_ALIGNMENT,
            values: Vec::new(),
            tensors: Vec::new(),
            keys: BTreeMap::new(),
            names: BTreeMap::new(),
        };
        for i in 0..value_count {
            let value = reader.value(i)?;
            if file.keys.insert(value.key.clone(), i).is_some() {
                return Err(Error::invalid(format!("the metadata has `{}` twice", value.key)));
            }
            push(&mut file.values, value, "the metadata of a GGUF file")?;
        }
        file.alignment = file.read_alignment()?;
        for i in 0..tensor_count {
            let tensor = reader.tensor(i, file.alignment)?;
            if file.names.insert(tensor.name.clone(), i).is_some() {
                return Err(Error::invalid(format!("the file has the tensor `{}` twice", tensor.name)));
            }
            push(&mut file.tensors, tensor, "the tensors of a GGUF file")?;
        }
        let start = reader.at.next_multiple_of(file.alignment);
        for tensor in &mut file.tensors {
            let end = start.checked_add(tensor.data.end).filter(|&end| end <= bytes.len()).ok_or_else(|| {
                Error::invalid(format!(
                    "the tensor `{}` ends {} bytes after the header; the file has {} there",
                    tensor.name,
                    tensor.data.end,
                    bytes.len().saturating_sub(start)
                ))
                .with_limit(tensor.data.end as u64, bytes.len().saturating_sub(start) as u64)
            })?;
            tensor.data = start + tensor.data.start..end;
        }
        Ok(file)
    }

    fn read_alignment(&self) -> Result<usize> {
        let Some(value) = self.value("general.alignment") else {
            return Ok(DEFAULT_ALIGNMENT);
        };
        match value.content {
            Content::Integer(alignment) if (1..=1 << 30).contains(&alignment) && alignment & (alignment - 1) == 0 => {
                Ok(alignment as usize)
            }
            ref other => Err(Error::invalid(format!("general.alignment is {other:?}; a power of two is needed"))),
        }
    }

    pub fn value(&self, key: &str) -> Option<&Value> {
        self.value_index(key).map(|i| &self.values[i])
    }

    pub fn value_index(&self, key: &str) -> Option<usize> {
        self.keys.get(key).copied()
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.tensor_index(name).map(|i| &self.tensors[i])
    }

    pub fn tensor_index(&self, name: &str) -> Option<usize> {
        self.names.get(name).copied()
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize, what: &str) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        if count > rest.len() {
            return Err(Error::invalid(format!(
                "the file ends inside {what}: {count} bytes are needed at byte {}, {} are there",
                self.at,
                rest.len()
            ))
            .with_limit(count as u64, rest.len() as u64));
        }
        self.at += count;
        Ok(&rest[..count])
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        let bytes = self.take(4, what)?;
        Ok(u32::from_le_bytes(bytes.try_into().expect("four bytes")))
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        let bytes = self.take(8, what)?;
        Ok(u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
    }

    /// A number of things of at least `smallest` bytes each, which must fit the rest of the file.
    fn count(&mut self, what: &str, smallest: usize) -> Result<usize> {
        let count = self.u64(what)?;
        let most = (self.bytes.len() - self.at) / smallest;
        usize::try_from(count).ok().filter(|&count| count <= most).ok_or_else(|| {
            Error::invalid(format!("{what} is {count}; the rest of the file has room for {most}"))
                .with_limit(count, most as u64)
        })
    }

    fn text(&mut self, what: &str) -> Result<Range<usize>> {
        let length = self.count(what, 1)?;
        self.take(length, what)?;
        Ok(self.at - length..self.at)
    }

    /// A key or a name: UTF-8 without NUL, so that C can have it.
    fn name(&mut self, what: &str) -> Result<String> {
        let range = self.text(what)?;
        match std::str::from_utf8(&self.bytes[range.clone()]) {
            Ok(text) if text.len() > MOST_NAME_BYTES => {
                Err(Error::invalid(format!("{what} has {} bytes; at most {MOST_NAME_BYTES} are supported", text.len()))
                    .with_limit(text.len() as u64, MOST_NAME_BYTES as u64))
            }
            Ok(text) if !text.is_empty() && !text.contains('\0') => Ok(text.to_string()),
            _ => Err(Error::invalid(format!("{what} at byte {} is empty, not UTF-8 or has a NUL", range.start))),
        }
    }

    fn value(&mut self, index: usize) -> Result<Value> {
        let key = self.name(&format!("the key of metadata value {index}"))?;
        let kind = self.u32(&format!("the type of `{key}`"))?;
        let what = format!("the value of `{key}`");
        let content = match kind {
            TYPE_STRING => Content::Text(self.text(&what)?),
            TYPE_ARRAY => self.array(&what, 0)?,
            _ => self.scalar(kind, &what)?,
        };
        Ok(Value { key, kind, content })
    }

    fn scalar(&mut self, kind: u32, what: &str) -> Result<Content> {
        let size =
            value_size(kind).ok_or_else(|| Error::invalid(format!("{what} has type {kind}, which is unknown")))?;
        let bytes = self.take(size, what)?;
        let mut word = [0; 8];
        word[..size].copy_from_slice(bytes);
        let unsigned = u64::from_le_bytes(word);
        let signed = |bits: u32| (unsigned << (64 - bits)) as i64 >> (64 - bits);
        Ok(match kind {
            1 => Content::Integer(signed(8)),
            3 => Content::Integer(signed(16)),
            5 => Content::Integer(signed(32)),
            6 => Content::Real(f64::from(f32::from_bits(unsigned as u32))),
            12 => Content::Real(f64::from_bits(unsigned)),
            TYPE_BOOL if unsigned > 1 => return Err(Error::invalid(format!("{what} is {unsigned}; 0 or 1 is needed"))),
            _ => Content::Integer(unsigned as i64),
        })
    }

    fn array(&mut self, what: &str, depth: usize) -> Result<Content> {
        let kind = self.u32(what)?;
        let size = value_size(kind);
        // A string has its length, an array its type and its length.
        let count = self.count(what, size.unwrap_or(if kind == TYPE_ARRAY { 12 } else { 8 }))?;
        match (kind, size) {
            (_, Some(size)) => {
                let start = self.at;
                self.take(count * size, what)?;
                Ok(Content::Array { kind, count, data: start..self.at })
            }
            (TYPE_STRING, _) => {
                let mut texts = with_room(count, what)?;
                for _ in 0..count {
                    texts.push(self.text(what)?);
                }
                Ok(Content::Texts(texts))
            }
            (TYPE_ARRAY, _) if depth < MAX_DEPTH => {
                for _ in 0..count {
                    self.array(what, depth + 1)?;
                }
                Ok(Content::Nested { count })
            }
            _ => Err(Error::invalid(format!("{what} is an array of type {kind}, or nested too deeply"))),
        }
    }

    /// With its data relative to the end of the header.
    fn tensor(&mut self, index: usize, alignment: usize) -> Result<TensorEntry> {
        let name = self.name(&format!("the name of tensor {index}"))?;
        let what = format!("the tensor `{name}`");
        let rank = self.u32(&what)? as usize;
        if rank > MAX_RANK {
            return Err(Error::invalid(format!("{what} has {rank} axes; at most {MAX_RANK} are supported")));
        }
        let mut shape = vec![1; rank.max(1)];
        // The file has the innermost axis first.
        for axis in (0..rank).rev() {
            let extent = self.u64(&what)?;
            shape[axis] = usize::try_from(extent)
                .ok()
                .filter(|&extent| extent <= i64::MAX as usize)
                .ok_or_else(|| Error::invalid(format!("{what} has an extent of {extent}")))?;
        }
        let kind = self.u32(&what)?;
        let offset = self.u64(&what)?;
        let start = usize::try_from(offset)
            .ok()
            .filter(|start| start.is_multiple_of(alignment))
            .ok_or_else(|| Error::invalid(format!("{what} begins at {offset}; a multiple of {alignment} is needed")))?;
        let bytes = match block_size(kind) {
            None => 0,
            Some((elements, bytes)) => {
                let innermost = shape[shape.len() - 1];
                if !innermost.is_multiple_of(elements) {
                    return Err(Error::invalid(format!("{what} has rows of {innermost}; blocks are {elements}")));
                }
                let blocks = shape.iter().try_fold(1usize, |product, &extent| product.checked_mul(extent));
                let size = blocks.and_then(|count| (count / elements).checked_mul(bytes));
                size.ok_or_else(|| Error::invalid(format!("the size of {what} {shape:?} overflows")))?
            }
        };
        let end = start.checked_add(bytes).ok_or_else(|| Error::invalid(format!("the end of {what} overflows")))?;
        Ok(TensorEntry { name, kind, shape, data: start..end })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
    }

    fn header(version: u32, tensors: u64, values: u64) -> Vec<u8> {
        [&b"GGUF"[..], &version.to_le_bytes(), &tensors.to_le_bytes(), &values.to_le_bytes()].concat()
    }

    fn value(key: &str, kind: u32, bytes: &[u8]) -> Vec<u8> {
        [&text(key)[..], &kind.to_le_bytes(), bytes].concat()
    }

    fn tensor(name: &str, innermost_first: &[u64], kind: u32, offset: u64) -> Vec<u8> {
        let shape: Vec<u8> = innermost_first.iter().flat_map(|extent| extent.to_le_bytes()).collect();
        let rank = (innermost_first.len() as u32).to_le_bytes();
        [&text(name)[..], &rank, &shape, &kind.to_le_bytes(), &offset.to_le_bytes()].concat()
    }

    /// All kinds of values, and three tensors.
    fn sample() -> Vec<u8> {
        let texts = [&TYPE_STRING.to_le_bytes()[..], &2u64.to_le_bytes(), &text("a"), &text("")].concat();
        let numbers =
            [&5u32.to_le_bytes()[..], &3u64.to_le_bytes(), &[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1]].concat();
        let nested = [&TYPE_ARRAY.to_le_bytes()[..], &1u64.to_le_bytes(), &numbers].concat();
        let mut file = [
            header(3, 3, 9),
            value("general.architecture", TYPE_STRING, &text("gemma3")),
            value("general.alignment", 4, &64u32.to_le_bytes()),
            value("i8", 1, &[0xfe]),
            value("f32", 6, &1.5f32.to_le_bytes()),
            value("u64", 10, &u64::MAX.to_le_bytes()),
            value("bool", TYPE_BOOL, &[1]),
            value("texts", TYPE_ARRAY, &texts),
            value("numbers", TYPE_ARRAY, &numbers),
            value("nested", TYPE_ARRAY, &nested),
            tensor("a", &[64, 3], 2, 0),
            tensor("b", &[5], 0, 128),
            tensor("unknown", &[7, 2], 99, 192),
        ]
        .concat();
        file.resize(file.len().next_multiple_of(64) + 256, 0x5a);
        file
    }

    #[test]
    fn what_was_written_is_read() {
        let bytes = sample();
        let file = GgufFile::parse(&bytes).unwrap();
        assert_eq!((file.version, file.alignment, file.values.len(), file.tensors.len()), (3, 64, 9, 3));
        let content = |key: &str| file.value(key).unwrap().content.clone();
        assert!(matches!(content("general.architecture"), Content::Text(range) if &bytes[range.clone()] == b"gemma3"));
        assert_eq!(content("i8"), Content::Integer(-2));
        assert_eq!(content("f32"), Content::Real(1.5));
        assert_eq!((content("u64"), content("bool")), (Content::Integer(-1), Content::Integer(1)));
        assert!(
            matches!(content("texts"), Content::Texts(texts) if texts.len() == 2 && bytes[texts[0].clone()] == *b"a")
        );
        assert!(matches!(content("numbers"), Content::Array { kind: 5, count: 3, data } if data.len() == 12));
        assert_eq!(content("nested"), Content::Nested { count: 1 });
        let a = file.tensor("a").unwrap();
        assert_eq!((&a.shape[..], a.kind, a.data.len()), (&[3, 64][..], 2, 3 * 2 * 18));
        assert!(a.data.start.is_multiple_of(64));
        let (b, unknown) = (file.tensor("b").unwrap(), file.tensor("unknown").unwrap());
        assert_eq!((b.data.start - a.data.start, b.data.len(), unknown.data.len()), (128, 20, 0));
        assert!(file.tensor("c").is_none() && file.value("c").is_none());
    }

    #[test]
    fn every_truncation_is_refused() {
        let bytes = sample();
        let file = GgufFile::parse(&bytes).unwrap();
        let needed = file.tensors.iter().map(|tensor| tensor.data.end).max().unwrap();
        for length in 0..needed {
            assert!(GgufFile::parse(&bytes[..length]).is_err(), "{length} of {needed} bytes");
        }
        assert!(GgufFile::parse(&bytes[..needed]).is_ok());
    }

    #[test]
    fn errors_name_what_is_wrong() {
        let refused = |bytes: &[&[u8]]| GgufFile::parse(&bytes.concat()).unwrap_err().message;
        assert!(refused(&[b"GGML"]).contains("GGUF"));
        assert!(refused(&[&header(1, 0, 0)]).contains("version 1"));
        assert!(refused(&[&header(3u32.swap_bytes(), 0, 0)]).contains("big-endian"));
        assert!(refused(&[&header(3, 1 << 60, 0)]).contains("1152921504606846976"));
        assert!(refused(&[&header(3, 0, 1), &value("k", 77, &[0; 9])]).contains("type 77"));
        assert!(refused(&[&header(3, 0, 2), &value("k", 0, &[1]), &value("k", 0, &[1])]).contains("twice"));
        assert!(refused(&[&header(3, 0, 1), &value("b", TYPE_BOOL, &[2])]).contains("`b` is 2"));
        let alignment = value("general.alignment", 4, &48u32.to_le_bytes());
        assert!(refused(&[&header(3, 0, 1), &alignment]).contains("power of two"));
        let pad = [0; 64];
        assert!(refused(&[&header(3, 1, 0), &tensor("t", &[1; 5], 0, 0), &pad]).contains("5 axes"));
        assert!(refused(&[&header(3, 1, 0), &tensor("t", &[33], 2, 0), &pad]).contains("blocks are 32"));
        assert!(refused(&[&header(3, 1, 0), &tensor("t", &[4], 0, 8), &pad]).contains("multiple of 32"));
        assert!(refused(&[&header(3, 1, 0), &tensor("t", &[u64::MAX >> 1; 3], 0, 0), &pad]).contains("overflows"));
        assert!(refused(&[&header(3, 1, 0), &tensor("t", &[9999], 0, 0), &pad]).contains("`t` ends 39996"));
        let mut deep = Vec::new();
        for _ in 0..6 {
            deep.extend(TYPE_ARRAY.to_le_bytes());
            deep.extend(1u64.to_le_bytes());
        }
        deep.extend([0; 64]);
        assert!(refused(&[&header(3, 0, 1), &value("deep", TYPE_ARRAY, &deep)]).contains("nested too deeply"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        /// Bytes changed at random are read or refused; what is read lies inside the file.
        #[test]
        fn no_bytes_do_harm(changes in prop::collection::vec((0..900usize, any::<u8>()), 1..6)) {
            let mut bytes = sample();
            for (at, byte) in changes {
                let length = bytes.len();
                bytes[at % length] = byte;
            }
            if let Ok(file) = GgufFile::parse(&bytes) {
                for tensor in &file.tensors {
                    prop_assert!(tensor.data.start <= tensor.data.end && tensor.data.end <= bytes.len());
                }
            }
        }
    }
}

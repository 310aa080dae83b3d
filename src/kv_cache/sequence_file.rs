//! A sequence in a file: a head that says what it is, then its image (`swap.rs`).
//!
//! All numbers are little-endian. What does not fit the cache is refused before memory is taken for it, and what was changed on
//! the way by the sum over all of it.

use super::swap::{Held, Swap};
use super::{KvCache, KvCacheOptions};
use crate::error::{Error, Result, Status};
use crate::file;
use crate::stream::Stream;
use std::io::{Read, Write};
use std::path::Path;

const MAGIC: [u8; 8] = *b"nvbKVseq";
const VERSION: u64 = 1;
/// Words of the head behind the magic: see `Head::words`.
const WORDS: usize = 15;
const HEAD_BYTES: usize = MAGIC.len() + WORDS * 8;

/// What a file says of itself.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Head {
    /// The cache: layers, heads, dims, whether values are in keys, dtypes, tokens of a page and of a ring.
    geometry: [u64; 9],
    held: Held,
    image_sum: u64,
}

/// Names of what `Head::geometry` has.
const GEOMETRY: [&str; 9] = [
    "layers",
    "kv_heads",
    "head_dim",
    "value_dim",
    "values_in_keys",
    "dtype",
    "value_dtype",
    "page_tokens",
    "the ring's tokens",
];

fn geometry(options: &KvCacheOptions) -> [u64; 9] {
    [
        options.layers as u64,
        options.kv_heads as u64,
        options.head_dim as u64,
        options.value_dim() as u64,
        options.values_in_keys.into(),
        options.dtype as u64,
        options.value_dtype() as u64,
        options.page_tokens as u64,
        options.ring_tokens().unwrap_or(0) as u64,
    ]
}

/// Four sums of FNV-1a over words of 64 bits, one word each in turn, so that they are formed side by side, and the bytes that are
/// left; then over the four. A changed word changes its sum, whatever it was.
fn sum(bytes: &[u8]) -> u64 {
    const START: u64 = 0xcbf2_9ce4_8422_2325;
    const FACTOR: u64 = 0x0000_0100_0000_01b3;
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    let add = |sum: u64, word: u64| (sum ^ word).wrapping_mul(FACTOR);
    let mut sums = [START, START + 1, START + 2, START + 3];
    let mut blocks = bytes.chunks_exact(32);
    for block in &mut blocks {
        for (sum, bytes) in sums.iter_mut().zip(block.chunks_exact(8)) {
            *sum = add(*sum, word(bytes));
        }
    }
    let rest = blocks.remainder().iter().fold(bytes.len() as u64, |sum, &byte| add(sum, byte.into()));
    sums.iter().fold(rest, |sum, &part| add(sum, part))
}

impl Head {
    fn words(&self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        words[0] = VERSION;
        words[1..10].copy_from_slice(&self.geometry);
        let Held { tokens, most, bytes } = self.held;
        words[10..14].copy_from_slice(&[tokens as u64, most as u64, bytes as u64, self.image_sum]);
        // A sum over the head itself.
        words[14] = sum(&Head::bytes_of(&words[..14]));
        words
    }

    fn bytes_of(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn parse(bytes: &[u8; HEAD_BYTES]) -> Result<Head> {
        let refuse = |text: String| Err(Error::new(Status::Io, text));
        let (magic, rest) = bytes.split_at(MAGIC.len());
        if magic != MAGIC {
            return refuse("it holds no sequence of a KV cache".to_string());
        }
        let words: Vec<u64> =
            rest.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes"))).collect();
        if words[0] != VERSION {
            return refuse(format!("it has version {} of the format; this library reads {VERSION}", words[0]));
        }
        if words[14] != sum(&rest[..14 * 8]) {
            return refuse("its head was changed: the sum over it is another one".to_string());
        }
        let number = |word: u64| usize::try_from(word).unwrap_or(usize::MAX);
        let mut geometry = [0; 9];
        geometry.copy_from_slice(&words[1..10]);
        let held = Held { tokens: number(words[10]), most: number(words[11]), bytes: number(words[12]) };
        Ok(Head { geometry, held, image_sum: words[13] })
    }
}

impl KvCache {
    /// Writes the sequence to the file, as a whole or not at all. Waits for `stream`.
    pub fn save(&self, sequence: usize, path: &Path, stream: &Stream) -> Result<()> {
        let tokens = self.expect_held_tokens(sequence)?;
        let swap = Swap::new(self, tokens, stream)?;
        self.swap_out(&swap, sequence, stream)?;
        // SAFETY: the swap is this call's, and its copies are queued.
        let (held, image) = unsafe { swap.image()? };
        self.clear_behind(image, held.tokens);
        let head = Head { geometry: geometry(self.options()), held, image_sum: sum(image) };
        let write = |out: &mut dyn Write| {
            out.write_all(&MAGIC)?;
            out.write_all(&Head::bytes_of(&head.words()))?;
            out.write_all(image)
        };
        file::replace(path, write).map_err(|error| failed("cannot write", path, error))
    }

    /// Gives `sequence`, which must be empty, what `save` has written, of this cache or of one like it. Waits for the copies.
    pub fn restore(&self, sequence: usize, path: &Path, stream: &Stream, queue: super::Queue<'_>) -> Result<()> {
        self.check_sequence("sequence", sequence)?;
        let context = |error: Error| error.context(format_args!("{}", path.display()));
        let (mut file, metadata) = file::open(path).map_err(|error| failed("cannot open", path, error))?;
        let mut bytes = [0; HEAD_BYTES];
        if metadata.len() < HEAD_BYTES as u64 {
            return Err(context(Error::new(Status::Io, "it is too short to hold a sequence of a KV cache")));
        }
        file.read_exact(&mut bytes).map_err(|error| failed("cannot read", path, error))?;
        let head = Head::parse(&bytes).map_err(context)?;
        self.check_head(&head, metadata.len()).map_err(context)?;
        let swap = Swap::new(self, head.held.tokens, stream)?;
        swap.set(self, head.held, |image| {
            file.read_exact(image).map_err(|error| failed("cannot read", path, error))?;
            match sum(image) == head.image_sum {
                true => Ok(()),
                false => Err(context(Error::new(Status::Io, "it was changed: the sum over it is another one"))),
            }
        })?;
        self.swap_in(&swap, sequence, stream, queue)?;
        swap.wait(stream)?;
        swap.synchronize()
    }

    fn check_head(&self, head: &Head, file_bytes: u64) -> Result<()> {
        let own = geometry(self.options());
        for (name, (theirs, ours)) in GEOMETRY.iter().zip(head.geometry.iter().zip(own)) {
            if *theirs != ours {
                return Err(Error::invalid(format!("it is of a cache whose {name} is {theirs}; this one's is {ours}"))
                    .with_limit(*theirs, ours));
            }
        }
        let Held { tokens, most, bytes } = head.held;
        let capacity = self.options().capacity;
        if tokens == 0 || tokens > capacity || most < tokens || most > capacity {
            return Err(Error::invalid(format!(
                "it holds {tokens} tokens, of a sequence that had up to {most}; the cache holds up to {capacity} a sequence"
            ))
            .with_limit(most.max(tokens) as u64, capacity as u64));
        }
        let rows = if self.options().ring_tokens().is_some() { most } else { tokens };
        let needed = self.image_bytes(rows)?;
        if bytes != needed || file_bytes != (HEAD_BYTES + needed) as u64 {
            return Err(Error::new(
                Status::Io,
                format!("it has {file_bytes} bytes; {} are needed for {tokens} tokens", HEAD_BYTES + needed),
            ));
        }
        Ok(())
    }
}

fn failed(what: &str, path: &Path, error: std::io::Error) -> Error {
    Error::new(Status::Io, format!("{what} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> Head {
        let held = Held { tokens: 5, most: 7, bytes: 640 };
        Head { geometry: geometry(&KvCacheOptions::default()), held, image_sum: 99 }
    }

    fn bytes(head: &Head) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..].copy_from_slice(&Head::bytes_of(&head.words()));
        bytes
    }

    #[test]
    fn a_head_comes_back_and_no_changed_one_does() {
        assert_eq!(Head::parse(&bytes(&head())).unwrap(), head());
        for at in 0..HEAD_BYTES {
            for bit in 0..8 {
                let mut changed = bytes(&head());
                changed[at] ^= 1 << bit;
                assert_eq!(Head::parse(&changed).unwrap_err().status, Status::Io, "bit {bit} of byte {at}");
            }
        }
    }

    #[test]
    fn every_byte_counts_for_the_sum() {
        for length in [0, 1, 7, 31, 32, 33, 64, 100] {
            let mut bytes: Vec<u8> = (0..length).map(|i| (i * 37) as u8).collect();
            let before = sum(&bytes);
            for at in 0..length {
                bytes[at] ^= 0x40;
                assert_ne!(sum(&bytes), before, "byte {at} of {length}");
                bytes[at] ^= 0x40;
            }
            bytes.push(0);
            assert_ne!(sum(&bytes), before, "a byte more than {length}");
        }
    }
}

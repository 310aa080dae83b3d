//! A list's fingerprint: equal for the same operations on memory that lies elsewhere.
//!
//! What counts of an operation is its descriptor as `Debug` writes it (kind, shapes, dtypes, strides and numbers), with each
//! address as the place at which the list names it first, and the nodes that it runs after. The content of memory does not count.

use super::region::Ranges;
use super::Node;
use crate::error::{Error, Result, Status};
use std::collections::HashMap;
use std::fmt::Write as _;

/// FNV-1a with 64 bits (Fowler, Noll and Vo): tells a damaged file from a whole one and one list from another, and keeps nobody off
/// who makes one on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hash(pub u64);

impl Hash {
    pub fn new() -> Hash {
        Hash(0xcbf2_9ce4_8422_2325)
    }

    pub fn of(bytes: &[u8]) -> u64 {
        Hash::new().with(bytes).0
    }

    fn with(self, bytes: &[u8]) -> Hash {
        Hash(bytes.iter().fold(self.0, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)))
    }
}

/// Addresses as the places at which they were first named.
#[derive(Default)]
struct Places(HashMap<String, usize>);

impl Places {
    fn of(&mut self, address: &str) -> Result<usize> {
        if let Some(place) = self.0.get(address) {
            return Ok(*place);
        }
        let place = self.0.len();
        self.0
            .try_reserve(1)
            .map_err(|_| Error::new(Status::OutOfMemory, "no host memory for a graph's fingerprint"))?;
        self.0.insert(address.to_string(), place);
        Ok(place)
    }

    /// The text with places for addresses.
    fn replaced(&mut self, text: &str) -> Result<String> {
        let mut replaced = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(at) = rest.find("0x") {
            let digits = rest[at + 2..].bytes().take_while(u8::is_ascii_hexdigit).count();
            let end = at + 2 + digits;
            replaced.push_str(&rest[..at]);
            // NULL is no memory.
            match rest[at + 2..end].trim_start_matches('0') {
                "" => replaced.push_str("@null"),
                address => _ = write!(replaced, "@{}", self.of(address)?),
            }
            rest = &rest[end..];
        }
        replaced.push_str(rest);
        Ok(replaced)
    }
}

/// Of nodes in their order, of whose memory some is internal.
pub fn of(nodes: &[Node], internal: &Ranges) -> Result<u64> {
    let (mut hash, mut places) = (Hash::new(), Places::default());
    for node in nodes {
        hash = hash.with(places.replaced(&format!("{:?}", node.op))?.as_bytes());
        node.dependencies.iter().for_each(|&before| hash = hash.with(&before.to_le_bytes()));
        for access in &node.accesses {
            hash = hash.with(&[0xFF, u8::from(internal.contain(&access.region))]);
        }
    }
    Ok(hash.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::passes::testing::{Case, M};

    /// On memory of a thread of its own.
    fn fingerprint(record: impl FnOnce(&mut Case, [M; 3]) + Send) -> u64 {
        let fingerprint = || {
            let mut case = Case::new();
            let matrices = case.matrices();
            record(&mut case, matrices);
            case.fingerprint()
        };
        std::thread::scope(|scope| scope.spawn(fingerprint).join().unwrap())
    }

    #[test]
    fn the_same_list_on_other_memory_has_the_same_fingerprint() {
        let record = |case: &mut Case, [a, b, c]: [M; 3]| _ = case.scale(a, 2.0, b).add(a, b, c);
        assert_eq!(fingerprint(record), fingerprint(record));
    }

    #[test]
    fn numbers_order_memory_in_common_and_marks_count() {
        let base = fingerprint(|case, [a, b, c]| _ = case.scale(a, 2.0, b).add(a, b, c));
        let others = [
            fingerprint(|case, [a, b, c]| _ = case.scale(a, 2.5, b).add(a, b, c)),
            fingerprint(|case, [a, b, c]| _ = case.add(a, b, c).scale(a, 2.0, b)),
            fingerprint(|case, [a, b, c]| _ = case.scale(a, 2.0, b).add(a, a, c)),
            fingerprint(|case, [a, b, _]| _ = case.scale(a, 2.0, b)),
            fingerprint(|case, [a, b, c]| _ = case.scale(a, 2.0, b).add(a, b, c).internal(b)),
            // Half of the memory that the first writes.
            fingerprint(|case, [a, b, c]| _ = case.scale(a, 2.0, b).add(a.part(0, 2), b.part(2, 2), c.part(0, 2))),
        ];
        assert!(others.iter().all(|other| *other != base), "{base:x} {others:x?}");
    }

    #[test]
    fn addresses_become_places_and_other_text_stays() {
        let mut places = Places::default();
        let text = "data: 0x7f00, other: 0x0, again: 0x7f00, 1e-6, next: 0xAB)";
        assert_eq!(places.replaced(text).unwrap(), "data: @0, other: @null, again: @0, 1e-6, next: @1)");
        assert_eq!(places.replaced("").unwrap(), "");
        assert_eq!(places.replaced("0x").unwrap(), "@null");
        // The example of the hash's authors.
        assert_eq!(Hash::of(b"foobar"), 0x85944171f73967e8);
    }
}

//! Structs that go in and come out: whole, cut short, or longer than the library knows them.

use super::arguments::{Arguments, Watched};
use super::callbacks;
use super::interface::{Field, Role, Structure, STRUCTURES};
use super::memory::{self, LARGEST};
use super::palette;
use super::tensors::{make_rows, Rows, Tensor};

const WORD: usize = size_of::<usize>();

/// How large a struct says that it is, and what stands behind the part that the library knows.
struct Size {
    said: usize,
    tail: u8,
}

fn wrong_size(whole: usize, value: u8) -> Size {
    let high = usize::from(value / 12);
    let said = match value % 12 {
        0 => 0,
        1 => 4,
        2 => WORD,
        3 => whole - WORD.min(whole),
        4 => whole - 4,
        5 => WORD + high * 8,
        6 => WORD + high * 4,
        7 => whole + 8 * high,
        8 | 9 => whole + 8 * (1 + high),
        10 => (1 << 16) + high,
        _ => usize::MAX - high,
    };
    Size { said, tail: if value % 12 == 9 { 1 } else { 0 } }
}

impl Arguments<'_> {
    /// A struct that the call reads, in memory of just as many bytes as it says.
    pub(super) fn structure(&mut self, at: usize, optional: bool, name: &str) -> usize {
        let structure = &STRUCTURES[at];
        let wrong = self.wrong();
        let (bytes, size) = self.filled(structure, wrong);
        let absent = optional && self.random.one_in(3) || name == "allocator" && !self.random.one_in(4);
        if wrong == Some(255) || absent && !self.call.is_wrong {
            return 0;
        }
        self.lay(&bytes, size, 1, structure)
    }

    /// `count` structs, or one with a count that the library must refuse.
    pub(super) fn structures(&mut self, at: usize, count: u64, absent: bool) -> usize {
        let structure = &STRUCTURES[at];
        let wrong = self.wrong();
        let (bytes, size) = self.filled(structure, wrong);
        if wrong == Some(255) || absent || structure.size > LARGEST / 4 {
            return 0;
        }
        // As many as the tensors of a cache of three layers.
        self.lay(&bytes, size, if count > 6 { 1 } else { count as usize }, structure)
    }

    fn lay(&mut self, bytes: &[u8], size: Size, count: usize, structure: &'static Structure) -> usize {
        // What says less than a word or more than the library takes is not read, but for its size.
        let each = if !structure.is_versioned() || !(WORD..=1 << 16).contains(&size.said) {
            structure.size
        } else {
            size.said.next_multiple_of(8)
        };
        let mut all = Vec::new();
        for _ in 0..count.min(LARGEST / each) {
            let start = all.len();
            all.extend_from_slice(&bytes[..bytes.len().min(each)]);
            all.resize(start + each, size.tail);
        }
        let address = memory::copy(&all) as usize;
        let end = all.len();
        self.call.watched.push(Watched { address, before: all, what: structure.name, output: false, head: 0, end });
        address
    }

    /// The bytes of a struct, those past its size zeroed as the library sees them.
    fn filled(&mut self, structure: &'static Structure, wrong: Option<u8>) -> (Vec<u8>, Size) {
        let mut bytes = vec![0; structure.size];
        let whole = structure.size;
        let size = match wrong {
            Some(value) if structure.is_versioned() => wrong_size(whole, value),
            _ => Size { said: whole, tail: 0 },
        };
        let is_number = |field: &&Field| matches!(field.role, Role::Number { .. } | Role::Real { .. });
        for field in structure.fields.iter().filter(is_number) {
            let value = self.number(structure.name, field.name, field.role);
            put(&mut bytes, field, &value.to_le_bytes());
        }
        for field in structure.fields.iter().filter(|field| !is_number(field)) {
            self.field(structure, field, &mut bytes);
        }
        // A weight that exists says what the case would.
        let weight = structure.offset("weight").filter(|_| structure.name == "nvb_linear_case" && !self.call.is_wrong);
        if weight.is_some_and(|at| bytes[at..at + WORD].iter().any(|&byte| byte != 0)) {
            for name in ["columns", "depth", "format", "granularity", "group_size", "zero_points", "arrangement"] {
                let field = structure.fields.iter().find(|field| field.name == name).expect("a field of the header");
                put(&mut bytes, field, &[0; 8]);
            }
        }
        if structure.is_versioned() {
            bytes[..WORD].copy_from_slice(&size.said.to_le_bytes());
            // What is cut in two is left out: the part that is there would describe other memory than was taken.
            for field in structure.fields.iter().filter(|field| field.role != Role::StructSize) {
                let end = field.offset + bytes_of(field.role);
                if field.offset < size.said && size.said < end && end - field.offset > 8 {
                    bytes[field.offset..end].fill(0);
                }
            }
        }
        (bytes, size)
    }

    fn field(&mut self, structure: &'static Structure, field: &'static Field, bytes: &mut [u8]) {
        let number = |bytes: &[u8], at: usize| {
            let at = structure.fields[at].offset;
            u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
        };
        let pointer = match field.role {
            Role::StructSize | Role::Plain { .. } => return,
            Role::Tensor => {
                let wrong = [self.wrong(), self.wrong(), self.wrong(), self.wrong(), self.wrong()];
                let comment = if field.comment.is_empty() { "[T, width]" } else { field.comment };
                let tensor = self.place_tensor(field.name, comment, wrong);
                // SAFETY: integers without padding between them.
                let raw: [u8; size_of::<Tensor>()] = unsafe { std::mem::transmute(tensor) };
                return put(bytes, field, &raw);
            }
            Role::QuantizedRows => {
                let wrong = [self.wrong(), self.wrong(), self.wrong(), self.wrong(), self.wrong()];
                let rows = make_rows(&self.extents, field.name, field.comment, wrong, &mut self.random);
                // SAFETY: integers without padding between them.
                let raw: [u8; size_of::<Rows>()] = unsafe { std::mem::transmute(rows) };
                if rows.data != 0 {
                    self.replace(structure, field.comment, bytes);
                }
                return put(bytes, field, &raw);
            }
            Role::Handle(kind) => {
                let known = self.call.handles.len();
                let optional = field.comment.contains("Optional") || field.comment.contains("or NULL");
                let value = self.handle(kind, structure.name);
                // Of the call's own parameters alone is known what must come of a wrong one.
                self.call.handles.truncate(known);
                if optional && !self.call.is_wrong && self.random.one_in(2) {
                    0
                } else {
                    value
                }
            }
            Role::StructIn(at) => self.structure(at, true, field.name),
            Role::Structs { structure: at, count } => {
                let count = number(bytes, count);
                let of_file = self.extents.values["source format"] != 0;
                self.structures(at, count, (field.name == "blocks") != of_file && !self.call.is_wrong)
            }
            Role::Text => {
                let address = self.text(field.name);
                if self.random.one_in(2) && !self.call.is_wrong {
                    0
                } else {
                    address
                }
            }
            Role::Path { written } => {
                let address = self.path(written);
                if self.random.one_in(4) {
                    address
                } else {
                    0
                }
            }
            Role::Numbers { count } => self.numbers(field.name, number(bytes, count)),
            Role::Memory { bytes: at } => {
                let size = number(bytes, at);
                let null = self.wrong().is_some();
                let wanted = if size == 0 && field.name != "zeros" && field.name != "order" { 16 << 10 } else { size };
                let given = wanted.min(LARGEST as u64);
                let at = structure.fields[at].offset;
                if size <= isize::MAX as u64 {
                    bytes[at..at + 8].copy_from_slice(&given.to_le_bytes());
                }
                if null {
                    0
                } else {
                    memory::piece(given as usize, false, self.random.of(&[0x2c, 0x2c, 0x2c, 0, 0xff])) as usize
                }
            }
            Role::Opaque => {
                let value = self.wrong().unwrap_or(0);
                usize::from(value) << 8
            }
            Role::Callback(kind) => {
                let null = self.wrong().is_some() || kind == "nvb_log_callback" && self.random.one_in(2);
                if null {
                    0
                } else {
                    callbacks::address(kind)
                }
            }
            role => unreachable!("{role:?} is no role of a field"),
        };
        put(bytes, field, &pointer.to_le_bytes());
    }

    /// "in the place of `input`, which then must be absent".
    fn replace(&self, structure: &Structure, comment: &str, bytes: &mut [u8]) {
        let replaced = comment.split_once("in the place of `").and_then(|(_, rest)| rest.split('`').next());
        if let Some(place) = replaced.and_then(|name| structure.fields.iter().find(|field| field.name == name)) {
            bytes[place.offset..place.offset + bytes_of(place.role)].fill(0);
        }
    }

    /// A host array of the call's sequences: where they start, how long they are, which sequences they have.
    fn numbers(&mut self, name: &str, count: u64) -> usize {
        let wrong = self.wrong();
        let count = count.min(4) as i64;
        let value = |name: &str| self.extents.values[name];
        let entries = if name.ends_with("starts") { count + 1 } else { count };
        let numbers: Vec<i32> = (0..entries)
            .map(|at| {
                let spread = |whole: i64| (whole * at / count.max(1)) as i32;
                match name {
                    "query_starts" => spread(value("T")),
                    "key_starts" => spread(value("T_kv")),
                    "kv_lengths" => value("cache capacity").min(value("T").max(1)) as i32,
                    _ => (at % value("cache sequences").max(1)) as i32,
                }
            })
            .collect();
        let to = memory::piece(numbers.len() * 4, false, 0) as *mut i32;
        for (at, &right) in numbers.iter().enumerate() {
            let given = match wrong {
                Some(value) if usize::from(value / 2) % numbers.len() == at => {
                    palette::number(Role::Number { bytes: 4 }, "", right as u64, value) as i32
                }
                _ => right,
            };
            // SAFETY: as many numbers were taken.
            unsafe { to.add(at).write(given) };
        }
        let optional = matches!(name, "sequences" | "prefix_lengths") && self.random.one_in(2);
        if wrong == Some(255) || optional {
            0
        } else {
            to as usize
        }
    }

    /// A struct that the call fills in.
    pub(super) fn structure_out(&mut self, at: usize, optional: bool) -> usize {
        let structure = &STRUCTURES[at];
        if !structure.is_versioned() {
            return self.watch_output(structure.size, structure.name);
        }
        let wrong = self.wrong();
        for field in structure.fields {
            // Its fields are not read; their leaves are there for structs that go in.
            self.skip(field.role);
        }
        if wrong == Some(255) || optional && wrong.is_none() && self.random.one_in(2) {
            return 0;
        }
        let size = wrong.map_or(Size { said: structure.size, tail: 0 }, |value| wrong_size(structure.size, value));
        let readable = (WORD..=1 << 16).contains(&size.said);
        let bytes = if readable { size.said.next_multiple_of(8) } else { structure.size };
        let address = self.watch_output(bytes.min(LARGEST), structure.name);
        let watched = self.call.watched.last_mut().expect("just pushed");
        let length = watched.before.len();
        watched.before[..WORD].copy_from_slice(&size.said.to_le_bytes());
        if length > structure.size {
            watched.before[structure.size..].fill(size.tail);
        }
        (watched.head, watched.end) = (WORD, structure.size.min(size.said).max(WORD));
        // SAFETY: as many bytes were taken.
        unsafe { (address as *mut u8).copy_from_nonoverlapping(watched.before.as_ptr(), length) };
        address
    }

    fn skip(&mut self, role: Role) {
        match role {
            Role::StructSize | Role::Plain { .. } => {}
            _ => {
                self.wrong();
            }
        }
    }
}

fn bytes_of(role: Role) -> usize {
    match role {
        Role::Number { bytes } | Role::Real { bytes } | Role::Plain { bytes } => bytes,
        Role::Tensor => size_of::<Tensor>(),
        Role::QuantizedRows => size_of::<Rows>(),
        _ => WORD,
    }
}

fn put(bytes: &mut [u8], field: &Field, value: &[u8]) {
    let count = bytes_of(field.role).min(value.len());
    bytes[field.offset..field.offset + count].copy_from_slice(&value[..count]);
}

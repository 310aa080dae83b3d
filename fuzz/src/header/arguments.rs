//! The arguments of one call: valid ones by the header's names and comments, one of which may be replaced by a wrong value.

use super::callbacks;
use super::interface::{handle_kind, Function, Parameter, Role, HANDLES, STRUCTURES};
use super::limits;
use super::memory::{self, LARGEST};
use super::numbers::valid;
use super::palette::{self, Random};
use super::tensors::{self, Extents};
use super::world::{field, structure, World};

/// Memory of the caller's that a call may not change, or only if it succeeds.
pub struct Watched {
    pub address: usize,
    pub before: Vec<u8>,
    pub what: &'static str,
    /// Whether success may change it.
    pub output: bool,
    /// Bytes at the start that never change: `struct_size`.
    pub head: usize,
    /// Bytes from here on are not the library's.
    pub end: usize,
}

pub struct Given {
    pub kind: usize,
    pub value: usize,
    pub alive: bool,
}

/// What was drawn for a call.
#[derive(Default)]
pub struct Call {
    pub values: Vec<usize>,
    pub watched: Vec<Watched>,
    /// Handles among the parameters themselves.
    pub handles: Vec<Given>,
    /// Buffers of text with their capacities.
    pub texts: Vec<(usize, usize)>,
    /// The first struct that goes in, which a new object may be asked about.
    pub options: Vec<u8>,
    /// Whether one of the values was got wrong.
    pub is_wrong: bool,
}

/// A call that is being drawn.
pub struct Arguments<'a> {
    pub(super) call: Call,
    pub(super) world: &'a World,
    pub(super) files: &'a super::setup::Files,
    pub(super) thread: usize,
    pub(super) random: Random,
    pub(super) extents: Extents,
    weight: usize,
    cache: usize,
    attention: usize,
    target: Option<usize>,
    value: u8,
    leaf: usize,
}

/// Target bytes below this leave the call as it is.
const VALID: u8 = 96;

impl<'a> Arguments<'a> {
    pub fn draw(
        world: &'a World,
        files: &'a super::setup::Files,
        thread: usize,
        function: &'static Function,
        leaves: usize,
        bytes: [u8; 3],
    ) -> Call {
        let [variant, target, value] = bytes;
        let is_valid = target < VALID || leaves == 0;
        let target = (!is_valid).then(|| usize::from(target - VALID) % leaves.max(1));
        // Where nothing is wrong, all bytes vary what is right.
        let seed = u64::from(variant) + if is_valid { u64::from(value) << 8 | u64::from(bytes[1]) << 16 } else { 0 };
        let mut arguments = Arguments {
            call: Call { values: vec![0; function.parameters.len()], is_wrong: !is_valid, ..Call::default() },
            world,
            files,
            thread,
            random: Random::new(seed + 1),
            extents: Extents::default(),
            weight: 0,
            cache: 0,
            attention: 0,
            target,
            value,
            leaf: 0,
        };
        arguments.extents.function = function.name;
        arguments.choose_extents(function);
        let is_number =
            |parameter: &&(usize, &Parameter)| matches!(parameter.1.role, Role::Number { .. } | Role::Real { .. });
        let all: Vec<(usize, &Parameter)> = function.parameters.iter().enumerate().collect();
        for &(at, parameter) in all.iter().filter(is_number) {
            arguments.call.values[at] = arguments.number(function.name, parameter.name, parameter.role) as usize;
        }
        for &(at, parameter) in all.iter().filter(|it| !is_number(it)) {
            arguments.call.values[at] = arguments.pointer(function, at, parameter);
        }
        arguments.call
    }

    /// Whether the next leaf is the one to get wrong, and how.
    pub(super) fn wrong(&mut self) -> Option<u8> {
        self.leaf += 1;
        (self.target == Some(self.leaf - 1)).then_some(self.value)
    }

    /// Shapes that fit the weight, the cache and the attention which the call will be given.
    fn choose_extents(&mut self, function: &Function) {
        let random = &mut self.random;
        let mut pick = |kind: &str| {
            let choice = if random.one_in(2) { 0 } else { random.below(64) };
            let found = self.world.pick(handle_kind(kind), self.thread, choice);
            found.map(|handle| (handle.value, handle.options.as_slice())).unwrap_or((0, &[]))
        };
        let (weight, info) = pick("nvb_weight");
        let (cache, cache_options) = pick("nvb_kv_cache");
        let (attention, attention_options) = pick("nvb_attention");
        (self.weight, self.cache, self.attention) = (weight, cache, attention);
        let of = |name: &str, bytes: &[u8], field_name: &str, or: i64| {
            field(structure(name), bytes, field_name).map_or(or, |value| (value & 0xffff) as i64)
        };
        let rows = of("nvb_weight_info", info, "rows", 64);
        let names: &[&str] = if function.parameters.iter().any(|it| it.name == "args") { &["weight"] } else { &[] };
        let uses_weight = !names.is_empty()
            && function.parameters.iter().any(|it| match it.role {
                Role::StructIn(at) => {
                    STRUCTURES[at].fields.iter().any(|field| field.role == Role::Handle(handle_kind("nvb_weight")))
                }
                _ => false,
            });
        let sequences = of("nvb_kv_cache_options", cache_options, "sequences", 2);
        let tokens = if function.name.contains("decode") {
            random.of(&[1, sequences, sequences, 2])
        } else {
            random.of(&[1, 1, 2, 3, 4, 7, 8, 17, 33, 0])
        };
        let width = random.of(&[1, 2, 8, 16, 31, 32, 64, 64, 100, 128]);
        let values = &mut self.extents.values;
        for name in ["T", "M", "B", "rows"] {
            values.insert(name, tokens);
        }
        values.insert("T_kv", tokens + random.of(&[0, 0, 3, 16]));
        for name in ["width", "F", "V", "n", "N", "K"] {
            values.insert(name, width);
        }
        values.insert("experts", 2);
        values.insert("P", random.of(&[1, 2, 3]));
        // Query rows of a sequence in a decode.
        values.insert("R", random.of(&[1, 1, 2]));
        values.insert("rows of the weight", rows);
        if uses_weight {
            let grouped = function.name.contains("grouped");
            let columns = of("nvb_weight_info", info, "columns", 64);
            let output = of("nvb_weight_info", info, "output_columns", rows);
            values.insert("K", columns);
            values.insert("width", columns);
            values.insert("N", if grouped { output / 2 } else { output });
        } else if function.name == "nvb_weight_dequantize" {
            values.insert("N", rows);
            values.insert("K", of("nvb_weight_info", info, "columns", 64));
        } else if function.name == "nvb_weight_create" {
            values.insert("Nᵢ", random.of(&[64, 64, 32, 1, 33, 128]));
            values.insert("K", random.of(&[64, 64, 32, 128, 256, 33]));
        } else if function.name.starts_with("nvb_matmul") {
            values.insert("K", random.of(&[1, 8, 32, 64]));
            values.insert("N", random.of(&[1, 8, 31, 64]));
        }
        let (file_rows, file_columns) = random.of(&[(64, 64), (16, 256), (8, 512), (32, 128)]);
        values.insert("file rows", file_rows);
        values.insert("file columns", file_columns);
        values.insert("source format", if random.one_in(3) { 1 + random.below(20) as i64 } else { 0 });
        values.insert("sequences", random.of(&[1, 1, 2, 3]));
        let heads = |name: &str, or: i64| {
            let cached = of("nvb_kv_cache_options", cache_options, name, or);
            of("nvb_attention_options", attention_options, name, cached)
        };
        values.insert("query_heads", heads("query_heads", 4));
        values.insert("kv_heads", heads("kv_heads", 2));
        values.insert("head_dim", heads("head_dim", 16));
        values.insert("cache capacity", of("nvb_kv_cache_options", cache_options, "capacity", 24));
        values.insert("cache sequences", sequences);
        values.insert("batch", random.of(&[0, 0, 1, 2]));
        self.extents.dtype = 1 + random.of(&[0, 0, 1, 2]);
        let kept = match function.name {
            name if name.contains("linear") => of("nvb_weight_info", info, "dtype", 0),
            _ => of("nvb_kv_cache_options", cache_options, "dtype", 1),
        };
        self.extents.weight_dtype = match kept {
            // Of keys in FP8 queries are floats.
            0 | 5 | 6 => random.of(&[1, 3]),
            dtype => dtype as u32,
        };
    }

    pub(super) fn number(&mut self, owner: &str, name: &str, role: Role) -> u64 {
        let right = valid(owner, name, &self.extents, &mut self.random);
        let value = match self.wrong() {
            Some(value) => palette::number(role, name, right, value),
            None => right,
        };
        limits::number(owner, name, value)
    }

    fn pointer(&mut self, function: &'static Function, at: usize, parameter: &Parameter) -> usize {
        let is_optional = ["options", "callback", "log_callback", "report"].contains(&parameter.name);
        match parameter.role {
            Role::Handle(kind) => self.handle(kind, function.name),
            Role::StructIn(structure) => {
                let address = self.structure(structure, is_optional, parameter.name);
                if self.call.options.is_empty() && address != 0 {
                    let size = STRUCTURES[structure].size;
                    // SAFETY: the first word is there, and as many bytes as it says, which no more are copied of.
                    self.call.options = unsafe {
                        let given = (address as *const usize).read().min(size);
                        std::slice::from_raw_parts(address as *const u8, given.min(LARGEST)).to_vec()
                    };
                    self.call.options.resize(size, 0);
                }
                address
            }
            Role::StructOut(structure) => self.structure_out(structure, is_optional),
            Role::Structs { structure, count } => self.structures(structure, self.call.values[count] as u64, false),
            Role::TensorPointer => self.tensor_pointer(parameter.name),
            Role::HandleOut(_) | Role::PointerOut | Role::BlockOut | Role::HostBlockOut => {
                self.output(8, parameter.name)
            }
            Role::NumberOut { bytes } => self.output(bytes, parameter.name),
            Role::Text => self.text(parameter.name),
            Role::Path { written } => self.path(written),
            Role::TextBuffer => {
                let capacity = self.call.values[at + 1];
                let null = self.wrong().is_some_and(|value| value < 128) || capacity > LARGEST;
                if null {
                    return 0;
                }
                let text = self.watch_output(capacity, "text");
                self.call.texts.push((text, capacity));
                text
            }
            Role::Block => self.block(),
            Role::HostBlock => self.host_block(function),
            Role::Blocks { count } => {
                let count = self.call.values[count].min(4);
                let blocks: Vec<usize> = (0..count).map(|_| self.some_block()).collect();
                let to = memory::piece(count * 8, false, 0);
                for (at, &block) in blocks.iter().enumerate() {
                    // SAFETY: `count` words were taken, which end on a page and so are aligned.
                    unsafe { to.cast::<usize>().add(at).write(block) };
                }
                if self.wrong().is_some() {
                    0
                } else {
                    to as usize
                }
            }
            Role::Extents => {
                let to = memory::piece(32, false, 0) as *mut i64;
                let wrong = self.wrong();
                for axis in 0..4 {
                    let value = match wrong {
                        Some(value) if axis == usize::from(value) % 4 => palette::extent(value),
                        _ => self.random.of(&[1, 2, 8, 33]),
                    };
                    // SAFETY: four numbers were taken.
                    unsafe { to.add(axis).write(value) };
                }
                if wrong == Some(255) {
                    0
                } else {
                    to as usize
                }
            }
            Role::Memory { bytes } => self.range(function, bytes),
            Role::Opaque => match self.wrong() {
                Some(value) => (palette::number(Role::Number { bytes: 8 }, "", 0, value)) as usize,
                None => 0,
            },
            Role::Callback(kind) => {
                let null = self.wrong().is_some() || is_optional && self.random.one_in(2);
                if null {
                    0
                } else {
                    callbacks::address(kind)
                }
            }
            role => unreachable!("{role:?} is no role of a parameter"),
        }
    }

    /// A handle of the kind: mostly one that fits, and NULL where the header has a meaning for it.
    pub(super) fn handle(&mut self, kind: usize, owner: &str) -> usize {
        let name = HANDLES[kind];
        // The first of a kind more often, so that calls meet on one object.
        let choice = if self.random.one_in(2) { 0 } else { self.random.below(64) };
        let chosen = match name {
            "nvb_stream" if self.random.one_in(2) && !owner.starts_with("nvb_stream") => None,
            "nvb_weight" => Some(self.weight),
            "nvb_kv_cache" => Some(self.cache),
            "nvb_attention" => Some(self.attention),
            "nvb_backend" if choice < 56 => self.world.pick(kind, self.thread, 0).map(|handle| handle.value),
            _ => self.world.pick(kind, self.thread, choice).map(|handle| handle.value),
        };
        let right = chosen.unwrap_or(0);
        let Some(value) = self.wrong() else {
            self.call.handles.push(Given { kind, value: right, alive: right != 0 });
            return right;
        };
        let high = usize::from(value / 8);
        let given = match value % 8 {
            0 => 0,
            1 | 2 => self.world.destroyed(kind, high).unwrap_or(0),
            3 => {
                let other = (kind + 1 + high) % HANDLES.len();
                self.world.pick(other, self.thread, high).map_or(0x10, |handle| handle.value)
            }
            4 => [1, 0x10, usize::MAX, usize::MAX - 1, 0x101, 0xdead_beef][high % 6],
            5 => right ^ 1 << (32 + high),
            6 => memory::piece(64, false, 0x11) as usize,
            _ => self.world.pick(kind, self.thread, high).map_or(0, |handle| handle.value),
        };
        let alive = self.world.live(kind, self.thread).any(|handle| handle.value == given)
            || (self.world.is_live(given) && !(value % 8 == 3));
        self.call.handles.push(Given { kind, value: given, alive });
        given
    }

    /// Memory for what a call writes, which stays as it is if the call fails.
    pub(super) fn watch_output(&mut self, bytes: usize, what: &'static str) -> usize {
        let address = memory::piece(bytes, false, 0x5a) as usize;
        self.call.watched.push(Watched { address, before: vec![0x5a; bytes], what, output: true, head: 0, end: bytes });
        address
    }

    fn output(&mut self, bytes: usize, name: &'static str) -> usize {
        if self.wrong().is_some() {
            return 0;
        }
        self.watch_output(bytes, name)
    }

    pub(super) fn text(&mut self, name: &'static str) -> usize {
        let text = match self.wrong() {
            Some(255) => return 0,
            Some(value) => palette::wrong_text(value),
            None => palette::text(name, &mut self.random),
        };
        let mut bytes = text.to_vec();
        bytes.push(0);
        memory::copy(&bytes) as usize
    }

    pub(super) fn path(&mut self, written: bool) -> usize {
        let paths = if written { &self.files.written } else { &self.files.read };
        let path = match self.wrong() {
            Some(255) => return 0,
            Some(value) if value >= 200 => palette::wrong_text(value),
            Some(value) => paths[usize::from(value) % paths.len()].as_slice(),
            None => paths[0].as_slice(),
        };
        // A name of the palette's would be made in the current folder.
        let path = if written && !path.starts_with(b"/") { paths[0].as_slice() } else { path };
        let mut bytes = path.to_vec();
        bytes.push(0);
        memory::copy(&bytes) as usize
    }

    fn some_block(&mut self) -> usize {
        let thread = self.thread;
        let count = self.world.blocks.iter().filter(|block| block.thread == thread).count();
        let choice = self.random.below(count + 1);
        self.world.blocks.iter().filter(|block| block.thread == thread).nth(choice).map_or(0, |block| block.address)
    }

    fn block(&mut self) -> usize {
        let right = self.some_block();
        match self.wrong() {
            None => right,
            Some(value) => match value % 6 {
                0 => 0,
                1 => right.wrapping_add(usize::from(value)),
                2 => right.wrapping_add(4096),
                3 => memory::piece(256, false, 0) as usize,
                4 => usize::MAX,
                _ => right.wrapping_sub(1 << 20),
            },
        }
    }

    /// Nothing is promised for memory that is none of `nvb_host_allocate`, or for another size.
    fn host_block(&mut self, function: &Function) -> usize {
        let choice = self.random.below(8);
        let block = self.world.host_blocks.iter().filter(|block| block.thread == self.thread).nth(choice).copied();
        let null = self.wrong().is_some();
        let at = function.parameters.iter().position(|it| it.name == "bytes").expect("the size of what is freed");
        match block {
            Some(block) if !null => {
                self.call.values[at] = block.bytes;
                block.address
            }
            _ => 0,
        }
    }

    /// Memory of as many bytes as the call says, of the library's or the caller's.
    fn range(&mut self, function: &Function, bytes_at: usize) -> usize {
        let wrong = self.wrong();
        let bytes = self.call.values[bytes_at];
        if wrong.is_some_and(|value| value < 64) {
            // With NULL no bytes can be there.
            if function.name == "nvb_memory_copy" {
                self.call.values[bytes_at] = 0;
            }
            return 0;
        }
        let filled = function.name == "nvb_memory_fill";
        let choice = self.random.below(8);
        let block = self.world.blocks.iter().filter(|block| block.thread == self.thread).nth(choice).copied();
        match block {
            // The library tells by itself that a range is not one block's.
            Some(block) if filled => block.address + wrong.map_or(0, usize::from),
            Some(block)
                if function.name == "nvb_memory_copy"
                    && self.world.asleep == 0
                    && bytes <= block.bytes
                    && !self.call.values.contains(&block.address) =>
            {
                block.address
            }
            _ if function.name == "nvb_gguf_open_memory" => {
                let file = &self.files.gguf[choice % self.files.gguf.len()];
                let shorter = wrong.map_or(file.len(), |value| file.len() * usize::from(value) / 256);
                if bytes <= isize::MAX as usize {
                    self.call.values[bytes_at] = shorter;
                }
                file.as_ptr() as usize
            }
            _ if filled => memory::piece(bytes.min(LARGEST), false, 0) as usize,
            _ => {
                if bytes > LARGEST && function.name == "nvb_memory_copy" {
                    self.call.values[bytes_at] = LARGEST;
                }
                memory::piece(self.call.values[bytes_at].min(LARGEST), false, 0x33) as usize
            }
        }
    }

    fn tensor_pointer(&mut self, name: &'static str) -> usize {
        let wrong = [self.wrong(), self.wrong(), self.wrong(), self.wrong(), self.wrong()];
        if wrong[0] == Some(255) {
            return 0;
        }
        let tensor = self.place_tensor(name, "[N, K], any float dtype", wrong);
        let to = memory::piece(size_of::<tensors::Tensor>(), false, 0);
        // SAFETY: as many bytes were taken, which end on a page.
        unsafe { to.cast::<tensors::Tensor>().write(tensor) };
        to as usize
    }

    pub(super) fn place_tensor(
        &mut self,
        name: &'static str,
        comment: &str,
        wrong: [Option<u8>; 5],
    ) -> tensors::Tensor {
        let (world, thread) = (self.world, self.thread);
        let mut place = |random: &mut Random, bytes: u64| {
            if world.asleep > 0 || !random.one_in(4) {
                return None;
            }
            let fits = |block: &&super::world::Block| block.thread == thread && block.bytes as u64 >= bytes;
            world.blocks.iter().rev().find(fits).map(|block| block.address)
        };
        tensors::make(&mut self.extents, name, comment, wrong, &mut self.random, &mut place)
    }
}

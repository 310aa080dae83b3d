//! The objects that calls work on: handles that live, those that were destroyed, and blocks of the library's memory.

use super::interface::{handle_kind, Function, Structure, HANDLES, STRUCTURES};

#[derive(Clone)]
pub struct Handle {
    pub value: usize,
    /// Whose it is, where the header wants one thread at a time.
    pub thread: usize,
    /// What it was created with: the bytes of the first struct, which tells what fits it.
    pub options: Vec<u8>,
}

#[derive(Clone, Copy)]
pub struct Block {
    pub address: usize,
    pub bytes: usize,
    /// The manager or pool of the call.
    pub owner: usize,
    pub thread: usize,
}

/// Blocks that a call is about to free.
#[derive(Default)]
pub struct Freed {
    pub blocks: Vec<Block>,
    of_host: bool,
    are_many: bool,
}

pub struct World {
    live: Vec<Vec<Handle>>,
    destroyed: Vec<Vec<usize>>,
    pub blocks: Vec<Block>,
    pub host_blocks: Vec<Block>,
    /// Managers that sleep: their blocks are in nobody's reach.
    pub asleep: usize,
    pub captured: bool,
}

pub fn is_private(kind: usize) -> bool {
    ["nvb_stream", "nvb_event", "nvb_configuration", "nvb_graph"].contains(&HANDLES[kind])
}

impl World {
    pub fn new() -> World {
        World {
            live: vec![Vec::new(); HANDLES.len()],
            destroyed: vec![Vec::new(); HANDLES.len()],
            blocks: Vec::new(),
            host_blocks: Vec::new(),
            asleep: 0,
            captured: false,
        }
    }

    pub fn add(&mut self, kind: usize, value: usize, thread: usize, options: Vec<u8>) {
        self.live[kind].push(Handle { value, thread, options });
    }

    pub fn live(&self, kind: usize, thread: usize) -> impl DoubleEndedIterator<Item = &Handle> {
        self.live[kind].iter().filter(move |handle| !is_private(kind) || handle.thread == thread)
    }

    /// The live handle that `choice` selects, among them the newest more often than the others.
    pub fn pick(&self, kind: usize, thread: usize, choice: usize) -> Option<&Handle> {
        let count = self.live(kind, thread).count();
        self.live(kind, thread).nth(choice % count.max(1))
    }

    pub fn destroyed(&self, kind: usize, choice: usize) -> Option<usize> {
        let list = &self.destroyed[kind];
        (!list.is_empty()).then(|| list[choice % list.len()])
    }

    pub fn is_live(&self, value: usize) -> bool {
        self.live.iter().flatten().any(|handle| handle.value == value)
    }

    pub fn remove(&mut self, kind: usize, value: usize) {
        self.live[kind].retain(|handle| handle.value != value);
        if value != 0 {
            self.destroyed[kind].push(value);
        }
    }

    pub fn forget_blocks(&mut self, mut gone: impl FnMut(&Block) -> bool) {
        self.blocks.retain(|block| !gone(block));
    }

    /// Takes the blocks that a call is about to free. Another thread may be given their memory before this one has noted the end
    /// of the call.
    pub fn take_freed(&mut self, function: &Function, values: &[usize]) -> Freed {
        let value =
            |wanted: &str| function.parameters.iter().position(|it| it.name == wanted).map_or(0, |at| values[at]);
        let (blocks, addresses) = match function.name {
            "nvb_memory_free" | "nvb_pool_free" => (&mut self.blocks, vec![value("pointer")]),
            "nvb_host_free" => (&mut self.host_blocks, vec![value("pointer")]),
            "nvb_memory_free_many" | "nvb_pool_free_many" if value("pointers") != 0 => {
                // SAFETY: the array that the call is given.
                let address = |at| unsafe { (value("pointers") as *const usize).add(at).read() };
                (&mut self.blocks, (0..value("count").min(4)).map(address).collect())
            }
            _ => return Freed::default(),
        };
        let (going, staying) = blocks.iter().partition(|block| addresses.contains(&block.address));
        *blocks = staying;
        Freed { blocks: going, of_host: function.name == "nvb_host_free", are_many: function.name.ends_with("_many") }
    }

    /// Puts back what a call that failed did not free. Of many blocks those before the first that is none have been freed.
    pub fn keep(&mut self, freed: Freed) {
        match freed {
            Freed { are_many: true, .. } => {}
            Freed { of_host: true, blocks, .. } => self.host_blocks.extend(blocks),
            Freed { blocks, .. } => self.blocks.extend(blocks),
        }
    }

    /// All that is left, children before parents.
    pub fn handles(&self) -> Vec<(usize, usize)> {
        let mut all = Vec::new();
        for (kind, list) in self.live.iter().enumerate() {
            all.extend(list.iter().map(|handle| (kind, handle.value)));
        }
        let backend = handle_kind("nvb_backend");
        all.sort_by_key(|&(kind, _)| kind == backend);
        all
    }
}

/// A field of a struct's bytes.
pub fn field(structure: &Structure, bytes: &[u8], name: &str) -> Option<u64> {
    let at = structure.offset(name)?;
    let place = structure.fields.iter().find(|field| field.name == name)?;
    let width = match place.role {
        super::interface::Role::Number { bytes } => bytes,
        _ => 8,
    };
    let mut value = [0; 8];
    value[..width].copy_from_slice(bytes.get(at..at + width)?);
    Some(u64::from_le_bytes(value))
}

pub fn structure(name: &str) -> &'static Structure {
    STRUCTURES.iter().find(|structure| structure.name == name).expect("a struct of the header")
}

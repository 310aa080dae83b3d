//! An input is two bytes for the set-up and steps of five: which function, what of its arguments varies, which of them is
//! wrong, and how.

use super::arguments::Arguments;
use super::interface::{handle_kind, leaves, Function, Role, FUNCTIONS, HANDLES};
use super::tensors::Tensor;
use super::world::{Block, World};
use super::{check, limits, memory, setup, statistics};
use crate::crash::{self, fail, Doing};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError, RwLock};

const SET_UP: usize = 2;
const STEP: usize = 5;
/// More would make inputs slow without reaching more.
const MOST_STEPS: usize = 80;

struct Shared {
    world: Mutex<World>,
    /// Taken whole by calls that the header wants all others out of the way of.
    alone: RwLock<()>,
}

impl Shared {
    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub fn run(input: &[u8], threads: usize) {
    crash::watch();
    let Some((choice, steps)) = input.split_first_chunk::<SET_UP>() else { return };
    crash::note(Doing { function: "the set-up", step: 0, bytes: [0; 3] });
    memory::restart();
    let shared = Shared { world: Mutex::new(setup::world(*choice, threads)), alone: RwLock::new(()) };
    let steps: Vec<[u8; STEP]> =
        steps.chunks_exact(STEP).take(MOST_STEPS).map(|step| step.try_into().expect("a step")).collect();
    let work = |thread: usize| {
        for (at, &bytes) in steps.iter().enumerate().filter(|(at, _)| at % threads == thread) {
            step(&shared, thread, at, bytes);
        }
    };
    if threads == 1 {
        work(0);
    } else {
        std::thread::scope(|scope| {
            for thread in 0..threads {
                scope.spawn(move || work(thread));
            }
        });
    }
    finish(shared.world.into_inner().unwrap_or_else(PoisonError::into_inner));
}

/// The function that two bytes name. New functions take few of the numbers of the others, so that kept inputs go on
/// meaning what they did.
fn function(number: u16) -> usize {
    static RING: LazyLock<Vec<u8>> = LazyLock::new(|| {
        assert!(FUNCTIONS.len() <= 256, "a byte names a function");
        let hash = |name: &str, number: u64| {
            name.bytes().fold(number.wrapping_mul(0x9e37_79b9_7f4a_7c15), |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3).rotate_left(29)
            })
        };
        let best = |number| (0..FUNCTIONS.len()).max_by_key(|&at| hash(FUNCTIONS[at].name, number)).expect("functions");
        (0..4096).map(|number| best(number) as u8).collect()
    });
    usize::from(RING[usize::from(number % 4096)])
}

fn step(shared: &Shared, thread: usize, at: usize, bytes: [u8; STEP]) {
    let [low, high, variant, target, value] = bytes;
    let index = function(u16::from_le_bytes([low, high]));
    let function = &FUNCTIONS[index];
    if !limits::runs(function.name, variant) {
        return;
    }
    crash::note(Doing { function: function.name, step: at, bytes: [variant, target, value] });
    let alone = limits::runs_alone(function.name);
    let _whole = alone.then(|| shared.alone.write());
    let _part = (!alone).then(|| shared.alone.read());
    memory::restart();
    let mut world = shared.world();
    let call = Arguments::draw(&world, &setup::FILES, thread, function, leaves(index), [variant, target, value]);
    let going = world.take_freed(function, &call.values);
    // Nothing of the world is held while the library runs.
    drop(world);
    let answer = (function.call)(&call.values);
    let mut world = shared.world();
    check::after(function, &call, answer);
    statistics::count(index, !function.fallible || answer as i32 == 0);
    let blocks = world.blocks.len() + world.host_blocks.len() + going.blocks.len();
    if answer as i32 != 0 {
        world.keep(going);
    }
    remember(&mut world, function, &call.values, &call.options, answer as i32, thread);
    // A step's own buffers, which a graph may be bound to now, are no more after it.
    let bound = function.name == "nvb_graph_rebind" && answer as i32 == 0;
    if bound || world.blocks.len() + world.host_blocks.len() < blocks {
        end_graphs(&mut world, if alone { None } else { Some(thread) });
    }
}

/// The memory that a graph names is the caller's, who may not launch it once that is freed. Blocks are a thread's own, but for
/// calls that all others are out of the way of.
fn end_graphs(world: &mut World, thread: Option<usize>) {
    let kind = handle_kind("nvb_graph");
    let graphs: Vec<usize> = world.handles().iter().filter(|(of, _)| *of == kind).map(|(_, graph)| *graph).collect();
    for graph in graphs {
        let is_meant = thread.is_none_or(|thread| world.live(kind, thread).any(|handle| handle.value == graph));
        if is_meant {
            destroy(kind, graph);
            world.remove(kind, graph);
        }
    }
}

fn destroy(kind: usize, handle: usize) {
    let name = format!("{}_destroy", HANDLES[kind]);
    let destroy = FUNCTIONS.iter().find(|function| function.name == name);
    let destroy = destroy.unwrap_or_else(|| panic!("the header has no {name}"));
    if (destroy.call)(&[handle]) as i32 != 0 {
        fail(&format!("{name} of a live handle failed: {}", check::message()));
    }
}

fn word(address: usize) -> usize {
    // SAFETY: an output of eight bytes that the call succeeded with.
    unsafe { (address as *const usize).read() }
}

/// Takes note of what the call made and ended.
fn remember(world: &mut World, function: &Function, values: &[usize], options: &[u8], status: i32, thread: usize) {
    let name = function.name;
    let value = |wanted: &str| function.parameters.iter().position(|it| it.name == wanted).map_or(0, |at| values[at]);
    if !function.fallible || status != 0 {
        return;
    }
    let first = values.first().copied().unwrap_or(0);
    for (parameter, &address) in function.parameters.iter().zip(values) {
        match parameter.role {
            Role::HandleOut(kind) => {
                let handle = word(address);
                if handle == 0 || world.is_live(handle) {
                    fail(&format!("success with {handle:#x} for a new {}", HANDLES[kind]));
                }
                let options =
                    if kind == handle_kind("nvb_weight") { setup::weight_info(handle) } else { options.to_vec() };
                world.add(kind, handle, thread, options);
            }
            Role::BlockOut => {
                let block = Block { address: word(address), bytes: value("bytes"), owner: first, thread };
                check_block(world, block);
                world.blocks.push(block);
            }
            Role::HostBlockOut => {
                world.host_blocks.push(Block { address: word(address), bytes: value("bytes"), owner: first, thread });
            }
            _ => {}
        }
    }
    match name {
        "nvb_memory_allocate_tensor" => {
            // SAFETY: the tensor that the call wrote.
            let tensor = unsafe { (value("tensor") as *const Tensor).read() };
            match tensor.span() {
                Some((_, bytes)) if bytes > 0 => {
                    world.blocks.push(Block { address: tensor.data, bytes: bytes as usize, owner: first, thread });
                }
                _ => fail("a tensor of no size was allocated"),
            }
        }
        "nvb_pool_clear" | "nvb_pool_destroy" | "nvb_memory_manager_destroy" => {
            let captured = world.captured;
            world.forget_blocks(|block| captured || block.owner == first);
        }
        "nvb_pool_begin_capture" => world.captured = true,
        "nvb_memory_sleep" => world.asleep += 1,
        "nvb_memory_wake" => world.asleep = world.asleep.saturating_sub(1),
        _ => {}
    }
    if let (true, Some(Role::Handle(kind))) =
        (name.ends_with("_destroy"), function.parameters.first().map(|it| it.role))
    {
        world.remove(kind, first);
    }
}

/// Blocks that live do not share a byte.
fn check_block(world: &World, new: Block) {
    if new.address == 0 || new.bytes == 0 {
        fail("success without a block");
    }
    let overlaps = |old: &&Block| old.address < new.address + new.bytes && new.address < old.address + old.bytes;
    if let Some(old) = world.blocks.iter().find(overlaps) {
        fail(&format!("a block at {:#x} over a live one at {:#x}", new.address, old.address));
    }
}

/// Destroys what is left; each must be there still.
fn finish(world: World) {
    crash::note(Doing { function: "the end", step: 0, bytes: [0; 3] });
    for block in &world.host_blocks {
        setup::free_host_block(block.address, block.bytes);
    }
    for (kind, handle) in world.handles() {
        destroy(kind, handle);
    }
}

//! What is there before the first step: files, and the objects that most calls want.

use super::interface::{self, handle_kind};
use super::memory;
use super::world::{structure, Block, World};
use crate::crash::fail;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::LazyLock;

pub struct Files {
    /// Paths that calls read from; the first is a GGUF file.
    pub read: Vec<Vec<u8>>,
    /// Paths that calls may write.
    pub written: Vec<Vec<u8>>,
    /// GGUF files in memory.
    pub gguf: Vec<&'static [u8]>,
}

pub static FILES: LazyLock<Files> = LazyLock::new(|| {
    let folder = std::env::temp_dir().join(format!("nvbackend-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for temporary files");
    let weights = include_bytes!("../../../tests/data/weights.gguf");
    let model = include_bytes!("../../../tests/data/tiny-gemma3-q8_0.gguf");
    let path = |name: &str| folder.join(name);
    std::fs::write(path("weights.gguf"), weights).expect("the folder is writable");
    std::fs::write(path("cut.gguf"), &weights[..weights.len() / 2]).expect("the folder is writable");
    std::fs::write(path("empty"), b"").expect("the folder is writable");
    let pipe = std::ffi::CString::new(path("pipe").into_os_string().into_encoded_bytes()).expect("no NUL");
    // SAFETY: a path with a closing NUL. A pipe that nobody writes is waited for by who opens it carelessly.
    unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) };
    let bytes = |path: PathBuf| path.into_os_string().into_encoded_bytes();
    Files {
        read: ["weights.gguf", "cut.gguf", "empty", "missing", "", "empty/below", "pipe"]
            .map(|name| bytes(path(name)))
            .into(),
        written: ["written", "", "missing/below", "empty/below", "tuning.json", "pipe"]
            .map(|name| bytes(path(name)))
            .into(),
        gguf: [&weights[..], &model[..]].map(memory::kept).into(),
    }
});

/// Removes what `FILES` and the calls wrote.
pub fn remove_files() {
    let folder = std::env::temp_dir().join(format!("nvbackend-fuzz-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(folder);
}

fn expect(status: i32, what: &str) {
    if status != 0 {
        let mut text = [0u8; 512];
        // SAFETY: a buffer of its size.
        unsafe { interface::nvb_last_error_message(text.as_mut_ptr().cast(), text.len()) };
        let text = String::from_utf8_lossy(&text);
        fail(&format!("the set-up's {what} failed: {status}, {}", text.trim_end_matches('\0')));
    }
}

/// Calls `create` with a place for the handle.
fn created(what: &str, create: impl FnOnce(*const c_void) -> i32) -> usize {
    let mut handle = 0usize;
    expect(create((&raw mut handle).cast_const().cast()), what);
    handle
}

fn options<T>() -> T {
    // SAFETY: structs of the header, whose defaults are all zero.
    let mut value: T = unsafe { std::mem::zeroed() };
    // SAFETY: each begins with its size.
    unsafe { (&raw mut value).cast::<usize>().write(size_of::<T>()) };
    value
}

fn at<T>(value: &T) -> *const c_void {
    std::ptr::from_ref(value).cast()
}

fn bytes<T>(value: &T) -> Vec<u8> {
    // SAFETY: plain structs of integers and pointers.
    unsafe { std::slice::from_raw_parts(at(value).cast(), size_of::<T>()) }.to_vec()
}

/// A backend with one object of each kind, as two bytes choose them. `threads`: who will work on them.
pub fn world(choice: [u8; 2], threads: usize) -> World {
    let mut world = World::new();
    let mut choice = u16::from_le_bytes(choice);
    let mut bit = || {
        choice = choice.rotate_right(1);
        choice >> 15 == 1
    };
    let mut backend_options: interface::nvb_backend_options = options();
    backend_options.device = c"cpu".as_ptr().cast();
    backend_options.threads = if bit() { 2 } else { 1 };
    backend_options.memory_limit = if bit() { 256 << 20 } else { 8 << 20 };
    let second = bit();
    let format = u32::from(bit()) << 2 | u32::from(bit()) << 1 | u32::from(bit());
    // Recordings are few: what they take reaches no kernel before a launch.
    let (recorded, ended) = (bit() && bit(), bit());
    // SAFETY: the header's structs with their sizes set, and places for handles.
    unsafe {
        let backend = created("backend", |out| interface::nvb_backend_create(at(&backend_options), out));
        world.add(handle_kind("nvb_backend"), backend, 0, Vec::new());
        let backend = backend as *const c_void;
        if second {
            let other = created("second backend", |out| interface::nvb_backend_create(at(&backend_options), out));
            world.add(handle_kind("nvb_backend"), other, 0, Vec::new());
        }
        let memory = created("manager", |out| interface::nvb_backend_get_memory_manager(backend, 0, out));
        world.add(handle_kind("nvb_memory_manager"), memory, 0, Vec::new());
        let pool =
            created("pool", |out| interface::nvb_pool_create(memory as *const c_void, c"pool".as_ptr().cast(), out));
        world.add(handle_kind("nvb_pool"), pool, 0, Vec::new());
        for thread in 0..threads {
            let block = created("block", |out| {
                interface::nvb_memory_allocate(memory as *const c_void, 4096, std::ptr::null(), out)
            });
            world.blocks.push(Block { address: block, bytes: 4096, owner: memory, thread });
            let stream = created("stream", |out| interface::nvb_stream_create(backend, 0, out));
            world.add(handle_kind("nvb_stream"), stream, thread, Vec::new());
            let event = created("event", |out| interface::nvb_event_create(backend, out));
            expect(interface::nvb_event_record(event as *const c_void, stream as *const c_void), "record of an event");
            world.add(handle_kind("nvb_event"), event, thread, Vec::new());
            let configuration = created("configuration", |out| interface::nvb_configuration_create(0, out));
            world.add(handle_kind("nvb_configuration"), configuration, thread, Vec::new());
            let graph = created("graph", |out| interface::nvb_graph_create(backend, out));
            if recorded {
                let (graph, stream) = (graph as *const c_void, stream as *const c_void);
                expect(interface::nvb_graph_begin(graph, stream), "begin of a recording");
                let (memory, block) = (memory as *const c_void, block as *const c_void);
                expect(interface::nvb_memory_fill(memory, block, 1, 4096, stream), "recorded fill");
                if ended {
                    expect(interface::nvb_graph_end(graph, stream), "end of a recording");
                }
            }
            world.add(handle_kind("nvb_graph"), graph, thread, Vec::new());
        }
        let manager =
            created("stream manager", |out| interface::nvb_stream_manager_create(backend, std::ptr::null(), out));
        world.add(handle_kind("nvb_stream_manager"), manager, 0, Vec::new());
        for gated in [0, 1] {
            let values = [0.5f32; 64 * 64];
            let half = super::tensors::Tensor {
                data: values.as_ptr() as usize,
                dtype: 1,
                rank: 2,
                shape: [32, 64, 1, 1],
                ..Default::default()
            };
            let parts = [half, half];
            let mut desc: interface::nvb_weight_desc = options();
            desc.parts = at(&parts);
            desc.part_count = 2;
            desc.arrangement = gated;
            desc.format = (format + gated) % 8;
            let weight =
                created("weight", |out| interface::nvb_weight_create(backend, at(&desc), std::ptr::null(), out));
            let options = weight_info(weight);
            world.add(handle_kind("nvb_weight"), weight, 0, options);
        }
        let mut cache_options: interface::nvb_kv_cache_options = options();
        (cache_options.layers, cache_options.sequences, cache_options.capacity) = (2, 3, 24);
        (cache_options.kv_heads, cache_options.head_dim, cache_options.dtype) = (2, 16, 1 + format % 3);
        let cache = created("cache", |out| interface::nvb_kv_cache_create(backend, at(&cache_options), out));
        world.add(handle_kind("nvb_kv_cache"), cache, 0, bytes(&cache_options));
        (cache_options.page_tokens, cache_options.pages) = (4, 16);
        let pages = created("cache with pages", |out| interface::nvb_kv_cache_create(backend, at(&cache_options), out));
        for sequence in 0..3 {
            expect(interface::nvb_kv_cache_reserve(pages as *const c_void, sequence, 17, std::ptr::null()), "reserve");
        }
        world.add(handle_kind("nvb_kv_cache"), pages, 0, bytes(&cache_options));
        let mut attention_options: interface::nvb_attention_options = options();
        (attention_options.query_heads, attention_options.kv_heads, attention_options.head_dim) = (4, 2, 16);
        attention_options.window = 8 * (format & 1);
        let attention =
            created("attention", |out| interface::nvb_attention_create(backend, at(&attention_options), out));
        world.add(handle_kind("nvb_attention"), attention, 0, bytes(&attention_options));
        let file = FILES.gguf[usize::from(format > 3)];
        let gguf = created("file", |out| interface::nvb_gguf_open_memory(file.as_ptr().cast(), file.len(), out));
        world.add(handle_kind("nvb_gguf"), gguf, 0, Vec::new());
    }
    world
}

/// `nvb_weight_info` of a weight, which shapes of products are made from; empty if it is not there any more.
pub fn weight_info(weight: usize) -> Vec<u8> {
    let info: interface::nvb_weight_info = options();
    // SAFETY: a struct with its size set.
    match unsafe { interface::nvb_weight_get_info(weight as *const c_void, at(&info)) } {
        0 => bytes(&info),
        _ => vec![0; structure("nvb_weight_info").size],
    }
}

/// Frees a block whose backend may be gone: on the CPU one is as good as another.
pub fn free_host_block(address: usize, bytes: usize) {
    let mut backend_options: interface::nvb_backend_options = options();
    (backend_options.device, backend_options.threads) = (c"cpu".as_ptr().cast(), 1);
    // SAFETY: a struct with its size set; a block of the CPU's, with its size.
    unsafe {
        let backend = created("last backend", |out| interface::nvb_backend_create(at(&backend_options), out));
        expect(interface::nvb_host_free(backend as *const c_void, address as *const c_void, bytes), "free of a block");
        expect(interface::nvb_backend_destroy(backend as *const c_void), "last backend's end");
    }
}

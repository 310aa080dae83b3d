//! What an engine does with the C ABI, each status checked: creation, memory, copies, streams, events, weights, caches.
//!
//! The first call that fails ends the run with a `Failure`; what was created by then is destroyed on the way out, and
//! destroying must succeed whatever the driver says.

use crate::fake::{fake, Books};
use crate::{graphs, operations};
use nvbackend::capi::backend::*;
use nvbackend::capi::backend_options::*;
use nvbackend::capi::configuration::*;
use nvbackend::capi::device::*;
use nvbackend::capi::event::*;
use nvbackend::capi::hardware::*;
use nvbackend::capi::kv_cache::*;
use nvbackend::capi::memory::*;
use nvbackend::capi::memory_options::*;
use nvbackend::capi::memory_statistics::*;
use nvbackend::capi::metrics::*;
use nvbackend::capi::operations::*;
use nvbackend::capi::status::*;
use nvbackend::capi::stream::*;
use nvbackend::capi::stream_manager::*;
use nvbackend::capi::tensor::*;
use nvbackend::capi::weight::*;
use std::cell::Cell;
use std::ffi::c_void;
use std::fmt;
use std::ptr::{null, null_mut};

#[derive(Debug, Clone)]
pub struct Failure {
    pub step: &'static str,
    pub status: i32,
    /// `nvb_error_detail.cuda_code`
    pub code: i32,
    pub text: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} gave {} with code {}: {}", self.step, self.status, self.code, self.text)
    }
}

/// A struct of the C ABI with its size set.
pub fn versioned<T: nvbackend::capi::structs::Versioned>() -> T {
    // SAFETY: versioned structs are integers, floats and pointers, and start with their size.
    unsafe {
        let mut value: T = std::mem::zeroed();
        (&raw mut value).cast::<usize>().write(size_of::<T>());
        value
    }
}

pub fn check(step: &'static str, status: nvb_status) -> Result<(), Failure> {
    if status == NVB_OK {
        return Ok(());
    }
    let mut text = [0u8; 1024];
    let mut detail: nvb_error_detail = versioned();
    // SAFETY: a buffer of its size and a struct with its size.
    unsafe {
        nvb_last_error_message(text.as_mut_ptr().cast(), text.len());
        assert_eq!(nvb_last_error_get(&mut detail), NVB_OK);
    }
    assert_eq!(detail.status, status, "{step}: the detail's status");
    let length = text.iter().position(|&byte| byte == 0).unwrap();
    let text = String::from_utf8(text[..length].to_vec()).unwrap();
    Err(Failure { step, status, code: detail.cuda_code, text })
}

/// Calls a function of the C ABI; a failure names it.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: handles of this run, structs with their sizes, and memory that outlives the call.
        $crate::engine::check(stringify!($name), unsafe { $name($($argument),*) })
    };
}
pub(crate) use call;

pub fn wrong(step: &'static str, text: impl Into<String>) -> Failure {
    Failure { step, status: -1, code: 0, text: text.into() }
}

/// A handle and what destroys it. Destroying never fails: a destructor has nowhere to report to.
pub struct Handle<T> {
    pub raw: *mut T,
    destroy: unsafe extern "C" fn(*mut T) -> nvb_status,
}

impl<T> Handle<T> {
    pub fn new(destroy: unsafe extern "C" fn(*mut T) -> nvb_status) -> Handle<T> {
        Handle { raw: null_mut(), destroy }
    }
}

impl<T> Drop for Handle<T> {
    fn drop(&mut self) {
        // SAFETY: a handle of this run, or NULL.
        check("destroying a handle", unsafe { (self.destroy)(self.raw) }).unwrap();
    }
}

pub struct Engine {
    // Dropped in this order, so that the manager outlives its backend where `keep` says nothing else.
    pub backend: Handle<nvb_backend>,
    pub memory: Handle<nvb_memory_manager>,
    /// Whether the first fault fired in a call that goes on without what the driver refused.
    pub unreported: Cell<bool>,
}

pub fn create_backend(device: &std::ffi::CStr) -> Result<Handle<nvb_backend>, Failure> {
    let mut options: nvb_backend_options = versioned();
    options.device = device.as_ptr();
    options.vendor_libraries = NVB_SWITCH_OFF;
    let mut backend = Handle::new(nvb_backend_destroy);
    call!(nvb_backend_create(&options, &mut backend.raw))?;
    Ok(backend)
}

/// A backend of the configuration that this JSON makes of the preset for inference.
pub fn create_configured(json: &std::ffi::CStr) -> Result<Handle<nvb_backend>, Failure> {
    let mut configuration = Handle::new(nvb_configuration_destroy);
    call!(nvb_configuration_create(NVB_PRESET_INFERENCE, &mut configuration.raw))?;
    call!(nvb_configuration_apply_json(configuration.raw, json.as_ptr()))?;
    let mut options: nvb_backend_options = versioned();
    options.configuration = configuration.raw;
    let mut backend = Handle::new(nvb_backend_destroy);
    call!(nvb_backend_create(&options, &mut backend.raw))?;
    Ok(backend)
}

impl Engine {
    pub fn new() -> Result<Engine, Failure> {
        Engine::on(c"cuda:0")
    }

    fn on(device: &std::ffi::CStr) -> Result<Engine, Failure> {
        let backend = create_backend(device)?;
        let mut memory = Handle::new(nvb_memory_manager_destroy);
        call!(nvb_backend_get_memory_manager(backend.raw, 0, &mut memory.raw))?;
        Ok(Engine { backend, memory, unreported: Cell::new(false) })
    }

    /// Readable whatever state the device is in.
    pub fn statistics(&self) -> nvb_memory_statistics {
        let mut statistics: nvb_memory_statistics = versioned();
        call!(nvb_memory_get_statistics(self.memory.raw, &mut statistics)).unwrap();
        statistics
    }

    pub fn stream(&self) -> Result<Handle<nvb_stream>, Failure> {
        let mut stream = Handle::new(nvb_stream_destroy);
        call!(nvb_stream_create(self.backend.raw, 0, &mut stream.raw))?;
        Ok(stream)
    }

    pub fn event(&self) -> Result<Handle<nvb_event>, Failure> {
        let mut event = Handle::new(nvb_event_destroy);
        call!(nvb_event_create(self.backend.raw, &mut event.raw))?;
        Ok(event)
    }

    pub fn block(&self, bytes: usize, stream: *mut nvb_stream) -> Result<Block<'_>, Failure> {
        Block::of(&self.memory, bytes, stream)
    }

    fn pinned(&self, bytes: usize) -> Result<Pinned<'_>, Failure> {
        let mut pointer = null_mut();
        call!(nvb_host_allocate(self.backend.raw, bytes, &mut pointer))?;
        Ok(Pinned { engine: self, pointer: pointer.cast(), bytes })
    }

    pub fn weight(&self, parts: &[nvb_tensor], arrangement: u32, source: u32) -> Result<Handle<nvb_weight>, Failure> {
        let mut desc: nvb_weight_desc = versioned();
        (desc.parts, desc.part_count) = (parts.as_ptr(), parts.len());
        (desc.arrangement, desc.source) = (arrangement, source);
        let mut weight = Handle::new(nvb_weight_destroy);
        call!(nvb_weight_create(self.backend.raw, &desc, null_mut(), &mut weight.raw))?;
        Ok(weight)
    }

    /// A weight that is quantised to INT4 on its way.
    pub fn quantized(&self, parts: &[nvb_tensor], source: u32) -> Result<Handle<nvb_weight>, Failure> {
        let mut desc: nvb_weight_desc = versioned();
        (desc.parts, desc.part_count, desc.source) = (parts.as_ptr(), parts.len(), source);
        desc.format = NVB_WEIGHT_FORMAT_INT4;
        let mut weight = Handle::new(nvb_weight_destroy);
        call!(nvb_weight_create(self.backend.raw, &desc, null_mut(), &mut weight.raw))?;
        Ok(weight)
    }

    pub fn kv_cache(&self) -> Result<Handle<nvb_kv_cache>, Failure> {
        let mut options: nvb_kv_cache_options = versioned();
        (options.layers, options.sequences, options.kv_heads) = (2, 2, 1);
        (options.head_dim, options.capacity) = (32, 16);
        let mut cache = Handle::new(nvb_kv_cache_destroy);
        call!(nvb_kv_cache_create(self.backend.raw, &options, &mut cache.raw))?;
        Ok(cache)
    }

    /// Everything once.
    pub fn work(&self) -> Result<(), Failure> {
        self.streams_and_copies()?;
        self.managed_streams()?;
        self.peers()?;
        self.weights()?;
        self.pages()?;
        operations::run(self)?;
        graphs::run(self)?;
        self.profiled()
    }

    /// The operations again, measured. Figures are readable whatever the driver says.
    fn profiled(&self) -> Result<(), Failure> {
        call!(nvb_backend_set_profiling(self.backend.raw, 1))?;
        let books = || fake().map_or_else(Books::default, |fake| fake.books());
        let faults = books().faults;
        let outcome = operations::run(self);
        call!(nvb_backend_set_profiling(self.backend.raw, 0))?;
        // Asked for until slow events have finished; what could not be timed once is timed the next time.
        let (start, mut before, mut metrics) = (books(), Books::default(), versioned());
        for _ in 0..5 {
            before = books();
            metrics = self.metrics();
        }
        let after = books();
        // These functions copy decode's positions; their failure costs the call its time alone.
        let of_positions = |function: &str| matches!(function, "cuMemHostAlloc" | "cuMemcpyDtoHAsync_v2");
        let fault = fake().map(|fake| fake.fault_function()).unwrap_or_default();
        if faults == 0 && start.faults > 0 && outcome.is_ok() && of_positions(&fault) {
            self.unreported.set(true);
        }
        self.unreported.set(self.unreported.get() || (start.faults == 0 && after.faults > 0));
        // A lost device is not asked any more.
        let asked = after.faults == before.faults && after.calls > before.calls;
        // What could not be measured at its time never will be.
        let measured = start.faults == faults;
        let untimed = metrics.timed_calls != 1 && asked && measured;
        if outcome.is_ok() && (metrics.calls != 1 || untimed) {
            let text = format!("{} calls, {} timed", metrics.calls, metrics.timed_calls);
            return Err(wrong("nvb_backend_get_metrics", text));
        }
        call!(nvb_backend_reset_metrics(self.backend.raw))?;
        outcome
    }

    fn metrics(&self) -> nvb_operation_metrics {
        let mut metrics: nvb_operation_metrics = versioned();
        call!(nvb_backend_get_metrics(self.backend.raw, NVB_OPERATION_SOFTMAX, &mut metrics)).unwrap();
        metrics
    }

    fn managed_streams(&self) -> Result<(), Failure> {
        let mut manager = Handle::new(nvb_stream_manager_destroy);
        call!(nvb_stream_manager_create(self.backend.raw, null(), &mut manager.raw))?;
        let streams = [0, 0, -1].map(|priority| {
            let mut stream = Handle::new(nvb_stream_destroy);
            call!(nvb_stream_manager_acquire(manager.raw, priority, &mut stream.raw)).map(|()| stream)
        });
        for stream in streams {
            let stream = stream?;
            let mut called = 0u32;
            let user_data = (&raw mut called).cast();
            call!(nvb_stream_add_callback(stream.raw, Some(count_call), user_data))?;
            let mut finished = 0;
            call!(nvb_stream_synchronize_for(stream.raw, 60_000_000_000, &mut finished))?;
            if (finished, called) != (1, 1) {
                return Err(wrong("nvb_stream_synchronize_for", format!("finished {finished}, called {called} times")));
            }
        }
        call!(nvb_stream_manager_synchronize(manager.raw))?;
        let mut statistics: nvb_stream_statistics = versioned();
        call!(nvb_stream_manager_get_statistics(manager.raw, &mut statistics))?;
        if (statistics.streams, statistics.users) != (3, 0) {
            return Err(wrong("nvb_stream_manager_get_statistics", format!("{} streams", statistics.streams)));
        }
        Ok(())
    }

    /// Where there is a second device: each reaches the memory of the other's backend once that was asked for, however often.
    fn peers(&self) -> Result<(), Failure> {
        const BYTES: usize = 5000;
        const MORE: usize = 3 << 20;
        let mut count = 0;
        call!(nvb_cuda_get_device_count(&mut count))?;
        if count < 2 {
            return Ok(());
        }
        let mut access: nvb_peer_access = versioned();
        call!(nvb_hardware_get_peer_access(0, 1, &mut access))?;
        if access.accessible != 1 {
            return Err(wrong("nvb_hardware_get_peer_access", "device 1 is out of reach"));
        }
        let peer = Engine::on(c"cuda:1")?;
        let (stream, its_stream) = (self.stream()?, peer.stream()?);
        let (own, mapped) = (self.block(BYTES, stream.raw)?, peer.block(BYTES, its_stream.raw)?);
        let mut options: nvb_memory_options = versioned();
        options.pooling = NVB_SWITCH_OFF;
        let mut unpooled = Handle::new(nvb_memory_manager_destroy);
        call!(nvb_memory_manager_create(peer.backend.raw, &options, &mut unpooled.raw))?;
        let single = Block::of(&unpooled, BYTES, its_stream.raw)?;
        call!(nvb_memory_fill(peer.memory.raw, mapped.pointer, 7, BYTES, its_stream.raw))?;
        let filled = peer.event()?;
        call!(nvb_event_record(filled.raw, its_stream.raw))?;
        call!(nvb_stream_wait_event(stream.raw, filled.raw))?;
        let copy = |to: *mut c_void, from: *mut c_void, kind| {
            call!(nvb_memory_copy(self.memory.raw, to, from, BYTES, kind, stream.raw))
        };
        match copy(own.pointer, mapped.pointer, NVB_COPY_DEVICE_TO_DEVICE) {
            Err(failure) if failure.status == NVB_ERROR_INVALID_ARGUMENT => {}
            Err(failure) => return Err(failure),
            Ok(()) => return Err(wrong("nvb_memory_copy", "memory of the other device was taken unasked")),
        }
        call!(nvb_backend_enable_peer_access(self.backend.raw, peer.backend.raw))?;
        call!(nvb_backend_enable_peer_access(peer.backend.raw, self.backend.raw))?;
        call!(nvb_backend_enable_peer_access(self.backend.raw, peer.backend.raw))?;
        let mapped_later = peer.block(MORE, its_stream.raw)?;
        let mut plain = vec![0u8; BYTES];
        copy(own.pointer, mapped.pointer, NVB_COPY_DEVICE_TO_DEVICE)?;
        copy(mapped_later.pointer, own.pointer, NVB_COPY_DEVICE_TO_DEVICE)?;
        copy(single.pointer, mapped_later.pointer, NVB_COPY_DEVICE_TO_DEVICE)?;
        copy(plain.as_mut_ptr().cast(), single.pointer, NVB_COPY_DEVICE_TO_HOST)?;
        call!(nvb_stream_synchronize(stream.raw))?;
        if plain.iter().any(|&byte| byte != 7) {
            return Err(wrong("nvb_memory_copy", "the other device's bytes came back changed"));
        }
        Ok(())
    }

    fn streams_and_copies(&self) -> Result<(), Failure> {
        const BYTES: usize = 5000;
        let memory = self.memory.raw;
        let stream = self.stream()?;
        let mut native = null_mut();
        call!(nvb_stream_get_native(stream.raw, &mut native))?;
        let mut wrapped = Handle::new(nvb_stream_destroy);
        call!(nvb_stream_wrap(self.backend.raw, native, &mut wrapped.raw))?;
        let (start, end) = (self.event()?, self.event()?);
        let pinned = self.pinned(BYTES)?;
        pinned.bytes().iter_mut().zip(0u8..=250).for_each(|(byte, value)| *byte = value);
        let first = self.block(BYTES, stream.raw)?;
        let second = self.block(BYTES, null_mut())?;
        let mut plain = vec![0u8; BYTES];

        call!(nvb_event_record(start.raw, stream.raw))?;
        let from = pinned.pointer.cast::<c_void>();
        call!(nvb_memory_copy(memory, first.pointer, from, BYTES, NVB_COPY_HOST_TO_DEVICE, stream.raw))?;
        let (to, from) = (second.pointer, first.pointer);
        call!(nvb_memory_copy(memory, to, from, BYTES, NVB_COPY_DEVICE_TO_DEVICE, stream.raw))?;
        let to = plain.as_mut_ptr().cast();
        call!(nvb_memory_copy(memory, to, second.pointer, BYTES, NVB_COPY_DEVICE_TO_HOST, stream.raw))?;
        call!(nvb_event_record(end.raw, stream.raw))?;
        call!(nvb_stream_wait_event(wrapped.raw, end.raw))?;
        let mut finished = 0;
        while finished == 0 {
            call!(nvb_event_query(start.raw, &mut finished))?;
        }
        call!(nvb_event_synchronize(end.raw))?;
        let mut milliseconds = 0.0;
        call!(nvb_event_get_elapsed(start.raw, end.raw, &mut milliseconds))?;
        if milliseconds <= 0.0 {
            return Err(wrong("nvb_event_get_elapsed", format!("{milliseconds} ms for three copies")));
        }
        call!(nvb_stream_query(stream.raw, &mut finished))?;
        call!(nvb_stream_synchronize(wrapped.raw))?;
        if plain != pinned.bytes() {
            return Err(wrong("nvb_memory_copy", "the bytes that came back are not those that went"));
        }

        call!(nvb_memory_fill(memory, first.pointer, 7, BYTES, stream.raw))?;
        let to = plain.as_mut_ptr().cast();
        call!(nvb_memory_copy(memory, to, first.pointer, BYTES, NVB_COPY_DEVICE_TO_HOST, stream.raw))?;
        call!(nvb_stream_synchronize(stream.raw))?;
        if plain.iter().any(|&byte| byte != 7) {
            return Err(wrong("nvb_memory_fill", "not every byte is 7"));
        }
        // Memory that is not the manager's: this is what asks the driver about an address.
        let from = pinned.pointer.cast::<c_void>();
        call!(nvb_memory_copy(memory, first.pointer, from, BYTES, NVB_COPY_DEVICE_TO_DEVICE, stream.raw))?;
        let statistics = self.statistics();
        if (statistics.blocks, statistics.allocated) != (2, 2 * BYTES as u64) {
            return Err(wrong("nvb_memory_get_statistics", format!("{} blocks", statistics.blocks)));
        }
        Ok(())
    }

    /// Pages are taken, shared, copied and given back; what fails has changed nothing.
    fn pages(&self) -> Result<(), Failure> {
        // Rows so long that the third change of them writes where the first one was staged.
        const LONG: u32 = 4000;
        let mut options: nvb_kv_cache_options = versioned();
        (options.layers, options.sequences, options.kv_heads, options.head_dim) = (2, 2, 1, 8);
        (options.capacity, options.page_tokens, options.pages) = (2 * LONG, 2, LONG + 8);
        let mut cache = Handle::new(nvb_kv_cache_destroy);
        call!(nvb_kv_cache_create(self.backend.raw, &options, &mut cache.raw))?;
        let (cache, stream) = (cache.raw, self.stream()?);
        let held = || {
            let mut usage: nvb_kv_cache_usage = versioned();
            call!(nvb_kv_cache_get_usage(cache, &mut usage)).unwrap();
            (usage.tokens, usage.free_pages, usage.shared_pages, usage.sequences)
        };
        let change = |call: &dyn Fn() -> Result<(), Failure>| {
            let before = held();
            let outcome = call();
            match outcome.is_err() && held() != before {
                true => Err(wrong("a change of pages", format!("{:?} of {before:?} after it failed", held()))),
                false => outcome,
            }
        };
        change(&|| call!(nvb_kv_cache_reserve(cache, 0, 5, stream.raw)))?;
        change(&|| call!(nvb_kv_cache_fork(cache, 0, 1, 5, stream.raw)))?;
        change(&|| call!(nvb_kv_cache_truncate(cache, 1, 3, stream.raw)))?;
        change(&|| call!(nvb_kv_cache_release(cache, 0, stream.raw)))?;
        change(&|| call!(nvb_kv_cache_fork(cache, 1, 0, 3, stream.raw)))?;
        change(&|| call!(nvb_kv_cache_truncate(cache, 0, 1, stream.raw)))?;
        // The first page is shared and has room: it is copied.
        change(&|| call!(nvb_kv_cache_reserve(cache, 0, 2, stream.raw)))?;
        change(&|| call!(nvb_kv_cache_release(cache, 0, stream.raw)))?;
        change(&|| call!(nvb_kv_cache_copy(cache, 1, 0, 3, stream.raw)))?;
        for _ in 0..2 {
            change(&|| call!(nvb_kv_cache_reserve(cache, 0, 2 * LONG, stream.raw)))?;
            change(&|| call!(nvb_kv_cache_release(cache, 0, stream.raw)))?;
        }
        if held() != (3, LONG + 6, 0, 1) {
            return Err(wrong("nvb_kv_cache_get_usage", format!("{:?}", held())));
        }
        Ok(())
    }

    fn weights(&self) -> Result<(), Failure> {
        let host: Vec<u16> = (0..64 * 24).collect();
        let part = |rows: i64, columns: i64| tensor(host.as_ptr().cast_mut().cast(), NVB_DTYPE_BF16, &[rows, columns]);
        // Rows of 16 bytes go as they stand; rows of 10 bytes and gated pairs through a page-locked buffer.
        self.weight(&[part(4, 8), part(6, 8)], NVB_WEIGHT_STACKED, NVB_SOURCE_HOST)?;
        self.weight(&[part(3, 5)], NVB_WEIGHT_STACKED, NVB_SOURCE_HOST)?;
        let gated = self.weight(&[part(4, 8), part(4, 8)], NVB_WEIGHT_GATED, NVB_SOURCE_HOST)?;
        let mut info: nvb_weight_info = versioned();
        call!(nvb_weight_get_info(gated.raw, &mut info))?;
        if info.output_columns != 4 {
            return Err(wrong("nvb_weight_get_info", format!("{} output columns", info.output_columns)));
        }
        let device = self.block(4096, null_mut())?;
        let part = |rows: i64, columns: i64| tensor(device.pointer, NVB_DTYPE_BF16, &[rows, columns]);
        self.weight(&[part(8, 8)], NVB_WEIGHT_STACKED, NVB_SOURCE_DEVICE)?;
        self.weight(&[part(3, 5), part(2, 5)], NVB_WEIGHT_STACKED, NVB_SOURCE_DEVICE)?;
        self.weight(&[part(8, 8)], NVB_WEIGHT_STACKED, NVB_SOURCE_BORROWED)?;
        // Panels through page-locked memory, there and back.
        let host: Vec<u16> = (0..8 * 64).map(|i| 0x3c00 + i).collect();
        let part = |data: *mut c_void| tensor(data, NVB_DTYPE_BF16, &[8, 64]);
        let on_host = host.as_ptr().cast_mut().cast();
        let weight = self.quantized(&[part(on_host)], NVB_SOURCE_HOST)?;
        call!(nvb_weight_dequantize(weight.raw, &part(device.pointer), null_mut()))?;
        self.quantized(&[part(device.pointer)], NVB_SOURCE_DEVICE)?;
        let cache = self.kv_cache()?;
        let mut bytes = 0;
        call!(nvb_kv_cache_get_bytes(cache.raw, &mut bytes))
    }
}

unsafe extern "C" fn count_call(user_data: *mut c_void) {
    // SAFETY: the counter of the scenario, which waits for the call.
    unsafe { *user_data.cast::<u32>() += 1 };
}

pub struct Block<'a> {
    memory: &'a Handle<nvb_memory_manager>,
    pub pointer: *mut c_void,
    stream: *mut nvb_stream,
}

impl Block<'_> {
    fn of(memory: &Handle<nvb_memory_manager>, bytes: usize, stream: *mut nvb_stream) -> Result<Block<'_>, Failure> {
        let mut pointer = null_mut();
        call!(nvb_memory_allocate(memory.raw, bytes, stream, &mut pointer))?;
        Ok(Block { memory, pointer, stream })
    }
}

impl Drop for Block<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated by this manager and freed once.
        let status = unsafe { nvb_memory_free(self.memory.raw, self.pointer, self.stream) };
        check("nvb_memory_free", status).unwrap();
    }
}

struct Pinned<'a> {
    engine: &'a Engine,
    pointer: *mut u8,
    bytes: usize,
}

impl Pinned<'_> {
    #[allow(clippy::mut_from_ref)]
    fn bytes(&self) -> &mut [u8] {
        // SAFETY: host memory of this size; the scenario uses one such slice at a time.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated by this backend with this size and freed once.
        let status = unsafe { nvb_host_free(self.engine.backend.raw, self.pointer.cast(), self.bytes) };
        check("nvb_host_free", status).unwrap();
    }
}

/// A contiguous tensor.
pub fn tensor(data: *mut c_void, dtype: u32, shape: &[i64]) -> nvb_tensor {
    let mut tensor = nvb_tensor { data, dtype, rank: shape.len() as u32, shape: [0; 4], strides: [0; 4] };
    tensor.shape[..shape.len()].copy_from_slice(shape);
    tensor
}

/// "Absent" where a call says optional.
pub const ABSENT: nvb_tensor =
    nvb_tensor { data: null::<c_void>().cast_mut(), dtype: 0, rank: 0, shape: [0; 4], strides: [0; 4] };

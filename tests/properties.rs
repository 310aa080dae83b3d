//! Properties over random inputs: no tensor is too odd to be checked, and handles and memory behave as their models.

use nvbackend::backend::Backend;
use nvbackend::capi::backend::*;
use nvbackend::capi::backend_options::*;
use nvbackend::capi::handle::Table;
use nvbackend::capi::memory::*;
use nvbackend::capi::operations::*;
use nvbackend::capi::sampling::*;
use nvbackend::capi::status::*;
use nvbackend::capi::tensor::*;
use nvbackend::configuration::{Configuration, MemoryConfiguration};
use nvbackend::device::RawHandle;
use nvbackend::error::Status;
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::mem::{size_of, zeroed};
use std::sync::{Arc, OnceLock};

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

// Tensors -------------------------------------------------------------------------------------------------------------

/// A CPU backend and a block of its memory, by the C ABI.
struct Fixture {
    backend: *mut nvb_backend,
    block: *mut c_void,
}

// SAFETY: a const backend may be used from many threads, and only the library reads and writes the block.
unsafe impl Send for Fixture {}
// SAFETY: as above.
unsafe impl Sync for Fixture {}

const BLOCK: usize = 1 << 16;

fn fixture() -> &'static Fixture {
    static FIXTURE: OnceLock<Fixture> = OnceLock::new();
    FIXTURE.get_or_init(|| {
        // The first call hands panics to the log, where this test's own failures would go too.
        let hook = std::panic::take_hook();
        // SAFETY: zeroed structs with their sizes set, and valid pointers for the outputs.
        unsafe {
            let mut options: nvb_backend_options = zeroed();
            options.struct_size = size_of::<nvb_backend_options>();
            options.device = c"cpu".as_ptr();
            options.threads = 2;
            let (mut backend, mut memory, mut block) = (zeroed(), zeroed(), zeroed());
            assert_eq!(nvb_backend_create(&options, &mut backend), NVB_OK);
            assert_eq!(nvb_backend_get_memory_manager(backend, 0, &mut memory), NVB_OK);
            assert_eq!(nvb_memory_allocate(memory, BLOCK, zeroed(), &mut block), NVB_OK);
            assert_eq!(nvb_memory_fill(memory, block, 0, BLOCK, zeroed()), NVB_OK);
            std::panic::set_hook(hook);
            Fixture { backend, block }
        }
    })
}

/// Extents and strides at which arithmetic goes wrong, and small ones that pass the checks.
fn number() -> impl Strategy<Value = i64> {
    let edges = [0, 1, -1, i64::MAX, i64::MIN, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 61, 1 << 62, 65_537];
    prop_oneof![6 => 0..9i64, 1 => 9..5000i64, 1 => prop::sample::select(edges.to_vec()), 1 => any::<i64>()]
}

fn tensor() -> impl Strategy<Value = nvb_tensor> {
    let dtype = prop_oneof![8 => 1..4u32, 1 => 0..8u32, 1 => any::<u32>()];
    let rank = prop_oneof![8 => 1..5u32, 1 => 0..7u32, 1 => any::<u32>()];
    let offset = prop_oneof![4 => (0..64usize).prop_map(|at| at * 16), 1 => 0..BLOCK];
    let strides = prop_oneof![2 => Just([0; 4]), 1 => vec(number(), 4).prop_map(|s| [s[0], s[1], s[2], 1]), 1 => vec(number(), 4).prop_map(|s| [s[0], s[1], s[2], s[3]])];
    (dtype, rank, offset, vec(number(), 4), strides).prop_map(|(dtype, rank, offset, shape, strides)| nvb_tensor {
        data: fixture().block.cast::<u8>().wrapping_add(offset).cast(),
        dtype,
        rank,
        shape: [shape[0], shape[1], shape[2], shape[3]],
        strides,
    })
}

fn last_error() -> String {
    let mut text = [0 as c_char; 1024];
    // SAFETY: the buffer has this capacity, and the text is NUL-terminated.
    unsafe {
        nvb_last_error_message(text.as_mut_ptr(), text.len());
        std::ffi::CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned()
    }
}

/// Accepted tensors lie in the block whole, so that whatever passes the checks may run.
fn expect_checked(status: nvb_status) -> Result<(), TestCaseError> {
    prop_assert!(status == NVB_OK || status == NVB_ERROR_INVALID_ARGUMENT, "{status}: {}", last_error());
    Ok(())
}

proptest! {
    // A panic poisons the backend that all cases share, so that shrinking would blame any other case.
    #![proptest_config(ProptestConfig { max_shrink_iters: 0, ..config(20_000) })]

    #[test]
    fn no_tensor_is_too_odd_to_be_checked(a in tensor(), b in tensor(), c in tensor(), heads in any::<bool>()) {
        let backend = fixture().backend;
        // SAFETY: zeroed argument structs with their sizes set; tensors that pass the checks lie in the block.
        unsafe {
            let mut elementwise: nvb_elementwise_args = zeroed();
            elementwise.struct_size = size_of::<nvb_elementwise_args>();
            (elementwise.input, elementwise.output) = (a, b);
            expect_checked(nvb_convert(backend, &elementwise, zeroed()))?;
            elementwise.output = a;
            expect_checked(nvb_convert(backend, &elementwise, zeroed()))?;
            elementwise.second = c;
            expect_checked(nvb_add(backend, &elementwise, zeroed()))?;
            let mut norm: nvb_rms_norm_args = zeroed();
            norm.struct_size = size_of::<nvb_rms_norm_args>();
            (norm.input, norm.weight, norm.output) = (a, b, c);
            expect_checked(nvb_rms_norm(backend, &norm, zeroed()))?;
            let mut rope: nvb_rope_args = zeroed();
            rope.struct_size = size_of::<nvb_rope_args>();
            (rope.query, rope.query_output, rope.positions) = (a, if heads { a } else { b }, c);
            rope.positions.dtype = NVB_DTYPE_I32;
            expect_checked(nvb_rope(backend, &rope, zeroed()))?;
            let mut sample: nvb_sample_args = zeroed();
            sample.struct_size = size_of::<nvb_sample_args>();
            (sample.logits, sample.tokens) = (a, b);
            sample.tokens.dtype = NVB_DTYPE_I32;
            expect_checked(nvb_sample(backend, &sample, zeroed()))?;
        }
    }
}

// Handles -------------------------------------------------------------------------------------------------------------

#[derive(Debug, Clone)]
enum HandleStep {
    Insert(u64),
    /// One of the handles made so far, alive or not.
    Get(usize),
    Remove(usize),
    /// Any number, dressed as a handle.
    GetNumber(usize),
}

fn handle_step() -> impl Strategy<Value = HandleStep> {
    prop_oneof![
        3 => any::<u64>().prop_map(HandleStep::Insert),
        3 => any::<usize>().prop_map(HandleStep::Get),
        3 => any::<usize>().prop_map(HandleStep::Remove),
        1 => any::<usize>().prop_map(HandleStep::GetNumber),
    ]
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn handles_behave_as_a_map(steps in vec(handle_step(), 1..300)) {
        // Tables live as long as the process, whose children they are told of.
        let table: &'static Table<u64> = Box::leak(Box::new(Table::new("thing", 99)));
        let other: Table<u64> = Table::new("other", 98);
        let mut made: Vec<*mut u8> = Vec::new();
        let mut alive: BTreeMap<usize, u64> = BTreeMap::new();
        for step in steps {
            match step {
                HandleStep::Insert(value) => {
                    let handle: *mut u8 = table.insert(Arc::new(value)).unwrap();
                    prop_assert!(!handle.is_null() && !made.contains(&handle), "{handle:p} was there before");
                    made.push(handle);
                    alive.insert(handle as usize, value);
                }
                HandleStep::Get(which) if !made.is_empty() => {
                    let handle = made[which % made.len()];
                    let found = table.get(handle).map(|value| *value);
                    prop_assert_eq!(found.as_ref().ok(), alive.get(&(handle as usize)));
                    if let Err(error) = found {
                        prop_assert!(error.message.contains("destroyed"), "{}", error.message);
                    }
                    prop_assert!(other.get(handle).is_err());
                }
                HandleStep::Remove(which) if !made.is_empty() => {
                    let handle = made[which % made.len()];
                    prop_assert_eq!(table.remove(handle).is_ok(), alive.remove(&(handle as usize)).is_some());
                }
                HandleStep::GetNumber(number) if !alive.contains_key(&number) => {
                    prop_assert!(table.get(number as *const u8).is_err());
                    prop_assert_eq!(table.remove(number as *mut u8).is_ok(), number == 0);
                }
                _ => {}
            }
        }
    }
}

// Memory --------------------------------------------------------------------------------------------------------------

const LIMIT: usize = 1 << 20;

#[derive(Debug, Clone)]
enum MemoryStep {
    Allocate(usize),
    /// One of the blocks made so far, alive or not, this many bytes into it.
    Free(usize, usize),
    Owns(usize, usize, usize),
    /// From there to the block's end, and this much further.
    OwnsToTheEnd(usize, usize, isize),
}

fn memory_step() -> impl Strategy<Value = MemoryStep> {
    let bytes = prop_oneof![6 => 1..100_000usize, 1 => Just(0), 1 => LIMIT - 10..LIMIT + 10, 1 => any::<usize>()];
    let inside = prop_oneof![4 => Just(0usize), 1 => 0..100_000usize];
    let length = prop_oneof![4 => 0..100_000usize, 1 => any::<usize>()];
    prop_oneof![
        3 => bytes.prop_map(MemoryStep::Allocate),
        3 => (any::<usize>(), inside.clone()).prop_map(|(which, at)| MemoryStep::Free(which, at)),
        1 => (any::<usize>(), inside.clone(), length).prop_map(|(which, at, bytes)| MemoryStep::Owns(which, at, bytes)),
        1 => (any::<usize>(), inside, -2..3isize).prop_map(|(which, at, by)| MemoryStep::OwnsToTheEnd(which, at, by)),
    ]
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn memory_behaves_as_a_map(steps in vec(memory_step(), 1..200)) {
        let memory = MemoryConfiguration { limit: LIMIT as u64, ..Default::default() };
        let options = Configuration { device: "cpu".into(), memory, threads: 1, ..Default::default() };
        let backend = Backend::new(options).unwrap();
        let memory = backend.memory();
        let mut made: Vec<usize> = Vec::new();
        let mut alive: BTreeMap<usize, usize> = BTreeMap::new();
        let (mut peak, mut allocations, mut frees, mut failures) = (0, 0, 0, 0);
        let block_of = |alive: &BTreeMap<usize, usize>, address: usize| {
            alive.range(..=address).next_back().map(|(start, bytes)| (*start, *bytes)).filter(|(start, bytes)| address - start < *bytes)
        };
        for step in steps {
            let live: usize = alive.values().sum();
            match step {
                MemoryStep::Allocate(bytes) => {
                    let fits = live.checked_add(bytes).is_some_and(|sum| sum <= LIMIT);
                    match memory.allocate(bytes, RawHandle::NULL) {
                        Ok(pointer) => {
                            prop_assert!(fits && bytes > 0, "{bytes} bytes beside {live}");
                            let start = pointer as usize;
                            prop_assert_eq!(start % 256, 0);
                            // SAFETY: the block has these bytes; writing them all shows that no other block has them too.
                            unsafe { pointer.cast::<u8>().write_bytes(allocations as u8, bytes) };
                            let apart = alive.iter().all(|(other, length)| other + length <= start || start + bytes <= *other);
                            prop_assert!(apart, "blocks overlap");
                            alive.insert(start, bytes);
                            made.push(start);
                            allocations += 1;
                            peak = peak.max(live + bytes);
                        }
                        Err(error) => {
                            let expected = if bytes == 0 { Status::InvalidArgument } else { Status::OutOfMemory };
                            prop_assert!(error.status == expected && !(fits && bytes > 0), "{bytes} beside {live}: {error}");
                            failures += (bytes > 0) as u64;
                        }
                    }
                }
                MemoryStep::Free(which, inside) if !made.is_empty() => {
                    let address = made[which % made.len()] + inside;
                    let freed = memory.free(address as *mut c_void, RawHandle::NULL).is_ok();
                    prop_assert_eq!(freed, alive.remove(&address).is_some());
                    frees += freed as u64;
                }
                MemoryStep::Owns(which, inside, bytes) if !made.is_empty() => {
                    let address = made[which % made.len()] + inside;
                    let block = block_of(&alive, address);
                    let whole = block.is_some_and(|(start, length)| bytes <= length - (address - start));
                    prop_assert_eq!(memory.owns(address as *const c_void, bytes), whole);
                }
                MemoryStep::OwnsToTheEnd(which, inside, by) if !made.is_empty() => {
                    let address = made[which % made.len()] + inside;
                    if let Some((start, length)) = block_of(&alive, address) {
                        let bytes = (length - (address - start)).saturating_add_signed(by);
                        prop_assert_eq!(memory.owns(address as *const c_void, bytes), by <= 0);
                    }
                }
                _ => {}
            }
            let now = memory.get_statistics();
            let live: usize = alive.values().sum();
            prop_assert_eq!((now.allocated, now.blocks), (live as u64, alive.len() as u64));
            prop_assert_eq!((now.peak, now.allocations, now.frees, now.failures), (peak as u64, allocations, frees, failures));
        }
        for address in alive.into_keys() {
            prop_assert!(memory.free(address as *mut c_void, RawHandle::NULL).is_ok());
        }
        prop_assert_eq!(memory.get_statistics().allocated, 0);
    }
}

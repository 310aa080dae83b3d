//! Properties of weights through the C ABI: whatever a descriptor says and whatever bytes it points at, the call succeeds
//! or names what is wrong, and what was created reads back as finite values.

use nvbackend::capi::backend::*;
use nvbackend::capi::backend_options::*;
use nvbackend::capi::gguf::*;
use nvbackend::capi::memory::*;
use nvbackend::capi::status::*;
use nvbackend::capi::tensor::*;
use nvbackend::capi::weight::*;
use nvbackend::capi::weight_blocks::*;
use proptest::collection::vec;
use proptest::prelude::*;
use std::ffi::c_void;
use std::mem::{size_of, zeroed};
use std::sync::OnceLock;

fn config(cases: u32) -> ProptestConfig {
    // A panic poisons the backend that all cases share, so that shrinking would blame any other case.
    ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 0, ..ProptestConfig::default() }
}

/// A CPU backend, and bytes that stand for files.
struct Fixture {
    backend: *mut nvb_backend,
    memory: *mut nvb_memory_manager,
    bytes: Vec<u8>,
}

// SAFETY: a const backend may be used from many threads, and the bytes are only read.
unsafe impl Send for Fixture {}
// SAFETY: as above.
unsafe impl Sync for Fixture {}

const BYTES: usize = 1 << 16;

fn fixture() -> &'static Fixture {
    static FIXTURE: OnceLock<Fixture> = OnceLock::new();
    FIXTURE.get_or_init(|| {
        // The first call hands panics to the log, where this test's own failures would go too.
        let hook = std::panic::take_hook();
        // SAFETY: a zeroed struct with its size set, and valid pointers for the outputs.
        unsafe {
            let mut options: nvb_backend_options = zeroed();
            options.struct_size = size_of::<nvb_backend_options>();
            options.device = c"cpu".as_ptr();
            options.threads = 2;
            let (mut backend, mut memory) = (zeroed(), zeroed());
            assert_eq!(nvb_backend_create(&options, &mut backend), NVB_OK);
            assert_eq!(nvb_backend_get_memory_manager(backend, 0, &mut memory), NVB_OK);
            std::panic::set_hook(hook);
            // Half-precision numbers near 0.01, as scales are, with bytes of every value between them.
            let bytes = (0..BYTES).map(|i| if i % 2 == 1 && i % 34 < 8 { 0x20 } else { (i * 89 + i / 251) as u8 });
            Fixture { backend, memory, bytes: bytes.collect() }
        }
    })
}

fn last_error() -> String {
    let mut text = [0; 512];
    // SAFETY: the buffer and its size.
    unsafe {
        nvb_last_error_message(text.as_mut_ptr(), text.len());
        std::ffi::CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned()
    }
}

fn extent() -> impl Strategy<Value = i64> {
    let odd = [0, -1, i64::MAX, i64::MIN, 1 << 31, (1 << 31) - 1, 1 << 40];
    let usual = [1, 8, 16, 24, 32, 64, 128, 256, 512];
    prop_oneof![
        8 => prop::sample::select(usual.to_vec()),
        3 => 1..300i64,
        1 => prop::sample::select(odd.to_vec()),
    ]
}

fn span() -> impl Strategy<Value = (usize, usize)> {
    prop_oneof![6 => Just((0, BYTES)), 2 => (0..64usize, 0..BYTES - 64), 1 => (0..64usize, 0..600usize)]
}

/// Mostly right, rarely anything.
fn code(most: u32) -> impl Strategy<Value = u32> {
    prop_oneof![20 => 0..most, 1 => any::<u32>()]
}

fn pointer((offset, _): (usize, usize)) -> *const c_void {
    fixture().bytes[offset..].as_ptr().cast()
}

prop_compose! {
    fn blocks()(
        spans in (span(), span(), prop::option::of(span()), prop::option::weighted(0.3, span())),
        extents in (extent(), extent(), prop_oneof![9 => Just(0), 1 => extent()]),
        numbers in (code(4), prop::sample::select(vec![0, 32, 64, 128, 128, 256, 48]), code(5), code(3), code(21)),
        scale in prop_oneof![4 => Just(0.0f32), 1 => any::<f32>()],
        reserved in prop_oneof![30 => Just(0u64), 1 => any::<u64>()],
    ) -> nvb_weight_blocks {
        let (data, scales, zeros, order) = spans;
        let optional = |span: Option<(usize, usize)>| span.map_or((std::ptr::null(), 0), |span| (pointer(span), span.1));
        let ((zeros, zero_bytes), (order, order_bytes)) = (optional(zeros), optional(order));
        nvb_weight_blocks {
            data: pointer(data),
            bytes: data.1,
            rows: extents.0,
            columns: extents.1,
            row_stride: extents.2,
            scales: pointer(scales),
            scale_bytes: scales.1,
            zeros,
            zero_bytes,
            order,
            order_bytes,
            scale_dtype: numbers.0,
            group_size: numbers.1,
            granularity: numbers.2,
            version: numbers.3,
            source_format: numbers.4,
            scale,
            reserved: [0, reserved, 0, 0],
        }
    }
}

/// Creates, reads back and destroys.
fn exercise(desc: &nvb_weight_desc) -> Result<(), TestCaseError> {
    let Fixture { backend, memory, .. } = fixture();
    // SAFETY: a struct with its size set whose pointers are valid for what stands beside them.
    unsafe {
        let mut weight = zeroed();
        let status = nvb_weight_create(*backend, desc, zeroed(), &mut weight);
        if status != NVB_OK {
            let expected = [NVB_ERROR_INVALID_ARGUMENT, NVB_ERROR_CONFIGURATION, NVB_ERROR_OUT_OF_MEMORY];
            prop_assert!(expected.contains(&status), "{status}: {}", last_error());
            return Ok(());
        }
        let mut info: nvb_weight_info = zeroed();
        info.struct_size = size_of::<nvb_weight_info>();
        prop_assert_eq!(nvb_weight_get_info(weight, &mut info), NVB_OK);
        prop_assert!(info.relative_error >= 0.0 && info.scale_bytes <= info.bytes, "{}", info.relative_error);
        let elements = (info.rows * info.columns) as usize;
        let mut block = zeroed();
        prop_assert_eq!(nvb_memory_allocate(*memory, elements * 4, zeroed(), &mut block), NVB_OK);
        let mut output: nvb_tensor = zeroed();
        (output.data, output.dtype, output.rank) = (block, NVB_DTYPE_F32, 2);
        (output.shape[0], output.shape[1]) = (info.rows as i64, info.columns as i64);
        prop_assert_eq!(nvb_weight_dequantize(weight, &output, zeroed()), NVB_OK, "{}", last_error());
        let values = std::slice::from_raw_parts(block.cast::<f32>(), elements);
        // Floats are kept as they are, NaN and infinities too.
        let floats = info.dtype != 0;
        prop_assert!(floats || values.iter().all(|value| value.is_finite()));
        prop_assert_eq!(nvb_memory_free(*memory, block, zeroed()), NVB_OK);
        prop_assert_eq!(nvb_weight_destroy(weight), NVB_OK);
    }
    Ok(())
}

proptest! {
    #![proptest_config(config(3000))]

    #[test]
    fn no_blocks_are_too_odd(
        parts in vec(blocks(), 1..3),
        arrangement in code(2),
        (format, granularity, group_size) in (code(10), code(5), prop::sample::select(vec![0, 0, 0, 32, 64, 128, 7])),
        (zero_points, clipping) in (code(2), code(2)),
        as_is in any::<bool>(),
        source_format in code(21),
    ) {
        // SAFETY: zeroed is a default.
        let mut desc: nvb_weight_desc = unsafe { zeroed() };
        desc.struct_size = size_of::<nvb_weight_desc>();
        (desc.blocks, desc.part_count, desc.arrangement) = (parts.as_ptr(), parts.len(), arrangement);
        desc.source_format = source_format.max(1);
        if !as_is {
            (desc.format, desc.granularity, desc.group_size) = (format, granularity, group_size);
            (desc.zero_points, desc.clipping) = (zero_points, clipping);
        }
        exercise(&desc)?;
    }

    /// Matrices that are right, so that most are created, in every format.
    #[test]
    fn right_blocks_become_any_format(
        mut part in blocks(),
        source in 1..12u32,
        format in 0..8u32,
        (zero_points, clipping) in (any::<bool>(), any::<bool>()),
        (rows, columns) in (1..9i64, 1..3i64),
    ) {
        (part.data, part.bytes, part.rows, part.columns) = (pointer((0, BYTES)), BYTES, 8 * rows, 256 * columns);
        (part.scales, part.scale_bytes) = (pointer((0, BYTES)), BYTES);
        (part.zeros, part.zero_bytes, part.order, part.order_bytes) = (std::ptr::null(), 0, std::ptr::null(), 0);
        (part.row_stride, part.source_format, part.group_size, part.scale_dtype) = (0, source, 0, NVB_DTYPE_F16);
        (part.version, part.granularity, part.scale, part.reserved) = (0, 0, 0.0, [0; 4]);
        // SAFETY: zeroed is a default.
        let mut desc: nvb_weight_desc = unsafe { zeroed() };
        desc.struct_size = size_of::<nvb_weight_desc>();
        (desc.blocks, desc.part_count, desc.source_format, desc.format) = (&part, 1, source, format);
        desc.zero_points = u32::from(zero_points && format == NVB_WEIGHT_FORMAT_INT4);
        desc.clipping = u32::from(clipping && format >= NVB_WEIGHT_FORMAT_INT8 && format != NVB_WEIGHT_FORMAT_F32);
        exercise(&desc)?;
    }

    /// Bytes that begin as a GGUF file does and go on at random.
    #[test]
    fn no_file_is_too_odd(tail in vec(any::<u8>(), 0..300), tensors in 0..4u64, values in 0..4u64) {
        // Before this test's own first call, so that the hook found is the one that prints.
        fixture();
        let header = [&b"GGUF"[..], &3u32.to_le_bytes(), &tensors.to_le_bytes(), &values.to_le_bytes(), &tail].concat();
        // SAFETY: bytes that outlive the handle.
        unsafe {
            let mut file = zeroed();
            let status = nvb_gguf_open_memory(header.as_ptr().cast(), header.len(), &mut file);
            prop_assert!(status == NVB_OK || status == NVB_ERROR_INVALID_ARGUMENT, "{status}: {}", last_error());
            if status == NVB_OK {
                prop_assert_eq!(nvb_gguf_destroy(file), NVB_OK);
            }
        }
    }
}

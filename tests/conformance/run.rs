//! The harness: tensors in device memory between guards, poisoned outputs, and a report of every case that fails.

use crate::compare::{bound, compare, compare_rows, decode, encode};
use crate::device::{devices, Device};
use crate::random::{seed, Random};
use crate::writes_all::Checked;
use nvbackend::capi::backend::{nvb_backend, nvb_backend_synchronize};
use nvbackend::capi::status::{nvb_last_error_message, nvb_status, NVB_ERROR_INVALID_ARGUMENT, NVB_OK};
use nvbackend::capi::stream::nvb_stream;
use nvbackend::capi::tensor::nvb_tensor;
use nvbackend::device::CopyKind;
use nvbackend::error::{Error, Result, Status};
use nvbackend::stream::Stream;
use nvbackend::tensor::{CacheLayer, DType, Tensor};
use std::ffi::{c_void, CStr};
use std::fmt::Debug;
use std::io::Write;
use std::ops::Range;
use std::panic::{catch_unwind, AssertUnwindSafe};

/// Why a case fails.
pub struct Failure(String);

impl Failure {
    pub fn text(&self) -> &str {
        &self.0
    }
}

pub type Outcome = std::result::Result<(), Failure>;

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure(format!("{}: {}", error.status, error.message))
    }
}

impl From<String> for Failure {
    fn from(text: String) -> Failure {
        Failure(text)
    }
}

/// Runs every case on every device, and fails with the list of those that failed.
pub fn check<C: Debug>(operation: &str, cases: &[C], test: impl Fn(&mut Run, &C) -> Outcome) {
    let mut failures = Vec::new();
    let traces = std::env::var_os("NVB_TEST_TRACE").is_some();
    for device in devices() {
        let stream = Stream::new(device.backend.executor(), 0).expect("a stream can be created");
        for case in cases {
            let label = format!("{operation} {case:?}");
            if traces {
                // Past the harness, which keeps what a test prints until it has ended.
                let _ = writeln!(std::io::stderr(), "{}: {label}", device.name);
            }
            let mut run = Run { device, stream: &stream, random: Random::new(&label), blocks: Vec::new() };
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                test(&mut run, case)?;
                run.check_blocks()
            }));
            let text = match outcome {
                Ok(Ok(())) => continue,
                Ok(Err(Failure(text))) => text,
                Err(panic) => format!(
                    "panicked: {}",
                    panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref().copied()).unwrap_or("?")
                ),
            };
            failures.push(format!("{}: {label}: {text}", device.name));
        }
    }
    assert!(!cases.is_empty(), "{operation} has cases");
    let shown = failures.len().min(12);
    assert!(
        failures.is_empty(),
        "{} of {} cases failed; NVB_TEST_SEED={} repeats them\n{}",
        failures.len(),
        cases.len() * devices().len(),
        seed(),
        failures[..shown].join("\n")
    );
}

/// Where a tensor lies: elements before its first, and elements after each item of its first axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub offset: usize,
    pub padding: usize,
}

pub const PLAIN: Layout = Layout { offset: 0, padding: 0 };
/// No row starts on a 16-byte boundary by design.
pub const UNALIGNED: Layout = Layout { offset: 1, padding: 3 };
/// Aligned rows with room between them.
pub const PITCHED: Layout = Layout { offset: 0, padding: 16 };
pub const LAYOUTS: [Layout; 3] = [PLAIN, UNALIGNED, PITCHED];

/// Guards, padding and outputs hold this byte: NaN in every float dtype, −1 in i32.
const POISON: u8 = 0xff;
const GUARD: usize = 256;

struct Block {
    pointer: *mut c_void,
    /// What was uploaded.
    image: Vec<u8>,
    /// What the operation may write.
    writable: Vec<Tensor>,
    /// The writable tensors' bytes of the image.
    writable_bytes: Vec<Range<usize>>,
}

/// One case on one device.
pub struct Run<'a> {
    pub device: &'a Device,
    pub stream: &'a Stream,
    pub random: Random,
    blocks: Vec<Block>,
}

impl Run<'_> {
    /// Looks at whether an operation writes what it says, and runs it.
    pub fn executor(&self) -> Checked<'_> {
        Checked(self.device.backend.executor().as_ref())
    }

    /// Calls a function of the C ABI on this device's default stream, and waits for its work. Before that the operations that it
    /// queues are looked at.
    pub fn call(&self, function: impl Fn(*const nvb_backend, *mut nvb_stream) -> nvb_status) -> Result<()> {
        self.executor().look_at(self.device.handle(), &function)?;
        self.call_once(function)
    }

    /// The same for a function that makes or reads an object, which is called once and whose operations nobody looks at.
    pub fn call_once(&self, function: impl FnOnce(*const nvb_backend, *mut nvb_stream) -> nvb_status) -> Result<()> {
        let backend = self.device.handle();
        let mut status = function(backend, std::ptr::null_mut());
        if status == NVB_OK {
            // SAFETY: a live handle.
            status = unsafe { nvb_backend_synchronize(backend) };
        }
        if status == NVB_OK {
            return Ok(());
        }
        let mut text = [0u8; 1024];
        // SAFETY: a buffer of its size.
        unsafe { nvb_last_error_message(text.as_mut_ptr().cast(), text.len()) };
        let text = CStr::from_bytes_until_nul(&text).expect("the text ends").to_string_lossy();
        match status {
            NVB_ERROR_INVALID_ARGUMENT => Err(Error::invalid(text)),
            other => Err(Error::new(Status::Internal, format!("status {other}: {text}"))),
        }
    }

    /// A tensor with these values, in row-major order.
    pub fn tensor(&mut self, dtype: DType, shape: &[usize], layout: Layout, values: &[f64]) -> Result<Tensor> {
        let (span, strides) = strides(shape, layout);
        self.strided(dtype, shape, &strides, layout.offset, span, Some(values))
    }

    /// A tensor of poison that the operation shall write.
    pub fn output(&mut self, dtype: DType, shape: &[usize], layout: Layout) -> Result<Tensor> {
        let (span, strides) = strides(shape, layout);
        let tensor = self.strided(dtype, shape, &strides, layout.offset, span, None)?;
        self.allow_write(&tensor);
        Ok(tensor)
    }

    /// A contiguous i32 vector.
    pub fn integers(&mut self, values: &[i32]) -> Result<Tensor> {
        let values: Vec<f64> = values.iter().map(|&value| value.into()).collect();
        self.tensor(DType::I32, &[values.len()], PLAIN, &values)
    }

    /// Normally distributed values, and the tensor that holds them. The values are as the dtype has rounded them.
    pub fn normal(&mut self, dtype: DType, shape: &[usize], layout: Layout, scale: f64) -> Result<(Tensor, Vec<f64>)> {
        let values = self.random.normals(shape.iter().product(), scale);
        let tensor = self.tensor(dtype, shape, layout, &values)?;
        Ok((tensor, rounded(dtype, &values)))
    }

    pub fn strided(
        &mut self,
        dtype: DType,
        shape: &[usize],
        strides: &[usize],
        offset: usize,
        span: usize,
        values: Option<&[f64]>,
    ) -> Result<Tensor> {
        let size = dtype.size();
        let mut image = vec![POISON; GUARD + (offset + span) * size + GUARD];
        let pointer = self.device.backend.memory().allocate(image.len(), self.stream.raw())?;
        let data = pointer.cast::<u8>().wrapping_add(GUARD + offset * size).cast();
        let tensor = Tensor::new(data, dtype, shape).with_strides(strides);
        if let Some(values) = values {
            assert_eq!(values.len(), tensor.elements(), "values and shape agree");
            let encoded = encode(dtype, values);
            for (element, value) in offsets(&tensor).into_iter().zip(encoded.chunks(size)) {
                let at = GUARD + (offset + element) * size;
                image[at..at + size].copy_from_slice(value);
            }
        }
        self.copy_in(pointer, &image)?;
        self.blocks.push(Block { pointer, image, writable: Vec::new(), writable_bytes: Vec::new() });
        Ok(tensor)
    }

    /// Rows of bytes, `offset` bytes behind a 256-byte boundary: these, or poison that the operation shall write.
    pub fn byte_rows(
        &mut self,
        (rows, columns): (usize, usize),
        row_stride: usize,
        offset: usize,
        values: Option<&[u8]>,
    ) -> Result<*mut c_void> {
        let mut image = vec![POISON; GUARD + offset + rows * row_stride.max(columns) + GUARD];
        let places: Vec<Range<usize>> =
            (0..rows).map(|row| GUARD + offset + row * row_stride).map(|first| first..first + columns).collect();
        for (place, values) in places.iter().zip(values.unwrap_or(&[]).chunks(columns.max(1))) {
            image[place.clone()].copy_from_slice(values);
        }
        let pointer = self.device.backend.memory().allocate(image.len(), self.stream.raw())?;
        self.copy_in(pointer, &image)?;
        let writable_bytes = if values.is_some() { Vec::new() } else { places };
        self.blocks.push(Block { pointer, image, writable: Vec::new(), writable_bytes });
        Ok(pointer.cast::<u8>().wrapping_add(GUARD + offset).cast())
    }

    /// The bytes of such rows, without the gaps between them.
    pub fn read_byte_rows(
        &self,
        from: *const c_void,
        (rows, columns): (usize, usize),
        row_stride: usize,
    ) -> Result<Vec<u8>> {
        if rows == 0 {
            return Ok(Vec::new());
        }
        let bytes = self.copy_out(from, (rows - 1) * row_stride + columns)?;
        Ok((0..rows).flat_map(|row| bytes[row * row_stride..][..columns].to_vec()).collect())
    }

    /// Lets the operation write a tensor that was an input; views of a tensor are fine.
    pub fn allow_write(&mut self, tensor: &Tensor) {
        let address = tensor.data as usize;
        let block = self.blocks.iter_mut().find(|block| {
            let start = block.pointer as usize;
            (start..start + block.image.len()).contains(&address)
        });
        block.expect("the tensor belongs to this case").writable.push(*tensor);
    }

    /// Lets the operation write byte rows that were an input.
    pub fn allow_byte_writes(&mut self, place: *const c_void, bytes: usize) {
        let address = place as usize;
        let block = self.blocks.iter_mut().find(|block| {
            let start = block.pointer as usize;
            (start..start + block.image.len()).contains(&address)
        });
        let block = block.expect("the rows belong to this case");
        let first = address - block.pointer as usize;
        block.writable_bytes.push(first..first + bytes);
    }

    /// The values of a tensor, in row-major order, once the stream has passed them.
    pub fn read(&self, tensor: &Tensor) -> Result<Vec<f64>> {
        let bytes = self.copy_out(tensor.data, tensor.span_bytes())?;
        let size = tensor.dtype.size();
        Ok(offsets(tensor).into_iter().map(|element| decode(tensor.dtype, &bytes[element * size..])).collect())
    }

    /// Overwrites a contiguous tensor, such as a layer of a cache.
    pub fn write(&self, tensor: &Tensor, values: &[f64]) -> Result<()> {
        assert!(tensor.is_contiguous() && values.len() == tensor.elements(), "a contiguous tensor of these values");
        self.copy_in(tensor.data, &encode(tensor.dtype, values))
    }

    /// Fills a layer's keys and values with poison, as stale tokens may look.
    pub fn poison(&self, layer: &CacheLayer) -> Result<()> {
        for tensor in [key_tensor(layer), value_tensor(layer)] {
            // SAFETY: the layer's keys, then its values, lie in the cache's block.
            unsafe { self.executor().fill(tensor.data, POISON, tensor.span_bytes(), self.stream.raw())? };
        }
        self.stream.synchronize()
    }

    /// Compares an output with its unrounded reference, within the bound of the output's dtype.
    pub fn expect(&self, name: &str, tensor: &Tensor, reference: &[f64]) -> Outcome {
        self.expect_within(name, tensor, reference, bound(tensor.dtype))
    }

    pub fn expect_within(&self, name: &str, tensor: &Tensor, reference: &[f64], bound: f64) -> Outcome {
        self.expect_rows(name, tensor, reference, bound, reference.len())
    }

    /// Compares rows that differ in size, as `compare_rows` does.
    pub fn expect_rows(&self, name: &str, tensor: &Tensor, reference: &[f64], bound: f64, row: usize) -> Outcome {
        let out = self.read(tensor)?;
        compare_rows(tensor.dtype, &out, reference, bound, &[], row).map_err(|text| Failure(format!("{name}: {text}")))
    }

    /// Compares as `expect` does, for x · Φ(x) and its like: 1 + erf and 1 + tanh cancel where x is negative, which
    /// leaves an error relative to x. `inputs` holds what each result is at most, the activation's input times its factor.
    pub fn expect_activated(&self, name: &str, tensor: &Tensor, reference: &[f64], inputs: &[f64]) -> Outcome {
        let slack: Vec<f64> = inputs.iter().map(|x| x.abs() * 2f64.powi(-21)).collect();
        self.expect_with_slack(name, tensor, reference, &slack)
    }

    /// Compares as `expect` does, for sums in f32, whose terms may cancel: `terms` holds the sum of their absolute values,
    /// of which a rounding (2^-24) may be lost.
    pub fn expect_summed(&self, name: &str, tensor: &Tensor, reference: &[f64], terms: &[f64]) -> Outcome {
        let slack: Vec<f64> = terms.iter().map(|sum| sum * 2f64.powi(-24)).collect();
        self.expect_with_slack(name, tensor, reference, &slack)
    }

    fn expect_with_slack(&self, name: &str, tensor: &Tensor, reference: &[f64], slack: &[f64]) -> Outcome {
        let out = self.read(tensor)?;
        compare(tensor.dtype, &out, reference, bound(tensor.dtype), slack)
            .map_err(|text| Failure(format!("{name}: {text}")))
    }

    /// Compares i32 results exactly.
    pub fn expect_integers(&self, name: &str, tensor: &Tensor, reference: &[i32]) -> Outcome {
        let out: Vec<i32> = self.read(tensor)?.into_iter().map(|value| value as i32).collect();
        match out.iter().zip(reference).position(|(a, b)| a != b) {
            None if out.len() == reference.len() => Ok(()),
            None => Err(Failure(format!("{name}: {} values, {} expected", out.len(), reference.len()))),
            Some(i) => Err(Failure(format!("{name}[{i}] is {}; {} is expected", out[i], reference[i]))),
        }
    }

    fn copy_in(&self, to: *mut c_void, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let from = bytes.as_ptr().cast();
        // SAFETY: the callers' ranges lie in one block; the bytes outlive the copy, which is waited for.
        unsafe { self.executor().copy(to, from, bytes.len(), CopyKind::HostToDevice, self.stream.raw())? };
        self.stream.synchronize()
    }

    fn copy_out(&self, from: *const c_void, count: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0u8; count];
        if count > 0 {
            let to = bytes.as_mut_ptr().cast();
            // SAFETY: the callers' ranges lie in one block; the buffer outlives the copy, which is waited for.
            unsafe { self.executor().copy(to, from, count, CopyKind::DeviceToHost, self.stream.raw())? };
        }
        self.stream.synchronize()?;
        Ok(bytes)
    }

    /// Nothing but the outputs' elements has changed.
    fn check_blocks(&mut self) -> Outcome {
        for block in &self.blocks {
            let now = self.copy_out(block.pointer, block.image.len())?;
            if now == block.image {
                continue;
            }
            let mut changed: Vec<bool> = now.iter().zip(&block.image).map(|(a, b)| a != b).collect();
            for tensor in &block.writable {
                let first = tensor.data as usize - block.pointer as usize;
                let size = tensor.dtype.size();
                for element in offsets(tensor) {
                    changed[first + element * size..][..size].fill(false);
                }
            }
            for range in &block.writable_bytes {
                changed[range.clone()].fill(false);
            }
            if let Some(at) = changed.iter().position(|&changed| changed) {
                let (count, length) = (changed.iter().filter(|&&changed| changed).count(), now.len() - 2 * GUARD);
                let at = at as isize - GUARD as isize;
                return Err(Failure(format!("{count} bytes that are no output changed, first byte {at} of {length}")));
            }
        }
        Ok(())
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        for block in &self.blocks {
            // A device that is lost has said so in the case's failure.
            let _ = self.device.backend.memory().free(block.pointer, self.stream.raw());
        }
    }
}

/// The tensor as the C ABI has it.
pub fn c_tensor(tensor: &Tensor) -> nvb_tensor {
    let integers = |values: [usize; 4]| values.map(|value| value as i64);
    let (rank, dtype) = (tensor.rank as u32, tensor.dtype as u32);
    nvb_tensor { data: tensor.data, dtype, rank, shape: integers(tensor.shape), strides: integers(tensor.strides) }
}

/// Row-major strides with the layout's padding, and the elements that they span.
fn strides(shape: &[usize], layout: Layout) -> (usize, Vec<usize>) {
    let mut strides = vec![1; shape.len()];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        strides[axis] = strides[axis + 1] * shape[axis + 1];
    }
    if shape.len() > 1 {
        strides[0] += layout.padding;
    }
    (shape[0] * strides[0], strides)
}

/// The element offsets of a tensor in row-major order.
pub fn offsets(tensor: &Tensor) -> Vec<usize> {
    let mut offsets = vec![0];
    for axis in 0..tensor.rank {
        let (extent, stride) = (tensor.shape[axis], tensor.strides[axis]);
        offsets = offsets.iter().flat_map(|&first| (0..extent).map(move |i| first + i * stride)).collect();
    }
    offsets
}

pub fn rounded(dtype: DType, values: &[f64]) -> Vec<f64> {
    encode(dtype, values).chunks(dtype.size()).map(|bytes| decode(dtype, bytes)).collect()
}

/// A layer's keys or values as [sequences, heads, capacity, head_dim].
pub fn key_tensor(layer: &CacheLayer) -> Tensor {
    Tensor::new(layer.key, layer.dtype, &[layer.sequences, layer.heads, layer.capacity, layer.head_dim])
}

/// A layer's values, as `key_tensor` has its keys.
pub fn value_tensor(layer: &CacheLayer) -> Tensor {
    Tensor::new(layer.value, layer.dtype, &[layer.sequences, layer.heads, layer.capacity, layer.value_dim])
}

/// An error of this status whose text holds all of these words: it names the value and the limit.
pub fn expect_error<T>(result: Result<T>, status: Status, words: &[&str]) -> Outcome {
    match result {
        Ok(_) => Err(Failure(format!("succeeded; {status} is expected"))),
        Err(error) if error.status == status && words.iter().all(|word| error.message.contains(word)) => Ok(()),
        Err(error) => {
            Err(Failure(format!("{}: {:?}; {status} with {words:?} is expected", error.status, error.message)))
        }
    }
}

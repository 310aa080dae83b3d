//! A layer of a model in Rust: a weight, an input, and `output = input · weightᵀ`, through the same functions that C programs
//! call. The header says what each of them does.
//!
//! ```sh
//! cargo run --release --example linear --no-default-features -- cpu
//! ```

use nvbackend::capi::backend::*;
use nvbackend::capi::backend_options::*;
use nvbackend::capi::memory::*;
use nvbackend::capi::operations::*;
use nvbackend::capi::status::*;
use nvbackend::capi::structs::init;
use nvbackend::capi::tensor::*;
use nvbackend::capi::weight::*;
use std::ffi::{c_void, CString};
use std::ptr::null_mut;

/// The library's text of the call that has just failed on this thread.
fn check(status: nvb_status) -> Result<(), String> {
    if status == NVB_OK {
        return Ok(());
    }
    let mut text = vec![0u8; 1024];
    // SAFETY: the buffer has as many bytes as the call is told.
    let needed = unsafe { nvb_last_error_message(text.as_mut_ptr().cast(), text.len()) };
    text.truncate(needed.clamp(1, text.len()) - 1);
    Err(String::from_utf8_lossy(&text).into_owned())
}

/// A contiguous F32 matrix of memory that the caller owns.
fn matrix(data: *mut c_void, rows: usize, columns: usize) -> nvb_tensor {
    let shape = [rows as i64, columns as i64, 0, 0];
    nvb_tensor { data, dtype: NVB_DTYPE_F32, rank: 2, shape, strides: [0; 4] }
}

/// Device memory that is freed with its owner, on the backend's default stream.
struct Block {
    memory: *mut nvb_memory_manager,
    data: *mut c_void,
    bytes: usize,
}

impl Block {
    fn new(memory: *mut nvb_memory_manager, bytes: usize) -> Result<Block, String> {
        let mut data = null_mut();
        // SAFETY: the manager is alive as long as `run` is at work.
        check(unsafe { nvb_memory_allocate(memory, bytes, null_mut(), &mut data) })?;
        Ok(Block { memory, data, bytes })
    }

    fn copy_from(&self, values: &[f32]) -> Result<(), String> {
        assert_eq!(size_of_val(values), self.bytes);
        let from = values.as_ptr().cast();
        // SAFETY: both have `bytes` bytes, and pageable host memory is read before the call returns.
        check(unsafe { nvb_memory_copy(self.memory, self.data, from, self.bytes, NVB_COPY_HOST_TO_DEVICE, null_mut()) })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: the block is this one's, and work that uses it runs on the stream that it is freed on.
        unsafe { nvb_memory_free(self.memory, self.data, null_mut()) };
    }
}

/// input [1, 3] · weightᵀ [3, 2] on the device of this name. Where a call fails, what was made before is left to the end of the
/// process; an engine would give handles owners as `Block` is one.
fn run(device: &str) -> Result<[f32; 2], String> {
    let (mut numbers, input) = ([1f32, 0.0, 1.0, 0.0, 2.0, 0.0], [3f32, 4.0, 5.0]);
    let mut output = [0f32; 2];
    let device = CString::new(device).map_err(|error| error.to_string())?;
    let mut options = init::<nvb_backend_options>();
    options.device = device.as_ptr();
    let (mut backend, mut memory, mut weight) = (null_mut(), null_mut(), null_mut());

    // SAFETY: options, tensors and host arrays outlive the calls that are handed them; device memory outlives the wait
    // for the work on it; handles are destroyed once each.
    unsafe {
        check(nvb_backend_create(&options, &mut backend))?;
        check(nvb_backend_get_memory_manager(backend, 0, &mut memory))?;
        let part = matrix(numbers.as_mut_ptr().cast(), 2, 3);
        let mut desc = init::<nvb_weight_desc>();
        desc.parts = &part;
        desc.part_count = 1;
        check(nvb_weight_create(backend, &desc, null_mut(), &mut weight))?;

        let (x, y) = (Block::new(memory, size_of_val(&input))?, Block::new(memory, size_of_val(&output))?);
        x.copy_from(&input)?;
        let mut args = init::<nvb_linear_args>();
        args.input = matrix(x.data, 1, 3);
        args.weight = weight;
        args.output = matrix(y.data, 1, 2);
        check(nvb_linear(backend, &args, null_mut()))?;
        let to = output.as_mut_ptr().cast();
        check(nvb_memory_copy(memory, to, y.data, y.bytes, NVB_COPY_DEVICE_TO_HOST, null_mut()))?;
        check(nvb_backend_synchronize(backend))?;

        drop((x, y));
        check(nvb_weight_destroy(weight))?;
        check(nvb_memory_manager_destroy(memory))?;
        check(nvb_backend_destroy(backend))?;
    }
    Ok(output)
}

fn main() {
    let device = std::env::args().nth(1).unwrap_or_else(|| "auto".to_string());
    match run(&device) {
        Ok(output) => println!("{} {}", output[0], output[1]),
        Err(text) => {
            eprintln!("linear: {text}");
            std::process::exit(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::run;

    #[test]
    fn the_example_multiplies_and_reports() {
        assert_eq!(run("cpu"), Ok([8.0, 8.0]));
        let text = run("abacus").unwrap_err();
        assert!(text.contains("device is \"abacus\""), "{text}");
    }
}

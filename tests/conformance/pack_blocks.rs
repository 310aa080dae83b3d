//! Weights that take the place of their blocks, and slices of rows: products, embeddings and dequantising equal those of weights
//! that the library allocated, and the blocks come back bit for bit.

use crate::block_weights::{code, create, part, read_back, values_of, Handle};
use crate::run::{c_tensor, check, expect_error, rounded, Outcome, Run, PITCHED, PLAIN};
use crate::weight_formats::blocks;
use nvbackend::capi::operations::*;
use nvbackend::capi::structs::init;
use nvbackend::capi::weight::*;
use nvbackend::capi::weight_blocks::*;
use nvbackend::error::{Result, Status};
use nvbackend::tensor::{DType, Tensor};
use nvbackend::weight::BlockFormat;
use std::ffi::c_void;
use std::ptr::null_mut;

const FORMATS: [BlockFormat; 3] = [BlockFormat::Q4_0, BlockFormat::Q4_1, BlockFormat::Q8_0];

/// The blocks in device memory, and the weight that takes their place.
fn in_place(
    run: &mut Run,
    format: BlockFormat,
    (rows, columns): (usize, usize),
    data: &[u8],
) -> Result<(*mut c_void, Handle)> {
    let row_bytes = format.bytes(columns);
    let place = run.byte_rows((rows, row_bytes), row_bytes, 0, Some(data))?;
    run.allow_byte_writes(place, data.len());
    let given = part(place, data.len(), rows, columns, 0);
    let weight = create(run, &[given], |desc| {
        (desc.format, desc.source) = (NVB_WEIGHT_FORMAT_AS_IS, NVB_SOURCE_IN_PLACE);
        desc.source_format = code(format);
    })?;
    Ok((place, weight))
}

/// A weight of the library's own memory from the same blocks.
fn imported(run: &Run, format: BlockFormat, (rows, columns): (usize, usize), data: &[u8]) -> Result<Handle> {
    let given = part(data.as_ptr().cast(), data.len(), rows, columns, 0);
    let format_of_weight = if format == BlockFormat::Q4_1 { NVB_WEIGHT_FORMAT_BLOCKS } else { NVB_WEIGHT_FORMAT_AS_IS };
    create(run, &[given], |desc| (desc.format, desc.source_format) = (format_of_weight, code(format)))
}

fn restore(run: &Run, weight: &Handle) -> Result<()> {
    // SAFETY: a live handle.
    run.call_once(|_, stream| unsafe { nvb_weight_restore_blocks(weight.0, stream) })
}

fn slice(run: &Run, weight: &Handle, first: u64, rows: u64) -> Result<Handle> {
    let mut made = Handle(null_mut());
    // SAFETY: a live handle, and room for another.
    run.call_once(|_, _| unsafe { nvb_weight_slice(weight.0, first, rows, &mut made.0) })?;
    Ok(made)
}

fn product(run: &mut Run, weight: &Handle, input: &Tensor, columns: usize) -> Result<Vec<f64>> {
    let output = run.output(DType::F32, &[input.shape[0], columns], PITCHED)?;
    let mut args: nvb_linear_args = init();
    (args.input, args.weight, args.output) = (c_tensor(input), weight.0, c_tensor(&output));
    // SAFETY: a struct with its size set, and tensors of the case's device.
    run.call(|backend, stream| unsafe { nvb_linear(backend, &args, stream) })?;
    run.read(&output)
}

fn expect_equal(what: &str, found: &[f64], wanted: &[f64]) -> Outcome {
    match found.iter().zip(wanted).position(|(a, b)| a.to_bits() != b.to_bits()) {
        None if found.len() == wanted.len() => Ok(()),
        None => Err(format!("{what}: {} values, {} wanted", found.len(), wanted.len()).into()),
        Some(i) => Err(format!("{what}: {} at {i}, {} wanted", found[i], wanted[i]).into()),
    }
}

#[test]
fn blocks_come_back_to_their_place() {
    let shapes = [(16, 64), (48, 192), (144, 576), (32, 4096)];
    let cases: Vec<_> = FORMATS.iter().flat_map(|&format| shapes.map(|shape| (format, shape))).collect();
    check("weight, in place", &cases, |run, &(format, (rows, columns))| {
        let data = blocks(run, format, rows, columns);
        let (place, weight) = in_place(run, format, (rows, columns), &data)?;
        let mut info: nvb_weight_info = init();
        // SAFETY: a struct with its size set.
        run.call_once(|_, _| unsafe { nvb_weight_get_info(weight.0, &mut info) })?;
        let encoding = if format == BlockFormat::Q8_0 { NVB_WEIGHT_FORMAT_INT8 } else { NVB_WEIGHT_FORMAT_INT4 };
        let found = (info.encoding, info.source_format, info.group_size, info.zero_points, info.bytes);
        if found != (encoding, code(format), 32, u32::from(format == BlockFormat::Q4_1), 0) {
            return Err(format!("{found:?}").into());
        }
        if info.relative_error != 0.0 {
            return Err(format!("an error of {}", info.relative_error).into());
        }
        let whole = run.output(DType::F32, &[rows, columns], PLAIN)?;
        let c_whole = c_tensor(&whole);
        // SAFETY: a tensor of the weight's shape.
        run.call(|_, stream| unsafe { nvb_weight_dequantize(weight.0, &c_whole, stream) })?;
        expect_equal("values", &run.read(&whole)?, &values_of(format, &data, columns))?;
        if read_back(run, &weight, data.len())? != data {
            return Err("other blocks were read".to_string().into());
        }
        let part = slice(run, &weight, 0, 16)?;
        if read_back(run, &part, format.bytes(columns) * 16)? != data[..format.bytes(columns) * 16] {
            return Err("a slice has other blocks".to_string().into());
        }
        expect_error(restore(run, &part), Status::InvalidArgument, &["slice"])?;
        restore(run, &weight)?;
        let row_bytes = format.bytes(columns);
        if run.read_byte_rows(place, (rows, row_bytes), row_bytes)? != data {
            return Err("other blocks lie in the place".to_string().into());
        }
        for refused in [restore(run, &weight), read_back(run, &weight, data.len()).map(drop)] {
            expect_error(refused, Status::InvalidArgument, &["put back"])?;
        }
        expect_error(slice(run, &weight, 0, 16), Status::InvalidArgument, &["put back"])?;
        let input = run.tensor(DType::F32, &[1, columns], PLAIN, &vec![1.0; columns])?;
        expect_error(product(run, &part, &input, 16), Status::InvalidArgument, &["put back"])
    });
}

#[test]
fn products_are_those_of_own_memory() {
    let mut cases = Vec::new();
    for format in FORMATS {
        for (tokens, rows, columns) in
            [(1, 16, 64), (1, 4096, 2560), (3, 48, 192), (9, 256, 1024), (40, 128, 512), (130, 64, 256)]
        {
            for dtype in [DType::Bf16, DType::F16, DType::F32] {
                cases.push((format, dtype, tokens, rows, columns));
            }
        }
    }
    check("linear, packed in place", &cases, |run, &(format, dtype, tokens, rows, columns)| {
        let data = blocks(run, format, rows, columns);
        let (_, weight) = in_place(run, format, (rows, columns), &data)?;
        let (input, x) = run.normal(dtype, &[tokens, columns], PITCHED, 1.0)?;
        let found = product(run, &weight, &input, rows)?;
        if format != BlockFormat::Q4_1 {
            let own = imported(run, format, (rows, columns), &data)?;
            return expect_equal("product", &found, &product(run, &own, &input, rows)?);
        }
        // Nothing imports Q4_1 without loss, so the reference is its definition, which a GPU rounds to the input's dtype where
        // it multiplies many rows.
        let mut w = values_of(format, &data, columns);
        if tokens > 64 && !run.device.is_cpu() {
            w = rounded(dtype, &w);
        }
        let (mut reference, mut terms) = (Vec::new(), Vec::new());
        for t in 0..tokens {
            for row in w.chunks_exact(columns) {
                let products: Vec<f64> = x[t * columns..][..columns].iter().zip(row).map(|(x, w)| x * w).collect();
                reference.push(products.iter().sum());
                terms.push(products.iter().map(|term| term.abs()).sum::<f64>() * 4.0);
            }
        }
        let output = run.output(DType::F32, &[tokens, rows], PLAIN)?;
        let mut args: nvb_linear_args = init();
        (args.input, args.weight, args.output) = (c_tensor(&input), weight.0, c_tensor(&output));
        // SAFETY: a struct with its size set, and tensors of the case's device.
        run.call(|backend, stream| unsafe { nvb_linear(backend, &args, stream) })?;
        run.expect_summed("output", &output, &reference, &terms)
    });
}

#[test]
fn slices_are_weights_of_their_rows() {
    let formats = [BlockFormat::Q4_0, BlockFormat::Q8_0, BlockFormat::Q6K];
    let parts = [(0, 64), (16, 32), (48, 80), (112, 21), (0, 133)];
    let mut cases = Vec::new();
    for format in formats {
        for part in parts {
            for tokens in [1, 20] {
                cases.push((format, part, tokens));
            }
        }
    }
    check("weight slices", &cases, |run, &(format, (first, count), tokens)| {
        let (rows, columns) = (133, 512);
        let data = blocks(run, format, rows, columns);
        let row_bytes = format.bytes(columns);
        let given = part(data.as_ptr().cast(), data.len(), rows, columns, 0);
        let kept = if format == BlockFormat::Q6K { NVB_WEIGHT_FORMAT_BLOCKS } else { NVB_WEIGHT_FORMAT_AS_IS };
        let change = |desc: &mut nvb_weight_desc| (desc.format, desc.source_format) = (kept, code(format));
        let weight = create(run, &[given], change)?;
        let rows_alone = &data[first * row_bytes..][..count * row_bytes];
        let given = part(rows_alone.as_ptr().cast(), rows_alone.len(), count, columns, 0);
        let alone = create(run, &[given], change)?;
        let found = slice(run, &weight, first as u64, count as u64)?;
        // The slice keeps the memory.
        drop(weight);
        let (input, _) = run.normal(DType::Bf16, &[tokens, columns], PLAIN, 1.0)?;
        let wanted = product(run, &alone, &input, count)?;
        expect_equal("product", &product(run, &found, &input, count)?, &wanted)?;
        let numbers: Vec<i32> = vec![count as i32 - 1, 0, count as i32 / 2];
        let tokens = run.integers(&numbers)?;
        let output = run.output(DType::F32, &[numbers.len(), columns], PLAIN)?;
        let mut args: nvb_embedding_args = init();
        (args.tokens, args.table, args.output) = (c_tensor(&tokens), found.0, c_tensor(&output));
        // SAFETY: as above.
        run.call(|backend, stream| unsafe { nvb_embedding(backend, &args, stream) })?;
        let values = values_of(format, rows_alone, columns);
        let wanted: Vec<f64> =
            numbers.iter().flat_map(|&row| values[row as usize * columns..][..columns].to_vec()).collect();
        expect_equal("rows", &run.read(&output)?, &rounded(DType::F32, &wanted))
    });
}

#[test]
fn what_is_refused() {
    check("weight, in place", &FORMATS, |run, &format| {
        let (rows, columns) = (32, 128);
        let mut data = blocks(run, format, rows, columns);
        let row_bytes = format.bytes(columns);
        let place = run.byte_rows((rows, row_bytes), row_bytes, 0, Some(&data))?;
        let good = part(place, data.len(), rows, columns, 0);
        let attempt = |run: &Run, change: &dyn Fn(&mut nvb_weight_blocks, &mut nvb_weight_desc)| {
            let mut given = good;
            let mut desc: nvb_weight_desc = init();
            (desc.part_count, desc.source, desc.source_format) = (1, NVB_SOURCE_IN_PLACE, code(format));
            change(&mut given, &mut desc);
            let both = [given, given];
            desc.blocks = both.as_ptr();
            let mut weight = Handle(null_mut());
            // SAFETY: a struct with its size set.
            run.call_once(|backend, stream| unsafe { nvb_weight_create(backend, &desc, stream, &mut weight.0) })
        };
        let refused = |change: &dyn Fn(&mut nvb_weight_blocks, &mut nvb_weight_desc), words: &[&str]| {
            expect_error(attempt(run, change), Status::InvalidArgument, words)
        };
        refused(&|given, _| given.rows = 24, &["blocks[0]", "24", "16"])?;
        refused(&|given, _| given.columns = 32, &["32", "64"])?;
        refused(&|given, _| (given.rows, given.columns, given.row_stride) = (16, 64, 128), &["gap"])?;
        refused(&|given, _| given.bytes -= 1, &["bytes"])?;
        refused(&|given, _| given.data = std::ptr::null(), &["NULL"])?;
        refused(
            &|given, _| (given.data, given.bytes, given.rows) = (given.data.wrapping_byte_add(2), given.bytes - 2, 16),
            &["multiple of 16"],
        )?;
        refused(&|_, desc| desc.format = NVB_WEIGHT_FORMAT_BLOCKS, &["NVB_SOURCE_BORROWED"])?;
        refused(&|_, desc| desc.format = NVB_WEIGHT_FORMAT_BF16, &["format"])?;
        refused(&|_, desc| desc.group_size = 32, &["group_size"])?;
        refused(&|_, desc| desc.part_count = 2, &["2 parts"])?;
        refused(&|_, desc| desc.arrangement = NVB_WEIGHT_GATED, &["gated"])?;
        refused(&|_, desc| desc.source_format = NVB_SOURCE_FORMAT_SFP, &["source_format is 6"])?;
        refused(
            &|given, desc| (given.columns, given.rows, desc.source_format) = (256, 1, NVB_SOURCE_FORMAT_GGUF_Q2_K),
            &["Q2_K", "no other layout"],
        )?;
        if run.read_byte_rows(place, (rows, row_bytes), row_bytes)? != data {
            return Err("a refused call has changed the blocks".to_string().into());
        }

        // The scale of a late block is NaN: what was packed before is undone.
        let last = data.len() - format.block_bytes();
        data[last..last + 2].copy_from_slice(&[0x01, 0xfc]);
        let place = run.byte_rows((rows, row_bytes), row_bytes, 0, Some(&data))?;
        let result = attempt(run, &|given, _| given.data = place);
        expect_error(result, Status::InvalidArgument, &["blocks[0]", "not finite"])?;
        if run.read_byte_rows(place, (rows, row_bytes), row_bytes)? != data {
            return Err("a refused weight has changed the blocks".to_string().into());
        }

        data[last..last + 2].copy_from_slice(&[0, 0]);
        let own = imported(run, format, (rows, columns), &data)?;
        expect_error(restore(run, &own), Status::InvalidArgument, &["NVB_SOURCE_IN_PLACE"])?;
        for (first, count) in [(0, 33), (33, 1), (0, 0), (8, 16), (0, 8), (u64::MAX, 2)] {
            expect_error(slice(run, &own, first, count), Status::InvalidArgument, &["rows"])?;
        }
        let values = rounded(DType::F32, &vec![1.0; 32 * 16]);
        let floats = run.tensor(DType::F32, &[32, 16], PLAIN, &values)?;
        let c_floats = [c_tensor(&floats), c_tensor(&floats)];
        let gated = create(run, &[], |desc| {
            (desc.blocks, desc.format) = (std::ptr::null(), NVB_WEIGHT_FORMAT_AS_IS);
            (desc.parts, desc.part_count, desc.source) = (c_floats.as_ptr(), 2, NVB_SOURCE_DEVICE);
            desc.arrangement = NVB_WEIGHT_GATED;
        })?;
        expect_error(slice(run, &gated, 0, 16), Status::InvalidArgument, &["gated"])
    });
}

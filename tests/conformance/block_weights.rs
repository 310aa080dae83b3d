//! `weight` of GGUF's blocks as a file has them: kept bit for bit, from host, device and borrowed memory, and read by products,
//! embeddings and `nvb_weight_dequantize` with the values of their definition.

use crate::compare::FLOATS;
use crate::run::{c_tensor, check, expect_error, rounded, Layout, Outcome, Run, PITCHED, PLAIN};
use crate::weight_formats::blocks;
use nvbackend::capi::operations::*;
use nvbackend::capi::products::*;
use nvbackend::capi::structs::init;
use nvbackend::capi::weight::*;
use nvbackend::capi::weight_blocks::*;
use nvbackend::error::Status;
use nvbackend::tensor::DType;
use nvbackend::weight::BlockFormat;
use std::ffi::c_void;
use std::ptr::null_mut;

/// The `NVB_SOURCE_FORMAT_…` of a format.
pub fn code(format: BlockFormat) -> u32 {
    match format {
        BlockFormat::Q4_0 => NVB_SOURCE_FORMAT_GGUF_Q4_0,
        BlockFormat::Q4_1 => NVB_SOURCE_FORMAT_GGUF_Q4_1,
        BlockFormat::Q5_0 => NVB_SOURCE_FORMAT_GGUF_Q5_0,
        BlockFormat::Q5_1 => NVB_SOURCE_FORMAT_GGUF_Q5_1,
        BlockFormat::Q8_0 => NVB_SOURCE_FORMAT_GGUF_Q8_0,
        BlockFormat::Q2K => NVB_SOURCE_FORMAT_GGUF_Q2_K,
        BlockFormat::Q3K => NVB_SOURCE_FORMAT_GGUF_Q3_K,
        BlockFormat::Q4K => NVB_SOURCE_FORMAT_GGUF_Q4_K,
        BlockFormat::Q5K => NVB_SOURCE_FORMAT_GGUF_Q5_K,
        BlockFormat::Q6K => NVB_SOURCE_FORMAT_GGUF_Q6_K,
        BlockFormat::Iq4Nl => NVB_SOURCE_FORMAT_GGUF_IQ4_NL,
        BlockFormat::Iq4Xs => NVB_SOURCE_FORMAT_GGUF_IQ4_XS,
        BlockFormat::Mxfp4 => NVB_SOURCE_FORMAT_GGUF_MXFP4,
    }
}

/// A handle that is destroyed with its case.
pub struct Handle(pub *mut nvb_weight);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: a live handle.
        unsafe { nvb_weight_destroy(self.0) };
    }
}

pub fn part(data: *const c_void, bytes: usize, rows: usize, columns: usize, row_stride: usize) -> nvb_weight_blocks {
    // SAFETY: a plain struct whose zeros are its defaults.
    let mut part: nvb_weight_blocks = unsafe { std::mem::zeroed() };
    (part.data, part.bytes) = (data, bytes);
    (part.rows, part.columns, part.row_stride) = (rows as i64, columns as i64, row_stride as i64);
    part
}

pub fn create(
    run: &Run,
    parts: &[nvb_weight_blocks],
    change: impl Fn(&mut nvb_weight_desc),
) -> nvbackend::error::Result<Handle> {
    let mut desc: nvb_weight_desc = init();
    (desc.blocks, desc.part_count, desc.format) = (parts.as_ptr(), parts.len(), NVB_WEIGHT_FORMAT_BLOCKS);
    change(&mut desc);
    let mut weight = Handle(null_mut());
    // SAFETY: a struct with its size set, and blocks of the sizes that it says.
    run.call_once(|backend, stream| unsafe { nvb_weight_create(backend, &desc, stream, &mut weight.0) })?;
    Ok(weight)
}

pub fn read_back(run: &Run, weight: &Handle, bytes: usize) -> nvbackend::error::Result<Vec<u8>> {
    let mut back = vec![0; bytes];
    // SAFETY: a buffer of its size.
    run.call_once(|_, stream| unsafe { nvb_weight_read_blocks(weight.0, back.as_mut_ptr().cast(), bytes, stream) })?;
    Ok(back)
}

pub fn values_of(format: BlockFormat, data: &[u8], columns: usize) -> Vec<f64> {
    let mut values = vec![0.0; data.len() / format.block_bytes() * format.elements()];
    format.decode(data, &mut values);
    assert_eq!(values.len() % columns, 0);
    values.into_iter().map(f64::from).collect()
}

#[test]
fn blocks_come_back_bit_for_bit() {
    let sources = [NVB_SOURCE_HOST, NVB_SOURCE_DEVICE, NVB_SOURCE_BORROWED];
    let cases: Vec<_> = BlockFormat::ALL.iter().flat_map(|&format| sources.map(|source| (format, source))).collect();
    check("weight blocks", &cases, |run, &(format, source)| {
        let (rows, columns) = (37, 3 * format.elements());
        let (row_bytes, stride) = (format.bytes(columns), columns + format.elements());
        let mut data = blocks(run, format, rows, columns);
        // A file's bytes are kept whatever they say: a scale that is NaN.
        data[..2].copy_from_slice(&[0xff, 0x7f]);
        let pitch = format.bytes(stride);
        let on_device = run.byte_rows((rows, row_bytes), pitch, 0, Some(&data))?;
        let given = match source {
            NVB_SOURCE_HOST => part(data.as_ptr().cast(), data.len(), rows, columns, 0),
            _ => part(on_device, (rows - 1) * pitch + row_bytes, rows, columns, stride),
        };
        let weight = create(run, &[given], |desc| (desc.source, desc.source_format) = (source, code(format)))?;
        if read_back(run, &weight, data.len())? != data {
            return Err("other bytes came back".to_string().into());
        }
        let mut info: nvb_weight_info = init();
        // SAFETY: a struct with its size set.
        run.call_once(|_, _| unsafe { nvb_weight_get_info(weight.0, &mut info) })?;
        let owned = if source == NVB_SOURCE_BORROWED { 0 } else { data.len() as u64 };
        let found =
            (info.encoding, info.source_format, info.granularity, info.dtype, info.relative_error, info.scale_bytes);
        if found != (NVB_WEIGHT_FORMAT_BLOCKS, code(format), 0, 0, 0.0, 0)
            || info.bytes < owned
            || info.bytes > owned + 256
        {
            return Err(format!("{found:?}, {} bytes", info.bytes).into());
        }
        let mut size = 0;
        // SAFETY: an address of a usize.
        run.call_once(|_, _| unsafe {
            nvb_weight_get_block_bytes(code(format), rows as i64, columns as i64, &mut size)
        })?;
        match size == data.len() {
            true => Ok(()),
            false => Err(format!("{size} bytes are asked for; there are {}", data.len()).into()),
        }
    });
}

#[derive(Debug, Clone, Copy)]
struct Case {
    format: BlockFormat,
    tokens: usize,
    rows: usize,
    /// Blocks of a row.
    blocks: usize,
    input: DType,
    output: DType,
    gated: bool,
    layout: Layout,
}

#[test]
fn products_are_those_of_the_values() {
    let mut cases = Vec::new();
    for &format in BlockFormat::ALL {
        let case = Case {
            format,
            tokens: 1,
            rows: 33,
            blocks: 2,
            input: DType::F32,
            output: DType::F32,
            gated: false,
            layout: PLAIN,
        };
        // Rows of a register tile and beyond, more than a slice of K, one block, and rows of the weight that are too long
        // for the input to lie in shared memory at once.
        for (tokens, rows, blocks) in [
            (1, 33, 2),
            (4, 16, 1),
            (3, 50, 8),
            (7, 70, 5),
            (16, 35, 4),
            (40, 33, 9),
            (130, 20, 3),
            (2, 33, 60),
            (5, 33, 61),
            (16, 19, 64),
        ] {
            cases.push(Case { tokens, rows, blocks: blocks * if format.elements() == 32 { 5 } else { 1 }, ..case });
        }
        for (input, output) in [(DType::F16, DType::F32), (DType::Bf16, DType::Bf16), (DType::F32, DType::F16)] {
            cases.push(Case { tokens: 9, input, output, layout: PITCHED, ..case });
        }
        cases.push(Case { tokens: 3, gated: true, ..case });
    }
    check("linear, blocks", &cases, |run, case| {
        let &Case { format, tokens, rows, gated, .. } = case;
        let columns = case.blocks * format.elements();
        let parts: Vec<Vec<u8>> = (0..1 + usize::from(gated)).map(|_| blocks(run, format, rows, columns)).collect();
        let given: Vec<_> = parts.iter().map(|data| part(data.as_ptr().cast(), data.len(), rows, columns, 0)).collect();
        let weight = create(run, &given, |desc| {
            (desc.source_format, desc.arrangement) = (code(format), u32::from(gated));
        })?;
        let values: Vec<Vec<f64>> = parts.iter().map(|data| values_of(format, data, columns)).collect();
        let (input, x) = run.normal(case.input, &[tokens, columns], case.layout, 1.0)?;
        let output = run.output(case.output, &[tokens, rows], case.layout)?;
        let mut args: nvb_linear_args = init();
        (args.input, args.weight, args.output) = (c_tensor(&input), weight.0, c_tensor(&output));
        // SAFETY: a struct with its size set, and tensors of the case's device.
        run.call(|backend, stream| unsafe { nvb_linear(backend, &args, stream) })?;
        let (mut reference, mut terms) = (Vec::new(), Vec::new());
        for t in 0..tokens {
            for n in 0..rows {
                let products = |w: &[f64]| -> Vec<f64> {
                    x[t * columns..][..columns].iter().zip(&w[n * columns..][..columns]).map(|(x, w)| x * w).collect()
                };
                let sums: Vec<f64> = values.iter().map(|w| products(w).iter().sum()).collect();
                reference.push(sums.iter().product());
                let most = |w: &Vec<f64>| products(w).iter().map(|term| term.abs()).sum::<f64>();
                terms.push(values.iter().map(most).product::<f64>() * 4.0);
            }
        }
        run.expect_summed("output", &output, &reference, &terms)
    });
}

/// A token with an infinite element has the sums that its products have, and its neighbours those without one.
#[test]
fn infinite_inputs() {
    let cases: Vec<_> = BlockFormat::ALL.iter().flat_map(|&format| [(format, 2), (format, 5)]).collect();
    check("linear, blocks, infinite inputs", &cases, |run, &(format, tokens)| {
        let (rows, columns) = (20, 256);
        let data = blocks(run, format, rows, columns);
        let given = part(data.as_ptr().cast(), data.len(), rows, columns, 0);
        let weight = create(run, &[given], |desc| desc.source_format = code(format))?;
        let values = values_of(format, &data, columns);
        let mut x = rounded(DType::F32, &run.random.normals(tokens * columns, 1.0));
        x[7] = f64::INFINITY;
        let input = run.strided(DType::F32, &[tokens, columns], &[columns, 1], 0, tokens * columns, Some(&x))?;
        let output = run.output(DType::F32, &[tokens, rows], PLAIN)?;
        let mut args: nvb_linear_args = init();
        (args.input, args.weight, args.output) = (c_tensor(&input), weight.0, c_tensor(&output));
        // SAFETY: a struct with its size set, and tensors of the case's device.
        run.call(|backend, stream| unsafe { nvb_linear(backend, &args, stream) })?;
        let (mut reference, mut terms) = (Vec::new(), Vec::new());
        for t in 0..tokens {
            for n in 0..rows {
                let of_row = x[t * columns..][..columns].iter().zip(&values[n * columns..][..columns]);
                let products: Vec<f64> = of_row.map(|(x, w)| x * w).collect();
                reference.push(products.iter().sum());
                terms.push(if t == 0 { 0.0 } else { products.iter().map(|term| term.abs()).sum::<f64>() * 4.0 });
            }
        }
        run.expect_summed("output", &output, &reference, &terms)
    });
}

#[test]
fn rows_are_gathered_and_dequantised_exactly() {
    let cases: Vec<_> = BlockFormat::ALL.iter().flat_map(|&format| FLOATS.map(|dtype| (format, dtype))).collect();
    check("embedding, blocks", &cases, |run, &(format, dtype)| {
        let (rows, columns) = (19, 5 * format.elements());
        let data = blocks(run, format, rows, columns);
        let given = part(data.as_ptr().cast(), data.len(), rows, columns, 0);
        let weight = create(run, &[given], |desc| desc.source_format = code(format))?;
        let values = rounded(dtype, &values_of(format, &data, columns));
        let numbers = [3, 18, 0, 3];
        let tokens = run.integers(&numbers)?;
        let output = run.output(dtype, &[numbers.len(), columns], PITCHED)?;
        let mut args: nvb_embedding_args = init();
        (args.tokens, args.table, args.output) = (c_tensor(&tokens), weight.0, c_tensor(&output));
        // SAFETY: as above.
        run.call(|backend, stream| unsafe { nvb_embedding(backend, &args, stream) })?;
        let wanted: Vec<f64> =
            numbers.iter().flat_map(|&row| values[row as usize * columns..][..columns].to_vec()).collect();
        if run.read(&output)? != wanted {
            return Err("a gathered row has other values".to_string().into());
        }
        let all = run.output(dtype, &[rows, columns], PITCHED)?;
        let c_all = c_tensor(&all);
        // SAFETY: as above.
        run.call(|_, stream| unsafe { nvb_weight_dequantize(weight.0, &c_all, stream) })?;
        match run.read(&all)? == values {
            true => Ok(()),
            false => Err("a dequantised row has other values".to_string().into()),
        }
    });
}

/// Experts by number: each row of the output is the product with the expert that it names.
#[test]
fn experts_by_number() {
    let formats = [None, Some(BlockFormat::Q4_0), Some(BlockFormat::Q6K), Some(BlockFormat::Mxfp4)];
    let mut cases = Vec::new();
    for format in formats {
        for (tokens, used) in [(1, 1), (1, 4), (9, 2), (40, 3)] {
            for shared in [false, true] {
                for stride in [used, 8] {
                    cases.push((format, tokens, used, shared, stride));
                }
            }
        }
    }
    check("grouped_linear, by number", &cases, |run, &(format, tokens, used, shared, stride)| {
        let (experts, n, columns) = (8usize, 21usize, 256usize);
        let (data, w) = match format {
            None => {
                let values = rounded(DType::F32, &run.random.normals(experts * n * columns, 0.1));
                (crate::compare::encode(DType::F32, &values), values)
            }
            Some(format) => {
                let data = blocks(run, format, experts * n, columns);
                let values = values_of(format, &data, columns);
                (data, values)
            }
        };
        let weight = match format {
            Some(format) => {
                let given = part(data.as_ptr().cast(), data.len(), experts * n, columns, 0);
                create(run, &[given], |desc| desc.source_format = code(format))?
            }
            None => {
                let mut host = data.clone();
                let tensor =
                    nvbackend::tensor::Tensor::new(host.as_mut_ptr().cast(), DType::F32, &[experts * n, columns]);
                let tensor = c_tensor(&tensor);
                create(run, &[], |desc| {
                    (desc.blocks, desc.format) = (std::ptr::null(), NVB_WEIGHT_FORMAT_AS_IS);
                    (desc.parts, desc.part_count) = (&tensor, 1);
                })?
            }
        };
        let mut numbers = Vec::new();
        for _ in 0..tokens {
            numbers.extend(run.random.permutation(experts)[..used].iter().map(|&expert| expert as f64));
        }
        let ids = run.strided(DType::I32, &[tokens, used], &[stride, 1], 0, tokens * stride, Some(&numbers))?;
        let rows = tokens * used;
        let (input, x) = run.normal(DType::F32, &[if shared { tokens } else { rows }, columns], PITCHED, 1.0)?;
        let output = run.output(DType::F32, &[rows, n], PITCHED)?;
        let mut args: nvb_grouped_linear_args = init();
        (args.input, args.weight, args.output) = (c_tensor(&input), weight.0, c_tensor(&output));
        (args.expert_ids, args.experts) = (c_tensor(&ids), experts as u32);
        // SAFETY: as above.
        run.call(|backend, stream| unsafe { nvb_grouped_linear(backend, &args, stream) })?;
        let (mut reference, mut terms) = (Vec::new(), Vec::new());
        for (row, &expert) in numbers.iter().enumerate() {
            let from = if shared { row / used } else { row };
            for column in 0..n {
                let line = (expert as usize * n + column) * columns;
                let products: Vec<f64> =
                    x[from * columns..][..columns].iter().zip(&w[line..]).map(|(x, w)| x * w).collect();
                reference.push(products.iter().sum());
                terms.push(4.0 * products.iter().map(|term| term.abs()).sum::<f64>());
            }
        }
        run.expect_summed("output", &output, &reference, &terms)?;
        // What is refused, and a number that is no expert's.
        let refused = |change: &dyn Fn(&mut nvb_grouped_linear_args), words: &[&str]| -> Outcome {
            let mut args = args;
            change(&mut args);
            // SAFETY: as above.
            let result = run.call(|backend, stream| unsafe { nvb_grouped_linear(backend, &args, stream) });
            expect_error(result, Status::InvalidArgument, words)
        };
        refused(&|args| args.experts = 0, &["experts is 0"])?;
        refused(&|args| args.experts = 5, &["5 experts"])?;
        refused(&|args| args.expert_ids.dtype = DType::F32 as u32, &["`expert_ids`", "f32"])?;
        refused(&|args| args.expert_offsets = args.expert_ids, &["both given"])?;
        refused(&|args| args.output.shape[0] += 1, &["output"])?;
        if run.device.is_cpu() {
            let strange = run.strided(DType::I32, &[tokens, used], &[used, 1], 0, rows, Some(&vec![8.0; rows]))?;
            let mut args = args;
            args.expert_ids = c_tensor(&strange);
            // SAFETY: as above.
            let result = run.call(|backend, stream| unsafe { nvb_grouped_linear(backend, &args, stream) });
            expect_error(result, Status::InvalidArgument, &["expert_ids[0, 0]", "8 experts"])?;
        }
        Ok(())
    });
}

#[test]
fn what_is_refused() {
    check("weight blocks", &[()], |run, ()| {
        let data = blocks(run, BlockFormat::Q4K, 4, 512);
        let good = part(data.as_ptr().cast(), data.len(), 4, 512, 0);
        let refused = |change: &dyn Fn(&mut nvb_weight_blocks, &mut nvb_weight_desc), words: &[&str]| -> Outcome {
            let mut given = good;
            let mut desc: nvb_weight_desc = init();
            (desc.part_count, desc.format, desc.source_format) =
                (1, NVB_WEIGHT_FORMAT_BLOCKS, NVB_SOURCE_FORMAT_GGUF_Q4_K);
            change(&mut given, &mut desc);
            desc.blocks = &given;
            let mut weight = null_mut();
            // SAFETY: a struct with its size set.
            let result =
                run.call_once(|backend, stream| unsafe { nvb_weight_create(backend, &desc, stream, &mut weight) });
            expect_error(result, Status::InvalidArgument, words)
        };
        refused(&|given, _| given.columns = 500, &["Q4_K", "500", "256"])?;
        refused(&|given, _| given.row_stride = 256, &["Q4_K", "256", "overlap"])?;
        refused(&|given, _| given.bytes -= 1, &["Q4_K", "bytes"])?;
        refused(&|given, _| given.rows = 0, &["rows is 0"])?;
        refused(&|given, _| given.rows = i64::MAX, &["rows"])?;
        refused(&|given, _| given.data = std::ptr::null(), &["`data`"])?;
        refused(&|given, _| given.reserved[1] = 1, &["reserved"])?;
        refused(&|_, desc| desc.source_format = NVB_SOURCE_FORMAT_SFP, &["source_format is 6"])?;
        refused(&|_, desc| desc.source_format = 21, &["source_format is 21"])?;
        refused(&|_, desc| desc.group_size = 32, &["group_size"])?;
        refused(&|_, desc| desc.clipping = 1, &["clipping"])?;
        refused(&|_, desc| desc.format = 10, &["format is 10"])?;
        // The blocks of this test are the host's, which a GPU does not borrow.
        let borrowed = if run.device.is_cpu() { "gated" } else { "not memory of" };
        refused(&|_, desc| (desc.source, desc.arrangement) = (NVB_SOURCE_BORROWED, NVB_WEIGHT_GATED), &[borrowed])?;

        let weight = create(run, &[good], |desc| desc.source_format = NVB_SOURCE_FORMAT_GGUF_Q4_K)?;
        expect_error(read_back(run, &weight, data.len() - 1), Status::InvalidArgument, &["bytes", "are needed"])?;
        let mut size = 0;
        let mut ask = |format, rows, columns| {
            // SAFETY: an address of a usize.
            run.call_once(|_, _| unsafe { nvb_weight_get_block_bytes(format, rows, columns, &mut size) })
        };
        expect_error(ask(NVB_SOURCE_FORMAT_AWQ, 1, 256), Status::InvalidArgument, &["source_format is 4"])?;
        expect_error(ask(NVB_SOURCE_FORMAT_GGUF_Q4_K, 1, 255), Status::InvalidArgument, &["Q4_K", "256"])?;
        expect_error(ask(NVB_SOURCE_FORMAT_GGUF_Q4_K, -1, 256), Status::InvalidArgument, &["Q4_K", "-1"])?;
        expect_error(ask(NVB_SOURCE_FORMAT_GGUF_Q4_K, i64::MAX, 256), Status::InvalidArgument, &["overflows"])?;

        let floats = run.tensor(DType::F32, &[1, 256], PLAIN, &[1.0; 256])?;
        let c_floats = c_tensor(&floats);
        let plain = create(run, &[], |desc| {
            (desc.blocks, desc.format) = (std::ptr::null(), NVB_WEIGHT_FORMAT_AS_IS);
            (desc.parts, desc.part_count, desc.source) = (&c_floats, 1, NVB_SOURCE_DEVICE);
        })?;
        expect_error(read_back(run, &plain, 144), Status::InvalidArgument, &["f32", "no blocks"])
    });
}

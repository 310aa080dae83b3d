//! `block_rows`: rows of blocks become floats and floats rows of blocks, called as an engine calls it.

use crate::block_weights::code;
use crate::compare::FLOATS;
use crate::run::{c_tensor, check, expect_error, rounded, Outcome, Run};
use crate::strided::{Placement, PLACEMENTS, ROW_MAJOR};
use crate::weight_formats::blocks;
use nvbackend::capi::block_rows::*;
use nvbackend::capi::structs::init;
use nvbackend::error::Status;
use nvbackend::tensor::DType;
use nvbackend::weight::blocks::can_encode;
use nvbackend::weight::BlockFormat;

#[derive(Debug, Clone, Copy)]
struct Case {
    format: BlockFormat,
    /// i, j, t; and the blocks of a row.
    shape: [usize; 4],
    /// Rows of blocks; `None`: those of the floats, without numbers.
    places: Option<usize>,
    dtype: DType,
    placement: Placement,
    /// Blocks between rows that belong to nobody.
    gap: usize,
    encode: bool,
}

/// The bytes that a block of these values has, found without the library's own order of operations where that is exact.
fn encoded(format: BlockFormat, values: &[f64]) -> Vec<u8> {
    let values: Vec<f32> = values.iter().map(|&value| value as f32).collect();
    let mut bytes = vec![0; format.bytes(values.len())];
    format.encode(&values, &mut bytes);
    bytes
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let &Case { format, shape: [outer, inner, tokens, row_blocks], dtype, encode, .. } = case;
    let (width, rows) = (row_blocks * format.elements(), case.places.unwrap_or(tokens));
    let (row_bytes, pitch) = (row_blocks * format.block_bytes(), (row_blocks + case.gap) * format.block_bytes());
    let mut numbers = Vec::new();
    for _ in 0..inner {
        numbers.extend(run.random.permutation(rows)[..tokens].iter().map(|&row| row as f64));
    }
    let data = blocks(run, format, outer * inner * rows, width);
    let count = outer * inner * rows;
    // What is encoded goes into poison, so that a byte that stays is seen.
    let memory = run.byte_rows((count, row_bytes), pitch, 0, (!encode).then_some(&data[..]))?;
    let shape = [outer, inner, tokens, width];
    let values = rounded(dtype, &run.random.normals(shape.iter().product(), 1.0));
    let floats = match encode {
        true => case.placement.tensor(run, dtype, shape, &values)?,
        false => case.placement.output(run, dtype, shape)?,
    };
    let mut args: nvb_block_rows_args = init();
    args.floats = c_tensor(&floats);
    args.blocks = nvb_block_tensor {
        data: memory,
        source_format: code(format),
        rank: 4,
        shape: [outer, inner, rows, width].map(|extent| extent as i64),
        strides: [inner * rows * pitch, rows * pitch, pitch, 0].map(|stride| stride as i64),
    };
    if case.places.is_some() {
        // The low halves of 64-bit numbers, the same for every place of the outer axis.
        let strides = [2 * inner * tokens, 2 * tokens, 2];
        let tensor =
            run.strided(DType::I32, &[1, inner, tokens], &strides, 0, 2 * (inner * tokens).max(1), Some(&numbers))?;
        args.rows = c_tensor(&tensor);
    }
    args.direction = if encode { NVB_BLOCKS_ENCODE } else { NVB_BLOCKS_DECODE };
    // SAFETY: a struct with its size set, and tensors of the case's device.
    run.call(|backend, stream| unsafe { nvb_block_rows(backend, &args, stream) })?;

    let back = run.read_byte_rows(memory, (count, row_bytes), pitch)?;
    let mut reference = Vec::new();
    for row in 0..outer * inner * tokens {
        let (i, j, t) = (row / tokens / inner, row / tokens % inner, row % tokens);
        let place = if case.places.is_some() { numbers[j * tokens + t] as usize } else { t };
        let at = ((i * inner + j) * rows + place) * row_bytes;
        if encode {
            if back[at..at + row_bytes] != encoded(format, &values[row * width..][..width]) {
                return Err(format!("row {row} has other bytes").into());
            }
        } else {
            let mut line = vec![0.0f32; width];
            format.decode(&data[at..at + row_bytes], &mut line);
            reference.extend(line.into_iter().map(f64::from));
        }
    }
    if encode {
        return Ok(());
    }
    match run.read(&floats)? == rounded(dtype, &reference) {
        true => Ok(()),
        false => Err("a decoded row has other values".to_string().into()),
    }
}

#[test]
fn formats_directions_and_places() {
    let mut cases = Vec::new();
    for &format in BlockFormat::ALL {
        for encode in [false, true] {
            if encode && !can_encode(format) {
                continue;
            }
            let case = Case {
                format,
                shape: [2, 3, 5, 2],
                places: Some(7),
                dtype: DType::F32,
                placement: ROW_MAJOR,
                gap: 1,
                encode,
            };
            for dtype in FLOATS {
                cases.push(Case { dtype, ..case });
                cases.push(Case { dtype, places: None, gap: 0, ..case });
            }
            for placement in PLACEMENTS {
                cases.push(Case { placement, ..case });
            }
            // More than a slice of a row, one row, and nothing.
            for shape in [[1, 1, 1, 1], [1, 1, 70, 40], [1, 2, 0, 1], [0, 1, 3, 1]] {
                let places = if shape[0] == 0 { None } else { Some(shape[2] + 1) };
                cases.push(Case { shape, places, ..case });
            }
        }
    }
    check("block_rows", &cases, test);
}

#[test]
fn what_is_refused() {
    check("block_rows", &[()], |run, ()| {
        let data = blocks(run, BlockFormat::Q8_0, 6, 64);
        let memory = run.byte_rows((6, 68), 68, 0, Some(&data))?;
        let floats = ROW_MAJOR.output(run, DType::F32, [1, 1, 6, 64])?;
        let rows = run.integers(&[0, 1, 2, 3, 4, 9])?;
        let mut good: nvb_block_rows_args = init();
        good.floats = c_tensor(&floats);
        good.blocks = nvb_block_tensor {
            data: memory,
            source_format: code(BlockFormat::Q8_0),
            rank: 2,
            shape: [6, 64, 0, 0],
            strides: [0; 4],
        };
        let call = |change: &dyn Fn(&mut nvb_block_rows_args)| {
            let mut args = good;
            change(&mut args);
            // SAFETY: as in `test`.
            run.call(|backend, stream| unsafe { nvb_block_rows(backend, &args, stream) })
        };
        let refused = |change: &dyn Fn(&mut nvb_block_rows_args), words: &[&str]| {
            expect_error(call(change), Status::InvalidArgument, words)
        };
        refused(&|args| args.direction = 2, &["direction is 2"])?;
        refused(&|args| args.reserved = 1, &["reserved"])?;
        refused(&|args| args.blocks.source_format = 5, &["`blocks`", "format 5"])?;
        refused(&|args| args.blocks.rank = 0, &["`blocks`", "rank 0"])?;
        refused(&|args| args.blocks.rank = 5, &["`blocks`", "rank 5"])?;
        refused(&|args| args.blocks.shape[1] = 63, &["63", "32"])?;
        refused(&|args| args.blocks.shape[0] = -1, &["`blocks`", "-1"])?;
        refused(&|args| args.blocks.shape[0] = i64::MAX, &["overflows"])?;
        refused(&|args| args.blocks.shape[0] = 5, &["one shape"])?;
        refused(&|args| args.blocks.data = std::ptr::null_mut(), &["`blocks`", "no memory"])?;
        refused(&|args| args.floats.dtype = DType::I32 as u32, &["`floats`", "i32"])?;
        refused(&|args| args.floats.strides = [0, 0, 3, 1], &["`floats`", "overlap"])?;
        refused(
            &|args| {
                args.direction = NVB_BLOCKS_ENCODE;
                args.blocks.strides[0] = 34;
            },
            &["`blocks`", "overlap"],
        )?;
        if run.device.is_cpu() {
            // Row 5 has no place; nothing is written then.
            let rows = c_tensor(&rows);
            refused(&|args| args.rows = rows, &["row 5", "number 9", "6 rows"])?;
        }
        let result = call(&|args| {
            args.direction = NVB_BLOCKS_ENCODE;
            args.blocks.source_format = code(BlockFormat::Q6K);
            (args.blocks.shape, args.blocks.rank) = ([1, 256, 0, 0], 2);
            (args.floats.shape, args.floats.strides) = ([1, 1, 1, 256], [0; 4]);
        });
        match result {
            Err(error) if error.message.contains("Q6_K is read") => Ok(()),
            other => Err(format!("encoding Q6_K: {other:?}").into()),
        }
    });
}

//! `weight` in the quantised formats: what is made from float tensors and from the blocks of files, read back by
//! `dequantize`.

use crate::compare::{encode, FLOATS};
use crate::run::{check, expect_error, rounded, Failure, Layout, Outcome, Run, PITCHED, PLAIN, UNALIGNED};
use nvbackend::device::DeviceKind;
use nvbackend::error::{Result, Status};
use nvbackend::loading::{Source, Weight};
use nvbackend::tensor::{DType, Tensor};
use nvbackend::weight::gguf::GgufRows;
use nvbackend::weight::gptq::{gptq, GptqTensors, GptqVersion};
use nvbackend::weight::grouped::FloatBytes;
use nvbackend::weight::rows::RowSource;
use nvbackend::weight::sfp::SfpRows;
use nvbackend::weight::{Arrangement, BlockFormat, Encoding, Format, Granularity};

/// Every format that products read.
pub fn formats() -> Vec<Format> {
    let mut formats = Vec::new();
    for encoding in Encoding::QUANTIZED {
        let all = [Granularity::Tensor, Granularity::Rows, Granularity::Blocks];
        for granularity in all.into_iter().chain([32, 64, 128].map(Granularity::Groups)) {
            for (zero_points, clipping) in [(false, false), (true, false), (false, true), (true, true)] {
                formats.extend(Format::new(encoding, granularity, zero_points, clipping));
            }
        }
    }
    formats
}

/// What ‖weight − source‖ / ‖source‖ may be for normally distributed values.
fn bound(format: &Format) -> f64 {
    match format.encoding {
        // A scale for many values spends its range on the largest of them.
        Encoding::Int4 if matches!(format.granularity, Granularity::Groups(_)) => 0.16,
        Encoding::Int4 => 0.3,
        Encoding::Int8 => 0.015,
        Encoding::Fp8E4m3 | Encoding::Sfp => 0.035,
        _ => 0.07,
    }
}

pub fn values_of(run: &mut Run, weight: &Weight, layout: Layout) -> Result<Vec<f64>> {
    let view = weight.view();
    let output = run.output(DType::F32, &[view.rows, view.columns], layout)?;
    weight.dequantize(run.device.backend.memory(), &output, run.stream)?;
    run.read(&output)
}

fn relative_error(actual: &[f64], wanted: &[f64]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
    let difference = square(&mut actual.iter().zip(wanted).map(|(a, b)| a - b));
    if difference == 0.0 {
        0.0
    } else {
        (difference / square(&mut wanted.iter().copied())).sqrt()
    }
}

#[derive(Debug, Clone)]
struct Case {
    format: Format,
    dtype: DType,
    rows: Vec<usize>,
    columns: usize,
    layout: Layout,
    gated: bool,
    source: Source,
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let columns = case.columns;
    let (mut parts, mut tensors, mut host) = (Vec::new(), Vec::new(), Vec::new());
    for &rows in &case.rows {
        let values = rounded(case.dtype, &run.random.normals(rows * columns, 0.02));
        if case.source == Source::Host {
            let gap = vec![f64::NAN; case.layout.padding];
            let pitched: Vec<f64> = values.chunks(columns).flat_map(|row| [row, &gap].concat()).collect();
            host.push(encode(case.dtype, &pitched));
        } else {
            tensors.push(run.tensor(case.dtype, &[rows, columns], case.layout, &values)?);
        }
        parts.push(values);
    }
    for (bytes, &rows) in host.iter_mut().zip(&case.rows) {
        let tensor = Tensor::new(bytes.as_mut_ptr().cast(), case.dtype, &[rows, columns]);
        tensors.push(tensor.with_strides(&[columns + case.layout.padding, 1]));
    }
    let arrangement = if case.gated { Arrangement::Gated } else { Arrangement::Stacked };
    let memory = run.device.backend.memory();
    let weight = Weight::new(memory, &tensors, arrangement, case.source, Some(case.format), run.stream)?;
    host.iter_mut().for_each(|bytes| bytes.fill(0xff));
    let wanted: Vec<f64> = if case.gated {
        let pairs = parts[0].chunks(columns).zip(parts[1].chunks(columns));
        pairs.flat_map(|(gate, up)| [gate, up].concat()).collect()
    } else {
        parts.concat()
    };
    let stored = values_of(run, &weight, case.layout)?;
    let (error, reported) = (relative_error(&stored, &wanted), weight.relative_error());
    // Scales and offsets of groups are f16, whose smallest step is 2^-24: about one draw in 10^5 of a single value is
    // too small for it.
    let norm = wanted.iter().map(|x| x * x).sum::<f64>().sqrt();
    let smallest = if case.format.has_f16_scales() { 2f64.powi(-24) * (wanted.len() as f64).sqrt() } else { 0.0 };
    if error * norm > bound(&case.format) * norm + smallest || (error - reported).abs() > 1e-4 * error + 1e-7 {
        return Err(format!("relative error {error:.4e}, reported {reported:.4e}").into());
    }
    let view = weight.view();
    let scales = weight.scale_bytes();
    let codes = case.format.encoding.bytes(view.rows * view.columns);
    if weight.bytes() < codes + scales || (scales == 0) != case.format.encoding.is_float() {
        return Err(format!("{} bytes, {scales} of them scales", weight.bytes()).into());
    }
    // What the CPU's products read is what was reported.
    if run.device.backend.device().kind == DeviceKind::Cpu {
        for (i, &value) in stored.iter().enumerate() {
            // SAFETY: a weight in host memory and one of its elements.
            let read = unsafe { view.value(i / view.columns, i % view.columns) };
            if read as f32 != value as f32 {
                return Err(format!("element {i} reads as {read}, dequantised {value}").into());
            }
        }
    }
    Ok(())
}

#[test]
fn tensors_become_every_format() {
    let mut cases = Vec::new();
    let shapes = [(vec![1], 1), (vec![5], 33), (vec![130], 300), (vec![16, 3, 140], 64), (vec![128, 17], 129)];
    for (i, format) in formats().into_iter().enumerate() {
        for (j, (rows, columns)) in shapes.iter().enumerate() {
            let (dtype, layout) = (FLOATS[(i + j) % 3], [PLAIN, UNALIGNED, PITCHED][(i + 2 * j) % 3]);
            let case = Case {
                format,
                dtype,
                rows: rows.clone(),
                columns: *columns,
                layout,
                gated: false,
                source: Source::Host,
            };
            cases.push(Case { source: Source::Device, ..case.clone() });
            cases.push(case);
        }
        for (rows, source) in [(1, Source::Host), (70, Source::Device), (131, Source::Host)] {
            let (dtype, layout) = (DType::Bf16, PITCHED);
            cases.push(Case { format, dtype, rows: vec![rows; 2], columns: 96, layout, gated: true, source });
        }
    }
    // More than one panel, of codes and of device rows.
    let format = Format::new(Encoding::Int8, Granularity::Rows, false, false).unwrap();
    for source in [Source::Host, Source::Device] {
        let (dtype, layout) = (DType::F16, PLAIN);
        cases.push(Case { format, dtype, rows: vec![9000, 27_000], columns: 999, layout, gated: false, source });
    }
    check("weight format", &cases, test);
}

#[test]
fn floats_are_rounded_once() {
    let cases: Vec<_> = FLOATS.iter().flat_map(|&from| FLOATS.map(|to| (from, to))).collect();
    check("weight conversion", &cases, |run, &(from, to)| {
        for layout in [PLAIN, UNALIGNED] {
            let (part, values) = run.normal(from, &[70, 50], layout, 1.0)?;
            let (memory, format) = (run.device.backend.memory(), Some(Format::float(to)));
            let weight = Weight::new(memory, &[part], Arrangement::Stacked, Source::Device, format, run.stream)?;
            let stored = values_of(run, &weight, layout)?;
            let wanted = rounded(to, &values);
            if stored != wanted || weight.view().dtype() != Some(to) || weight.scale_bytes() != 0 {
                return Err(format!("{:?}", weight.view()).into());
            }
            let error = relative_error(&stored, &values);
            if (weight.relative_error() - error).abs() > 1e-6 {
                return Err(format!("relative error {error}, reported {}", weight.relative_error()).into());
            }
        }
        Ok(())
    });
}

/// Blocks with random codes and scales near 0.01.
pub fn blocks(run: &mut Run, kind: BlockFormat, rows: usize, columns: usize) -> Vec<u8> {
    let (elements, size) = (kind.elements(), kind.block_bytes());
    let count = rows * columns / elements;
    let scale =
        encode(DType::F16, &run.random.normals(2 * count, 1.0).iter().map(|x| 0.01 + 0.001 * x).collect::<Vec<_>>());
    let mut data: Vec<u8> = run.random.normals(count * size, 1000.0).iter().map(|&x| x as i64 as u8).collect();
    for (block, scale) in data.chunks_exact_mut(size).zip(scale.chunks_exact(4)) {
        match kind {
            BlockFormat::Q4_1 | BlockFormat::Q5_1 | BlockFormat::Q4K | BlockFormat::Q5K => {
                block[..4].copy_from_slice(scale)
            }
            BlockFormat::Q2K => block[80..].copy_from_slice(scale),
            BlockFormat::Q3K => block[108..].copy_from_slice(&scale[..2]),
            BlockFormat::Q6K => block[208..].copy_from_slice(&scale[..2]),
            // A power of two.
            BlockFormat::Mxfp4 => block[0] = 118 + block[0] % 6,
            _ => block[..2].copy_from_slice(&scale[..2]),
        }
    }
    data
}

fn source_values(source: &dyn RowSource) -> Result<Vec<f64>> {
    let mut row_values = vec![0.0; source.columns()];
    let mut values = Vec::new();
    for row in 0..source.rows() {
        source.values(row, &mut row_values)?;
        values.extend(row_values.iter().map(|&value| f64::from(value)));
    }
    Ok(values)
}

fn import(run: &mut Run, parts: &[&dyn RowSource], arrangement: Arrangement, format: Option<Format>) -> Result<Weight> {
    Weight::import(run.device.backend.memory(), parts, arrangement, format, run.stream)
}

fn expect_values(actual: &[f64], wanted: &[f64], bound: f64, weight: &Weight) -> Outcome {
    let error = relative_error(actual, wanted);
    if error > bound || (error - weight.relative_error()).abs() > 1e-4 * error {
        return Err(format!("relative error {error:.3e}, reported {:.3e}", weight.relative_error()).into());
    }
    Ok(())
}

#[test]
fn blocks_of_files_are_kept() {
    let shapes = [(1, 256), (20, 512), (150, 256), (257, 768)];
    let kinds =
        [(BlockFormat::Q4_0, 0.0), (BlockFormat::Q8_0, 0.0), (BlockFormat::Q4K, 5e-4), (BlockFormat::Q6K, 0.01)];
    let cases: Vec<_> = shapes.iter().flat_map(|&shape| kinds.map(|kind| (shape, kind))).collect();
    check("weight import", &cases, |run, &((rows, columns), (kind, bound))| {
        let data = blocks(run, kind, rows, columns);
        let source = GgufRows::new(kind, rows, columns, &data)?;
        let wanted = source_values(&source)?;
        let weight = import(run, &[&source], Arrangement::Stacked, None)?;
        if weight.format() != source.format() {
            return Err(format!("{} became {}", source.format(), weight.format()).into());
        }
        expect_values(&values_of(run, &weight, PLAIN)?, &wanted, bound, &weight)?;
        // Gate and up, the same matrix twice.
        let weight = import(run, &[&source, &source], Arrangement::Gated, None)?;
        let twice: Vec<f64> = wanted.chunks(columns).flat_map(|row| [row, row].concat()).collect();
        expect_values(&values_of(run, &weight, UNALIGNED)?, &twice, bound, &weight)?;
        // Read out into floats and into another format.
        let weight = import(run, &[&source], Arrangement::Stacked, Some(Format::float(DType::F32)))?;
        if values_of(run, &weight, PLAIN)? != wanted {
            return Err("f32 is not exact".to_string().into());
        }
        let format = Format::new(Encoding::Int8, Granularity::Rows, false, false)?;
        let weight = import(run, &[&source], Arrangement::Stacked, Some(format))?;
        expect_values(&values_of(run, &weight, PLAIN)?, &wanted, 0.02, &weight)
    });
}

#[test]
fn parts_of_different_formats_find_a_common_one() {
    check("weight mixture", &[()], |run, _| {
        let (q4_0, q4_k) = (blocks(run, BlockFormat::Q4_0, 24, 512), blocks(run, BlockFormat::Q4K, 8, 512));
        let q8_0 = blocks(run, BlockFormat::Q8_0, 8, 512);
        let symmetric = GgufRows::new(BlockFormat::Q4_0, 24, 512, &q4_0)?;
        let offsets = GgufRows::new(BlockFormat::Q4K, 8, 512, &q4_k)?;
        let int8 = GgufRows::new(BlockFormat::Q8_0, 8, 512, &q8_0)?;
        let weight = import(run, &[&symmetric, &offsets], Arrangement::Stacked, None)?;
        if weight.format() != offsets.format() {
            return Err(format!("became {}", weight.format()).into());
        }
        let wanted = [source_values(&symmetric)?, source_values(&offsets)?].concat();
        let stored = values_of(run, &weight, PLAIN)?;
        if stored[..24 * 512] != wanted[..24 * 512] {
            return Err("the symmetric part is not exact".to_string().into());
        }
        expect_values(&stored, &wanted, 5e-4, &weight)?;
        let refused = import(run, &[&symmetric, &int8], Arrangement::Stacked, None);
        expect_error(refused, Status::InvalidArgument, &["parts[1]", "int8", "int4"])?;
        let format = Some(Format::new(Encoding::Int8, Granularity::Groups(32), false, false)?);
        let weight = import(run, &[&symmetric, &int8], Arrangement::Stacked, format)?;
        let wanted = [source_values(&symmetric)?, source_values(&int8)?].concat();
        expect_values(&values_of(run, &weight, PLAIN)?, &wanted, 0.01, &weight)
    });
}

/// GPTQ with activation order: the weight's columns are sorted, what it gives out is not.
#[test]
fn orders_are_undone() {
    check("weight order", &[32, 128], |run, &group| {
        let (rows, columns) = (40, 256);
        let words = |run: &mut Run, count: usize| -> Vec<u8> {
            run.random.normals(4 * count, 1000.0).iter().map(|&x| x as i64 as u8).collect()
        };
        let (weights, zeros) = (words(run, rows * columns / 8), words(run, rows * columns / group / 8));
        let scales: Vec<f64> = (0..rows * columns / group).map(|i| 2f64.powi(-4 - (i % 5) as i32)).collect();
        let scales = encode(DType::F16, &scales);
        let index = |k: usize| ((k * 91 + 7) % columns / group) as i32;
        let group_index: Vec<u8> = (0..columns).flat_map(|k| index(k).to_le_bytes()).collect();
        let source = gptq(GptqTensors {
            rows,
            columns,
            group_size: group,
            weights: &weights,
            zeros: Some(&zeros),
            scales: FloatBytes { bytes: &scales, dtype: DType::F16 },
            group_index: Some(&group_index),
            version: GptqVersion::V2,
        })?;
        let wanted = source_values(&source)?;
        let weight = import(run, &[&source], Arrangement::Stacked, None)?;
        if weight.view().order.is_null() || weight.format().encoding != Encoding::Int4 {
            return Err(format!("{:?}", weight.view()).into());
        }
        expect_values(&values_of(run, &weight, PLAIN)?, &wanted, 0.0, &weight)?;
        // Quantised again the columns stay where they are.
        let format = Format::new(Encoding::Int8, Granularity::Rows, false, false)?;
        let weight = import(run, &[&source], Arrangement::Stacked, Some(format))?;
        if !weight.view().order.is_null() {
            return Err(format!("{:?}", weight.view()).into());
        }
        expect_values(&values_of(run, &weight, PLAIN)?, &wanted, 0.02, &weight)
    });
}

#[test]
fn what_cannot_be_converted_is_named() {
    check("weight format errors", &[()], |run, _| {
        let int4 = Format::new(Encoding::Int4, Granularity::Groups(32), false, false)?;
        let (stacked, invalid) = (Arrangement::Stacked, Status::InvalidArgument);
        let make = |run: &mut Run, value: f64, format: Format, source: Source| {
            let mut values = vec![0.5; 6 * 40];
            values[5 * 40 + 33] = value;
            let part = run.tensor(DType::F32, &[6, 40], UNALIGNED, &values)?;
            Weight::new(run.device.backend.memory(), &[part], stacked, source, Some(format), run.stream)
        };
        let nan = make(run, f64::NAN, int4, Source::Device);
        expect_error(nan, invalid, &["parts[0]", "row 5, column 33", "NaN"])?;
        let infinite = make(run, f64::INFINITY, int4, Source::Device);
        expect_error(infinite, invalid, &["row 5, column 33", "inf"])?;
        expect_error(make(run, 1e9, int4, Source::Device), invalid, &["row 5, column 32", "65504"])?;
        let half = Format::float(DType::F16);
        expect_error(make(run, 1e9, half, Source::Device), invalid, &["row 5, column 33", "f16"])?;
        expect_error(make(run, 1.0, int4, Source::Borrowed), invalid, &["borrowed", "converted"])?;
        make(run, f64::INFINITY, half, Source::Device)?;
        let data = [0x80; 64];
        let source = SfpRows::new(2, 32, 32, &data, 1.0)?;
        expect_error(import(run, &[&source], stacked, None), invalid, &["parts[0]", "row 0, column 0", "0x80"])?;
        // An output of another shape.
        let weight = make(run, 1.0, int4, Source::Device)?;
        let output = run.output(DType::F32, &[40, 6], PLAIN)?;
        let result = weight.dequantize(run.device.backend.memory(), &output, run.stream);
        expect_error(result, invalid, &["output", "[40, 6]", "[6, 40]"])
    });
}

/// gemma.cpp's SFP is BF16 in a byte, times a scale of its tensor: kept as it is, or as BF16 without the scale.
#[test]
fn sfp_is_kept() {
    check("weight sfp", &[1.0, 0.7f32], |run, &scale| {
        let data: Vec<u8> = (0..=255u8).filter(|&code| code != 0x80).cycle().take(20 * 51).collect();
        let first = SfpRows::new(20, 51, 51, &data, scale)?;
        let second = SfpRows::new(3, 51, 60, &data, 2.0 * scale)?;
        let weight = import(run, &[&first, &second], Arrangement::Stacked, None)?;
        let wanted = [source_values(&first)?, source_values(&second)?].concat();
        if values_of(run, &weight, PLAIN)? != wanted || weight.relative_error() != 0.0 {
            return Err(Failure::from(format!("another value in {:?}", weight.view())));
        }
        if weight.view().encoding != Encoding::Sfp || weight.bytes() > 23 * 64 + 23 * 4 + 2 * 256 {
            return Err(Failure::from(format!("{} bytes of {:?}", weight.bytes(), weight.view())));
        }
        let bf16 = import(run, &[&first], Arrangement::Stacked, Some(Format::float(DType::Bf16)))?;
        let exact = values_of(run, &bf16, PLAIN)? == source_values(&first)?;
        if exact != (scale == 1.0) {
            return Err(Failure::from(format!("as BF16 with the scale {scale} it is exact: {exact}")));
        }
        Ok(())
    });
}

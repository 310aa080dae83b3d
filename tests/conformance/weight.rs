//! `weight`: stacked, gated, strided, borrowed and device-side parts end up as rows in the stated layout.

use crate::compare::{encode, FLOATS};
use crate::run::{check, expect_error, rounded, Failure, Outcome, Run, PITCHED, PLAIN, UNALIGNED};
use nvbackend::error::Status;
use nvbackend::loading::{Source, Weight};
use nvbackend::tensor::{DType, Tensor};
use nvbackend::weight::{Arrangement, WeightView};

#[derive(Debug, Clone)]
struct Case {
    dtype: DType,
    rows: Vec<usize>,
    columns: usize,
    /// Elements between the rows of each part.
    padding: usize,
    arrangement: Arrangement,
    source: Source,
}

fn stored(run: &Run, view: &WeightView) -> Result<Vec<f64>, Failure> {
    let dtype = view.dtype().ok_or_else(|| "the weight is not of floats".to_string())?;
    let tensor = Tensor::new(view.data, dtype, &[view.rows, view.columns]).with_strides(&[view.row_stride, 1]);
    Ok(run.read(&tensor)?)
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let layout = crate::run::Layout { offset: case.padding % 2, padding: case.padding };
    let mut parts: Vec<Vec<f64>> = Vec::new();
    let mut tensors = Vec::new();
    let mut host = Vec::new();
    for &rows in &case.rows {
        let values = rounded(case.dtype, &run.random.normals(rows * case.columns, 1.0));
        if case.source == Source::Host {
            let gap = vec![f64::NAN; case.padding];
            let rows: Vec<f64> = values.chunks(case.columns).flat_map(|row| [row, &gap].concat()).collect();
            host.push(encode(case.dtype, &rows));
        } else {
            tensors.push(run.tensor(case.dtype, &[rows, case.columns], layout, &values)?);
        }
        parts.push(values);
    }
    for (bytes, &rows) in host.iter_mut().zip(&case.rows) {
        let tensor = Tensor::new(bytes.as_mut_ptr().cast(), case.dtype, &[rows, case.columns]);
        tensors.push(tensor.with_strides(&[case.columns + case.padding, 1]));
    }
    let memory = run.device.backend.memory();
    let weight = Weight::new(memory, &tensors, case.arrangement, case.source, None, run.stream)?;
    // The parts were read: what becomes of the host's copy no longer matters.
    host.iter_mut().for_each(|bytes| bytes.fill(0));
    let view = weight.view();
    let total: usize = case.rows.iter().sum();
    let gated = case.arrangement == Arrangement::Gated;
    if (view.rows, view.columns, view.dtype(), view.gated) != (total, case.columns, Some(case.dtype), gated) {
        return Err(format!("the view is {view:?}").into());
    }
    let borrowed = case.source == Source::Borrowed;
    if borrowed != (weight.bytes() == 0) || borrowed != (view.data == tensors[0].data) {
        return Err(format!("{} bytes at {:p}", weight.bytes(), view.data).into());
    }
    if view.settled == borrowed {
        return Err(format!("settled is {}", view.settled).into());
    }
    let pitch = view.row_stride * case.dtype.size();
    let aligned = (view.data as usize).is_multiple_of(256) && pitch.is_multiple_of(16);
    if !borrowed && !aligned {
        return Err(format!("rows of {} elements at {:p} are not aligned", view.row_stride, view.data).into());
    }
    let expected = if gated {
        let pairs = parts[0].chunks(case.columns).zip(parts[1].chunks(case.columns));
        pairs.flat_map(|(gate, up)| [gate, up].concat()).collect()
    } else {
        parts.concat()
    };
    match stored(run, &view)?.iter().zip(&expected).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(i) => Err(format!("row {} column {} differs", i / case.columns, i % case.columns).into()),
    }
}

#[test]
fn weights() {
    let mut cases = Vec::new();
    for dtype in FLOATS {
        for source in [Source::Host, Source::Device] {
            for columns in [1, 7, 8, 64, 129] {
                for padding in [0, 1, 8] {
                    for rows in [vec![1], vec![5], vec![64, 16, 16], vec![3, 1, 2, 7]] {
                        let arrangement = Arrangement::Stacked;
                        cases.push(Case { dtype, rows, columns, padding, arrangement, source });
                    }
                    for rows in [vec![1, 1], vec![33, 33]] {
                        cases.push(Case { dtype, rows, columns, padding, arrangement: Arrangement::Gated, source });
                    }
                }
            }
        }
        for (columns, padding) in [(64, 0), (7, 0), (33, 3), (64, 16)] {
            let (arrangement, source) = (Arrangement::Stacked, Source::Borrowed);
            cases.push(Case { dtype, rows: vec![9], columns, padding, arrangement, source });
        }
    }
    // More rows than one staging buffer takes.
    let (arrangement, source) = (Arrangement::Gated, Source::Host);
    cases.push(Case { dtype: DType::Bf16, rows: vec![20_000, 20_000], columns: 505, padding: 0, arrangement, source });
    check("weight", &cases, test);
}

#[test]
fn wrong_parts_are_named() {
    check("weight errors", &[()], |run, _| {
        let make = |parts: &[Tensor], arrangement, source| {
            Weight::new(run.device.backend.memory(), parts, arrangement, source, None, run.stream)
        };
        let mut bytes = vec![0u8; 4096];
        let data = bytes.as_mut_ptr().cast();
        let part = |dtype, shape: &[usize]| Tensor::new(data, dtype, shape);
        let (stacked, gated) = (Arrangement::Stacked, Arrangement::Gated);
        let invalid = Status::InvalidArgument;
        let f32 = part(DType::F32, &[4, 8]);
        expect_error(make(&[], stacked, Source::Host), invalid, &["at least one part"])?;
        expect_error(make(&[part(DType::I32, &[4, 8])], stacked, Source::Host), invalid, &["parts[0]", "i32"])?;
        expect_error(make(&[part(DType::F32, &[4])], stacked, Source::Host), invalid, &["parts[0]", "rank 1"])?;
        expect_error(make(&[part(DType::F32, &[0, 8])], stacked, Source::Host), invalid, &["parts[0]", "empty"])?;
        expect_error(
            make(&[f32, part(DType::F16, &[4, 8])], stacked, Source::Host),
            invalid,
            &["parts[1]", "f16", "f32"],
        )?;
        expect_error(make(&[f32, part(DType::F32, &[4, 9])], stacked, Source::Host), invalid, &["parts[1]", "9", "8"])?;
        expect_error(make(&[f32], gated, Source::Host), invalid, &["gate and up"])?;
        expect_error(make(&[f32, part(DType::F32, &[5, 8])], gated, Source::Host), invalid, &["gate and up"])?;
        expect_error(make(&[f32, f32], stacked, Source::Borrowed), invalid, &["borrowed"])
    });
}

/// A view with padding between unaligned rows is read where it stands.
#[test]
fn borrowed_weights_keep_their_strides() {
    let cases = [PLAIN, UNALIGNED, PITCHED];
    check("borrowed weight", &cases, |run, &layout| {
        let (part, values) = run.normal(DType::F16, &[6, 10], layout, 1.0)?;
        let weight = Weight::new(
            run.device.backend.memory(),
            &[part],
            Arrangement::Stacked,
            Source::Borrowed,
            None,
            run.stream,
        )?;
        let view = weight.view();
        if view.row_stride != 10 + layout.padding || stored(run, &view)? != values {
            return Err(format!("{view:?}").into());
        }
        Ok(())
    });
}

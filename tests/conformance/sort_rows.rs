//! `sort_rows`: the columns of each row in the order of their elements, called as an engine calls it.

use crate::compare::FLOATS;
use crate::run::{c_tensor, check, expect_error, rounded, Outcome, Run, PLAIN};
use crate::strided::{Placement, ROW_MAJOR, SWAPPED};
use nvbackend::capi::rows::*;
use nvbackend::capi::structs::init;
use nvbackend::error::Status;
use nvbackend::tensor::DType;

#[derive(Debug, Clone, Copy)]
enum Content {
    Normal,
    /// Few distinct values, zeros of both signs among them.
    Ties,
    Equal(f64),
    /// NaN of both signs, infinities and numbers.
    Special,
    Rising,
    Falling,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    shape: [usize; 4],
    /// Of the columns.
    count: usize,
    order: u32,
    dtype: DType,
    placements: [Placement; 2],
    content: Content,
}

const CASE: Case = Case {
    shape: [2, 3, 2, 37],
    count: 37,
    order: NVB_ORDER_ASCENDING,
    dtype: DType::F32,
    placements: [ROW_MAJOR; 2],
    content: Content::Normal,
};

fn values(run: &mut Run, case: &Case) -> Vec<f64> {
    let columns = case.shape[3].max(1);
    let mut values = run.random.normals(case.shape.iter().product(), 2.0);
    for (number, value) in values.iter_mut().enumerate() {
        let column = (number % columns) as f64;
        *value = match case.content {
            Content::Normal => *value,
            // Truncation leaves −0 of small negative numbers.
            Content::Ties => value.trunc(),
            Content::Equal(same) => same,
            Content::Special => match run.random.below(6) {
                0 => f64::NAN,
                1 => -f64::NAN,
                2 => f64::INFINITY,
                3 => f64::NEG_INFINITY,
                _ => *value,
            },
            Content::Rising => column,
            Content::Falling => -column,
        };
    }
    rounded(case.dtype, &values)
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let values = values(run, case);
    let [first, second, third, columns] = case.shape;
    let input = case.placements[0].tensor(run, case.dtype, case.shape, &values)?;
    let output = case.placements[1].output(run, DType::I32, [first, second, third, case.count])?;
    let mut args: nvb_sort_rows_args = init();
    (args.input, args.output, args.order) = (c_tensor(&input), c_tensor(&output), case.order);
    // SAFETY: a struct with its size set, and tensors of the case's device.
    run.call(|backend, stream| unsafe { nvb_sort_rows(backend, &args, stream) })?;

    let mut reference = Vec::new();
    for row in values.chunks(columns.max(1)) {
        let mut order: Vec<usize> = (0..columns).collect();
        order.sort_by(|&a, &b| match (row[a].is_nan(), row[b].is_nan()) {
            (false, false) if case.order == NVB_ORDER_DESCENDING => row[b].partial_cmp(&row[a]).unwrap(),
            (false, false) => row[a].partial_cmp(&row[b]).unwrap(),
            (one, other) => one.cmp(&other),
        });
        reference.extend(order[..case.count].iter().map(|&column| column as i32));
    }
    run.expect_integers("output", &output, &reference)
}

#[test]
fn sort_rows() {
    let mut cases = Vec::new();
    let contents = [
        Content::Normal,
        Content::Ties,
        Content::Equal(0.0),
        Content::Equal(f64::NAN),
        Content::Special,
        Content::Rising,
        Content::Falling,
    ];
    for order in [NVB_ORDER_ASCENDING, NVB_ORDER_DESCENDING] {
        for content in contents {
            for count in [0, 1, 2, 36, 37] {
                cases.push(Case { order, content, count, ..CASE });
            }
            for dtype in FLOATS {
                cases.push(Case { order, content, dtype, placements: [SWAPPED, ROW_MAJOR], ..CASE });
                cases.push(Case { order, content, dtype, placements: [ROW_MAJOR, SWAPPED], count: 20, ..CASE });
            }
            // Around what fits into shared memory, and chunks of what does not: an even number, an odd one, of which the first
            // few or more than one chunk are asked for.
            for (columns, count) in [
                (4096, 4096),
                (4097, 4097),
                (5000, 7),
                (4096, 100),
                (8192, 8192),
                (8193, 1),
                (12289, 4097),
                (20500, 20500),
            ] {
                cases.push(Case { order, content, shape: [1, 1, 2, columns], count, ..CASE });
            }
        }
        for columns in [1, 2, 3, 31, 32, 33, 64, 65, 255, 256, 257, 1023, 1024, 1025, 2049] {
            for content in [Content::Ties, Content::Special] {
                cases.push(Case { order, content, shape: [1, 2, 1, columns], count: columns, ..CASE });
            }
        }
    }
    for shape in [[0, 3, 2, 5], [2, 0, 2, 5], [2, 3, 0, 5], [1, 1, 1000, 5]] {
        cases.push(Case { shape, count: 3, content: Content::Ties, ..CASE });
    }
    cases.push(Case { shape: [1, 2, 2, 0], count: 0, ..CASE });
    check("sort_rows", &cases, test);
}

#[test]
fn what_is_refused() {
    check("sort_rows", &[()], |run, ()| {
        let input = run.tensor(DType::F32, &[3, 8], PLAIN, &[1.0; 24])?;
        let output = run.output(DType::I32, &[3, 8], PLAIN)?;
        let mut good: nvb_sort_rows_args = init();
        (good.input, good.output) = (c_tensor(&input), c_tensor(&output));
        let refused = |change: &dyn Fn(&mut nvb_sort_rows_args), words: &[&str]| {
            let mut args = good;
            change(&mut args);
            // SAFETY: as in `test`.
            let result = run.call(|backend, stream| unsafe { nvb_sort_rows(backend, &args, stream) });
            expect_error(result, Status::InvalidArgument, words)
        };
        refused(&|args| args.order = 2, &["order is 2"])?;
        refused(&|args| args.reserved = 1, &["reserved"])?;
        refused(&|args| args.input.dtype = DType::I32 as u32, &["`input`", "i32"])?;
        refused(&|args| args.output.dtype = DType::F32 as u32, &["output", "f32"])?;
        refused(&|args| (args.output.shape[1], args.output.strides) = (9, [0; 4]), &["`output`", "at most"])?;
        refused(&|args| args.output.shape[0] = 2, &["`output`", "rows"])?;
        refused(&|args| args.output.strides = [0, 1, 0, 0], &["output", "overlap"])?;
        refused(&|args| args.output.data = input.data, &["output", "input"])?;
        refused(&|args| args.input.data = std::ptr::null_mut(), &["input"])
    });
}

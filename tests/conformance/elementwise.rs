//! `elementwise`: a + b, a · b, a · factor, cap · tanh(a / cap), conversion and activations.

use crate::activation::{activate, ACTIVATIONS};
use crate::compare::FLOATS;
use crate::run::{check, rounded, Failure, Layout, Outcome, Run, LAYOUTS, PLAIN, UNALIGNED};
use nvbackend::operation::elementwise::{Elementwise, ElementwiseKind};
use nvbackend::operation::Activation;
use nvbackend::operation::Operation;
use nvbackend::tensor::DType;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Place {
    Apart,
    OverInput,
    OverSecond,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    kind: ElementwiseKind,
    rows: usize,
    columns: usize,
    input: DType,
    second: DType,
    output: DType,
    /// One row of the second operand serves all.
    broadcast: bool,
    place: Place,
    layout: Layout,
    magnitude: f64,
    special: Option<f64>,
}

const CASE: Case = Case {
    kind: ElementwiseKind::Add,
    rows: 4,
    columns: 192,
    input: DType::F32,
    second: DType::F32,
    output: DType::F32,
    broadcast: false,
    place: Place::Apart,
    layout: PLAIN,
    magnitude: 1.0,
    special: None,
};

const KINDS: [ElementwiseKind; 8] = [
    ElementwiseKind::Add,
    ElementwiseKind::Multiply,
    ElementwiseKind::Scale(-2.7),
    ElementwiseKind::SoftCap(1.5),
    ElementwiseKind::Convert,
    ElementwiseKind::Activation(Activation::GeluTanh),
    ElementwiseKind::Activation(Activation::GeluErf),
    ElementwiseKind::Activation(Activation::Silu),
];

fn formula(kind: ElementwiseKind, a: f64, b: f64) -> f64 {
    match kind {
        ElementwiseKind::Add => a + b,
        ElementwiseKind::Multiply => a * b,
        ElementwiseKind::Scale(factor) => a * factor as f64,
        ElementwiseKind::SoftCap(cap) => cap as f64 * (a / cap as f64).tanh(),
        ElementwiseKind::Convert => a,
        ElementwiseKind::Activation(activation) => activate(activation, a),
    }
}

fn binary(kind: ElementwiseKind) -> bool {
    matches!(kind, ElementwiseKind::Add | ElementwiseKind::Multiply)
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let (shape, count) = ([case.rows, case.columns], case.rows * case.columns);
    let mut a = rounded(case.input, &run.random.normals(count, case.magnitude));
    if let Some(special) = case.special {
        a[count / 2] = special;
    }
    let input = run.tensor(case.input, &shape, case.layout, &a)?;
    let mut b = Vec::new();
    let second = if binary(case.kind) {
        let rows = if case.broadcast { 1 } else { case.rows };
        let (tensor, values) = run.normal(case.second, &[rows, case.columns], case.layout, 1.0)?;
        b = values;
        Some(tensor)
    } else {
        None
    };
    let output = match case.place {
        Place::Apart => run.output(case.output, &shape, case.layout)?,
        Place::OverInput => input,
        Place::OverSecond => second.expect("a binary case"),
    };
    run.allow_write(&output);
    let period = b.len().max(1);
    let second_value = |i: usize| b.get(i % period).copied().unwrap_or(0.0);
    let reference: Vec<f64> = a.iter().enumerate().map(|(i, &a)| formula(case.kind, a, second_value(i))).collect();
    run.executor().run(&Operation::from(Elementwise::new(case.kind, input, second, output)?), run.stream.raw())?;
    match case.kind {
        ElementwiseKind::Activation(_) => run.expect_activated("output", &output, &reference, &a),
        _ => run.expect("output", &output, &reference),
    }
}

#[test]
fn dtypes_and_layouts() {
    let mut cases = Vec::new();
    for kind in KINDS {
        for input in FLOATS {
            for output in FLOATS {
                for layout in LAYOUTS {
                    cases.push(Case { kind, input, output, layout, ..CASE });
                }
                if binary(kind) {
                    for second in FLOATS {
                        cases.push(Case { kind, input, second, output, columns: 77, ..CASE });
                        cases.push(Case { kind, input, second, output, broadcast: true, layout: UNALIGNED, ..CASE });
                        cases.push(Case { kind, input, second, output, broadcast: true, ..CASE });
                    }
                }
            }
            for layout in [PLAIN, UNALIGNED] {
                cases.push(Case { kind, input, output: input, place: Place::OverInput, layout, ..CASE });
                if binary(kind) {
                    let same = Case { kind, input, second: input, output: input, layout, ..CASE };
                    cases.push(Case { place: Place::OverSecond, ..same });
                    cases.push(Case { place: Place::OverInput, broadcast: true, ..same });
                }
            }
        }
    }
    check("elementwise", &cases, test);
}

#[test]
fn sizes_and_magnitudes() {
    let mut cases = Vec::new();
    for kind in KINDS.into_iter().chain(ACTIVATIONS.map(ElementwiseKind::Activation)) {
        for (rows, columns) in [(0, 5), (5, 0), (1, 1), (1, 3), (3, 1), (2, 7), (1, 65_537), (513, 33), (70_000, 2)] {
            cases.push(Case { kind, rows, columns, ..CASE });
        }
        for magnitude in [1e-30, 1e-6, 40.0, 1e15] {
            for output in FLOATS {
                cases.push(Case { kind, magnitude, output, ..CASE });
            }
        }
        for special in [f64::NAN, f64::INFINITY] {
            cases.push(Case { kind, special: Some(special), ..CASE });
        }
    }
    for kind in
        [ElementwiseKind::Add, ElementwiseKind::Scale(2.0), ElementwiseKind::SoftCap(30.0), ElementwiseKind::Convert]
    {
        cases.push(Case { kind, special: Some(f64::NEG_INFINITY), ..CASE });
    }
    for cap in [1e-3, 30.0, 50.0, 1e30] {
        cases.push(Case { kind: ElementwiseKind::SoftCap(cap), magnitude: 100.0, ..CASE });
    }
    cases.push(Case { kind: ElementwiseKind::Scale(0.0), ..CASE });
    check("elementwise", &cases, test);
}

/// Conversion is exact to the bit: ties to even, subnormals, the edge of the range, infinities and NaN.
#[test]
fn conversion_rounds_to_nearest_even() {
    let cases = FLOATS.map(|input| FLOATS.map(|output| (input, output))).concat();
    check("convert", &cases, |run, &(input, output)| {
        let mut values: Vec<f64> =
            vec![0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 65504.0, 65519.9, 65520.0];
        values.extend([2e-8, 3e-8, 6e-8, 8.9e-8, 1e-40, 1e-45, 3.3e38, 3.4e38, -65520.0]);
        for exponent in -30..16 {
            // Halfway between two numbers of 8 and of 11 bits, and one F32 step to either side.
            for step in [-24, -9, -8, -12, -11] {
                let (one, half) = (2f64.powi(exponent), 2f64.powi(exponent + step));
                let next = 2f64.powi(exponent - 7);
                values.extend([one + half, one + next + half, one + half * (1.0 + 1e-6), -one - half * (1.0 - 1e-6)]);
            }
        }
        for _ in 0..2000 {
            values.push(f32::from_bits(run.random.bits() as u32) as f64);
        }
        let values = rounded(input, &values);
        let from = run.tensor(input, &[1, values.len()], PLAIN, &values)?;
        let to = run.output(output, &[1, values.len()], PLAIN)?;
        let op = Elementwise::new(ElementwiseKind::Convert, from, None, to)?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        let (out, reference) = (run.read(&to)?, rounded(output, &values));
        let same = |a: f64, b: f64| a.is_nan() && b.is_nan() || a.to_bits() == b.to_bits();
        match out.iter().zip(&reference).position(|(&a, &b)| !same(a, b)) {
            None => Ok(()),
            Some(i) => {
                Err(Failure::from(format!("{:e} became {:e}; {:e} is expected", values[i], out[i], reference[i])))
            }
        }
    });
}

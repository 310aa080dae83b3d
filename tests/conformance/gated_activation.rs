//! `gated_activation`: output = activation(gate) · up.

use crate::activation::{activate, ACTIVATIONS};
use crate::compare::FLOATS;
use crate::run::{check, rounded, Layout, Outcome, Run, LAYOUTS, PITCHED, PLAIN, UNALIGNED};
use nvbackend::operation::gated_activation::GatedActivation;
use nvbackend::operation::Activation;
use nvbackend::operation::Operation;
use nvbackend::tensor::DType;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Place {
    Apart,
    OverGate,
    OverUp,
    /// Gate and up are the halves of each row of one tensor.
    Halves,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    rows: usize,
    columns: usize,
    input: DType,
    output: DType,
    activation: Activation,
    layout: Layout,
    place: Place,
    magnitude: f64,
    special: Option<f64>,
}

const CASE: Case = Case {
    rows: 5,
    columns: 192,
    input: DType::F32,
    output: DType::F32,
    activation: Activation::GeluTanh,
    layout: PLAIN,
    place: Place::Apart,
    magnitude: 1.0,
    special: None,
};

fn test(run: &mut Run, case: &Case) -> Outcome {
    let shape = [case.rows, case.columns];
    let count = case.rows * case.columns;
    let mut gates = rounded(case.input, &run.random.normals(count, case.magnitude));
    if let Some(special) = case.special {
        gates[count / 2] = special;
    }
    let ups = rounded(case.input, &run.random.normals(count, 1.0));
    let (gate, up) = if case.place == Place::Halves {
        let wide = [case.rows, 2, case.columns];
        let columns = case.columns.max(1);
        let both: Vec<f64> =
            gates.chunks(columns).zip(ups.chunks(columns)).flat_map(|(g, u)| [g, u].concat()).collect();
        let both = run.tensor(case.input, &wide, case.layout, &both)?;
        let half = |i: usize| {
            let data = both.data.cast::<u8>().wrapping_add(i * case.columns * case.input.size());
            nvbackend::tensor::Tensor::new(data.cast(), case.input, &shape).with_strides(&[both.strides[0], 1])
        };
        (half(0), half(1))
    } else {
        (run.tensor(case.input, &shape, case.layout, &gates)?, run.tensor(case.input, &shape, case.layout, &ups)?)
    };
    let output = match case.place {
        Place::OverGate => gate,
        Place::OverUp => up,
        Place::Apart | Place::Halves => run.output(case.output, &shape, case.layout)?,
    };
    run.allow_write(&output);
    let reference: Vec<f64> = gates.iter().zip(&ups).map(|(&gate, &up)| activate(case.activation, gate) * up).collect();
    let op = GatedActivation::new(gate, up, case.activation, Some(output), None)?;
    run.executor().run(&Operation::from(op), run.stream.raw())?;
    let most: Vec<f64> = gates.iter().zip(&ups).map(|(gate, up)| gate * up).collect();
    run.expect_activated("output", &output, &reference, &most)
}

#[test]
fn gated_activation() {
    let mut cases = Vec::new();
    for activation in ACTIVATIONS {
        for input in FLOATS {
            for output in FLOATS {
                for layout in LAYOUTS {
                    cases.push(Case { input, output, activation, layout, ..CASE });
                }
            }
            for place in [Place::OverGate, Place::OverUp] {
                cases.push(Case { input, output: input, activation, place, layout: UNALIGNED, ..CASE });
                cases.push(Case { input, output: input, activation, place, ..CASE });
            }
            cases.push(Case { input, output: input, activation, place: Place::Halves, ..CASE });
            cases.push(Case { input, activation, place: Place::Halves, layout: PITCHED, columns: 33, ..CASE });
        }
        for (magnitude, special) in
            [(1e-20, None), (30.0, None), (1e10, None), (1.0, Some(f64::NAN)), (1.0, Some(f64::INFINITY))]
        {
            cases.push(Case { activation, magnitude, special, ..CASE });
        }
    }
    for (rows, columns) in [(0, 8), (3, 0), (1, 1), (1, 7), (2, 33), (1, 14336), (130, 255), (9, 2048)] {
        for input in [DType::F32, DType::Bf16] {
            cases.push(Case { rows, columns, input, output: input, ..CASE });
        }
    }
    check("gated_activation", &cases, test);
}

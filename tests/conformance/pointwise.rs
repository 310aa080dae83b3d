//! `pointwise`: functions of elements over four strided axes, called as an engine calls them.

use crate::activation::activate;
use crate::compare::FLOATS;
use crate::run::{c_tensor, check, expect_error, rounded, Failure, Outcome, Run, PLAIN};
use crate::strided::{places, repeated, Placement, PLACEMENTS, REVERSED, ROW_MAJOR, SWAPPED, TRANSPOSED};
use nvbackend::capi::strided::*;
use nvbackend::capi::structs::init;
use nvbackend::error::Status;
use nvbackend::operation::pointwise::Function;
use nvbackend::operation::Activation;
use nvbackend::tensor::{DType, Tensor};

#[derive(Debug, Clone, Copy)]
struct Case {
    function: Function,
    shape: [usize; 4],
    input_shape: [usize; 4],
    second_shape: [usize; 4],
    /// Of input, second and output.
    dtypes: [DType; 3],
    placements: [Placement; 3],
    in_place: bool,
    magnitude: f64,
    special: Option<f64>,
}

const SHAPE: [usize; 4] = [2, 3, 4, 10];

const CASE: Case = Case {
    function: Function::Add,
    shape: SHAPE,
    input_shape: SHAPE,
    second_shape: SHAPE,
    dtypes: [DType::F32; 3],
    placements: [ROW_MAJOR; 3],
    in_place: false,
    magnitude: 1.0,
    special: None,
};

const ALPHA: f32 = -0.75;
const BETA: f32 = 1.25;

fn formula(function: Function, x: f64, y: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match function {
        Function::Copy => x,
        Function::Add => x + y,
        Function::Subtract => x - y,
        Function::Multiply => x * y,
        Function::Divide => x / y,
        Function::Scale => x * f64::from(ALPHA) + f64::from(BETA),
        Function::Clamp if x.is_nan() => x,
        Function::Clamp => x.clamp(f64::from(ALPHA), f64::from(BETA)),
        Function::Negate => -x,
        Function::Absolute => x.abs(),
        Function::Square => x * x,
        Function::SquareRoot => x.sqrt(),
        Function::Exponential => x.exp(),
        Function::Tanh => x.tanh(),
        Function::Sigmoid => sigmoid(x),
        Function::Relu if x.is_nan() => x,
        Function::Relu => x.max(0.0),
        Function::Silu => activate(Activation::Silu, x),
        Function::GeluTanh => activate(Activation::GeluTanh, x),
        Function::GeluErf => activate(Activation::GeluErf, x),
        Function::GeluSigmoid => x * sigmoid(1.702 * x),
    }
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let mut values = |dtype, shape: [usize; 4], magnitude| {
        let mut values = run.random.normals(shape.iter().product(), magnitude);
        if case.function == Function::SquareRoot {
            values.iter_mut().for_each(|value| *value = value.abs());
        }
        rounded(dtype, &values)
    };
    let mut a = values(case.dtypes[0], case.input_shape, case.magnitude);
    let b = values(case.dtypes[1], case.second_shape, 1.0);
    if let (Some(special), Some(place)) = (case.special, a.len().checked_sub(3)) {
        a[place] = special;
    }
    let input = case.placements[0].tensor(run, case.dtypes[0], case.input_shape, &a)?;
    let mut args: nvb_pointwise_args = init();
    args.input = c_tensor(&input);
    if case.function.is_binary() {
        args.second = c_tensor(&case.placements[1].tensor(run, case.dtypes[1], case.second_shape, &b)?);
    }
    let output = match case.in_place {
        true => input,
        false => case.placements[2].output(run, case.dtypes[2], case.shape)?,
    };
    run.allow_write(&output);
    args.output = c_tensor(&output);
    (args.function, args.alpha, args.beta) = (case.function as u32, ALPHA, BETA);
    // SAFETY: a struct with its size set, and tensors of the case's device.
    run.call(|backend, stream| unsafe { nvb_pointwise(backend, &args, stream) })?;

    let all = places(case.shape);
    let x: Vec<f64> = all.iter().map(|&place| a[repeated(case.input_shape, place)]).collect();
    let y: Vec<f64> = all.iter().map(|&place| b[repeated(case.second_shape, place)]).collect();
    let reference: Vec<f64> = x.iter().zip(&y).map(|(&x, &y)| formula(case.function, x, y)).collect();
    match case.function {
        Function::Silu | Function::GeluTanh | Function::GeluErf | Function::GeluSigmoid => {
            run.expect_activated("output", &output, &reference, &x)
        }
        _ => run.expect("output", &output, &reference),
    }
}

#[test]
fn functions_dtypes_and_placements() {
    let mut cases = Vec::new();
    for function in Function::ALL {
        for placement in PLACEMENTS {
            cases.push(Case { function, placements: [placement; 3], ..CASE });
            cases.push(Case { function, placements: [placement, SWAPPED, ROW_MAJOR], ..CASE });
            cases.push(Case { function, placements: [ROW_MAJOR, TRANSPOSED, placement], ..CASE });
            let placements = [placement, ROW_MAJOR, REVERSED];
            cases.push(Case { function, placements, in_place: true, ..CASE });
        }
        for input in FLOATS {
            for output in FLOATS {
                cases.push(Case { function, dtypes: [input, DType::F16, output], ..CASE });
            }
        }
    }
    check("pointwise", &cases, test);
}

#[test]
fn repetitions_and_sizes() {
    let mut cases = Vec::new();
    for function in [Function::Copy, Function::Multiply, Function::Subtract] {
        for (input_shape, second_shape) in [
            (SHAPE, [1, 1, 1, 10]),
            (SHAPE, [1, 3, 1, 1]),
            (SHAPE, [1; 4]),
            (SHAPE, [2, 1, 2, 5]),
            ([1, 3, 2, 10], [2, 1, 4, 2]),
            ([1; 4], SHAPE),
        ] {
            for placement in PLACEMENTS {
                let placements = [placement, placement, ROW_MAJOR];
                cases.push(Case { function, input_shape, second_shape, placements, ..CASE });
            }
        }
        for shape in [[1; 4], [1, 1, 1, 1000], [3, 1, 1, 65], [1, 257, 1, 3], [5, 7, 11, 13], [1, 1, 300, 300]] {
            for placement in PLACEMENTS {
                let placements = [placement, ROW_MAJOR, TRANSPOSED];
                let shapes = Case { shape, input_shape: shape, second_shape: shape, ..CASE };
                cases.push(Case { function, placements, ..shapes });
            }
        }
    }
    check("pointwise", &cases, test);
}

#[test]
fn magnitudes() {
    let mut cases = Vec::new();
    for function in Function::ALL {
        for magnitude in [1e-30, 1e-6, 20.0] {
            cases.push(Case { function, magnitude, ..CASE });
        }
        for special in [f64::NAN, f64::INFINITY] {
            // A root takes no absolute value of NaN's.
            cases.push(Case { function, special: Some(special), ..CASE });
        }
    }
    check("pointwise", &cases, test);
}

/// Copies keep every bit of words, also those that are no numbers.
#[test]
fn words_and_empty_tensors() {
    check("pointwise", &PLACEMENTS, |run, placement| {
        let values: Vec<f64> = (0..240).map(|i| f64::from(0x7f80_0001i32.wrapping_mul(i))).collect();
        let input = placement.tensor(run, DType::I32, SHAPE, &values)?;
        let output = SWAPPED.output(run, DType::I32, SHAPE)?;
        let mut args: nvb_pointwise_args = init();
        (args.input, args.output, args.function) = (c_tensor(&input), c_tensor(&output), NVB_POINTWISE_COPY);
        // SAFETY: as in `test`.
        run.call(|backend, stream| unsafe { nvb_pointwise(backend, &args, stream) })?;
        let reference: Vec<i32> = values.iter().map(|&value| value as i32).collect();
        run.expect_integers("output", &output, &reference)?;

        let nothing = run.tensor(DType::F32, &[0, 4], PLAIN, &[])?;
        (args.input, args.output) = (c_tensor(&nothing), c_tensor(&nothing));
        // SAFETY: as in `test`.
        Ok(run.call(|backend, stream| unsafe { nvb_pointwise(backend, &args, stream) })?)
    });
}

#[test]
fn what_is_refused() {
    check("pointwise", &[()], |run, ()| {
        let values = [1.0; 24];
        let input = run.tensor(DType::F32, &[2, 3, 4], PLAIN, &values)?;
        let second = run.tensor(DType::F32, &[3, 1], PLAIN, &[1.0; 3])?;
        let output = run.output(DType::F32, &[2, 3, 4], PLAIN)?;
        let mut good: nvb_pointwise_args = init();
        (good.input, good.second, good.output) = (c_tensor(&input), c_tensor(&second), c_tensor(&output));
        good.function = NVB_POINTWISE_ADD;
        let call = |run: &mut Run, args: &nvb_pointwise_args| {
            // SAFETY: as in `test`.
            run.call(|backend, stream| unsafe { nvb_pointwise(backend, args, stream) })
        };
        let refused = |run: &mut Run, change: &dyn Fn(&mut nvb_pointwise_args), words: &[&str]| {
            let mut args = good;
            change(&mut args);
            expect_error(call(run, &args), Status::InvalidArgument, words)
        };
        for function in [0, 20] {
            refused(run, &|args| args.function = function, &["function is", "1 to 19"])?;
        }
        refused(run, &|args| args.second = init_tensor(), &["`second` is missing"])?;
        refused(run, &|args| args.function = NVB_POINTWISE_COPY, &["`second` is given"])?;
        refused(run, &|args| args.second.shape[0] = 2, &["`second`", "[2, 1]", "repeat"])?;
        refused(run, &|args| args.input.shape[0] = 4, &["`input`", "repeat"])?;
        refused(run, &|args| args.input.dtype = DType::I32 as u32, &["`input`", "i32"])?;
        refused(run, &|args| args.second.dtype = DType::I32 as u32, &["`second`", "i32"])?;
        refused(run, &|args| args.output.strides = [12, 4, 0, 0], &["`output`", "overlap"])?;
        refused(run, &|args| args.output.strides = [2, 1, 1, 0], &["`output`", "overlap"])?;
        refused(run, &|args| args.output.data = input.data.wrapping_byte_add(4), &["output", "input"])?;
        refused(run, &|args| args.input.data = std::ptr::null_mut(), &["`input`", "NULL"])?;
        refused(run, &|args| args.input.data = input.data.wrapping_byte_add(2), &["`input`", "aligned"])?;
        let alone = |args: &mut nvb_pointwise_args, function| {
            (args.second, args.function) = (init_tensor(), function);
        };
        let numbers = |alpha, beta, function| {
            move |args: &mut nvb_pointwise_args| {
                alone(args, function);
                (args.alpha, args.beta) = (alpha, beta);
            }
        };
        refused(run, &numbers(f32::NAN, 0.0, NVB_POINTWISE_SCALE), &["alpha and beta are NaN"])?;
        refused(run, &numbers(1.0, f32::INFINITY, NVB_POINTWISE_SCALE), &["inf"])?;
        refused(run, &numbers(1.0, 0.5, NVB_POINTWISE_CLAMP), &["1 and 0.5"])?;
        // A clamp by infinite bounds is a copy.
        let mut args = good;
        numbers(f32::NEG_INFINITY, f32::INFINITY, NVB_POINTWISE_CLAMP)(&mut args);
        call(run, &args)?;
        run.expect("output", &output, &values)
    });
}

/// The absent tensor.
fn init_tensor() -> nvbackend::capi::tensor::nvb_tensor {
    let nothing = Tensor::new(std::ptr::null_mut(), DType::F32, &[1]);
    nvbackend::capi::tensor::nvb_tensor { dtype: 0, rank: 0, ..c_tensor(&nothing) }
}

/// A copy between one dtype's tensors keeps NaN's bits.
#[test]
fn copies_of_one_dtype_are_exact() {
    check("pointwise", &FLOATS, |run, &dtype| {
        let values: Vec<f64> = (0..240).map(|i| f64::from(i) * 1e-3).collect();
        let input = TRANSPOSED.tensor(run, dtype, SHAPE, &values)?;
        let output = REVERSED.output(run, dtype, SHAPE)?;
        let mut args: nvb_pointwise_args = init();
        (args.input, args.output, args.function) = (c_tensor(&input), c_tensor(&output), NVB_POINTWISE_COPY);
        // SAFETY: as in `test`.
        run.call(|backend, stream| unsafe { nvb_pointwise(backend, &args, stream) })?;
        match run.read(&output)? == run.read(&input)? {
            true => Ok(()),
            false => Err(Failure::from("the copy differs".to_owned())),
        }
    });
}

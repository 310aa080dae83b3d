//! `linear`: y = activation(x · Wᵀ + bias) + residual; gated: activation(gate) · up + residual over interleaved rows of W.

use crate::activation::{activate, ACTIVATIONS};
use crate::compare::FLOATS;
use crate::linear_residual::{outputs, Residual};
use crate::random::Random;
use crate::run::{check, rounded, Layout, Outcome, Run, PITCHED, PLAIN, UNALIGNED};
use nvbackend::loading::{Source, Weight};
use nvbackend::operation::linear_product::LinearProduct;
use nvbackend::operation::Activation;
use nvbackend::operation::Operation;
use nvbackend::tensor::{DType, Tensor};
use nvbackend::weight::Arrangement;

#[derive(Debug, Clone, Copy)]
struct Case {
    m: usize,
    /// Columns of the output; a gated weight has twice as many rows.
    n: usize,
    k: usize,
    input: DType,
    weight: DType,
    output: DType,
    bias: Option<DType>,
    activation: Activation,
    gated: bool,
    residual: Residual,
    /// The weight is read where the caller has it, with the layout's offset and padding.
    borrowed: bool,
    layout: Layout,
    magnitude: f64,
    /// Put into the first row of x.
    special: Option<f64>,
}

const CASE: Case = Case {
    m: 5,
    n: 48,
    k: 64,
    input: DType::F32,
    weight: DType::F32,
    output: DType::F32,
    bias: None,
    activation: Activation::None,
    gated: false,
    residual: Residual::None,
    borrowed: false,
    layout: PLAIN,
    magnitude: 1.0,
    special: None,
};

/// x has the weight's dtype or F32; y any.
fn dtypes() -> Vec<(DType, DType, DType)> {
    let pairs =
        FLOATS.map(|weight| (weight, weight)).into_iter().chain([(DType::F32, DType::F16), (DType::F32, DType::Bf16)]);
    pairs.flat_map(|(input, weight)| FLOATS.map(|output| (input, weight, output))).collect()
}

const ROWS: [usize; 15] = [0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 65, 128, 300];

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    test_by(run, case, None)
}

/// The same by the kernel of this name where the device has it for the product.
fn test_by(run: &mut Run, case: &Case, kernel: Option<&str>) -> Outcome {
    let &Case { m, n, k, activation, .. } = case;
    let mut x = rounded(case.input, &run.random.normals(m * k, case.magnitude));
    if let Some(special) = case.special {
        x[k / 2] = special;
    }
    let input = run.tensor(case.input, &[m, k], case.layout, &x)?;
    // Outputs of the inputs' magnitude, so that activations are met where they bend.
    let scale = 1.0 / (k.max(1) as f64).sqrt();
    let parts: Vec<Vec<f64>> =
        (0..1 + case.gated as usize).map(|_| rounded(case.weight, &run.random.normals(n * k, scale))).collect();
    let arrangement = if case.gated { Arrangement::Gated } else { Arrangement::Stacked };
    let mut host: Vec<Vec<u8>> = parts.iter().map(|part| crate::compare::encode(case.weight, part)).collect();
    let (tensors, source) = if case.borrowed {
        (vec![run.tensor(case.weight, &[n, k], case.layout, &parts[0])?], Source::Borrowed)
    } else {
        let tensor = |bytes: &mut Vec<u8>| Tensor::new(bytes.as_mut_ptr().cast(), case.weight, &[n, k]);
        (host.iter_mut().map(tensor).collect(), Source::Host)
    };
    let weight = Weight::new(run.device.backend.memory(), &tensors, arrangement, source, None, run.stream)?;
    let biases = match case.bias {
        Some(dtype) => {
            let (tensor, values) = run.normal(dtype, &[n * parts.len()], case.layout, case.magnitude)?;
            Some((tensor, values))
        }
        None => None,
    };
    let (residual, added, output) = outputs(run, case.residual, case.output, [m, n], case.layout)?;
    let (mut reference, mut most, mut terms) = (Vec::new(), Vec::new(), Vec::new());
    for row in 0..m {
        for column in 0..n {
            let product = |part: usize| {
                let bias = biases.as_ref().map_or(0.0, |(_, values)| values[column * parts.len() + part]);
                dot(&x[row * k..][..k], &parts[part][column * k..][..k]) + bias
            };
            let (gate, up) = (product(0), if case.gated { product(1) } else { 1.0 });
            reference.push(activate(activation, gate) * up + added[row * n + column]);
            most.push(gate * up);
            let products = x[row * k..][..k].iter().zip(&parts[0][column * k..][..k]);
            let sum = products.map(|(x, w)| (x * w).abs()).filter(|term| term.is_finite()).sum::<f64>();
            terms.push(sum * up.abs());
        }
    }
    let op = LinearProduct::new(input, weight.view(), biases.map(|(tensor, _)| tensor), activation, output)?;
    let op = op.with_residual(residual)?;
    let executor = run.executor();
    let by = |name| executor.linear_candidates(&op).into_iter().find(|choice| choice.kernel.kernel().name == name);
    match kernel.and_then(by) {
        Some(choice) => {
            let ran = executor.linear_with(&op, &choice, run.stream.raw())?;
            ran.ok_or_else(|| format!("{} does not do what it can", choice.kernel.kernel().name))?;
        }
        None => executor.run(&Operation::from(op), run.stream.raw())?,
    }
    match activation {
        Activation::None => run.expect_summed("output", &output, &reference, &terms),
        _ => run.expect_activated("output", &output, &reference, &most),
    }
}

/// Every number of rows with every combination of dtypes; the rest varies from run to run.
#[test]
fn rows_and_dtypes() {
    let mut random = Random::new("linear cases");
    let mut cases = Vec::new();
    let sizes =
        [(1, 1), (1, 64), (7, 5), (16, 16), (33, 129), (64, 64), (65, 63), (96, 256), (130, 40), (200, 72), (256, 96)];
    for m in ROWS {
        for (input, weight, output) in dtypes() {
            let (n, k) = random.choose(&sizes);
            let bias = random.choose(&[None, Some(output), Some(DType::F32), Some(DType::Bf16)]);
            let activation = random.choose(&ACTIVATIONS);
            let layout = random.choose(&[PLAIN, PLAIN, UNALIGNED, PITCHED]);
            let (gated, borrowed) = (random.flip(), random.flip());
            let apart = Residual::Apart(random.choose(&FLOATS));
            let residual = random.choose(&[Residual::None, apart, Residual::Output]);
            cases.push(Case {
                m,
                n,
                k,
                input,
                weight,
                output,
                bias,
                activation,
                layout,
                gated,
                residual,
                borrowed: borrowed && !gated,
                ..CASE
            });
        }
    }
    check("linear", &cases, test);
}

#[test]
fn epilogues() {
    let mut cases = Vec::new();
    for (input, weight) in
        [(DType::F32, DType::F32), (DType::Bf16, DType::Bf16), (DType::F32, DType::Bf16), (DType::F16, DType::F16)]
    {
        for m in [1, 7, 40] {
            for activation in ACTIVATIONS {
                for gated in [false, true] {
                    for bias in [None, Some(DType::F32), Some(weight)] {
                        for residual in [Residual::None, Residual::Apart(weight)] {
                            let case = Case { m, input, weight, activation, gated, bias, residual, ..CASE };
                            cases.push(Case { output: DType::F32, ..case });
                        }
                    }
                }
            }
        }
    }
    check("linear", &cases, test);
}

/// Of many rows, where a kernel has the epilogue in it: tiles that are whole, cut, and more than one.
#[test]
fn epilogues_of_many_rows() {
    let mut cases = Vec::new();
    for dtype in [DType::Bf16, DType::F16] {
        for (m, n, k) in [(192, 128, 64), (257, 131, 72), (520, 300, 200)] {
            for activation in ACTIVATIONS {
                for (gated, bias) in
                    [(false, Some(dtype)), (false, Some(DType::F32)), (true, None), (true, Some(dtype))]
                {
                    let case = Case { input: dtype, weight: dtype, output: dtype, activation, gated, bias, ..CASE };
                    cases.push(Case { m, n, k, ..case });
                    cases.push(Case { m, n, k, residual: Residual::Output, ..case });
                }
            }
            // What a vendor's library may add, and what it may not.
            for residual in
                [Residual::Apart(dtype), Residual::Apart(DType::F32), Residual::Row(dtype), Residual::Output]
            {
                for (bias, output) in [(None, dtype), (Some(dtype), dtype), (None, DType::F32)] {
                    for layout in [PLAIN, PITCHED, UNALIGNED] {
                        let case = Case { input: dtype, weight: dtype, output, bias, residual, layout, ..CASE };
                        cases.push(Case { m, n, k, ..case });
                    }
                }
            }
        }
    }
    check("linear", &cases, test);
}

#[test]
fn sizes() {
    let mut cases = Vec::new();
    let kinds =
        [(DType::F32, DType::F32), (DType::Bf16, DType::Bf16), (DType::F32, DType::Bf16), (DType::F16, DType::F16)];
    for (input, weight) in kinds {
        let case = Case { input, weight, output: input, ..CASE };
        for (n, k) in
            [(1, 1), (2, 3), (3, 8), (1, 1000), (1000, 1), (31, 33), (127, 129), (255, 1024), (1024, 255), (512, 513)]
        {
            for (m, layout) in [(1, PLAIN), (1, UNALIGNED), (6, PLAIN), (20, PITCHED), (33, UNALIGNED)] {
                cases.push(Case { m, n, k, layout, ..case });
                cases.push(Case { m, n, k, layout, borrowed: true, ..case });
            }
            cases.push(Case { m: 3, n, k, gated: true, activation: Activation::GeluTanh, ..case });
        }
        // The shapes of a model: wide, deep, and both.
        for (m, n, k) in
            [(1, 2560, 1024), (1, 1024, 6912), (4, 1024, 2048), (300, 256, 640), (129, 640, 320), (1, 32_000, 64)]
        {
            cases.push(Case { m, n, k, ..case });
        }
    }
    check("linear", &cases, test);
}

/// One row against a weight with rows from 512 on, which a GPU may share out in one wave: rows in one part and in up to sixteen,
/// the last of them shorter, a block with several rows for each warp or with none, and what is too long for that.
#[test]
fn one_row_and_a_long_k() {
    let mut cases = Vec::new();
    for (dtype, other) in [(DType::Bf16, DType::F16), (DType::F16, DType::Bf16)] {
        let case = Case { m: 1, input: dtype, weight: dtype, output: dtype, ..CASE };
        for (n, k) in [
            (1, 504),
            (1, 512),
            (537, 640),
            (1, 1024),
            (5, 1288),
            (133, 2056),
            (301, 1280),
            (60, 10_248),
            (9, 20_480),
            (9, 20_488),
        ] {
            for layout in [PLAIN, PITCHED, UNALIGNED] {
                let case = Case { n, k, layout, ..case };
                cases.push(Case { borrowed: true, ..case });
                cases.push(Case { output: DType::F32, bias: Some(DType::F32), residual: Residual::Output, ..case });
                cases.push(Case { residual: Residual::Apart(other), activation: Activation::GeluTanh, ..case });
                cases.push(Case { gated: true, activation: Activation::Silu, bias: Some(dtype), ..case });
            }
        }
        for special in [f64::NAN, f64::INFINITY] {
            cases.push(Case { n: 133, k: 2056, special: Some(special), ..case });
        }
        // Several rows for each warp, so that what it reads into comes round.
        let many = if dtype == DType::Bf16 { [(4801, 1032), (1000, 10_248)] } else { [(1335, 5128), (2101, 2560)] };
        for (n, k) in many {
            cases.push(Case { n, k, bias: Some(dtype), ..case });
        }
    }
    check("linear", &cases, test);
}

/// Few rows against a weight with long rows, which a GPU may share out in one wave: rings for each warp and for the block,
/// clusters along K, whole steps of rows and cut ones, fewer rows than blocks, K that is not whole units, what is too long
/// or has too many rows. By name, because weights as small as these have another default.
#[test]
fn few_rows_and_a_long_k() {
    let mut cases = Vec::new();
    for (dtype, other) in [(DType::Bf16, DType::F16), (DType::F16, DType::Bf16)] {
        let case = Case { input: dtype, weight: dtype, output: dtype, ..CASE };
        for (n, k) in [(1, 256), (7, 1288), (200, 2560), (133, 2568), (70, 4096), (70, 4104), (70, 5128), (40, 10_240)]
        {
            for (m, layout) in [(2, PLAIN), (5, PITCHED), (8, PITCHED)] {
                let case = Case { m, n, k, layout, ..case };
                cases.push(Case { output: DType::F32, bias: Some(DType::F32), residual: Residual::Output, ..case });
                cases.push(Case { residual: Residual::Apart(other), borrowed: true, ..case });
                cases.push(Case { gated: true, activation: Activation::Silu, bias: Some(dtype), ..case });
            }
        }
        for (m, n, k) in [(8, 9, 10_248), (9, 37, 2560), (16, 37, 4096)] {
            cases.push(Case { m, n, k, bias: Some(dtype), ..case });
        }
        for special in [f64::NAN, f64::INFINITY] {
            for (n, k) in [(133, 2056), (41, 5120), (37, 10_232)] {
                cases.push(Case { n, k, special: Some(special), ..case });
            }
        }
        // Many steps for each block, so that what it reads into comes round.
        let many = if dtype == DType::Bf16 { [(4801, 1032), (2101, 5136)] } else { [(3301, 2560), (3301, 4104)] };
        for (n, k) in many {
            cases.push(Case { m: 6, n, k, bias: Some(dtype), ..case });
        }
        cases.push(Case { m: 3, n: 1701, k: 2560, gated: true, activation: Activation::GeluTanh, ..case });
        // So many rows that the warps share a ring.
        if dtype == DType::Bf16 {
            cases.push(Case { m: 3, n: 65_543, k: 264, bias: Some(dtype), ..case });
        }
    }
    check("linear", &cases, |run, case| test_by(run, case, Some("linear_skinny_ring")));
}

#[test]
fn magnitudes() {
    let mut cases = Vec::new();
    for (input, weight) in [(DType::F32, DType::F32), (DType::Bf16, DType::Bf16), (DType::F32, DType::Bf16)] {
        for m in [1, 9, 70] {
            for magnitude in [0.0, 1e-25, 1e-6, 1e6, 1e25] {
                cases.push(Case { m, input, weight, magnitude, ..CASE });
            }
            // A row with NaN or infinity leaves the other rows alone.
            for special in [f64::NAN, f64::INFINITY] {
                cases.push(Case { m, input, weight, special: Some(special), ..CASE });
                cases.push(Case { m, input, weight, special: Some(special), k: 77, layout: UNALIGNED, ..CASE });
            }
        }
    }
    // Gates on both sides of where GELU needs a division of its own, and next to those that have no value.
    for dtype in [DType::Bf16, DType::F16] {
        for activation in [Activation::GeluTanh, Activation::Silu] {
            let case = Case { m: 257, n: 131, k: 72, input: dtype, weight: dtype, gated: true, activation, ..CASE };
            for magnitude in [1e-6, 1.0, 4.0, 8.0, 100.0] {
                cases.push(Case { output: dtype, magnitude, ..case });
            }
            for special in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                cases.push(Case { output: dtype, special: Some(special), ..case });
            }
        }
    }
    for magnitude in [1e6, 1e15, 1e25] {
        let (dtype, activation) = (DType::Bf16, Activation::GeluTanh);
        let case = Case { m: 192, n: 128, input: dtype, weight: dtype, output: dtype, gated: true, activation, ..CASE };
        cases.push(Case { magnitude, ..case });
    }
    for m in [2, 30] {
        cases.push(Case { m, input: DType::F16, weight: DType::F16, output: DType::F16, magnitude: 1e4, ..CASE });
    }
    check("linear", &cases, test);
}

/// Leading axes fold into rows, and a sum is the same whatever else is in the batch.
#[test]
fn rows_do_not_depend_on_the_batch() {
    let cases = [DType::F32, DType::Bf16].map(|dtype| [2, 9, 64].map(|rows| (dtype, rows))).concat();
    check("linear batches", &cases, |run, &(dtype, rows)| {
        let (n, k) = (40, 72);
        let (folded, x) = run.normal(dtype, &[rows, 1, k], UNALIGNED, 1.0)?;
        let (part, w) = run.normal(dtype, &[n, k], PLAIN, 1.0)?;
        let weight =
            Weight::new(run.device.backend.memory(), &[part], Arrangement::Stacked, Source::Device, None, run.stream)?;
        let all = run.output(DType::F32, &[rows, 1, n], PLAIN)?;
        let op = LinearProduct::new(folded, weight.view(), None, Activation::None, all)?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        let reference: Vec<f64> = x.chunks(k).flat_map(|x| w.chunks(k).map(move |w| dot(x, w))).collect();
        run.expect("output", &all, &reference)?;
        let last = run.tensor(dtype, &[1, k], PLAIN, &x[(rows - 1) * k..])?;
        let one = run.output(DType::F32, &[1, n], PLAIN)?;
        run.executor().run(
            &Operation::from(LinearProduct::new(last, weight.view(), None, Activation::None, one)?),
            run.stream.raw(),
        )?;
        run.expect("the last row alone", &one, &reference[(rows - 1) * n..])
    });
}

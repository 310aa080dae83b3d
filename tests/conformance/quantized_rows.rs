//! Activations in 8 bits: what `rms_norm` and `gated_activation` leave.

use crate::activation::ACTIVATIONS;
use crate::compare::FLOATS;
use crate::linear_quantized_input::{weight, Kind, LinearCase};
use crate::run::{check, expect_error, rounded, Failure, Layout, Outcome, Run, PITCHED, PLAIN, UNALIGNED};
use nvbackend::error::{Result, Status};
use nvbackend::operation::gated_activation::GatedActivation;
use nvbackend::operation::linear::{Linear, LinearTensors};
use nvbackend::operation::quantized_rows::QuantizedRows;
use nvbackend::operation::rms_norm::RmsNorm;
use nvbackend::operation::Activation;
use nvbackend::operation::Operation;
use nvbackend::tensor::{DType, Tensor};
use nvbackend::weight::{fp8, int8, Encoding};

pub const ENCODINGS: [Encoding; 2] = [Encoding::Fp8E4m3, Encoding::Int8];

/// Where codes and scales lie: bytes of both behind a boundary, and bytes after each row.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    pub offset: usize,
    pub scale_offset: usize,
    pub padding: usize,
}

pub const TIGHT: Place = Place { offset: 0, scale_offset: 0, padding: 0 };
pub const PLACES: [Place; 4] = [
    TIGHT,
    Place { offset: 0, scale_offset: 0, padding: 32 },
    Place { offset: 8, scale_offset: 4, padding: 8 },
    Place { offset: 3, scale_offset: 4, padding: 5 },
];

/// Codes and their scales on the host.
pub type Codes = (Vec<u8>, Vec<f32>);

pub fn rows_at(
    run: &mut Run,
    encoding: Encoding,
    (rows, columns): (usize, usize),
    place: Place,
    values: Option<&Codes>,
) -> Result<QuantizedRows> {
    let row_stride = columns + place.padding;
    let scales: Option<Vec<u8>> =
        values.map(|(_, scales)| scales.iter().flat_map(|scale| scale.to_le_bytes()).collect());
    let data = run.byte_rows((rows, columns), row_stride, place.offset, values.map(|(codes, _)| &codes[..]))?;
    // Scales that nobody writes are no output: a norm of no columns has none.
    let width = if columns == 0 { 0 } else { 4 };
    let scales = run.byte_rows((rows, width), width, place.scale_offset, scales.as_deref())?;
    let given_scales = false;
    Ok(QuantizedRows { data, scales: scales.cast(), given_scales, encoding, rows, columns, row_stride })
}

pub fn read(run: &Run, rows: &QuantizedRows) -> Result<Codes> {
    let codes = run.read_byte_rows(rows.data, (rows.rows, rows.columns), rows.row_stride)?;
    let width = if rows.columns == 0 { 0 } else { 4 };
    let scales = run.read_byte_rows(rows.scales.cast(), (rows.rows, width), width)?;
    Ok((codes, scales.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()))
}

/// The definition of the codes: the largest magnitude of a row, NaN before all, spans their range.
pub fn quantized(encoding: Encoding, columns: usize, values: &[f32]) -> Codes {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for row in values.chunks(columns.max(1)) {
        let most = match row.iter().any(|value| value.is_nan()) {
            true => f32::NAN,
            false => row.iter().fold(0f32, |most, value| most.max(value.abs())),
        };
        let scale = most / if encoding == Encoding::Int8 { 127.0 } else { 448.0 };
        let inverse = Some(1.0 / scale).filter(|inverse| inverse.is_finite()).unwrap_or(0.0);
        scales.push(scale);
        codes.extend(row.iter().map(|value| match encoding {
            Encoding::Int8 if (value * inverse).is_nan() => -127i8 as u8,
            Encoding::Int8 => (value * inverse).clamp(-127.0, 127.0).round_ties_even() as i8 as u8,
            _ => fp8::e4m3_from_f32(value * inverse),
        }));
    }
    (codes, scales)
}

/// Equal to the bit, but for the sign of NaN.
pub fn expect_same(what: &str, encoding: Encoding, columns: usize, out: &Codes, expected: &Codes) -> Outcome {
    let is_nan = |code: u8| encoding == Encoding::Fp8E4m3 && code & 0x7f == 0x7f;
    if (out.0.len(), out.1.len()) != (expected.0.len(), expected.1.len()) {
        return Err(format!("{what}: {} codes, {} expected", out.0.len(), expected.0.len()).into());
    }
    let scale_differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan());
    if let Some(row) = out.1.iter().zip(&expected.1).position(scale_differs) {
        let (a, b) = (out.1[row], expected.1[row]);
        return Err(format!("{what}: the scale of row {row} is {a:e}; {b:e} is expected").into());
    }
    let code_differs = |(&a, &b): (&u8, &u8)| a != b && !(is_nan(a) && is_nan(b));
    if let Some(i) = out.0.iter().zip(&expected.0).position(code_differs) {
        let (row, column) = (i / columns, i % columns);
        let (a, b) = (out.0[i], expected.0[i]);
        return Err(format!("{what}: row {row}, column {column} is {a:#04x}; {b:#04x} is expected").into());
    }
    Ok(())
}

/// The codes of these values, or of what the order of a sum makes of them: another output may lead to wider vectors.
fn expect_near(what: &str, encoding: Encoding, columns: usize, (codes, scales): &Codes, values: &[f32]) -> Outcome {
    let expected = quantized(encoding, columns, values);
    let is_nan = |code: u8| encoding == Encoding::Fp8E4m3 && code & 0x7f == 0x7f;
    let code_of = |value: f32| match encoding {
        Encoding::Int8 => f32::from((value.clamp(-127.0, 127.0).round_ties_even() as i8) as i16),
        _ => fp8::e4m3_to_f32(fp8::e4m3_from_f32(value)),
    };
    let decode = if encoding == Encoding::Int8 { int8::decode } else { fp8::e4m3_to_f32 };
    for (row, (&scale, &expected_scale)) in scales.iter().zip(&expected.1).enumerate() {
        let same = scale.to_bits() == expected_scale.to_bits() || (scale.is_nan() && expected_scale.is_nan());
        if !same && (scale / expected_scale - 1.0).abs() > 3e-6 {
            return Err(format!("{what}: the scale of row {row} is {scale:e}; {expected_scale:e} is expected").into());
        }
        let part = row * columns..(row + 1) * columns;
        let most = values[part.clone()].iter().fold(0f32, |most, value| most.max(value.abs()));
        for i in part {
            let (code, value, inverse) = (codes[i], values[i], 1.0 / scale);
            let good = if (value * inverse).is_finite() && inverse.is_finite() {
                let slack = 2e-6 * value.abs() + 4e-7 * most;
                (code_of((value - slack) * inverse)..=code_of((value + slack) * inverse)).contains(&decode(code))
            } else {
                code == expected.0[i] || (is_nan(code) && is_nan(expected.0[i]))
            };
            if !good {
                let (column, expected) = (i % columns, expected.0[i]);
                return Err(format!(
                    "{what}: row {row}, column {column} is {code:#04x}; {expected:#04x} is expected of {value:e}"
                )
                .into());
            }
        }
    }
    Ok(())
}

pub fn floats(run: &Run, tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(run.read(tensor)?.into_iter().map(|value| value as f32).collect())
}

#[derive(Debug, Clone, Copy)]
struct NormCase {
    encoding: Encoding,
    rows: usize,
    columns: usize,
    dtype: DType,
    fused: bool,
    layout: Layout,
    place: Place,
    magnitude: f64,
    special: Option<f64>,
}

/// The f32 output says what the unrounded values are; without it and beside a rounded one the same codes come, but on a GPU
/// for what the order of a sum makes of them.
fn test_norm(run: &mut Run, case: &NormCase) -> Outcome {
    let &NormCase { encoding, rows, columns, dtype, layout, place, .. } = case;
    let (shape, vector) = ([rows, columns], [columns]);
    let mut x = rounded(dtype, &run.random.normals(rows * columns, case.magnitude));
    if let Some(special) = case.special {
        x[columns / 2] = special;
    }
    let input = run.tensor(dtype, &shape, layout, &x)?;
    let weight = Some(run.normal(DType::Bf16, &vector, layout, 0.3)?.0);
    let residual = if case.fused { Some(run.normal(dtype, &shape, layout, case.magnitude)?.0) } else { None };
    let post_weight = weight.filter(|_| case.fused);
    let mut values = None;
    for output in [Some(DType::F32), None, Some(DType::Bf16)] {
        let output = output.map(|dtype| run.output(dtype, &shape, layout)).transpose()?;
        let residual_output = residual.map(|_| run.output(dtype, &shape, layout)).transpose()?;
        let codes = rows_at(run, encoding, (rows, columns), place, None)?;
        let quantized_output = Some(codes);
        let call = RmsNorm {
            input,
            post_weight,
            residual,
            residual_output,
            weight,
            output,
            quantized_output,
            epsilon: 1e-6,
            weight_offset: 1.0,
        };
        run.executor().run(&Operation::from(call.validated()?), run.stream.raw())?;
        let (codes, what) = (read(run, &codes)?, format!("beside {output:?}"));
        let first = values.is_none();
        let values = match output {
            Some(output) if first => &*values.insert(floats(run, &output)?),
            _ => values.as_ref().expect("the f32 output is the first"),
        };
        // The CPU executor has one order, whatever the outputs are.
        if first || run.device.is_cpu() {
            expect_same(&what, encoding, columns, &codes, &quantized(encoding, columns, values))?;
        } else {
            expect_near(&what, encoding, columns, &codes, values)?;
        }
    }
    Ok(())
}

const NORM: NormCase = NormCase {
    encoding: Encoding::Int8,
    rows: 3,
    columns: 640,
    dtype: DType::Bf16,
    fused: false,
    layout: PLAIN,
    place: TIGHT,
    magnitude: 1.0,
    special: None,
};

#[test]
fn rms_norm_in_8_bits() {
    let mut cases = Vec::new();
    for encoding in ENCODINGS {
        let case = NormCase { encoding, ..NORM };
        for columns in [1, 2, 7, 8, 33, 128, 256, 1000, 2560, 3001, 5376, 8192, 16384, 20_001, 65536] {
            for fused in [false, true] {
                for (layout, place) in
                    [(PLAIN, PLACES[0]), (PITCHED, PLACES[1]), (PLAIN, PLACES[2]), (UNALIGNED, PLACES[3])]
                {
                    cases.push(NormCase { columns, fused, layout, place, ..case });
                }
                cases.push(NormCase { columns, fused, dtype: DType::F32, place: PLACES[columns % 4], ..case });
            }
        }
        for (rows, columns) in
            [(0, 64), (1, 64), (257, 64), (1000, 128), (300, 256), (200, 2048), (140, 9000), (7000, 4)]
        {
            cases.push(NormCase { rows, columns, ..case });
            cases.push(NormCase { rows, columns, fused: true, dtype: DType::F16, place: PLACES[3], ..case });
        }
        for magnitude in [0.0, 1e-30, 1e-12, 1e15] {
            cases.push(NormCase { magnitude, dtype: DType::F32, ..case });
        }
        for special in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for columns in [5, 640, 9000, 20_001] {
                cases.push(NormCase { special: Some(special), columns, ..case });
                cases.push(NormCase { special: Some(special), columns, fused: true, ..case });
            }
        }
    }
    check("rms_norm in 8 bits", &cases, test_norm);
}

#[derive(Debug, Clone, Copy)]
struct GatedCase {
    encoding: Encoding,
    rows: usize,
    columns: usize,
    dtype: DType,
    activation: Activation,
    layout: Layout,
    place: Place,
    in_place: bool,
    magnitude: f64,
    special: Option<f64>,
}

fn test_gated(run: &mut Run, case: &GatedCase) -> Outcome {
    let &GatedCase { encoding, rows, columns, dtype, layout, place, .. } = case;
    let shape = [rows, columns];
    let mut gates = rounded(dtype, &run.random.normals(rows * columns, case.magnitude));
    if let Some(special) = case.special {
        gates[columns / 2] = special;
    }
    let up = run.normal(dtype, &shape, layout, 1.0)?.0;
    let mut expected = None;
    for output in [Some(DType::F32), None, Some(dtype)] {
        let gate = run.tensor(dtype, &shape, layout, &gates)?;
        let over_gate = case.in_place && output == Some(dtype);
        if over_gate {
            run.allow_write(&gate);
        }
        let output = match output {
            Some(_) if over_gate => Some(gate),
            Some(dtype) => Some(run.output(dtype, &shape, layout)?),
            None => None,
        };
        let codes = rows_at(run, encoding, (rows, columns), place, None)?;
        let op = GatedActivation::new(gate, up, case.activation, output, Some(codes))?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        let codes = read(run, &codes)?;
        let expected = match (&expected, output) {
            (None, Some(output)) => &*expected.insert(quantized(encoding, columns, &floats(run, &output)?)),
            (expected, _) => expected.as_ref().expect("the f32 output is the first"),
        };
        expect_same(&format!("beside {output:?}"), encoding, columns, &codes, expected)?;
    }
    Ok(())
}

#[test]
fn gated_activation_in_8_bits() {
    let mut cases = Vec::new();
    for encoding in ENCODINGS {
        let case = GatedCase {
            encoding,
            rows: 5,
            columns: 192,
            dtype: DType::Bf16,
            activation: Activation::GeluTanh,
            layout: PLAIN,
            place: TIGHT,
            in_place: false,
            magnitude: 1.0,
            special: None,
        };
        for activation in ACTIVATIONS {
            for dtype in FLOATS {
                for (layout, place) in [(PLAIN, PLACES[1]), (PITCHED, PLACES[2]), (UNALIGNED, PLACES[3])] {
                    for in_place in [false, true] {
                        cases.push(GatedCase { activation, dtype, layout, place, in_place, ..case });
                    }
                }
            }
            for special in [f64::NAN, f64::INFINITY] {
                cases.push(GatedCase { activation, special: Some(special), ..case });
            }
        }
        for columns in [0, 1, 7, 33, 255, 256, 257, 4096, 15_360, 16_384, 16_385, 21_504] {
            cases.push(GatedCase { columns, ..case });
            cases.push(GatedCase { columns, rows: 2, place: PLACES[3], in_place: true, ..case });
        }
        // Longer than what a thread of the CPU executor keeps.
        cases.push(GatedCase { columns: 300_001, rows: 1, in_place: true, ..case });
        for (rows, magnitude) in [(0, 1.0), (1, 1.0), (300, 1.0), (2, 0.0), (2, 1e-20), (2, 1e10)] {
            cases.push(GatedCase { rows, magnitude, dtype: DType::F32, ..case });
        }
    }
    check("gated_activation in 8 bits", &cases, test_gated);
}

#[test]
fn what_is_no_matrix_of_codes_is_refused() {
    check("refused codes", &[()], |run, ()| {
        let (rows, columns) = (3, 32);
        let input = run.normal(DType::F32, &[rows, columns], PLAIN, 1.0)?.0;
        let good = rows_at(run, Encoding::Int8, (rows, columns), TIGHT, None)?;
        let call = |quantized_output: QuantizedRows| RmsNorm {
            input,
            post_weight: None,
            residual: None,
            residual_output: None,
            weight: None,
            output: None,
            quantized_output: Some(quantized_output),
            epsilon: 1e-6,
            weight_offset: 0.0,
        };
        let case = LinearCase {
            kind: Kind::Float(DType::F32),
            encoding: Encoding::Int8,
            m: rows,
            n: 4,
            k: columns,
            output: DType::F32,
            activation: Activation::None,
            gated: false,
            bias: false,
            place: TIGHT,
            special: false,
        };
        let weight = weight(run, &case)?;
        let output = run.output(DType::F32, &[rows, 4], PLAIN)?;
        let wrong: [(QuantizedRows, &[&str]); 8] = [
            (QuantizedRows { encoding: Encoding::Int4, ..good }, &["int4", "fp8 e4m3 or int8"]),
            (QuantizedRows { encoding: Encoding::Fp8E5m2, ..good }, &["fp8 e5m2"]),
            (QuantizedRows { encoding: Encoding::Float(DType::F32), ..good }, &["f32"]),
            (QuantizedRows { scales: std::ptr::null_mut(), ..good }, &["no scales"]),
            (QuantizedRows { data: std::ptr::null_mut(), ..good }, &["NULL data"]),
            (QuantizedRows { scales: good.scales.wrapping_byte_add(2), ..good }, &["not aligned to 4"]),
            (QuantizedRows { row_stride: columns - 1, ..good }, &["row stride of 31", "32 columns"]),
            (QuantizedRows { rows: rows + (1 << 31), ..good }, &["number of rows"]),
        ];
        for (wrong, words) in wrong {
            let invalid = Status::InvalidArgument;
            expect_error(call(wrong).validated(), invalid, words)?;
            expect_error(GatedActivation::new(input, input, Activation::Silu, None, Some(wrong)), invalid, words)?;
            expect_error(
                Linear::new(
                    LinearTensors { quantized_input: Some(wrong), output: Some(output), ..LinearTensors::default() },
                    weight.view(),
                    Activation::None,
                ),
                invalid,
                words,
            )?;
        }
        let narrow = QuantizedRows { columns: columns - 1, ..good };
        expect_error(call(narrow).validated(), Status::InvalidArgument, &["3 rows of 31", "32"])?;
        let gated = GatedActivation::new(input, input, Activation::Silu, None, Some(narrow));
        expect_error(gated, Status::InvalidArgument, &["3 rows of 31", "32"])?;
        let linear = Linear::new(
            LinearTensors { quantized_input: Some(narrow), output: Some(output), ..LinearTensors::default() },
            weight.view(),
            Activation::None,
        );
        expect_error(linear, Status::InvalidArgument, &["31 columns", "32"])?;
        let nothing = GatedActivation::new(input, input, Activation::Silu, None, None);
        expect_error(nothing, Status::InvalidArgument, &["quantized_output"])?;
        Ok::<(), Failure>(())
    });
}

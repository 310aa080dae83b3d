//! `embedding`: output[t] = table[tokens[t]] · scale.

use crate::compare::FLOATS;
use crate::run::{check, expect_error, Failure, Layout, Outcome, Run, PITCHED, PLAIN, UNALIGNED};
use nvbackend::error::Status;
use nvbackend::loading::{Source, Weight};
use nvbackend::operation::embedding::Embedding;
use nvbackend::operation::Operation;
use nvbackend::tensor::DType;
use nvbackend::weight::Arrangement;

#[derive(Debug, Clone, Copy)]
struct Case {
    tokens: usize,
    vocabulary: usize,
    width: usize,
    table: DType,
    output: DType,
    layout: Layout,
    scale: f32,
    magnitude: f64,
    /// A token that the table does not have, put in the middle.
    stray: Option<i32>,
}

const CASE: Case = Case {
    tokens: 9,
    vocabulary: 31,
    width: 64,
    table: DType::Bf16,
    output: DType::F32,
    layout: PLAIN,
    scale: 1.0,
    magnitude: 1.0,
    stray: None,
};

fn test(run: &mut Run, case: &Case) -> Outcome {
    let (table, values) = run.normal(case.table, &[case.vocabulary, case.width], case.layout, case.magnitude)?;
    let memory = run.device.backend.memory();
    let weight = Weight::new(memory, &[table], Arrangement::Stacked, Source::Borrowed, None, run.stream)?;
    let mut tokens: Vec<i32> = (0..case.tokens).map(|_| run.random.below(case.vocabulary) as i32).collect();
    let mut reference: Vec<f64> = tokens
        .iter()
        .flat_map(|&token| &values[token as usize * case.width..][..case.width])
        .map(|value| value * case.scale as f64)
        .collect();
    if let Some(stray) = case.stray {
        tokens[case.tokens / 2] = stray;
        reference[case.tokens / 2 * case.width..][..case.width].fill(0.0);
    }
    let tokens = run.integers(&tokens)?;
    let output = run.output(case.output, &[case.tokens, case.width], case.layout)?;
    let op = Embedding::new(tokens, weight.view(), case.scale, output)?;
    let result = run.executor().run(&Operation::from(op), run.stream.raw());
    if let (Some(stray), true) = (case.stray, run.device.is_cpu()) {
        return expect_error(result, Status::InvalidArgument, &[&stray.to_string(), &case.vocabulary.to_string()]);
    }
    result.map_err(Failure::from)?;
    run.expect("output", &output, &reference)
}

#[test]
fn embedding() {
    let mut cases = Vec::new();
    for table in FLOATS {
        for output in FLOATS {
            for layout in [PLAIN, UNALIGNED, PITCHED] {
                cases.push(Case { table, output, layout, ..CASE });
            }
            cases.push(Case { table, output, scale: 25.25, width: 640, tokens: 33, vocabulary: 500, ..CASE });
        }
    }
    for width in [1, 2, 3, 7, 8, 129, 1023, 5000] {
        cases.push(Case { width, scale: -0.5, ..CASE });
    }
    for tokens in [0, 1, 2, 300] {
        cases.push(Case { tokens, ..CASE });
    }
    cases.push(Case { vocabulary: 1, ..CASE });
    for magnitude in [1e-30, 1e30] {
        cases.push(Case { magnitude, ..CASE });
    }
    for stray in [-1, 31, i32::MAX, i32::MIN] {
        cases.push(Case { stray: Some(stray), ..CASE });
    }
    check("embedding", &cases, test);
}

/// Numbers of 32 bits in a table of F32, among them those that are signalling NaNs and numbers below the normal ones.
#[test]
fn rows_of_f32_keep_every_bit() {
    check("embedding", &[1usize, 3, 64], |run, &width| {
        let numbers: Vec<f64> =
            [0x7f80_0001, -0x007f_fffe, 1, -1, i32::MAX, i32::MIN, 0, 123_456_789].map(f64::from).into();
        let values: Vec<f64> = (0..numbers.len() * width).map(|at| numbers[at * 7 % numbers.len()]).collect();
        let table = run.tensor(DType::I32, &[numbers.len(), width], PITCHED, &values)?;
        let memory = run.device.backend.memory();
        let floats = nvbackend::tensor::Tensor { dtype: DType::F32, ..table };
        let weight = Weight::new(memory, &[floats], Arrangement::Stacked, Source::Borrowed, None, run.stream)?;
        let tokens = [5, 0, 0, 7, 1];
        let token_tensor = run.integers(&tokens)?;
        let output = run.output(DType::I32, &[tokens.len(), width], PLAIN)?;
        let written = nvbackend::tensor::Tensor { dtype: DType::F32, ..output };
        let op = Embedding::new(token_tensor, weight.view(), 1.0, written)?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        let wanted: Vec<i32> = tokens
            .iter()
            .flat_map(|&token| values[token as usize * width..][..width].iter().map(|&value| value as i32))
            .collect();
        run.expect_integers("output", &output, &wanted)
    });
}

/// Batches of numbers, whose rows may lie apart, each with rows of the table of its own.
#[test]
fn batches_have_parts_of_the_table() {
    let cases = [(1, 1, 5, 1, 1), (3, 8, 128, 8, 1), (3, 8, 128, 128, 1), (7, 2, 3, 5, 40), (2, 300, 9, 300, 64)];
    check("embedding in batches", &cases, |run, &(batches, each, vocabulary, stride, width)| {
        let (table, values) = run.normal(DType::F32, &[batches * vocabulary, width], PLAIN, 1.0)?;
        let memory = run.device.backend.memory();
        let weight = Weight::new(memory, &[table], Arrangement::Stacked, Source::Borrowed, None, run.stream)?;
        let numbers: Vec<f64> = (0..batches * each).map(|_| run.random.below(vocabulary) as f64).collect();
        let tokens =
            run.strided(DType::I32, &[batches, each], &[stride, 1], 0, batches * stride + each, Some(&numbers))?;
        let output = run.output(DType::F32, &[batches * each, width], PITCHED)?;
        let op = Embedding::new(tokens, weight.view(), 1.0, output)?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        let reference: Vec<f64> = numbers
            .iter()
            .enumerate()
            .flat_map(|(t, &number)| values[(t / each * vocabulary + number as usize) * width..][..width].to_vec())
            .collect();
        run.expect("output", &output, &reference)?;
        // A table that the batches do not divide.
        let odd = run.normal(DType::F32, &[batches * vocabulary + 1, width], PLAIN, 1.0)?.0;
        let odd = Weight::new(memory, &[odd], Arrangement::Stacked, Source::Borrowed, None, run.stream)?;
        match batches {
            1 => Ok(()),
            _ => expect_error(
                Embedding::new(tokens, odd.view(), 1.0, output),
                Status::InvalidArgument,
                &[&format!("{batches} batches"), &format!("{}", batches * vocabulary + 1)],
            ),
        }
    });
}

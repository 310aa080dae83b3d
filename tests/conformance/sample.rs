//! `sample`: temperature, then top-k, then top-p, then a draw by Philox4x32-10 from (seed, sequence, position).
//!
//! The reference sorts and sums in f64. Where a cumulative sum comes within `SLACK` of the number that decides, the
//! tokens on both sides are right.

use crate::compare::FLOATS;
use crate::run::{check, rounded, Failure, Layout, Outcome, Run, LAYOUTS, PLAIN, UNALIGNED};
use nvbackend::operation::sample::{Sample, SampleOptions};
use nvbackend::operation::Operation;
use nvbackend::tensor::DType;

/// What F32 sums may differ by.
const SLACK: f64 = 1e-5;

/// Salmon, Moraes, Dror and Shaw 2011: ten rounds.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let product = |multiplier: u32, word: u32| u64::from(multiplier) * u64::from(word);
        let (a, b) = (product(0xd251_1f53, counter[0]), product(0xcd9e_8d57, counter[2]));
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}

/// The published test vectors of the generator.
#[test]
fn the_reference_generator_is_philox() {
    assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    assert_eq!(philox([!0; 4], [!0; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
    assert_eq!(philox(pi, [0xa409_3822, 0x299f_31d0]), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
}

fn uniform(seed: u64, sequence: i32, position: i32) -> f64 {
    let word = philox([position as u32, sequence as u32, 0, 0], [seed as u32, (seed >> 32) as u32])[0];
    (word >> 8) as f64 / (1 << 24) as f64
}

/// A row's tokens in the order of the draw, and its probabilities after temperature.
struct Sorted {
    order: Vec<usize>,
    probabilities: Vec<f64>,
}

impl Sorted {
    fn new(logits: &[f64], temperature: f32) -> Sorted {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).expect("no NaN").then(a.cmp(&b)));
        let weight = |&logit: &f64| ((logit - logits[order[0]]) / temperature as f64).exp();
        let sum: f64 = logits.iter().map(weight).sum();
        Sorted { probabilities: logits.iter().map(|logit| weight(logit) / sum).collect(), order }
    }

    /// Whether `token` may be drawn with the number u.
    fn allows(&self, options: &SampleOptions, u: f64, token: i32) -> Result<(), String> {
        let k = if options.top_k == 0 { self.order.len() } else { self.order.len().min(options.top_k as usize) };
        let kept: f64 = self.order[..k].iter().map(|&token| self.probabilities[token]).sum();
        let mut sum = 0.0;
        let sums: Vec<f64> = self.order[..k]
            .iter()
            .map(|&token| {
                sum += self.probabilities[token] / kept;
                sum
            })
            .collect();
        let Some(rank) = self.order[..k].iter().position(|&candidate| candidate as i32 == token) else {
            return Err(format!("token {token} is not among the {k} that top-k keeps"));
        };
        let reaching = |p: f64| sums.iter().position(|&sum| sum >= p).map_or(k, |last| last + 1);
        let p = if options.top_p >= 1.0 { 2.0 } else { options.top_p as f64 };
        let counts = [reaching(p - SLACK), reaching(p), reaching(p + SLACK)];
        let (below, above) = (if rank == 0 { 0.0 } else { sums[rank - 1] }, sums[rank]);
        let fits = |&count: &usize| {
            let drawn = u * sums[count - 1];
            let last = rank + 1 == count && drawn >= above;
            rank < count && drawn >= below - SLACK && (drawn < above + SLACK || last)
        };
        if counts.iter().any(fits) {
            return Ok(());
        }
        Err(format!("token {token} of rank {rank} covers [{below}, {above}) of {counts:?} tokens' sums; u is {u}"))
    }
}

#[derive(Debug, Clone, Copy)]
struct Case {
    rows: usize,
    columns: usize,
    dtype: DType,
    layout: Layout,
    options: SampleOptions,
    /// Sequences and positions are given.
    counters: bool,
    magnitude: f64,
    /// Every other logit is −∞.
    masked: bool,
    /// Logits take few values.
    ties: bool,
}

const OPTIONS: SampleOptions = SampleOptions { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 0 };

const CASE: Case = Case {
    rows: 40,
    columns: 300,
    dtype: DType::F32,
    layout: PLAIN,
    options: OPTIONS,
    counters: true,
    magnitude: 3.0,
    masked: false,
    ties: false,
};

fn test(run: &mut Run, case: &Case) -> Outcome {
    let random = &mut run.random;
    let options = SampleOptions { seed: random.bits(), ..case.options };
    let mut logits = random.normals(case.rows * case.columns, case.magnitude);
    logits.iter_mut().enumerate().for_each(|(i, logit)| {
        if case.ties {
            *logit = logit.trunc();
        }
        if case.masked && i % case.columns % 2 == 1 {
            *logit = f64::NEG_INFINITY;
        }
    });
    let logits = rounded(case.dtype, &logits);
    let sequences: Vec<i32> = (0..case.rows).map(|_| random.bits() as i32).collect();
    let positions: Vec<i32> = (0..case.rows).map(|_| random.bits() as i32).collect();
    let tensor = run.tensor(case.dtype, &[case.rows, case.columns], case.layout, &logits)?;
    let (sequence_tensor, position_tensor) = (run.integers(&sequences)?, run.integers(&positions)?);
    let tokens = run.output(DType::I32, &[case.rows], PLAIN)?;
    let probabilities = run.output(DType::F32, &[case.rows], PLAIN)?;
    let given = |tensor| Some(tensor).filter(|_| case.counters);
    let op =
        Sample::new(tensor, options, given(sequence_tensor), given(position_tensor), tokens, given(probabilities))?;
    run.executor().run(&Operation::from(op), run.stream.raw())?;
    let tokens: Vec<i32> = run.read(&tokens)?.into_iter().map(|token| token as i32).collect();
    let mut expected = Vec::new();
    for (row, (logits, &token)) in logits.chunks(case.columns).zip(&tokens).enumerate() {
        if !(0..case.columns as i32).contains(&token) {
            return Err(format!("row {row}: token {token} of {}", case.columns).into());
        }
        let sorted = Sorted::new(logits, if options.temperature == 0.0 { 1.0 } else { options.temperature });
        if options.temperature == 0.0 {
            if sorted.order[0] as i32 != token {
                return Err(format!("row {row}: token {token}; the largest logit is at {}", sorted.order[0]).into());
            }
            continue;
        }
        let counter = if case.counters { (sequences[row], positions[row]) } else { (row as i32, 0) };
        let u = uniform(options.seed, counter.0, counter.1);
        sorted.allows(&options, u, token).map_err(|text| Failure::from(format!("row {row}: {text}")))?;
        expected.push(sorted.probabilities[token as usize]);
    }
    if case.counters && options.temperature != 0.0 {
        run.expect_within("probabilities", &probabilities, &expected, 1e-4)?;
    }
    Ok(())
}

#[test]
fn sample() {
    let mut cases = Vec::new();
    let limits = [
        (0, 1.0),
        (0, 0.9),
        (0, 0.5),
        (0, 1e-6),
        (1, 1.0),
        (1, 0.3),
        (5, 1.0),
        (40, 0.95),
        (64, 0.8),
        (100, 0.99),
        (1000, 0.7),
        (300, 1.0),
    ];
    for (top_k, top_p) in limits {
        for temperature in [0.0, 0.3, 1.0, 2.5] {
            let options = SampleOptions { top_k, top_p, temperature, ..OPTIONS };
            cases.push(Case { options, ..CASE });
            cases.push(Case { options, ties: true, ..CASE });
            cases.push(Case { options, masked: true, dtype: DType::Bf16, layout: UNALIGNED, ..CASE });
        }
    }
    for dtype in FLOATS {
        for layout in LAYOUTS {
            for counters in [true, false] {
                let options = SampleOptions { top_k: 50, top_p: 0.9, temperature: 0.8, ..OPTIONS };
                cases.push(Case { dtype, layout, counters, options, ..CASE });
                cases.push(Case { dtype, layout, counters, magnitude: 0.5, ..CASE });
            }
        }
    }
    for columns in [1, 2, 3, 31, 33, 127, 1025, 5000] {
        for (top_k, top_p) in [(0, 1.0), (0, 0.8), (20, 0.9), (64, 1.0)] {
            cases.push(Case { columns, options: SampleOptions { top_k, top_p, ..OPTIONS }, ..CASE });
        }
    }
    for (top_k, top_p) in [(0, 1.0), (0, 0.95), (64, 0.95), (1000, 0.9), (100_000, 1.0)] {
        for dtype in [DType::F32, DType::Bf16] {
            let options = SampleOptions { top_k, top_p, ..OPTIONS };
            cases.push(Case { rows: 3, columns: 32_000, dtype, options, ..CASE });
            cases.push(Case { rows: 2, columns: 262_144, dtype, options, magnitude: 2.0, ..CASE });
        }
    }
    for rows in [0, 1, 2, 500] {
        cases.push(Case { rows, columns: 50, ..CASE });
    }
    for magnitude in [0.0, 1e-20, 50.0, 1e4] {
        cases.push(Case { magnitude, ..CASE });
        cases.push(Case { magnitude, options: SampleOptions { top_p: 0.9, top_k: 30, ..OPTIONS }, ..CASE });
    }
    check("sample", &cases, test);
}

/// Frequencies over many positions follow the truncated distribution (chi-square, seven degrees of freedom at most:
/// a value above 45 has a probability below 2e-7).
#[test]
fn frequencies() {
    let cases =
        [(0, 1.0), (3, 1.0), (0, 0.8), (5, 0.7)].map(|(top_k, top_p)| SampleOptions { top_k, top_p, ..OPTIONS });
    check("sample frequencies", &cases, |run, options| {
        let (rows, columns) = (30_000, 8);
        let options = SampleOptions { seed: run.random.bits(), ..*options };
        let logits = rounded(DType::F32, &run.random.normals(columns, 1.0));
        let tensor = run.tensor(DType::F32, &[rows, columns], PLAIN, &logits.repeat(rows))?;
        let positions = run.integers(&(0..rows as i32).collect::<Vec<_>>())?;
        let sequences = run.integers(&vec![7; rows])?;
        let tokens = run.output(DType::I32, &[rows], PLAIN)?;
        let op = Sample::new(tensor, options, Some(sequences), Some(positions), tokens, None)?;
        run.executor().run(&Operation::from(op), run.stream.raw())?;
        let mut counts = vec![0.0; columns];
        run.read(&tokens)?.into_iter().for_each(|token| counts[token as usize] += 1.0);
        let sorted = Sorted::new(&logits, options.temperature);
        let k = if options.top_k == 0 { columns } else { options.top_k as usize };
        let total: f64 = sorted.order[..k].iter().map(|&token| sorted.probabilities[token]).sum();
        let (mut kept, mut sum) = (0, 0.0);
        while kept < k && sum < options.top_p as f64 - SLACK {
            sum += sorted.probabilities[sorted.order[kept]] / total;
            kept += 1;
        }
        let mut chi_square = 0.0;
        for (rank, &token) in sorted.order.iter().enumerate() {
            let expected = sorted.probabilities[token] / total / sum * rows as f64;
            if rank < kept {
                chi_square += (counts[token] - expected).powi(2) / expected;
            } else if counts[token] > 0.0 {
                return Err(format!("token {token} of rank {rank} was drawn; {kept} are kept").into());
            }
        }
        if chi_square < 45.0 {
            return Ok(());
        }
        Err(format!("chi-square is {chi_square}: {counts:?} of {:?}", sorted.probabilities).into())
    });
}

/// The draw depends on the row's logits, seed, sequence and position, and on nothing else in the batch.
#[test]
fn draws_do_not_depend_on_the_batch() {
    let cases =
        [(0, 1.0), (0, 0.9), (40, 0.95), (0, 0.99)].map(|(top_k, top_p)| SampleOptions { top_k, top_p, ..OPTIONS });
    check("sample in batches", &cases, |run, options| {
        let (rows, columns) = (9, 4000);
        let options = SampleOptions { seed: run.random.bits(), ..*options };
        let logits = run.random.normals(rows * columns, 1.0);
        let mut draw = |order: &[usize]| -> Result<Vec<i32>, Failure> {
            let values: Vec<f64> = order.iter().flat_map(|&row| logits[row * columns..][..columns].to_vec()).collect();
            let numbers = |scale: i32| order.iter().map(|&row| row as i32 * scale).collect::<Vec<_>>();
            let tensor = run.tensor(DType::F32, &[order.len(), columns], PLAIN, &values)?;
            let (sequences, positions) = (run.integers(&numbers(3))?, run.integers(&numbers(17))?);
            let tokens = run.output(DType::I32, &[order.len()], PLAIN)?;
            let op = Sample::new(tensor, options, Some(sequences), Some(positions), tokens, None)?;
            run.executor().run(&Operation::from(op), run.stream.raw())?;
            Ok(run.read(&tokens)?.into_iter().map(|token| token as i32).collect())
        };
        let together = draw(&[0, 1, 2, 3, 4, 5, 6, 7, 8])?;
        let reversed = draw(&[8, 7, 6, 5, 4, 3, 2, 1, 0])?;
        let mut alone = Vec::new();
        for row in 0..rows {
            alone.extend(draw(&[row])?);
        }
        if together == alone && reversed.iter().rev().eq(&alone) {
            return Ok(());
        }
        Err(format!("{together:?} together, {reversed:?} reversed, {alone:?} alone").into())
    });
}

//! `grouped_linear` of rows that name their experts: few, which a GPU computes one by one, and many in 16 bits, which it sorts.

use crate::activation::activate;
use crate::block_weights::{code, create, part, Handle};
use crate::compare::{bound, encode};
use crate::run::{c_tensor, check, rounded, Layout, Outcome, Run, PITCHED, PLAIN, UNALIGNED};
use crate::weight_formats::blocks;
use nvbackend::capi::operations::*;
use nvbackend::capi::products::*;
use nvbackend::capi::structs::init;
use nvbackend::capi::weight::*;
use nvbackend::graph::Graph;
use nvbackend::loading::{PartRows, Source, Weight};
use nvbackend::operation::grouped_linear::{GroupedLinear, Routing};
use nvbackend::operation::{Activation, Operation};
use nvbackend::stream::Stream;
use nvbackend::tensor::{DType, Tensor};
use nvbackend::weight::{Arrangement, BlockFormat};
use std::sync::Arc;

#[derive(Debug, Clone, Copy)]
enum Kind {
    Blocks(BlockFormat),
    /// Floats of the input's dtype.
    Floats,
    /// An `NVB_WEIGHT_FORMAT_…` of scales.
    Scaled(u32),
}

#[derive(Debug, Clone, Copy)]
struct Case {
    kind: Kind,
    tokens: usize,
    used: usize,
    experts: usize,
    /// Columns of the output, and elements of a row of the weight.
    n: usize,
    k: usize,
    input: DType,
    output: DType,
    /// A row of the input serves all experts of its token.
    shared: bool,
    gated: bool,
    bias: bool,
    layout: Layout,
}

/// The weight, and its values as the library reads them back.
fn weight_of(run: &mut Run, case: &Case) -> nvbackend::error::Result<(Handle, Vec<f64>)> {
    let &Case { kind, experts, n, k, gated, .. } = case;
    let (rows, parts) = (experts * n, 1 + usize::from(gated));
    let weight = match kind {
        Kind::Blocks(format) => {
            let data: Vec<Vec<u8>> = (0..parts).map(|_| blocks(run, format, rows, k)).collect();
            let given: Vec<_> = data.iter().map(|data| part(data.as_ptr().cast(), data.len(), rows, k, 0)).collect();
            create(run, &given, |desc| (desc.source_format, desc.arrangement) = (code(format), u32::from(gated)))?
        }
        Kind::Floats | Kind::Scaled(_) => {
            let (dtype, format) = match kind {
                Kind::Scaled(format) => (DType::F32, format),
                _ => (case.input, NVB_WEIGHT_FORMAT_AS_IS),
            };
            let mut data: Vec<Vec<u8>> =
                (0..parts).map(|_| encode(dtype, &run.random.normals(rows * k, 1.0 / (k as f64).sqrt()))).collect();
            let tensor = |data: &mut Vec<u8>| c_tensor(&Tensor::new(data.as_mut_ptr().cast(), dtype, &[rows, k]));
            let given: Vec<_> = data.iter_mut().map(tensor).collect();
            create(run, &[], |desc| {
                (desc.blocks, desc.parts, desc.part_count) = (std::ptr::null(), given.as_ptr(), given.len());
                (desc.format, desc.arrangement) = (format, u32::from(gated));
            })?
        }
    };
    let all = run.output(DType::F32, &[parts * rows, k], PLAIN)?;
    let c_all = c_tensor(&all);
    // SAFETY: a live weight, and a tensor of its size.
    run.call(|_, stream| unsafe { nvb_weight_dequantize(weight.0, &c_all, stream) })?;
    let values = run.read(&all)?;
    Ok((weight, values))
}

/// Experts of each token, none of them the last one. On a GPU some rows have numbers that are no expert's, which the CPU refuses.
fn numbers_of(run: &mut Run, case: &Case) -> Vec<f64> {
    let mut numbers = Vec::new();
    let named = (case.experts - 1).max(1);
    for _ in 0..case.tokens {
        let order = run.random.permutation(named);
        numbers.extend((0..case.used).map(|i| order[i % named] as f64));
    }
    if !run.device.is_cpu() {
        for row in (0..numbers.len()).skip(1).step_by(7) {
            numbers[row] = [-1.0, case.experts as f64, f64::from(i32::MIN), f64::from(i32::MAX)][row % 4];
        }
    }
    numbers
}

fn test(run: &mut Run, case: &Case) -> Outcome {
    let &Case { tokens, used, experts, n, k, gated, layout, .. } = case;
    let (rows, parts) = (tokens * used, 1 + usize::from(gated));
    let (weight, w) = weight_of(run, case)?;
    let numbers = numbers_of(run, case);
    let stride = used + 3;
    let ids = run.strided(DType::I32, &[tokens, used], &[stride, 1], 0, tokens * stride, Some(&numbers))?;
    let (input, x) = run.normal(case.input, &[if case.shared { tokens } else { rows }, k], layout, 1.0)?;
    let bias = match case.bias {
        true => Some(run.normal(DType::F32, &[parts * experts * n], PLAIN, 1.0)?),
        false => None,
    };
    let output = run.output(case.output, &[rows, n], layout)?;
    let mut args: nvb_grouped_linear_args = init();
    (args.input, args.weight, args.output) = (c_tensor(&input), weight.0, c_tensor(&output));
    (args.expert_ids, args.experts) = (c_tensor(&ids), experts as u32);
    if let Some((bias, _)) = &bias {
        args.bias = c_tensor(bias);
    }
    let activation = if gated { Activation::Silu } else { Activation::None };
    args.activation = if gated { NVB_ACTIVATION_SILU } else { NVB_ACTIVATION_NONE };
    // SAFETY: a struct with its size set, and tensors of the case's device.
    run.call(|backend, stream| unsafe { nvb_grouped_linear(backend, &args, stream) })?;

    // A row without an expert is as poisoned as it was.
    let expected = |w: &[f64]| {
        let (mut reference, mut inputs, mut terms) = (Vec::new(), Vec::new(), Vec::new());
        for (row, &expert) in numbers.iter().enumerate() {
            if !(0.0..experts as f64).contains(&expert) {
                reference.extend(std::iter::repeat_n(f64::NAN, n));
                inputs.extend(std::iter::repeat_n(0.0, n));
                terms.extend(std::iter::repeat_n(0.0, n));
                continue;
            }
            let x = &x[if case.shared { row / used } else { row } * k..][..k];
            for column in 0..n {
                let line = (expert as usize * n + column) * parts;
                let sum = |line: usize| {
                    let products = x.iter().zip(&w[line * k..][..k]).map(|(x, w)| x * w);
                    products.sum::<f64>() + bias.as_ref().map_or(0.0, |(_, bias)| bias[line])
                };
                let (gate, up) = (sum(line), if gated { sum(line + 1) } else { 1.0 });
                reference.push(activate(activation, gate) * up);
                inputs.push(gate * up);
                terms.push(4.0 * x.iter().zip(&w[line * k..][..k]).map(|(x, w)| (x * w).abs()).sum::<f64>());
            }
        }
        (reference, inputs, terms)
    };
    let (reference, inputs, terms) = expected(&w);
    // A GPU may have rounded blocks to the input's dtype.
    if matches!(case.kind, Kind::Blocks(_)) && case.input != DType::F32 && rows >= 32 && !run.device.is_cpu() {
        let bound = bound(case.input).max(bound(case.output));
        return run
            .expect_within("output", &output, &reference, bound)
            .or_else(|_| run.expect_within("output", &output, &expected(&rounded(case.input, &w)).0, bound));
    }
    match gated {
        true => run.expect_activated("output", &output, &reference, &inputs),
        false => run.expect_summed("output", &output, &reference, &terms),
    }
}

const FEW: Case = Case {
    kind: Kind::Floats,
    tokens: 3,
    used: 2,
    experts: 5,
    n: 21,
    k: 256,
    input: DType::F32,
    output: DType::F32,
    shared: true,
    gated: false,
    bias: false,
    layout: PLAIN,
};

/// Gate and up of experts are two products of one input, which a recorded list runs in one grid where they are alike.
#[test]
fn two_products_of_a_list() {
    let mut cases = Vec::new();
    for format in [BlockFormat::Q4K, BlockFormat::Q6K, BlockFormat::Q4_0] {
        let shapes = [(1, 8, 768, 2048), (1, 1, 16, 256), (2, 3, 40, 512), (5, 4, 21, 256), (3, 8, 17, 768)];
        for (tokens, used, n, k) in shapes {
            cases.push((format, Case { tokens, used, experts: 12, n, k, shared: tokens != 5, ..FEW }));
        }
        cases.push((format, Case { input: DType::Bf16, output: DType::Bf16, ..FEW }));
        // Many rows are sorted, for which no kernel takes two products.
        cases.push((format, Case { tokens: 20, used: 4, input: DType::Bf16, ..FEW }));
    }
    check("two products of experts in a recorded list", &cases, |run, &(format, ref case)| {
        let &Case { tokens, used, experts, n, k, .. } = case;
        let (rows, memory) = (tokens * used, run.device.backend.memory().clone());
        let mut weights = Vec::new();
        for _ in 0..2 {
            let data = blocks(run, format, experts * n, k);
            let row_bytes = data.len() / (experts * n);
            let part = PartRows { data: data.as_ptr(), rows: experts * n, row_bytes, pitch: row_bytes };
            let stacked = Arrangement::Stacked;
            weights.push(Weight::from_blocks(&memory, format, k, &[part], stacked, Source::Host, run.stream)?);
        }
        let numbers = numbers_of(run, case);
        let ids = run.strided(DType::I32, &[tokens, used], &[used, 1], 0, rows, Some(&numbers))?;
        let (input, _) = run.normal(case.input, &[if case.shared { tokens } else { rows }, k], PLAIN, 1.0)?;
        let mut products = Vec::new();
        for _ in ["recorded", "called"] {
            for weight in &weights {
                let output = run.output(case.output, &[rows, n], PLAIN)?;
                let routing = (Routing::Ids(ids), experts);
                let op = GroupedLinear::new(input, routing, weight.view(), None, Activation::None, output)?;
                products.push((Operation::from(op), output));
            }
        }
        run.stream.synchronize()?;
        let backend = &run.device.backend;
        let stream = Arc::new(Stream::new(backend.executor(), 0)?);
        let graph = Graph::new(backend.executor(), backend.memory());
        graph.begin(&stream)?;
        products[..2].iter().try_for_each(|(op, _)| backend.queue(op.clone(), &stream))?;
        graph.end(&stream)?;
        graph.launch(&stream)?;
        products[2..].iter().try_for_each(|(op, _)| backend.queue(op.clone(), &stream))?;
        stream.synchronize()?;
        // They may divide k otherwise. Rows without an expert are as poisoned as they were.
        for i in 0..2 {
            let (launched, called) = (run.read(&products[i].1)?, run.read(&products[2 + i].1)?);
            let largest = called.iter().filter(|x| x.is_finite()).fold(0.0, |most: f64, x| most.max(x.abs()));
            let allowed = largest * bound(case.output).max(1e-5);
            for (at, (a, b)) in launched.iter().zip(&called).enumerate() {
                if a.is_nan() != b.is_nan() || (a - b).abs() > allowed {
                    return Err(format!("product {i}, element {at}: {a} in the list, {b} by a call").into());
                }
            }
        }
        Ok(())
    });
}

#[test]
fn few_rows_of_blocks() {
    let mut cases = Vec::new();
    for (i, &format) in BlockFormat::ALL.iter().enumerate() {
        let small = format.elements() == 32;
        for (j, k) in [256, 512, 2048, 96, 768].into_iter().enumerate().filter(|&(_, k)| small || k != 96) {
            let input = [DType::F32, DType::F32, DType::F16, DType::Bf16][(i + j) % 4];
            let case = Case {
                kind: Kind::Blocks(format),
                k,
                n: [21, 48, 33, 7, 16][(i + j) % 5],
                tokens: [1, 3, 2][(i + j) % 3],
                used: [4, 1, 2][j % 3],
                input,
                output: [DType::F32, input][i % 2],
                shared: j % 2 == 0,
                bias: (i + j) % 3 == 1,
                layout: [PLAIN, PITCHED, UNALIGNED][(i + 2 * j) % 3],
                ..FEW
            };
            cases.extend([case, Case { gated: true, bias: !case.bias, ..case }]);
        }
        // More rows than a GPU has blocks for at a time.
        cases.push(Case { kind: Kind::Blocks(format), tokens: 50, used: 3, n: 50, layout: PITCHED, ..FEW });
    }
    check("grouped_linear, few rows by number", &cases, test);
}

/// An infinite element spoils the sums of its own token alone, and these are what its products have: of two rows, and of as many
/// in 16 bits as a GPU multiplies in the order of their experts.
#[test]
fn infinite_inputs() {
    let cases = BlockFormat::ALL.iter().flat_map(|&format| {
        let few = Case { kind: Kind::Blocks(format), tokens: 2, used: 2, experts: 3, ..FEW };
        [few, Case { tokens: 40, n: 24, k: 2048, input: DType::Bf16, ..few }]
    });
    check("grouped_linear by number, infinite inputs", &cases.collect::<Vec<_>>(), |run, &case| {
        let (weight, w) = weight_of(run, &case)?;
        let (tokens, used, k) = (case.tokens, case.used, case.k);
        let mut x = rounded(case.input, &run.random.normals(tokens * k, 1.0));
        x[7] = f64::INFINITY;
        let input = run.tensor(case.input, &[tokens, k], PLAIN, &x)?;
        let numbers: Vec<f64> = (0..tokens * used).map(|row| [2.0, 0.0, 1.0, 2.0][row % 4]).collect();
        let ids = run.strided(DType::I32, &[tokens, used], &[used, 1], 0, tokens * used, Some(&numbers))?;
        let output = run.output(DType::F32, &[tokens * used, case.n], PLAIN)?;
        let mut args: nvb_grouped_linear_args = init();
        (args.input, args.weight, args.output) = (c_tensor(&input), weight.0, c_tensor(&output));
        (args.expert_ids, args.experts) = (c_tensor(&ids), case.experts as u32);
        // SAFETY: a struct with its size set, and tensors of the case's device.
        run.call(|backend, stream| unsafe { nvb_grouped_linear(backend, &args, stream) })?;
        let (mut reference, mut terms) = (Vec::new(), Vec::new());
        for (row, &expert) in numbers.iter().enumerate() {
            for column in 0..case.n {
                let line = &w[(expert as usize * case.n + column) * k..][..k];
                let products: Vec<f64> = x[row / used * k..][..k].iter().zip(line).map(|(x, w)| x * w).collect();
                reference.push(products.iter().sum());
                terms.push(match row / used {
                    0 => 0.0,
                    _ => 4.0 * products.iter().map(|term| term.abs()).sum::<f64>(),
                });
            }
        }
        match case.input {
            DType::F32 => run.expect_summed("output", &output, &reference, &terms),
            input => run.expect_within("output", &output, &reference, bound(input)),
        }
    });
}

/// As many rows of an expert, on the average, as a GPU multiplies by blocks as they lie, in the order of the experts: fewer than
/// a tile of tokens has, as many and more, experts without a row, and rows of blocks that begin at multiples of 16 bytes or not.
#[test]
fn many_rows_of_blocks() {
    use BlockFormat::{Iq4Xs, Q2K, Q3K, Q4K, Q5K, Q6K};
    let mut cases = Vec::new();
    for (i, format) in [Q2K, Q3K, Q4K, Q5K, Q6K, Iq4Xs].into_iter().enumerate() {
        let shapes = [(64, 1, 40, 2048), (130, 4, 8, 256), (90, 2, 3, 2048), (40, 8, 100, 512), (33, 2, 1, 4096)];
        for (j, (tokens, used, experts, k)) in shapes.into_iter().enumerate() {
            let input = [DType::Bf16, DType::F16][(i + j) % 2];
            cases.push(Case {
                kind: Kind::Blocks(format),
                tokens,
                used,
                experts,
                n: [8, 104, 40, 24, 200][(i + j) % 5],
                k,
                input,
                output: [DType::F32, input][(i / 2 + j) % 2],
                shared: (i + j) % 3 != 0,
                gated: (i + j) % 4 == 1,
                bias: (i + j) % 2 == 0,
                layout: [PLAIN, PITCHED, UNALIGNED][(i + j) % 3],
            });
        }
    }
    check("grouped_linear, many rows of blocks by number", &cases, test);
}

#[test]
fn many_rows() {
    let kinds = [
        (Kind::Blocks(BlockFormat::Q4K), 48, 256),
        (Kind::Blocks(BlockFormat::Q6K), 36, 512),
        (Kind::Blocks(BlockFormat::Q4_0), 48, 96),
        (Kind::Blocks(BlockFormat::Mxfp4), 40, 64),
        (Kind::Blocks(BlockFormat::Q8_0), 21, 128),
        (Kind::Scaled(NVB_WEIGHT_FORMAT_INT8), 48, 128),
        (Kind::Scaled(NVB_WEIGHT_FORMAT_INT4), 48, 128),
        (Kind::Scaled(NVB_WEIGHT_FORMAT_INT4), 33, 72),
        (Kind::Scaled(NVB_WEIGHT_FORMAT_FP8_E4M3), 40, 192),
        (Kind::Floats, 40, 128),
        (Kind::Floats, 36, 104),
        (Kind::Floats, 21, 33),
    ];
    let mut cases = Vec::new();
    for (i, (kind, n, k)) in kinds.into_iter().enumerate() {
        // Of many rows each, of a few, and of so many that a warp that sorts goes through its part in several steps.
        for (j, (tokens, used, experts)) in [(300, 4, 8), (40, 1, 9), (2100, 2, 3)].into_iter().enumerate() {
            if j == 2 && i % 4 != 0 {
                continue;
            }
            let input = [DType::Bf16, DType::F16][(i + j) % 2];
            cases.push(Case {
                kind,
                tokens,
                used,
                experts,
                n,
                k,
                input,
                output: [DType::F32, input][(i / 2 + j) % 2],
                shared: (i + j) % 3 != 0,
                gated: (i + j) % 4 == 1 && n % 2 == 0,
                bias: (i + j) % 2 == 0,
                layout: [PLAIN, PITCHED, UNALIGNED][(i + j) % 3],
            });
        }
    }
    // As many experts as are sorted by, of which most have no row, and one more.
    for experts in [1024, 1025] {
        let (kind, n, k, input) = (Kind::Floats, 8, 64, DType::Bf16);
        cases.push(Case { kind, tokens: 150, used: 8, experts, n, k, input, ..FEW });
    }
    check("grouped_linear, many rows by number", &cases, test);
}

/// Experts that become floats in more than one part.
#[test]
fn experts_in_slices() {
    let case = Case {
        kind: Kind::Blocks(BlockFormat::Q4_0),
        tokens: 17,
        used: 2,
        experts: 4,
        n: 4104,
        k: 4352,
        input: DType::Bf16,
        ..FEW
    };
    check("grouped_linear, experts in slices", &[case], |run, case| {
        let &Case { tokens, used, experts, n, k, .. } = case;
        // A few rows again and again, so that each product is computed once; experts begin with different ones.
        let (period, rows, format) = (61, experts * n, BlockFormat::Q4_0);
        let some = blocks(run, format, period, k);
        let row_bytes = some.len() / period;
        let data: Vec<u8> = (0..rows).flat_map(|row| some[row % period * row_bytes..][..row_bytes].to_vec()).collect();
        let given = part(data.as_ptr().cast(), data.len(), rows, k, 0);
        let weight = create(run, &[given], |desc| desc.source_format = code(format))?;
        let w = crate::block_weights::values_of(format, &some, k);
        let (input, x) = run.normal(case.input, &[tokens, k], PLAIN, 1.0)?;
        let numbers: Vec<f64> = (0..tokens * used).map(|row| ((row + row / used) % experts) as f64).collect();
        let ids = run.strided(DType::I32, &[tokens, used], &[used, 1], 0, tokens * used, Some(&numbers))?;
        let output = run.output(DType::F32, &[tokens * used, n], PLAIN)?;
        let mut args: nvb_grouped_linear_args = init();
        (args.input, args.weight, args.output) = (c_tensor(&input), weight.0, c_tensor(&output));
        (args.expert_ids, args.experts) = (c_tensor(&ids), experts as u32);
        // SAFETY: a struct with its size set, and tensors of the case's device.
        run.call(|backend, stream| unsafe { nvb_grouped_linear(backend, &args, stream) })?;
        let w = if run.device.is_cpu() { w } else { rounded(case.input, &w) };
        let sums: Vec<f64> = (0..tokens * period)
            .map(|i| x[i / period * k..][..k].iter().zip(&w[i % period * k..][..k]).map(|(x, w)| x * w).sum())
            .collect();
        let of = |row: usize, column: usize| sums[row / used * period + (numbers[row] as usize * n + column) % period];
        let reference: Vec<f64> = (0..tokens * used * n).map(|i| of(i / n, i % n)).collect();
        run.expect_within("output", &output, &reference, bound(case.input))
    });
}

use super::super::linear::{linear, linear_in_columns, most_task_columns, reference};
use super::super::testing::{assert_close, at_every_level, threads, Buffer};
use super::super::testing_quantized::{Format, Quantized, FORMATS};
use super::*;
use crate::operation::Activation;
use crate::tensor::Tensor;

#[test]
fn every_format_and_shape_matches_the_reference() {
    let shapes = [
        (1, 1, 1),
        (1, 6, 33),
        (2, 34, 17),
        (3, 64, 100),
        (4, 20, 1100),
        (7, 66, 129),
        (13, 38, 2100),
        (40, 70, 160),
        (130, 36, 40),
        (3, 6, 16_500),
        // Tasks as wide as they come, of rows whose columns are unpacked several at once.
        (40, 9000, 36),
    ];
    at_every_level(|level| {
        for (f, format) in FORMATS.into_iter().enumerate() {
            for (i, (rows, columns, k)) in shapes.into_iter().enumerate() {
                let dtype = DType::FLOATS[(i + f) % 3];
                let gated = i % 2 == 1;
                let mut weight = Quantized::new(format, columns, k, gated);
                if i % 3 == 2 {
                    weight = weight.reordered();
                }
                let stride = k + 3;
                let mut x = Buffer::random(dtype, rows * stride, 1);
                let mut bias = Buffer::random(DType::Bf16, columns, 3);
                let x = Tensor::new(x.tensor(&[rows * stride]).data, dtype, &[rows, k]).with_strides(&[stride, 1]);
                let width = weight.view.output_columns();
                let activation = [Activation::None, Activation::GeluTanh, Activation::Silu][i % 3];
                let mut op = |y: &mut Buffer| {
                    let bias = Some(bias.tensor(&[columns]));
                    LinearProduct::new(x, weight.view, bias, activation, y.tensor(&[rows, width])).unwrap()
                };
                let mut y = Buffer::poisoned(DType::FLOATS[i % 3], rows * width);
                let mut expected = Buffer::poisoned(DType::F32, rows * width);
                linear(threads(), &op(&mut y));
                reference(&op(&mut expected));
                assert_close(&y, &expected, &format!("{level:?} {format:?} [{rows}, {k}] {dtype} x [{columns}, {k}]"));
            }
        }
    });
}

#[test]
fn a_row_does_not_depend_on_the_rows_beside_it_nor_on_the_threads() {
    let (rows, columns, k) = (103, 70, 2090);
    let mut x = Buffer::random(DType::F32, rows * k, 1);
    let x = x.tensor(&[rows, k]);
    at_every_level(|level| {
        for format in FORMATS {
            let weight = Quantized::new(format, columns, k, false);
            let run = |threads: &Threads, first: usize, count: usize| {
                let mut y = Buffer::poisoned(DType::F32, count * columns);
                let mut x = x;
                x.data = x.data.cast::<f32>().wrapping_add(first * k).cast();
                x.shape[0] = count;
                let y_tensor = y.tensor(&[count, columns]);
                linear(threads, &LinearProduct::new(x, weight.view, None, Activation::None, y_tensor).unwrap());
                y.values()
            };
            let all = run(threads(), 0, rows);
            assert!(all == run(&Threads::new(1).unwrap(), 0, rows), "{level:?} {format:?}");
            for (first, count) in [(0, 1), (102, 1), (5, 4), (7, 20), (30, 49)] {
                let part = &all[first * columns..(first + count) * columns];
                assert!(part == run(threads(), first, count), "{level:?} {format:?} rows {first} + {count}");
            }
        }
    });
}

#[test]
fn nan_and_infinity_go_through() {
    let (rows, columns, k) = (5, 8, 300);
    at_every_level(|level| {
        for format in FORMATS {
            let weight = Quantized::new(format, columns, k, false);
            let mut values = Buffer::random(DType::F32, rows * k, 1).values();
            (values[17], values[k + 299], values[3 * k + 40]) = (f32::INFINITY, f32::NEG_INFINITY, f32::NAN);
            for rows in [1, rows] {
                let mut x = Buffer::from(DType::F32, &values[..rows * k]);
                let mut op = |y: &mut Buffer| {
                    let (x, y) = (x.tensor(&[rows, k]), y.tensor(&[rows, columns]));
                    LinearProduct::new(x, weight.view, None, Activation::None, y).unwrap()
                };
                let mut y = Buffer::poisoned(DType::F32, rows * columns);
                let mut expected = Buffer::from(DType::F32, &vec![0.0; rows * columns]);
                linear(threads(), &op(&mut y));
                reference(&op(&mut expected));
                assert_close(&y, &expected, &format!("{level:?} {format:?} {rows} rows"));
            }
        }
    });
}

#[test]
fn every_code_of_8_bit_floats_has_its_value() {
    at_every_level(|level| {
        for encoding in [Encoding::Fp8E4m3, Encoding::Fp8E5m2, Encoding::Sfp] {
            let mut weight = Quantized::new(Format { encoding, size: 0, zero_points: false }, 256, 1, false);
            (0..256).for_each(|i| weight.quantized[i * 6] = i as u8);
            let mut x = Buffer::from(DType::F32, &[1.0]);
            let mut y = Buffer::poisoned(DType::F32, 256);
            let mut expected = Buffer::from(DType::F32, &[0.0; 256]);
            let mut op = |y: &mut Buffer| {
                LinearProduct::new(x.tensor(&[1, 1]), weight.view, None, Activation::None, y.tensor(&[1, 256])).unwrap()
            };
            linear(threads(), &op(&mut y));
            reference(&op(&mut expected));
            assert_close(&y, &expected, &format!("{level:?} {encoding}"));
        }
    });
}

#[test]
fn the_width_of_tasks_changes_no_bit() {
    // 48 rows of Int4 make one task, whose columns are more than are unpacked at once.
    let (columns, k) = (600, 1100);
    at_every_level(|level| {
        for (format, rows) in FORMATS.into_iter().flat_map(|format| [(format, 3), (format, 48)]) {
            let weight = Quantized::new(format, columns, k, false);
            let mut x = Buffer::random(DType::Bf16, rows * k, 1);
            let x = x.tensor(&[rows, k]);
            let run = |task_columns: usize| {
                let mut y = Buffer::poisoned(DType::F32, rows * columns);
                let op =
                    LinearProduct::new(x, weight.view, None, Activation::None, y.tensor(&[rows, columns])).unwrap();
                linear_in_columns(threads(), &op, task_columns);
                (y.values(), most_task_columns(&op))
            };
            let (suggested, most) = run(0);
            for task_columns in [16, 64, 256, 512].into_iter().filter(|&task_columns| task_columns <= most) {
                assert!(run(task_columns).0 == suggested, "{level:?} {format:?} {rows} rows, {task_columns} columns");
            }
        }
    });
}

//! Means over a row, of which no f32 collects so many terms that its roundings add up.

use super::row::{vectors, Row};
use crate::simd::Simd;

/// Additions to one sum in f32 before it joins the others in f64. Each may round by 2⁻²⁴ of the sum, and where the terms are
/// alike they all round to the same side: the error grows with their number, not with its root. One sum over the 65,536
/// elements of a row got the norm of a row of 0.9 wrong by 8e-5 (at four lanes), and the mean of a row around 30 by as much
/// as its standard deviation of 1e-3. 32 additions are off by 1e-6 at most.
pub const ADDITIONS: usize = 32;

/// Vectors are added to as many sums in turn, since an addition waits for the one before it.
const SUMS: usize = 4;

/// The mean of the elements.
///
/// # Safety
/// The CPU has `S`; the row is readable.
#[inline(always)]
pub unsafe fn mean<S: Simd>(row: Row, columns: usize) -> f32 {
    mean_of::<S, false>(row, columns, 0.0)
}

/// The mean of (x − centre)².
///
/// # Safety
/// The CPU has `S`; the row is readable.
#[inline(always)]
pub unsafe fn mean_square<S: Simd>(row: Row, columns: usize, centre: f32) -> f32 {
    mean_of::<S, true>(row, columns, centre)
}

#[inline(always)]
unsafe fn mean_of<S: Simd, const SQUARES: bool>(row: Row, columns: usize, centre: f32) -> f32 {
    let centre = S::splat(centre);
    let (mut first, mut total) = (0, 0.0f64);
    loop {
        let count = (columns - first).min(SUMS * ADDITIONS * S::LANES);
        let sum = sum_of_block::<S, SQUARES>(row.skip(first), count, centre);
        if count == columns {
            // On a short row the way through f64 would show in the time.
            return sum / columns as f32;
        }
        total += f64::from(sum);
        first += count;
        if first == columns {
            return (total / columns as f64) as f32;
        }
    }
}

#[inline(always)]
unsafe fn sum_of_block<S: Simd, const SQUARES: bool>(row: Row, count: usize, centre: S::Vector) -> f32 {
    let mut sums = [S::zero(); SUMS];
    let step = SUMS * S::LANES;
    let whole = count / step * step;
    for at in (0..whole).step_by(step) {
        for (i, sum) in sums.iter_mut().enumerate() {
            let value = S::sub(row.load::<S>(at + i * S::LANES, S::LANES), centre);
            *sum = added::<S, SQUARES>(*sum, value);
        }
    }
    for (at, lanes) in vectors::<S>(count - whole) {
        let value = S::first(lanes, S::sub(row.load::<S>(whole + at, lanes), centre), S::zero());
        sums[0] = added::<S, SQUARES>(sums[0], value);
    }
    S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])))
}

#[inline(always)]
unsafe fn added<S: Simd, const SQUARES: bool>(sum: S::Vector, value: S::Vector) -> S::Vector {
    if SQUARES {
        S::fma(value, value, sum)
    } else {
        S::add(sum, value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::at_every_level;
    use crate::simd::Kernel;
    use crate::tensor::DType;

    /// A row's mean and the mean of its squares.
    struct Means(Row, usize);

    impl Kernel for Means {
        type Output = (f32, f32);
        #[inline(always)]
        unsafe fn run<S: Simd>(self) -> (f32, f32) {
            (mean::<S>(self.0, self.1), mean_square::<S>(self.0, self.1, 0.0))
        }
    }

    /// Elements that are alike, of which every addition to one sum would round to the same side.
    #[test]
    fn long_rows_of_one_value_have_its_mean_and_its_square() {
        at_every_level(|level| {
            for columns in [1, 3, 8192, 65_535, 65_536] {
                let mut values = vec![0.9f32; columns];
                let row = Row::raw(values.as_mut_ptr().cast(), DType::F32);
                // SAFETY: the row has as many elements, and the CPU has the level.
                let (mean, square) = unsafe { level.run(Means(row, columns)) };
                let value = f64::from(0.9f32);
                let error = |found: f32, expected: f64| (f64::from(found) - expected).abs() / expected;
                assert!(error(mean, value) < 2e-6, "{columns}: mean {mean}");
                assert!(error(square, value * value) < 2e-6, "{columns}: square {square}");
            }
        });
    }
}

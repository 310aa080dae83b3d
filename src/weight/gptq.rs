//! GPTQ: qweight i32 [K / 8][N], nibble i of a word being row 8 · word + i of K; qzeros i32 [groups][N / 8] with outputs in
//! order; scales [groups][N]; g_idx i32 [K], the group of each k.
//!
//! Version 1 stores zero − 1 (0 wraps to 15), version 2 the zero. Checkpoints are labelled wrongly often enough that the
//! values decide where they can: zeros that are all 7 are those of a symmetric checkpoint of version 1, all 8 of version 2.
//!
//! With activation order (g_idx not sorted) the columns are sorted by group, so that groups are neighbours again, and the
//! product permutes its input.

use super::grouped::{group_length, nibble, FloatBytes, Grouped, Nibbles};
use super::rows::expect_bytes;
use crate::allocation::filled;
use crate::error::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GptqVersion {
    /// Found out from the values.
    Inspect,
    V1,
    V2,
}

pub struct Gptq<'a> {
    rows: usize,
    weights: &'a [u8],
    zeros: Option<&'a [u8]>,
    /// What is added to a stored zero.
    bias: u8,
}

impl Gptq<'_> {
    fn stored_zero(&self, zeros: &[u8], group: usize, n: usize) -> u8 {
        nibble(zeros, group * self.rows / 8 + n / 8, n % 8)
    }
}

impl Nibbles for Gptq<'_> {
    fn quantized_at(&self, k: usize, n: usize) -> u8 {
        nibble(self.weights, k / 8 * self.rows + n, k % 8)
    }

    fn zero(&self, group: usize, n: usize) -> Option<u8> {
        self.zeros.map(|zeros| (self.stored_zero(zeros, group, n) + self.bias) & 15)
    }
}

/// The tensors of one layer. `rows` is N and `columns` K.
pub struct GptqTensors<'a> {
    pub rows: usize,
    pub columns: usize,
    /// 0: one group.
    pub group_size: usize,
    pub weights: &'a [u8],
    /// `None`: all zeros are 8.
    pub zeros: Option<&'a [u8]>,
    pub scales: FloatBytes<'a>,
    /// i32 [K]; `None`: in order.
    pub group_index: Option<&'a [u8]>,
    pub version: GptqVersion,
}

pub fn gptq(tensors: GptqTensors) -> Result<Grouped<Gptq>> {
    let GptqTensors { rows, columns, group_size, weights, zeros, scales, group_index, version } = tensors;
    let aligned = columns.is_multiple_of(8) && (zeros.is_none() || rows.is_multiple_of(8));
    if !aligned || rows == 0 || columns == 0 {
        return Err(Error::invalid(format!("GPTQ of [{rows}, {columns}]: both must be multiples of 8 above 0")));
    }
    let words = |a: usize, b: usize| a.checked_mul(b).and_then(|words| words.checked_mul(4));
    expect_bytes("GPTQ's qweight", weights.len(), words(columns / 8, rows), rows, columns)?;
    let group = group_length(group_size, columns);
    let groups = columns.div_ceil(group);
    let mut layer = Gptq { rows, weights, zeros, bias: 0 };
    if let Some(zeros) = zeros {
        expect_bytes("GPTQ's qzeros", zeros.len(), words(groups, rows / 8), rows, columns)?;
        layer.bias = match version_of(&layer, zeros, columns, group, version) {
            GptqVersion::V1 => 1,
            _ => 0,
        };
    }
    let order = match group_index {
        None => None,
        Some(bytes) => {
            expect_bytes("GPTQ's g_idx", bytes.len(), words(columns, 1), rows, columns)?;
            order(bytes, columns, group)?
        }
    };
    Grouped::new(layer, rows, columns, group_size, scales, order)
}

/// Elements that are looked at to tell the versions apart.
const SAMPLES: usize = 1 << 20;

fn version_of(layer: &Gptq, zeros: &[u8], columns: usize, group: usize, label: GptqVersion) -> GptqVersion {
    let groups = columns.div_ceil(group);
    let mut stored = (0..groups).flat_map(|g| (0..layer.rows).map(move |n| (g, n)));
    let first = layer.stored_zero(zeros, 0, 0);
    if stored.all(|(g, n)| layer.stored_zero(zeros, g, n) == first) {
        match (first, label) {
            (7, _) => return GptqVersion::V1,
            (8, _) => return GptqVersion::V2,
            _ => {}
        }
    }
    if label != GptqVersion::Inspect {
        return label;
    }
    // Weights are 0 on average, so quantised values are the true zero on average: version 1 is one off.
    let step = (layer.rows * columns).div_ceil(SAMPLES).max(1);
    let (mut sum, mut count) = (0i64, 0i64);
    for k in (0..columns).step_by(step) {
        for n in 0..layer.rows {
            let zero = layer.stored_zero(zeros, k / group, n);
            sum += i64::from(layer.quantized_at(k, n)) - i64::from(zero);
            count += 1;
        }
    }
    if 2 * sum > count {
        GptqVersion::V1
    } else {
        GptqVersion::V2
    }
}

/// The columns sorted by group; `None` where they are.
fn order(group_index: &[u8], columns: usize, group_size: usize) -> Result<Option<Vec<i32>>> {
    let groups = columns.div_ceil(group_size);
    let group = |k: usize| i32::from_le_bytes(group_index[4 * k..][..4].try_into().expect("four bytes"));
    let mut members = filled(0usize, groups, "the groups of a weight's columns")?;
    for k in 0..columns {
        let members = usize::try_from(group(k)).ok().and_then(|group| members.get_mut(group)).ok_or_else(|| {
            Error::invalid(format!("g_idx[{k}] is {}; there are {groups} groups", group(k)))
                .with_limit(group(k).max(0) as u64, groups as u64)
        })?;
        *members += 1;
    }
    for (g, &members) in members.iter().enumerate() {
        let size = group_size.min(columns - g * group_size);
        if members != size {
            return Err(Error::invalid(format!("g_idx puts {members} columns into group {g}, which has {size}")));
        }
    }
    // Where the next column of each group goes.
    let mut places = members;
    places.iter_mut().enumerate().for_each(|(g, place)| *place = g * group_size);
    let mut order = filled(0i32, columns, "the order of a weight's columns")?;
    for k in 0..columns {
        let place = &mut places[group(k) as usize];
        order[*place] = k as i32;
        *place += 1;
    }
    let sorted = order.iter().enumerate().all(|(at, &k)| at == k as usize);
    Ok((!sorted).then_some(order))
}

#[cfg(test)]
mod tests {
    use super::super::rows::testing::{both, bytes};
    use super::super::rows::{QuantizedSource, RowSource};
    use super::*;
    use crate::tensor::DType;

    struct Layer {
        n: usize,
        k: usize,
        quantized: Vec<u8>,
        zeros: Vec<u8>,
        scales: Vec<f32>,
        groups: Vec<usize>,
    }

    impl Layer {
        fn random(n: usize, k: usize, group: usize, zero: impl Fn(u8) -> u8) -> Layer {
            let quantized = bytes(n * k, 1).iter().map(|b| b & 15).collect();
            let zeros = bytes(n * k / group, 2).iter().map(|&b| zero(b)).collect();
            let scales = bytes(n * k / group, 3).iter().map(|&b| 2f32.powi(i32::from(b % 8) - 9)).collect();
            Layer { n, k, quantized, zeros, scales, groups: (0..k).map(|k| k / group).collect() }
        }

        fn value(&self, k: usize, n: usize) -> f32 {
            let at = self.groups[k] * self.n + n;
            self.scales[at] * (f32::from(self.quantized[k * self.n + n]) - f32::from(self.zeros[at]))
        }

        /// qweight, qzeros, scales and g_idx by the format's definition.
        fn pack(&self, bias: u8) -> [Vec<u8>; 4] {
            let word = |nibbles: &mut dyn Iterator<Item = u8>| {
                nibbles.enumerate().fold(0u32, |word, (i, q)| word | u32::from(q) << (4 * i)).to_le_bytes()
            };
            let eights = (0..self.k / 8).flat_map(|row| (0..self.n).map(move |n| (row, n)));
            let weights =
                eights.flat_map(|(row, n)| word(&mut (0..8).map(|i| self.quantized[(8 * row + i) * self.n + n])));
            let zeros = self.zeros.chunks(8).flat_map(|z| word(&mut z.iter().map(|z| z.wrapping_sub(bias) & 15)));
            let scales = self.scales.iter().flat_map(|scale| scale.to_le_bytes());
            let groups = self.groups.iter().flat_map(|&group| (group as i32).to_le_bytes());
            [weights.collect(), zeros.collect(), scales.collect(), groups.collect()]
        }

        fn check(&self, packed: &[Vec<u8>; 4], group_size: usize, version: GptqVersion, what: &str) {
            let source = gptq(tensors(self, packed, group_size, version)).unwrap();
            for n in 0..self.n {
                let (values, stored) = both(&source, n).unwrap();
                for k in 0..self.k {
                    assert_eq!(values[k], self.value(k, n), "{what}: element {n}, {k}");
                    assert_eq!(stored[k], values[k], "{what}: stored {n}, {k}");
                }
            }
        }
    }

    fn tensors<'a>(
        layer: &Layer,
        [weights, zeros, scales, groups]: &'a [Vec<u8>; 4],
        group_size: usize,
        version: GptqVersion,
    ) -> GptqTensors<'a> {
        GptqTensors {
            rows: layer.n,
            columns: layer.k,
            group_size,
            weights,
            zeros: Some(zeros),
            scales: FloatBytes { bytes: scales, dtype: DType::F32 },
            group_index: Some(groups),
            version,
        }
    }

    #[test]
    fn both_versions_and_their_labels() {
        let asymmetric = Layer::random(16, 128, 32, |b| b & 15);
        asymmetric.check(&asymmetric.pack(1), 32, GptqVersion::V1, "v1");
        asymmetric.check(&asymmetric.pack(0), 32, GptqVersion::V2, "v2");
        let symmetric = Layer::random(16, 128, 64, |_| 8);
        for label in [GptqVersion::Inspect, GptqVersion::V1, GptqVersion::V2] {
            symmetric.check(&symmetric.pack(1), 64, label, "symmetric, stored as 7");
            symmetric.check(&symmetric.pack(0), 64, label, "symmetric, stored as 8");
        }
        // Quantised values that are the zero on average, as those of weights are.
        let mut weights = Layer::random(32, 256, 128, |b| 6 + b % 4);
        for k in 0..weights.k {
            for n in 0..weights.n {
                let q = &mut weights.quantized[k * weights.n + n];
                *q = weights.zeros[weights.groups[k] * weights.n + n] - 3 + *q % 7;
            }
        }
        weights.check(&weights.pack(1), 128, GptqVersion::Inspect, "v1, inspected");
        weights.check(&weights.pack(0), 128, GptqVersion::Inspect, "v2, inspected");
    }

    #[test]
    fn activation_order_sorts_the_columns() {
        let mut layer = Layer::random(8, 128, 32, |b| b & 15);
        layer.groups = (0..128).map(|k| (k * 37 + 5) % 128 / 32).collect();
        let packed = layer.pack(0);
        layer.check(&packed, 32, GptqVersion::V2, "order");
        let source = gptq(tensors(&layer, &packed, 32, GptqVersion::V2)).unwrap();
        let order = source.order().unwrap();
        assert!(order.windows(2).all(|pair| {
            let [a, b] = [layer.groups[pair[0] as usize], layer.groups[pair[1] as usize]];
            (a, pair[0]) < (b, pair[1])
        }));
        assert!(source.format().zero_points && source.is_exact());
    }

    #[test]
    fn a_stray_group_index_is_named() {
        let layer = Layer::random(8, 64, 32, |_| 8);
        let refused = |groups: Vec<usize>| {
            let packed = Layer { groups, ..Layer::random(8, 64, 32, |_| 8) }.pack(0);
            gptq(tensors(&layer, &packed, 32, GptqVersion::V2)).err().expect("refused").message
        };
        let mut stray = layer.groups.clone();
        stray[9] = 2;
        assert!(refused(stray.clone()).contains("g_idx[9] is 2"));
        stray[9] = 1;
        assert!(refused(stray).contains("31 columns into group 0"));
        let packed = layer.pack(0);
        for short in 0..4 {
            let mut packed = packed.clone();
            packed[short].pop();
            let error = gptq(tensors(&layer, &packed, 32, GptqVersion::V2)).err().expect("refused");
            assert!(error.message.contains("needed"), "{error}");
        }
    }
}

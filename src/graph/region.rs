//! How regions lie to each other, for whoever orders operations or leaves some out.

use crate::operation::access::Region;

impl Region {
    /// Whether the two may share a byte, for whoever may not miss one: regions that are not exact count as wholes.
    pub(super) fn may_share(&self, other: &Region) -> bool {
        let apart = self.end() <= other.start || other.end() <= self.start || self.is_empty() || other.is_empty();
        !apart && (!self.exact || !other.exact || self.overlaps(other))
    }

    /// Whether whatever shares a byte with `other` shares one with this too.
    pub(super) fn covers(&self, other: &Region) -> bool {
        let encloses = self.start <= other.start && other.end() <= self.end();
        self == other || (self.rows == 1 && encloses)
    }

    /// Whether every byte of `other` is one of this region, which has no gaps that are not known.
    pub(super) fn contains(&self, other: &Region) -> bool {
        if !self.exact || other.is_empty() {
            return other.is_empty();
        }
        if self.covers(other) {
            return true;
        }
        if self.stride < self.row_bytes || other.start < self.start || (other.rows > 1 && other.stride != self.stride) {
            return false;
        }
        // Columns of some rows of this one.
        let (row, column) = ((other.start - self.start) / self.stride, (other.start - self.start) % self.stride);
        row + other.rows <= self.rows && column + other.row_bytes <= self.row_bytes
    }

    /// Bytes from the first to the one behind the last.
    pub(super) fn span(&self) -> std::ops::Range<usize> {
        self.start..self.end()
    }
}

/// Ranges of addresses, in ascending order and apart from each other.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ranges(Vec<std::ops::Range<usize>>);

impl Ranges {
    /// Ranges that touch become one.
    pub fn of(mut all: Vec<std::ops::Range<usize>>) -> Ranges {
        all.sort_unstable_by_key(|range| range.start);
        all.dedup_by(|next, range| {
            let touch = next.start <= range.end;
            if touch {
                range.end = range.end.max(next.end);
            }
            touch
        });
        Ranges(all)
    }

    /// The place of the range that has this address.
    pub fn place(&self, address: usize) -> Option<usize> {
        let place = self.0.partition_point(|range| range.end <= address);
        self.0.get(place).filter(|range| range.start <= address).map(|_| place)
    }

    pub fn contain(&self, region: &Region) -> bool {
        self.place(region.start).is_some_and(|place| region.end() <= self.0[place].end)
    }

    pub fn iter(&self) -> impl Iterator<Item = &std::ops::Range<usize>> {
        self.0.iter()
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BASE: usize = 1 << 20;

    #[test]
    fn ranges_join_where_they_touch() {
        let ranges = Ranges::of(vec![20..30, 0..10, 10..12, 25..40]);
        assert_eq!(ranges.iter().cloned().collect::<Vec<_>>(), [0..12, 20..40]);
        assert_eq!(
            [0, 11, 12, 20, 39, 40].map(|at| ranges.place(at)),
            [Some(0), Some(0), None, Some(1), Some(1), None]
        );
    }

    proptest! {
        #[test]
        fn what_contains_a_region_has_all_of_its_bytes(
            a in (0usize..60, 1usize..5, 1usize..24, 0usize..12),
            b in (0usize..60, 1usize..5, 1usize..24, 0usize..12),
            same_stride in any::<bool>(),
        ) {
            let stride = a.2.max(b.2) + a.3;
            let region = |(start, rows, row_bytes, gap): (usize, usize, usize, usize)| Region {
                start: BASE + start, rows, row_bytes, stride: if same_stride { stride } else { row_bytes + gap }, exact: true,
            };
            let bytes = |region: &Region| -> Vec<usize> {
                (0..region.rows).flat_map(|row| (region.start + row * region.stride..).take(region.row_bytes)).collect()
            };
            let (a, b) = (region(a), region(b));
            let all = bytes(&a);
            let has = bytes(&b).iter().all(|byte| all.contains(byte));
            // It may miss that one contains the other, but never claims it wrongly.
            prop_assert!(!a.contains(&b) || has);
            prop_assert!(a.contains(&a));
            prop_assert!(!has || a.may_share(&b));
        }
    }
}

//! How several source matrices become the rows of one weight.

use super::encoding::BLOCK;
use crate::allocation::collected;
use crate::error::{Error, Result};
use crate::tensor::expect_extent;
use std::ops::Range;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrangement {
    /// The parts stand one below the other.
    Stacked,
    /// Two parts, gate and up, alternate row by row.
    Gated,
}

/// Which row of which part is a row of the weight.
#[derive(Debug, Clone)]
pub struct RowMap {
    pub arrangement: Arrangement,
    /// Rows of each part.
    counts: Vec<usize>,
    pub rows: usize,
    pub columns: usize,
}

impl RowMap {
    /// `shapes`: rows and columns of each part.
    pub fn new(arrangement: Arrangement, shapes: &[(usize, usize)]) -> Result<RowMap> {
        let Some(&(first_rows, columns)) = shapes.first() else {
            return Err(Error::invalid("a weight needs at least one part"));
        };
        let mut rows = 0usize;
        for (i, &(part_rows, part_columns)) in shapes.iter().enumerate() {
            if part_rows == 0 || part_columns == 0 {
                return Err(Error::invalid(format!(
                    "`parts[{i}]` has shape [{part_rows}, {part_columns}]: a weight cannot be empty"
                )));
            }
            if part_columns != columns {
                return Err(Error::invalid(format!("`parts[{i}]` has {part_columns} columns; parts[0] has {columns}")));
            }
            rows = rows.saturating_add(part_rows);
        }
        if arrangement == Arrangement::Gated && (shapes.len() != 2 || shapes[1].0 != first_rows) {
            return Err(Error::invalid("a gated weight takes two parts, gate and up, of one shape"));
        }
        expect_extent("the number of rows", rows)?;
        expect_extent("the number of columns", columns)?;
        let counts = collected(shapes.iter().map(|shape| shape.0), "the parts of a weight")?;
        Ok(RowMap { arrangement, counts, rows, columns })
    }

    pub fn is_gated(&self) -> bool {
        self.arrangement == Arrangement::Gated
    }

    /// The part and its row behind a row of the weight.
    pub fn source(&self, row: usize) -> (usize, usize) {
        if self.is_gated() {
            return (row % 2, row / 2);
        }
        let mut first = 0;
        for (part, &count) in self.counts.iter().enumerate() {
            if row < first + count {
                return (part, row - first);
            }
            first += count;
        }
        panic!("row {row} of a weight with {first} rows")
    }

    /// The rows of a part that rows `range` of the weight come from.
    pub fn rows_of(&self, part: usize, range: &Range<usize>) -> Range<usize> {
        if self.is_gated() {
            // Row 2i is row i of the gate, row 2i + 1 row i of the up projection.
            return (range.start + 1 - part) / 2..(range.end + 1 - part) / 2;
        }
        let first: usize = self.counts[..part].iter().sum();
        let inside = |row: usize| row.clamp(first, first + self.counts[part]) - first;
        inside(range.start)..inside(range.end)
    }

    /// Whether blocks of 128 rows of the parts are blocks of the weight.
    pub fn keeps_blocks(&self) -> bool {
        let but_last = &self.counts[..self.counts.len() - 1];
        !self.is_gated() && but_last.iter().all(|count| count.is_multiple_of(BLOCK))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn ranges_of_parts_are_the_sources_of_their_rows(
            counts in prop::collection::vec(1..20usize, 1..5),
            gated in any::<bool>(),
            begin in 0..1000usize,
            length in 1..1000usize,
        ) {
            let (arrangement, shapes): (_, Vec<_>) = if gated {
                (Arrangement::Gated, vec![(counts[0], 3); 2])
            } else {
                (Arrangement::Stacked, counts.iter().map(|&count| (count, 3)).collect())
            };
            let map = RowMap::new(arrangement, &shapes).unwrap();
            let begin = begin % map.rows;
            let range = begin..(begin + length).min(map.rows);
            for part in 0..shapes.len() {
                let sources: Vec<usize> =
                    range.clone().map(|row| map.source(row)).filter(|at| at.0 == part).map(|at| at.1).collect();
                prop_assert_eq!(map.rows_of(part, &range).collect::<Vec<_>>(), sources);
            }
        }
    }
}

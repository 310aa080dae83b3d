//! The columns of each row in the order of their elements. The output holds the heap of the smallest ones so far, so there
//! is no memory to find; what it holds is sorted at the end.

use super::row::{for_rows, Row};
use super::threads::Threads;
use crate::operation::sort_rows::SortRows;

pub fn sort_rows(threads: &Threads, op: &SortRows) {
    if op.output.is_empty() {
        return;
    }
    let [first, second, third, columns] = op.input.shape;
    for_rows(threads, first * second * third, columns, |rows, _| {
        for row in rows {
            let places = [row / third / second, row / third % second, row % third];
            let offset = |strides: &[usize]| (0..3).map(|axis| places[axis] * strides[axis]).sum::<usize>();
            let input = Row::raw(op.input.data, op.input.dtype).skip(offset(&op.input.strides));
            // SAFETY: the descriptor is validated, and tasks write different rows, each of `count` neighbouring elements.
            unsafe {
                let output = op.output.data.cast::<i32>().add(offset(&op.output.strides));
                let output = std::slice::from_raw_parts_mut(output, op.count());
                // No two columns of a row have one key, so any sort is stable.
                smallest(output, columns, |column| (op.key(input.element(column as usize)), column));
            }
        }
    });
}

/// The numbers below `columns` with the smallest keys, as many as there is room for, in the order of their keys. A sort of the
/// standard library panics where keys change under it, as they do where a caller's output lies in the gaps of an input and
/// reaches beyond them; this one leaves numbers of columns all the same.
fn smallest<K: Ord>(found: &mut [i32], columns: usize, key: impl Fn(i32) -> K) {
    found.iter_mut().zip(0..).for_each(|(column, number)| *column = number);
    // A heap whose first is the largest, which the next smaller one replaces.
    for parent in (0..found.len() / 2).rev() {
        sink(found, parent, &key);
    }
    for column in found.len() as i32..columns as i32 {
        if key(column) < key(found[0]) {
            found[0] = column;
            sink(found, 0, &key);
        }
    }
    for end in (1..found.len()).rev() {
        found.swap(0, end);
        sink(&mut found[..end], 0, &key);
    }
}

/// Moves an element of a heap down to where no child is larger.
fn sink<K: Ord>(heap: &mut [i32], mut parent: usize, key: &impl Fn(i32) -> K) {
    loop {
        let mut largest = parent;
        for child in [2 * parent + 1, 2 * parent + 2] {
            if child < heap.len() && key(heap[child]) > key(heap[largest]) {
                largest = child;
            }
        }
        if largest == parent {
            return;
        }
        heap.swap(parent, largest);
        parent = largest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn keys_that_change_meanwhile_leave_numbers_of_columns() {
        let calls = Cell::new(0u32);
        let key = |column: i32| {
            calls.set(calls.get() + 1);
            (column as u32 ^ calls.get()).wrapping_mul(2_654_435_761)
        };
        for count in [1, 40, 100] {
            let mut found = vec![-1; count];
            smallest(&mut found, 100, key);
            found.sort_unstable();
            found.dedup();
            assert!(found.len() == count && found.iter().all(|column| (0..100).contains(column)));
        }
    }
}

//! Sizes of small blocks: four classes for each doubling up to 1 MiB, so that rounding up wastes at most a fifth (from
//! 1 KiB on).

use super::page_table::UNIT_BYTES;

/// Every block starts on a multiple of this, which every vector width and TMA accept.
pub const GRANULE: usize = 256;
/// Larger blocks are runs of whole units.
pub const LARGEST_SMALL: usize = 1 << 20;
pub const CLASSES: usize = 44;
/// Stands for "a run of units" where a class is asked for.
pub const LARGE: usize = CLASSES;

/// The smallest class that holds `bytes` (1 to `LARGEST_SMALL`).
#[inline]
pub fn class_of(bytes: usize) -> usize {
    let granules = bytes.div_ceil(GRANULE);
    if granules <= 4 {
        return granules - 1;
    }
    // granules − 1 has its leading one at `exponent` ≥ 2; the two bits below it choose among the doubling's four.
    let exponent = (granules - 1).ilog2() as usize;
    let step = (granules - 1) >> (exponent - 2);
    4 * (exponent - 1) + (step - 4)
}

/// Bytes of each block of a class.
#[inline]
pub const fn class_bytes(class: usize) -> usize {
    if class < 4 {
        return (class + 1) * GRANULE;
    }
    ((5 + class % 4) * GRANULE) << (class / 4 - 1)
}

/// The smallest class for `bytes` whose blocks all start on a multiple of `alignment` (a power of two). `None`: only a
/// run of units will do.
#[inline]
pub fn class_for(bytes: usize, alignment: usize) -> Option<usize> {
    if bytes > LARGEST_SMALL || alignment > LARGEST_SMALL {
        return None;
    }
    if alignment <= GRANULE {
        return Some(class_of(bytes));
    }
    (class_of(bytes.max(alignment))..CLASSES).find(|&class| class_bytes(class).is_multiple_of(alignment))
}

/// Units of a slab: the fewest that leave at most a thirty-second part of it unused. A sixteenth would do with fewer units,
/// and then blocks of 320 KiB, which KV caches are made of, lose all of that sixteenth.
#[inline]
pub const fn slab_units(class: usize) -> usize {
    SLAB_UNITS[class] as usize
}

const SLAB_UNITS: [u8; CLASSES] = {
    let mut table = [1; CLASSES];
    let mut class = 0;
    while class < CLASSES {
        while (table[class] as usize * UNIT_BYTES) % class_bytes(class) * 32 > table[class] as usize * UNIT_BYTES {
            table[class] += 1;
        }
        class += 1;
    }
    table
};

/// Blocks of a slab.
pub const fn slab_blocks(class: usize) -> usize {
    slab_units(class) * UNIT_BYTES / class_bytes(class)
}

/// Blocks that one thread keeps of a class and stream, as far as its cache has room: enough to hide the shared
/// structures. A full magazine passes half of them on at once.
pub const fn magazine_capacity(class: usize) -> usize {
    at_most((16 << 20) / class_bytes(class), 128)
}

/// Blocks that a thread takes from the slabs at once.
pub const fn refill(class: usize) -> usize {
    at_most(magazine_capacity(class) / 2, 32)
}

const fn at_most(count: usize, most: usize) -> usize {
    if count > most {
        most
    } else {
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_meets_the_smallest_class_that_holds_it() {
        assert_eq!(class_of(LARGEST_SMALL), CLASSES - 1);
        for class in 0..CLASSES {
            let bytes = class_bytes(class);
            assert_eq!(bytes % GRANULE, 0);
            assert_eq!(class_of(bytes), class);
            if class > 0 {
                assert_eq!(class_of(class_bytes(class - 1) + 1), class);
                let waste = bytes - class_bytes(class - 1) - 1;
                assert!(class < 4 || waste * 5 <= bytes, "class {class} wastes {waste} of {bytes}");
            }
        }
        assert_eq!(class_of(1), 0);
    }

    #[test]
    fn slabs_waste_at_most_a_thirty_second_part() {
        for class in 0..CLASSES {
            let bytes = slab_units(class) * UNIT_BYTES;
            assert!(slab_units(class) <= 5 && (bytes - slab_blocks(class) * class_bytes(class)) * 32 <= bytes);
            assert!(slab_blocks(class) <= 1 << 13, "indices fit 16 bits");
        }
    }

    #[test]
    fn alignment_chooses_a_class_whose_blocks_keep_it() {
        for shift in 0..=20 {
            for bytes in [1, 255, 256, 257, 5000, 70_000, LARGEST_SMALL] {
                let class = class_for(bytes, 1 << shift).unwrap();
                assert!(class_bytes(class) >= bytes);
                assert!(shift <= 8 || class_bytes(class).is_multiple_of(1 << shift));
            }
        }
        assert_eq!(class_for(LARGEST_SMALL + 1, 256), None);
        assert_eq!(class_for(1, 2 << 20), None);
    }
}

//! The two regions of a range: large blocks have the first three quarters of its addresses, slabs the rest.
//!
//! Physical memory comes in pieces that move behind other addresses whole: long ones for large blocks, short ones for
//! slabs. One slab in a long piece holds up all of it, for as long as any block of the slab lives. When slabs took what
//! large blocks had left, a server near its limit had 2.5 GiB of free memory after three days and nowhere 66 MB in a row
//! (tests/memory/serving.rs). So each kind takes from its own region, and from the other one when it is told to.

use super::buddy::{Buddy, Side};
use super::zeroed::Zeros;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Region {
    Large,
    Slabs,
}

impl Region {
    pub fn other(self) -> Region {
        match self {
            Region::Large => Region::Slabs,
            Region::Slabs => Region::Large,
        }
    }
}

pub struct Regions {
    buddies: [Buddy; 2],
    /// The first unit of the slabs' region.
    boundary: usize,
}

impl Regions {
    pub fn new(zeros: &Zeros, units: usize) -> Regions {
        let slabs = units / 4;
        let buddies = [units - slabs, slabs].map(|units| Buddy::new(zeros, units));
        Regions { buddies, boundary: units - slabs }
    }

    fn of(&self, unit: usize) -> (&Buddy, usize) {
        if unit < self.boundary {
            (&self.buddies[0], unit)
        } else {
            (&self.buddies[1], unit - self.boundary)
        }
    }

    fn of_mut(&mut self, unit: usize) -> (&mut Buddy, usize) {
        if unit < self.boundary {
            (&mut self.buddies[0], unit)
        } else {
            (&mut self.buddies[1], unit - self.boundary)
        }
    }

    /// `units` > 0 of the region that nobody else has, for blocks that gather on a side of it.
    pub fn take(&mut self, units: usize, region: Region, side: Side) -> Option<usize> {
        Some(self.first(region) + self.buddies[region as usize].take(units, side)?)
    }

    /// Takes units as `take` does, but ones that have memory behind them.
    pub fn take_backed(&mut self, units: usize, region: Region, side: Side) -> Option<usize> {
        Some(self.first(region) + self.buddies[region as usize].take_backed(units, side)?)
    }

    fn first(&self, region: Region) -> usize {
        match region {
            Region::Large => 0,
            Region::Slabs => self.boundary,
        }
    }

    /// Takes `units` from `start` on, all of them free and of one region, as in all that follows.
    pub fn take_at(&mut self, start: usize, units: usize) {
        let (buddy, start) = self.of_mut(start);
        buddy.take_at(start, units);
    }

    pub fn give(&mut self, start: usize, units: usize) {
        let (buddy, start) = self.of_mut(start);
        buddy.give(start, units);
    }

    pub fn set_backed(&mut self, start: usize, units: usize, backed: bool) {
        let (buddy, start) = self.of_mut(start);
        buddy.set_backed(start, units, backed);
    }

    pub fn is_backed(&self, unit: usize) -> bool {
        let (buddy, unit) = self.of(unit);
        buddy.is_backed(unit)
    }

    pub fn all_backed(&self, start: usize, units: usize) -> bool {
        let (buddy, start) = self.of(start);
        buddy.all_backed(start, units)
    }

    pub fn is_free(&self, start: usize, units: usize) -> bool {
        let (buddy, start) = self.of(start);
        buddy.is_free(start, units)
    }

    pub fn free_backed_units(&self) -> usize {
        self.buddies.iter().map(Buddy::free_backed_units).sum()
    }

    pub fn longest_backed_run(&self) -> usize {
        self.buddies.iter().map(Buddy::longest_backed_run).max().unwrap_or(0)
    }

    pub fn largest_free_run(&self) -> usize {
        self.buddies.iter().map(Buddy::largest_free_run).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever its size, all units of a range can be taken, each once and from its own region.
    #[test]
    fn both_regions_together_are_the_range() {
        for units in [1, 2, 3, 4, 5, 63, 64, 65, 1000] {
            let mut regions = Regions::new(&Zeros::none(), units);
            let mut taken = vec![false; units];
            for region in [Region::Slabs, Region::Large] {
                let side = if region == Region::Large { Side::Start } else { Side::End };
                while let Some(unit) = regions.take(1, region, side) {
                    assert!(!std::mem::replace(&mut taken[unit], true), "unit {unit} of {units} twice");
                    assert_eq!(region == Region::Slabs, unit >= units - units / 4, "unit {unit} of {units}");
                    assert!(!regions.is_free(unit, 1) && regions.take_backed(1, region, side).is_none());
                }
            }
            assert!(taken.iter().all(|taken| *taken) && regions.largest_free_run() == 0, "{units}");
        }
    }

    #[test]
    fn memory_is_found_in_the_region_where_it_is() {
        let mut regions = Regions::new(&Zeros::none(), 64);
        regions.set_backed(40, 4, true);
        regions.set_backed(56, 4, true);
        assert_eq!(regions.free_backed_units(), 8);
        assert_eq!(regions.take_backed(8, Region::Large, Side::Start), None, "it is not in one piece");
        assert_eq!(regions.take_backed(4, Region::Slabs, Side::End), Some(56));
        assert_eq!(regions.take_backed(1, Region::Slabs, Side::End), None, "only the other region has any");
        assert_eq!(regions.take_backed(4, Region::Slabs.other(), Side::End), Some(40));
        regions.give(56, 4);
        assert!(regions.is_free(56, 4) && regions.all_backed(56, 4) && !regions.is_backed(60));
    }
}

//! The two regions of a range: large blocks have the first three quarters of its addresses, slabs the rest.
//!
//! Physical memory comes in pieces that move behind other addresses whole: long ones for large blocks, short ones for
//! slabs. One slab in a long piece holds up all of it, for as long as any block of the slab lives. When slabs took what
//! large blocks had left, a server near its limit had 2.5 GiB of free memory after three days and nowhere 66 MB in a row
//! (tests/memory/serving.rs). So each kind takes from its own region, and from the other one when it is told to.

use super::buddy::{Buddy, Side};

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
    pub fn new(units: usize) -> Regions {
        let slabs = units / 4;
        Regions { buddies: [Buddy::new(units - slabs), Buddy::new(slabs)], boundary: units - slabs }
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

    /// As `take`, units that have memory behind them.
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

    pub fn largest_free_run(&self) -> usize {
        self.buddies.iter().map(Buddy::largest_free_run).max().unwrap_or(0)
    }
}

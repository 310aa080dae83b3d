//! Test data: fresh in every run, repeatable by the seed that the run prints.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::OnceLock;

/// The run's seed: NVB_TEST_SEED, or the clock.
pub fn seed() -> u64 {
    static SEED: OnceLock<u64> = OnceLock::new();
    *SEED.get_or_init(|| match std::env::var("NVB_TEST_SEED") {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("NVB_TEST_SEED is {text:?}; a decimal number is needed")),
        Err(_) => std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64 >> 10,
    })
}

/// SplitMix64 (Steele, Lea and Flood 2014).
pub struct Random {
    state: u64,
}

impl Random {
    /// A generator that depends on the run's seed and the label alone, so that one case can be run again by itself.
    pub fn new(label: &str) -> Random {
        let mut hasher = DefaultHasher::new();
        label.hash(&mut hasher);
        Random { state: seed() ^ hasher.finish() }
    }

    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.state;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ bits >> 31
    }

    /// In [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// In [0, bound).
    pub fn below(&mut self, bound: usize) -> usize {
        (self.uniform() * bound as f64) as usize
    }

    pub fn flip(&mut self) -> bool {
        self.bits() >> 63 == 1
    }

    pub fn choose<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Normally distributed, by Box and Muller 1958.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    pub fn normals(&mut self, count: usize, scale: f64) -> Vec<f64> {
        (0..count).map(|_| self.normal() * scale).collect()
    }

    pub fn permutation(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for i in (1..count).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

//! Algorithms beyond the heuristic's lists: those of the lists with other tiles, clusters and orders of tiles.
//!
//! Several hundred algorithms of cuBLASLt 13.1 were timed for x·Wᵀ + b with GELU in BF16 on an H200. The fastest was in
//! no list, and all of the fastest, with an epilogue or without, had tiles of 128 by 112 to 176 in clusters of two.
//! Rates beside that of the best plain product, which its list reaches within 0.3 %:
//!
//! | m, n, k | first of its list | best of its list | best of the plain product's | best |
//! |---|---|---|---|---|
//! | 512, 14336, 4096 | 0.856 | 0.977 | 0.977 | 0.988 |
//! | 2048, 14336, 4096 | 0.918 | 0.974 | 0.974 | 0.982 |
//! | 8192, 14336, 4096 | 0.895 | 0.910 | 0.891 | 1.003 |
//! | 4096, 10240, 2560 | 0.850 | 0.880 | 0.973 | 0.977 |

use super::descriptors::Descriptors;
use super::{AlgorithmBytes, Alignments, CublasLt, Product};
use crate::driver::exit;
use crate::error::Result;
use std::ffi::c_int;

// Numbers of cublasLt.h.
const CONFIG_TILE: c_int = 1;
const CONFIG_SPLITS: c_int = 2;
const CONFIG_SWIZZLE: c_int = 4;
const CONFIG_CUSTOM_OPTION: c_int = 5;
const CONFIG_CLUSTER: c_int = 8;
const CAPABILITY_TILES: c_int = 6;
const CLUSTER_2X1: u16 = 3;
const CLUSTER_1X2: u16 = 5;

/// Tiles of 112, 120 … 192 by 128, and of 128 by as many.
const TILES: [[u32; 2]; 11] = [
    [165, 403],
    [171, 404],
    [20, 20],
    [179, 405],
    [184, 406],
    [189, 407],
    [30, 29],
    [197, 408],
    [201, 409],
    [205, 410],
    [31, 32],
];

/// How many of the fastest have their neighbours tried.
const CENTRES: usize = 2;

/// What is varied of an algorithm; all else stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Configuration {
    /// The tile's place in `TILES`.
    size: usize,
    /// The custom option, 0 to 3. To judge by its kernels' names, bit 0 says which extent of a tile is the one that varies,
    /// bit 1 whether the tiles are gone through along rows or columns; from 4 on two groups of warps share a tile.
    order: u32,
    cluster: u16,
    swizzle: u32,
}

impl Configuration {
    fn of(tile: u32, order: u32, cluster: u16, swizzle: u32) -> Option<Configuration> {
        let ours = order < 4 && swizzle < 2 && [CLUSTER_2X1, CLUSTER_1X2].contains(&cluster);
        let size = TILES.iter().position(|tiles| tiles[order as usize & 1] == tile)?;
        ours.then_some(Configuration { size, order, cluster, swizzle })
    }

    fn tile(self) -> u32 {
        TILES[self.size][self.order as usize & 1]
    }

    /// Every second tile in every order, with the cluster that goes along with it.
    fn spread() -> Vec<Configuration> {
        let cluster = |order: u32| if order & 2 == 0 { CLUSTER_2X1 } else { CLUSTER_1X2 };
        let of_order = |order: u32| {
            let sizes = (0..TILES.len()).step_by(2);
            sizes.map(move |size| Configuration { size, order, cluster: cluster(order), swizzle: 0 })
        };
        (0..4).flat_map(of_order).collect()
    }

    /// Configurations that differ in one thing: the tile's next size, the order, the cluster, the swizzle.
    fn neighbours(self) -> Vec<Configuration> {
        let sizes = [self.size.checked_sub(1), Some(self.size + 1).filter(|&size| size < TILES.len())];
        let sizes = sizes.into_iter().flatten().map(|size| Configuration { size, ..self });
        let cluster = CLUSTER_2X1 + CLUSTER_1X2 - self.cluster;
        let others = [
            Configuration { order: self.order ^ 2, ..self },
            Configuration { cluster, ..self },
            Configuration { swizzle: self.swizzle ^ 1, ..self },
        ];
        sizes.chain(others).collect()
    }
}

impl CublasLt {
    /// Algorithms that can do the product: without `fastest` some over all tiles and orders, else the neighbours of the first
    /// of these that have such tiles. The heuristic's lists may have some of them.
    pub fn variations(&self, product: &Product, fastest: &[AlgorithmBytes]) -> Result<Vec<AlgorithmBytes>> {
        let _inside = exit::enter()?;
        let Some(descriptors) = self.describe(product)? else { return Ok(Vec::new()) };
        let alignments = super::alignments(product);
        if !fastest.is_empty() {
            let centres = fastest.iter().filter_map(|algorithm| Some((algorithm, self.configuration(algorithm)?)));
            let vary = |(algorithm, centre): (&AlgorithmBytes, Configuration)| {
                self.vary(algorithm, &centre.neighbours(), alignments, &descriptors)
            };
            return Ok(centres.take(CENTRES).flat_map(vary).collect());
        }
        let mut listed: Vec<AlgorithmBytes> =
            self.lists(product, alignments, &descriptors)?.concat().iter().map(|result| result.algorithm).collect();
        // K in one piece; the nearest to what is made of it in front.
        listed.retain(|algorithm| self.get::<i32>(algorithm, CONFIG_SPLITS) == Some(1));
        listed.sort_by_key(|algorithm| self.configuration(algorithm).is_none());
        let Some(first) = listed.first() else { return Ok(Vec::new()) };
        Ok(self.vary(first, &Configuration::spread(), alignments, &descriptors))
    }

    /// The algorithm in these configurations, as far as it can do the product in them.
    fn vary(
        &self,
        algorithm: &AlgorithmBytes,
        configurations: &[Configuration],
        alignments: Alignments,
        descriptors: &Descriptors<'_>,
    ) -> Vec<AlgorithmBytes> {
        let tiles = self.tiles(algorithm);
        let in_configuration = |configuration: &Configuration| {
            let Configuration { order, cluster, swizzle, .. } = *configuration;
            let tile = Some(configuration.tile()).filter(|tile| tiles.contains(tile))?;
            let mut varied = *algorithm;
            let set = self.set(&mut varied, CONFIG_TILE, &tile)
                && self.set(&mut varied, CONFIG_CUSTOM_OPTION, &order)
                && self.set(&mut varied, CONFIG_CLUSTER, &cluster)
                && self.set(&mut varied, CONFIG_SWIZZLE, &swizzle);
            let checked = set.then(|| self.check(varied, alignments, descriptors)).flatten();
            checked.map(|result| result.algorithm)
        };
        configurations.iter().filter_map(in_configuration).collect()
    }

    fn configuration(&self, algorithm: &AlgorithmBytes) -> Option<Configuration> {
        let (tile, order) = (self.get(algorithm, CONFIG_TILE)?, self.get(algorithm, CONFIG_CUSTOM_OPTION)?);
        Configuration::of(tile, order, self.get(algorithm, CONFIG_CLUSTER)?, self.get(algorithm, CONFIG_SWIZZLE)?)
    }

    /// The numbers of the tiles that the algorithm has.
    fn tiles(&self, algorithm: &AlgorithmBytes) -> Vec<u32> {
        let capability = &self.functions.algorithm_capability;
        let mut bytes = 0;
        // SAFETY: an algorithm's bytes; without room the size alone is written.
        let code = unsafe { capability(algorithm.as_ptr(), CAPABILITY_TILES, std::ptr::null_mut(), 0, &mut bytes) };
        let mut tiles = vec![0u32; if code == 0 { bytes / size_of::<u32>() } else { 0 }];
        let room = size_of_val(tiles.as_slice());
        // SAFETY: as above, and room for as many bytes as are named.
        let code =
            unsafe { capability(algorithm.as_ptr(), CAPABILITY_TILES, tiles.as_mut_ptr().cast(), room, &mut bytes) };
        tiles.truncate(if code == 0 { bytes / size_of::<u32>() } else { 0 });
        tiles
    }

    /// A number of the algorithm's configuration, of the attribute's documented type.
    fn get<T: Default>(&self, algorithm: &AlgorithmBytes, attribute: c_int) -> Option<T> {
        let (mut value, mut written) = (T::default(), 0);
        let to = (&raw mut value).cast();
        // SAFETY: an algorithm's bytes, and a number of the size that is named.
        let code =
            unsafe { (self.functions.algorithm_get)(algorithm.as_ptr(), attribute, to, size_of::<T>(), &mut written) };
        (code == 0).then_some(value)
    }

    fn set<T>(&self, algorithm: &mut AlgorithmBytes, attribute: c_int, value: &T) -> bool {
        let from = (&raw const *value).cast();
        // SAFETY: as in `get`.
        let code = unsafe { (self.functions.algorithm_set)(algorithm.as_mut_ptr(), attribute, from, size_of::<T>()) };
        code == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the numbers of cublasLt.h.
    fn configuration(tile: u32, order: u32, cluster: u16, swizzle: u32) -> Configuration {
        let found = Configuration::of(tile, order, cluster, swizzle).unwrap();
        assert_eq!(found.tile(), tile);
        found
    }

    #[test]
    fn other_algorithms_are_no_centres() {
        let (square, large) = (20, 24);
        for order in 0..4 {
            configuration(square, order, CLUSTER_2X1, 1);
            assert_eq!(Configuration::of(large, order, CLUSTER_2X1, 0), None);
        }
        // Two groups of warps a tile; no cluster; a tile that lies the other way.
        assert_eq!(Configuration::of(square, 4, CLUSTER_2X1, 0), None);
        assert_eq!(Configuration::of(square, 0, 2, 0), None);
        assert_eq!(Configuration::of(square, 0, CLUSTER_2X1, 2), None);
        assert_eq!(Configuration::of(30, 1, CLUSTER_2X1, 0), None);
    }

    #[test]
    fn neighbours_differ_in_one_thing() {
        let centre = configuration(407, 1, CLUSTER_2X1, 0);
        let expected = [
            configuration(406, 1, CLUSTER_2X1, 0),
            configuration(29, 1, CLUSTER_2X1, 0),
            configuration(407, 3, CLUSTER_2X1, 0),
            configuration(407, 1, CLUSTER_1X2, 0),
            configuration(407, 1, CLUSTER_2X1, 1),
        ];
        assert_eq!(centre.neighbours(), expected);
        assert_eq!(configuration(165, 0, CLUSTER_1X2, 1).neighbours().len(), 4);
        assert_eq!(configuration(32, 3, CLUSTER_1X2, 1).neighbours().len(), 4);
    }

    #[test]
    fn two_steps_find_what_was_fastest() {
        let spread = Configuration::spread();
        for (tile, order, cluster, swizzle) in [
            // 112 x 128, 136 x 128, 160 x 128, 168 x 128 and its swizzle.
            (165, 0, CLUSTER_2X1, 0),
            (165, 2, CLUSTER_1X2, 0),
            (179, 2, CLUSTER_1X2, 0),
            (30, 2, CLUSTER_1X2, 0),
            (197, 2, CLUSTER_1X2, 0),
            // 128 x 152 and 128 x 160.
            (407, 1, CLUSTER_2X1, 0),
            (29, 1, CLUSTER_2X1, 0),
            (29, 3, CLUSTER_1X2, 1),
        ] {
            let wanted = configuration(tile, order, cluster, swizzle);
            let near = spread.iter().any(|centre| *centre == wanted || centre.neighbours().contains(&wanted));
            assert!(near, "{wanted:?}");
        }
        let most = spread.iter().map(|centre| centre.neighbours().len()).max().unwrap();
        assert!(spread.len() + CENTRES * most <= 34);
    }
}

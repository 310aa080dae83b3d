//! The CPU executor.

mod activation;
mod dot_tile;
pub mod linear;
pub mod simd;
pub mod threads;

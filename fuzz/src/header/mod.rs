//! Every function of include/nvbackend.h with arguments that are valid but for one, on objects that live, sleep, or are gone.

mod arguments;
mod callbacks;
mod check;
mod interface;
mod limits;
mod memory;
mod numbers;
mod palette;
mod run;
mod setup;
mod statistics;
mod structures;
mod tensors;
mod world;

pub use run::run;

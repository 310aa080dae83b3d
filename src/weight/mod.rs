//! What weights are made of: encodings, scales and layouts, the formats that files have, and quantising on the host.
//!
//! Several source tensors may be stacked (Q, K and V as one product), and a gate and an up projection may be interleaved
//! row by row, so that one product's neighbouring columns are the pair that a gated activation needs. Sources are float
//! tensors or quantised formats (`gguf`, `awq`, `gptq`, `sfp`, `byte_rows`), read row by row.

pub mod arrangement;
pub mod awq;
pub mod blocks;
pub mod byte_rows;
mod encoding;
pub mod format;
pub mod gguf;
pub mod gguf_file;
pub mod gptq;
pub mod grouped;
pub mod int4;
pub mod int8;
pub mod mapping;
pub mod pack;
pub mod quantize;
pub mod rows;
mod scale_search;
pub mod sfp;
pub mod stripe;
mod view;

pub use crate::tensor::fp8;
pub use arrangement::Arrangement;
pub use blocks::BlockFormat;
pub use encoding::{Encoding, Scales, WeightLayout, BLOCK};
pub use format::{Format, Granularity};
pub use view::WeightView;

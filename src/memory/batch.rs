//! Batches: blocks of one class on their way from a thread to others, with what must happen before their use.

use super::order::Order;
use super::slab::Block;

pub struct Batch {
    pub class: usize,
    pub blocks: Vec<Block>,
    pub order: Order,
}

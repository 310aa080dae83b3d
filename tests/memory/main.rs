//! The memory manager over a device in virtual time, and over the host.

mod asking;
mod captures;
mod faults;
mod fixture;
mod rungs;
mod sequence;
mod sequences;
mod serving;
mod simulated;
mod streams;
mod threads;

//! The memory manager over a device in virtual time, and over the host.

mod asking;
mod captures;
mod faults;
mod fixture;
mod leaks;
mod rungs;
mod sequence;
mod sequences;
mod serving;
mod shortage;
mod simulated;
mod streams;
mod threads;
mod zeroing;

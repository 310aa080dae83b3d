//! The memory manager over a device in virtual time, and over the host.

mod asking;
mod captures;
mod faults;
mod fixture;
mod gate;
mod leaks;
mod random;
mod recovery_steps;
mod sequence;
mod sequences;
mod serving;
mod shortage;
mod simulated;
mod simulated_threads;
mod streams;
mod threads;
mod zeroing;

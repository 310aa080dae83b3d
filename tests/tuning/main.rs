//! Tuning on the CPU: everything but the GPU's clock. Choices by a script of times, wrong kernels, and what may happen to the
//! file: damage, other machines' files, a killed process, a full disk, two writers.

mod choices;
mod files;
mod fixture;
mod processes;

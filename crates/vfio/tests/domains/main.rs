//! The domains over a kernel, tested over the fake one.

mod budget;
mod common;
mod contract;
mod dirty;
mod dma;
mod failures;
mod suite;
mod vaddr;

//! Strangers: a stock QEMU, a stock Linux and User-Mode Linux in front of `ringfence blk`,
//! `ringfence net` and `ringfence guard`.
//!
//! Guests are made by `cargo xtask guests` and run by `cargo xtask test --only guests`; a test of
//! these that is run without them fails and says so. A guest is emulated and takes a processor: as many
//! run at a time as there are, but one of `ringfence guard` alone; what a test says of one does not depend on
//! the others.

mod machine;
#[path = "../common/manager.rs"]
mod manager;
mod place;
mod proxy;
mod qemu;

mod blk;
mod conformance;
mod crash;
mod doctor;
mod firmware;
mod guard;
mod machines;
mod migrate;
mod net;
mod nvme;
mod rng;
mod speed;
mod successor;
mod uml;
mod vfio;
mod wire;

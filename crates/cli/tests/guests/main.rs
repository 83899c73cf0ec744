//! Third-party peers: a stock QEMU, a stock Linux and User-Mode Linux in front of `ringfence blk`,
//! `ringfence net`, `ringfence guard` and `ringfence proxy`.
//!
//! `cargo xtask guests` makes the guests and `cargo xtask test --only guests` runs them; a test
//! that runs without them fails and says so. A guest is emulated and takes a processor: as many run
//! at a time as there are processors; no test's verdict depends on the others.

mod machine;
#[path = "../common/manager.rs"]
mod manager;
mod place;
mod proxy;
mod qemu;
#[path = "../common/strangers.rs"]
mod strangers;

mod blk;
mod conformance;
mod crash;
mod doctor;
mod firmware;
mod guard;
mod isolated;
mod machines;
mod migrate;
mod net;
mod nvme;
mod rng;
mod rust_vmm;
mod speed;
mod successor;
mod uml;
mod vfio;
mod wire;

//! Hostile peers, against the command as another process. Each attack is on a disk alone, on a disk
//! of `guard` beside another, and on one end of `net --peer`; after each, the neighbour (if there
//! is one) and the next front end are served as if nothing had happened, and the process has the
//! threads and descriptors that it had before.

mod access;
mod bounds;
mod closing;
#[path = "../common/mod.rs"]
mod common;
mod cuts;
mod descriptors;
mod disks;
mod faults;
mod figures;
mod fuse;
mod guest;
mod honest;
mod idle;
mod iommu;
mod killed;
mod log;
#[path = "../common/manager.rs"]
mod manager;
mod messages;
mod pending;
mod rings;
mod sequences;
mod service;
mod successor;
mod systemd;
mod taken;
mod wire;
mod writer;

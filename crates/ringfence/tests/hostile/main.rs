//! Peers that mean harm, against the command as another process. Each attack is on a service that serves
//! somebody else too; after each the neighbour and the next front end are served as if nothing had
//! been, and the process has what it had before.

#[path = "../common/mod.rs"]
mod common;
mod descriptors;
mod disks;
mod fuse;
mod guest;
mod honest;
mod iommu;
mod messages;
mod rings;
mod sequences;
mod service;
mod wire;
